"""PyAV's demultiplexer: open a video file, and read its packets from a given time on.

FFmpeg may read only the named file: no network, no playlists, no other files. The sources decode.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import av

from protokv.errors import SourceUnreadable
from protokv.video.report import DecodeReport

if TYPE_CHECKING:
    from protokv.video.probe import Probe

# Demultiplexers that make pictures of text, or open other files than the named one.
REFUSED = {"tty", "bin", "xbin", "adf", "idf", "hls", "concat", "dash", "sdp", "rtsp", "imf", "ffmetadata"}

# These decoders show old memory where a frame is cut short, unless they are told to refuse such frames.
SHOWING_MEMORY = {"mjpeg"}

# Characters of a video's comment that are kept.
COMMENT = 200

# Failures of the demultiplexer in a row, and packets in a row of streams that it does not know.
MOST_FAILURES, MOST_STRANGERS = 16, 1 << 20

# Bytes of packets that are held while looking for the key frame before a time.
HELD_BYTES = 256 << 20

# These containers have no index, or none of the whole file.
WITHOUT_INDEX = {"mpegts", "mpeg", "h264", "hevc", "flv"}

# 8K in whole blocks. Decoders hold up to 17 frames, so this bounds the memory that a small file can make them take.
MAX_PIXELS = 8192 * 4352


@contextmanager
def opened(path: Path, max_pixels: int = MAX_PIXELS) -> Iterator[tuple[Any, Any]]:
    """Open a file; give PyAV's container and its video stream, and close them afterwards.

    Raises:
        SourceUnreadable: it is no video file, or its frames have more than `max_pixels`.
    """
    options = {"protocol_whitelist": "file", "max_pixels": str(max_pixels)}
    try:
        container = _open("file:" + str(path), options)
    except Exception as error:
        raise SourceUnreadable(
            f"expected a video file, cannot open {path}: {reason(error)}",
            hint="check that the file was copied or recorded to its end; `ffprobe FILE` shows what is in it",
        ) from error
    with container:
        if container.format.name.split(",")[0] in REFUSED:
            raise SourceUnreadable(
                f"expected a video file, {path} is text or a playlist ({container.format.name})",
                hint="name the video file itself",
            )
        stream = _video_stream(container, path)
        width, height = stream.codec_context.width, stream.codec_context.height
        if width * height > max_pixels:
            raise too_large(path, width, height, max_pixels)
        limit_decoder(stream.codec_context, max_pixels)
        yield container, stream


def limit_decoder(context: Any, max_pixels: int) -> None:
    """Let a decoder refuse frames that are too large before it allocates them, and frames that it would make up.

    One thread gives the same bytes every time; several may conceal damage in another order.
    """
    checks = {"max_pixels": str(max_pixels)}
    if context.name in SHOWING_MEMORY:
        checks["err_detect"] = "explode"
    context.thread_count = 1
    context.options = checks


def too_large(name: object, width: int, height: int, max_pixels: int) -> SourceUnreadable:
    """Return the error for frames of more than `max_pixels`."""
    return SourceUnreadable(
        f"the frames of {name} have {width} x {height} pixels, more than the limit of {max_pixels}",
        hint=f"if you trust it, allow that with --max-frame-pixels {width * height}, or scale it down",
    )


def packets(probe: Probe, container: Any, stream: Any, from_s: float, report: DecodeReport) -> Iterator[Any]:
    """Give the packets of the video stream, from the key frame at or before `from_s` (0: from the start) to the end.

    A demultiplexer that fails in the middle of the file is asked again. At the end the report learns of packets that
    the file promised and did not hold.
    """
    if from_s > 0:
        container.seek(probe.ticks(from_s), stream=stream, backward=True, any_frame=False)
    last_dts: int | None = None
    end_s, failures, strangers = 0.0, 0, 0
    demux = container.demux(stream)
    while True:
        try:
            packet = next(demux)
        except StopIteration:
            break
        except IndexError:
            # A packet of a stream that appeared in the middle of the file, which PyAV does not know; it is consumed.
            strangers += 1
            if strangers > MOST_STRANGERS:
                report.failed(None, "packets of unknown streams")
                break
            demux = container.demux(stream)
            continue
        except Exception as error:
            failures += 1
            if failures > MOST_FAILURES:
                report.failed(None, reason(error))
                break
            demux = container.demux(stream)
            continue
        if packet.size == 0:
            continue
        failures = strangers = 0
        if packet.dts is not None:
            last_dts = packet.dts
        ticks = packet.pts if packet.pts is not None and probe.has_pts else packet.dts
        if ticks is not None and (time_s := probe.time_s(ticks)) <= probe.timeline.limit_s:
            stated_s = float((packet.duration or 0) * probe.time_base)
            end_s = max(end_s, time_s + (probe.timeline.duration_s(time_s, stated_s) or 0.0))
        yield packet
    _check_promises(probe, stream, report, last_dts, end_s)


def skip_to_key(probe: Probe, packets: Iterator[Any], start_s: float) -> Iterator[Any]:
    """Skip to the last key frame before the first packet that is later than `start_s`.

    This replaces a seek where there is no index: FFmpeg guesses by time stamps, and lands elsewhere in a damaged file.
    If too much would have to be held, reading begins at the first key frame that is held.
    """
    held: list[Any] = []
    size = 0
    for packet in packets:
        time_s = probe.expected_s(packet)
        if packet.is_keyframe and (time_s is None or time_s <= start_s):
            held, size = [], 0
        held.append(packet)
        size += packet.size
        if size > HELD_BYTES or (time_s is not None and time_s > start_s):
            break
    yield from held
    yield from packets


def comment_of(container: Any) -> str | None:
    """Return the beginning of a video's comment; Matroska's tags are in capitals."""
    tags = {name.lower(): text for name, text in container.metadata.items()}
    return tags["comment"][:COMMENT] if tags.get("comment") else None


def reason(error: BaseException) -> str:
    """Return an error in one line, without numbers and paths if FFmpeg or the system has words for it."""
    text = getattr(error, "strerror", None) or str(error) or type(error).__name__
    return str(text).splitlines()[0]


def _open(url: str, options: dict[str, str]) -> Any:
    try:
        return av.open(url, options=options)
    except UnicodeDecodeError:
        # PyAV up to 18 refuses tags that are not UTF-8 unless it is told otherwise; later versions are never told.
        return av.open(url, options=options, metadata_errors="surrogateescape")


def _video_stream(container: Any, path: Path) -> Any:
    attached = av.stream.Disposition.attached_pic
    for stream in container.streams.video:
        if not stream.disposition & attached and stream.codec_context is not None:
            return stream
    kinds = sorted({str(stream.type) for stream in container.streams}) or ["nothing"]
    raise SourceUnreadable(
        f"expected a video stream in {path}, found {', '.join(kinds)}", hint="name a file that has pictures"
    )


def _check_promises(probe: Probe, stream: Any, report: DecodeReport, last_dts: int | None, end_s: float) -> None:
    """Count what the index or the declared end of the file promises and the packets did not hold."""
    why = "the file ends before the end that it declares"
    rate = probe.rate_fps or 1.0
    # Honest files are off by up to half a second, or two frames.
    honest_s = max(0.5, 2.0 / rate)
    if probe.indexed:
        after = probe.ticks(report.start_s) - 1 if last_dts is None else last_dts
        missing = sum(entry.timestamp > after for entry in stream.index_entries)
        if missing:
            report.missing(missing, end_s, why)
            return
        # Times that jump behind the last edit take frames out of the index. The declared end counts what an edit list
        # cuts away on purpose, but not to the second.
        honest_s = max(2.0, 0.25 * (probe.promised_s or 0.0))
    if probe.promised_s is None:
        return
    gap_s = probe.promised_s - max(end_s, report.start_s)
    if gap_s > honest_s:
        report.missing(max(1, round(gap_s * rate)), end_s, why)
