"""The container side of a video file: opening, what it says of itself, packets from a given time on.

Owns everything that PyAV's demultiplexer does; decoding belongs to the two sources. The origin of stream time
is the start of the video stream; the probe decodes up to the first frame, so that a file from which no
picture can be had is refused on opening. FFmpeg may read nothing but the one file (no network, no playlists).
"""

from __future__ import annotations

import hashlib
import os
import re
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from typing import Any

import av
import av.error

from protokv.errors import SourceNotFound, SourceUnreadable
from protokv.video.ledger import Ledger

MIB = 1 << 20

# Demultiplexers that make pictures of text, or that open other files than the one named.
_REFUSED = {"tty", "bin", "xbin", "adf", "idf", "hls", "concat", "dash", "sdp", "rtsp", "imf", "ffmetadata"}

# AVI has no presentation times: FFmpeg guesses them wrongly for reordered frames; the order of decoding holds.
_WITHOUT_PTS = {"avi"}

# Seconds to look back, in turn, where a seek did not land at or before the wanted time.
LOOK_BACK_S: tuple[float, ...] = (0.0, 2.0, 10.0, 60.0)


@dataclass(frozen=True)
class Probe:
    """What opening found out. Times and ticks: `time_s = (ticks - origin) * time_base`."""

    path: Path
    container: str
    codec: str
    pixel_format: str
    width: int  # as coded for display, before rotation
    height: int
    rotation: int  # degrees counter-clockwise: 0, 90, 180, 270
    interlaced: bool
    rate_fps: float | None
    time_base: Fraction
    origin: int
    indexed: bool  # the container has an index of all packets, to hold what was read against
    longest_gop: int | None  # most frames from one key frame to the next, where the index says so
    promised_s: float | None  # stream time of the end that the file declares
    size_bytes: int
    fingerprint: str

    @property
    def has_pts(self) -> bool:
        """Whether the container says when a frame is shown."""
        return self.container not in _WITHOUT_PTS

    def time_s(self, ticks: int) -> float:
        """Stream time of a tick."""
        return float((ticks - self.origin) * self.time_base)

    def ticks(self, time_s: float) -> int:
        """The tick at or before a stream time."""
        return self.origin + int(Fraction(time_s) / self.time_base)

    def clock(self, frame: Any) -> int | None:
        """Presentation ticks of a decoded frame."""
        ticks = frame.dts if not self.has_pts else frame.pts if frame.pts is not None else frame.dts
        return None if ticks is None else int(ticks)


def probe(path: str | os.PathLike[str]) -> Probe:
    """Look into the file. SourceNotFound, or SourceUnreadable where no picture can be had."""
    path = Path(path)
    size = _check_is_file(path)
    with opened(path) as (container, stream):
        context = stream.codec_context
        first = _first_frame(container, stream, path)
        name = container.format.name.split(",")[0]
        base = stream.time_base
        ticks = first.dts if name in _WITHOUT_PTS else first.pts if first.pts is not None else first.dts
        origin = int(ticks or 0)
        if stream.start_time is not None and name not in _WITHOUT_PTS:
            origin = min(origin, int(stream.start_time))
        rate = stream.average_rate
        return Probe(
            path=path,
            container=name,
            codec=context.codec.canonical_name,
            pixel_format=str(first.format.name),
            width=int(first.width),
            height=int(first.height),
            rotation=round(first.rotation / 90) % 4 * 90,
            # 0 is unknown, 1 progressive.
            interlaced=bool(first.interlaced_frame) or context.field_order > 1,
            rate_fps=float(rate) if rate else None,
            time_base=base,
            origin=origin,
            indexed=_is_indexed(name, stream),
            longest_gop=_longest_gop(name, stream),
            promised_s=_promised_end_s(container, stream, base),
            size_bytes=size,
            fingerprint=_fingerprint(path, size),
        )


@contextmanager
def opened(path: Path) -> Iterator[tuple[Any, Any]]:
    """PyAV's container and its video stream, closed afterwards."""
    try:
        container: Any = av.open("file:" + str(path), options={"protocol_whitelist": "file"}, metadata_errors="replace")
    except (av.error.FFmpegError, OSError, ValueError) as error:
        raise SourceUnreadable(
            f"expected a video file, cannot open {path}: {reason(error)}",
            hint="check that the file was copied or recorded to its end; `ffprobe FILE` shows what is in it",
        ) from error
    with container:
        if container.format.name.split(",")[0] in _REFUSED:
            raise SourceUnreadable(
                f"expected a video file, {path} is text or a playlist ({container.format.name})",
                hint="name the video file itself",
            )
        yield container, _video_stream(container, path)


def packets(probe: Probe, container: Any, stream: Any, from_s: float, ledger: Ledger) -> Iterator[Any]:
    """Packets of the video stream from the key frame at or before `from_s` (0: from the start) to the end.

    A demultiplexer that fails in mid-file is asked again; what the file promised and did not hold goes into
    the ledger at the end.
    """
    if from_s > 0:
        container.seek(probe.ticks(from_s), stream=stream, backward=True, any_frame=False)
    last_dts: int | None = None
    end_s, failures = 0.0, 0
    demux = container.demux(stream)
    while True:
        try:
            packet = next(demux)
        except StopIteration:
            break
        except (av.error.FFmpegError, OSError) as error:
            failures += 1
            if failures > 16:
                ledger.failed(None, reason(error))
                break
            demux = container.demux(stream)
            continue
        if packet.size == 0:
            continue
        failures = 0
        if packet.dts is not None:
            last_dts = packet.dts
        ticks = packet.pts if packet.pts is not None and probe.has_pts else packet.dts
        if ticks is not None:
            end_s = max(end_s, probe.time_s(ticks + (packet.duration or 0)))
        yield packet
    _settle_promises(probe, stream, ledger, last_dts, end_s)


def expected_s(probe: Probe, packet: Any) -> float | None:
    """Stream time of the frame that this packet should give; None where that cannot be told or none is due."""
    if packet.pts is None or packet.is_discard or not probe.has_pts:
        return None
    if probe.codec == "vp8" and not bytes(packet)[0] & 0x10:
        return None  # a reference frame that is never shown
    return probe.time_s(packet.pts)


def _settle_promises(probe: Probe, stream: Any, ledger: Ledger, last_dts: int | None, end_s: float) -> None:
    why = "the file ends before the end that it declares"
    if probe.indexed:
        # The index, unlike the declared duration, leaves out what an edit list cuts away.
        after = probe.ticks(ledger.start_s) - 1 if last_dts is None else last_dts
        ledger.missing(sum(entry.timestamp > after for entry in stream.index_entries), end_s, why)
        return
    if probe.promised_s is None:
        return
    gap_s = probe.promised_s - max(end_s, ledger.start_s)
    rate = probe.rate_fps or 1.0
    # Half a second, or two frames, is how far honest files are off.
    if gap_s > max(0.5, 2.0 / rate):
        ledger.missing(max(1, round(gap_s * rate)), end_s, why)


def _check_is_file(path: Path) -> int:
    try:
        status = path.stat()
    except (FileNotFoundError, NotADirectoryError):
        raise SourceNotFound(f"no video at {path}", hint="check the spelling of the path") from None
    except (OSError, ValueError) as error:
        raise SourceUnreadable(f"cannot read {path}: {reason(error)}") from error
    if stat.S_ISDIR(status.st_mode):
        raise SourceUnreadable(f"expected a video file, {path} is a folder", hint="name one file in it")
    if not stat.S_ISREG(status.st_mode):
        raise SourceUnreadable(f"expected a video file, {path} is not a regular file")
    if status.st_size == 0:
        raise SourceUnreadable(f"expected a video file, {path} is empty", hint="copy or record it again")
    if not os.access(path, os.R_OK):
        raise SourceUnreadable(f"no permission to read {path}", hint="change its permissions, or copy it")
    return status.st_size


def _video_stream(container: Any, path: Path) -> Any:
    attached = av.stream.Disposition.attached_pic
    for stream in container.streams.video:
        if not stream.disposition & attached and stream.codec_context is not None:
            # Threads may conceal damage in another order: one thread gives the same bytes every time.
            stream.codec_context.thread_count = 1
            return stream
    kinds = sorted({str(stream.type) for stream in container.streams}) or ["nothing"]
    raise SourceUnreadable(
        f"expected a video stream in {path}, found {', '.join(kinds)}", hint="name a file that has pictures"
    )


def _first_frame(container: Any, stream: Any, path: Path) -> Any:
    demux = container.demux(stream)
    failures = 0
    while failures <= 256:
        try:
            packet = next(demux)
            for frame in packet.decode():
                return frame
        except StopIteration:
            break
        except (av.error.FFmpegError, OSError):
            failures += 1
            demux = container.demux(stream)
    raise SourceUnreadable(
        f"no frame of {path} can be decoded (container {container.format.name}, codec {stream.codec_context.name})",
        hint="the file is damaged, or its codec is not supported; `ffmpeg -i FILE OUT.mp4` may repair it",
    )


def _is_indexed(name: str, stream: Any) -> bool:
    # `frames` is 0 for fragmented files, whose index grows while they are read.
    return name == "mov" and bool(stream.frames) and len(stream.index_entries) > 0


def _longest_gop(name: str, stream: Any) -> int | None:
    # Other containers index key frames only, or some of them.
    if not _is_indexed(name, stream):
        return None
    longest = run = 0
    for entry in stream.index_entries:
        run = 1 if entry.is_keyframe else run + 1
        longest = max(longest, run)
    return longest


def _promised_end_s(container: Any, stream: Any, base: Fraction) -> float | None:
    whole = container.duration / av.time_base if container.duration else None
    own: float | None = None
    if stream.duration:
        own = float(stream.duration * base)
    elif (tag := _tag_s(stream.metadata)) is not None:
        own = tag
    if own is not None:
        return own if whole is None else min(own, whole)
    # With other streams beside it, the whole may be longer than the video.
    return whole if len(container.streams) == 1 else None


def _tag_s(metadata: dict[str, str]) -> float | None:
    tag = next((value for key, value in metadata.items() if key.upper() == "DURATION"), "")
    match = re.fullmatch(r"(\d+):(\d\d):(\d\d(?:\.\d+)?)", tag)
    return int(match[1]) * 3600 + int(match[2]) * 60 + float(match[3]) if match else None


def _fingerprint(path: Path, size: int) -> str:
    digest = hashlib.sha256(size.to_bytes(8, "little"))
    with path.open("rb") as file:
        digest.update(file.read(MIB))
        file.seek(max(0, size - MIB))
        digest.update(file.read(MIB))
    return digest.hexdigest()


def reason(error: BaseException) -> str:
    """The error in one line, without numbers and paths where FFmpeg or the system has words for it."""
    text = getattr(error, "strerror", None) or str(error) or type(error).__name__
    return str(text).splitlines()[0]
