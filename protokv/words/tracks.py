"""Lines of text with times: the text tracks of a container, and files of subtitles.

FFmpeg reads the formats of both; a file is recoded to UTF-8 before. Packets are taken as they are, since FFmpeg's
decoders drop the times of words. Markup is left in
the lines, except what only ASS has. Sizes are bounded.
"""

from __future__ import annotations

import io
import re
from collections.abc import Iterable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import av

from protokv.errors import SourceUnreadable
from protokv.video.container import only, opened, reason
from protokv.video.file import check_is_file
from protokv.video.source import Line, Lines, ShouldStop, TextTrack, never

# The demultiplexers for files of subtitles, and the codecs of lines in their packets. None opens another file.
FILES = ("srt", "ass", "webvtt")
CODECS = {"srt", "subrip", "ass", "ssa", "webvtt", "mov_text", "text"}

# Bounds of a file, of one line, and of all lines together. A day of speech is a megabyte.
MOST_BYTES, MOST_OF_LINE, MOST_LINES = 16 << 20, 1 << 13, 100_001

# FFmpeg leaves out lines whose times have no milliseconds.
_WHOLE_SECONDS = re.compile(r"\b\d{1,4}:\d\d:\d\d(?=\s*-->)|(?<=--> )\d{1,4}:\d\d:\d\d(?![\d.,:])")

# A line without an end stays this long, in seconds.
STAYS_S = 3.0


def tracks_of(container: Any) -> tuple[TextTrack, ...]:
    """Return the text tracks of PyAV's open container. Tracks of pictures, as on discs, are none."""
    found = []
    for stream in container.streams.subtitles:
        if stream.codec_context is not None and stream.codec_context.name in CODECS:
            flags = av.stream.Disposition
            language = str(stream.metadata.get("language", ""))[:32]
            default, forced = (bool(stream.disposition & flag) for flag in (flags.default, flags.forced))
            found.append(TextTrack(stream.index, stream.codec_context.name, language, default, forced))
    return tuple(found)


def read_track(path: Path, number: int, origin_s: float, should_stop: ShouldStop = never) -> Lines:
    """Read the text track with this number from a video file, whose pictures FFmpeg skips where it can.

    `origin_s` is the time stamp at which the video begins.
    """
    with opened(path) as (container, _):
        stream = container.streams[number]
        only(container, stream)
        return _bounded(lines_of(container, stream, origin_s), should_stop)


def read_file(path: Path, should_stop: ShouldStop = never) -> Lines:
    """Read a file of subtitles.

    Raises:
        SourceError: it is not there, no file, or no subtitles of a kind that is read.
    """
    check_is_file(path)
    try:
        with path.open("rb") as file:
            data = file.read(MOST_BYTES + 1)
    except OSError as error:
        raise SourceUnreadable(f"cannot read {path.name}: {error.strerror or error}") from error
    whole = len(data) <= MOST_BYTES
    recoded = io.BytesIO(_WHOLE_SECONDS.sub(r"\g<0>.000", decoded(data[:MOST_BYTES])).encode())
    options = {"format_whitelist": ",".join(FILES), "protocol_whitelist": "none"}
    try:
        with av.open(recoded, "r", options=options) as container:
            found = _bounded(lines_of(container, container.streams[0]), should_stop)
    except Exception as error:
        raise SourceUnreadable(
            f"{path.name} holds no subtitles: {reason(error)}", hint="SubRip, WebVTT and ASS are read"
        ) from error
    return found if whole else Lines(found.lines, found.lost or f"only its first {MOST_BYTES >> 20} MiB are read")


def decoded(data: bytes) -> str:
    """Return the text of a file in UTF-8, UTF-16 or an encoding that its bytes suggest."""
    for encoding in ("utf-8-sig", *(["utf-16"] if data[:2] in (b"\xff\xfe", b"\xfe\xff") else [])):
        with suppress(UnicodeDecodeError):
            return data.decode(encoding)
    import charset_normalizer

    best = charset_normalizer.from_bytes(data).best()
    return data.decode("latin-1") if best is None else str(best)


def lines_of(container: Any, stream: Any, origin_s: float = 0.0) -> Iterator[Line]:
    """Give the lines of a stream that has begun to be read; `origin_s` is its time of the source's beginning."""
    for packet in container.demux(stream):
        line = line_of(packet, stream, origin_s)
        if line is not None:
            yield line


def line_of(packet: Any, stream: Any, origin_s: float = 0.0) -> Line | None:
    """Return the line of a packet; None if there is none in it."""
    if packet.pts is None or not packet.size:
        return None
    start_s = float(packet.pts * stream.time_base) - origin_s
    long_s = float(packet.duration * stream.time_base) if packet.duration else 0.0
    text = _text_of(bytes(packet)[: 4 * MOST_OF_LINE], stream.codec_context.name).strip()
    return Line(start_s, start_s + (long_s if long_s > 0 else STAYS_S), text[:MOST_OF_LINE]) if text else None


def _text_of(data: bytes, codec: str) -> str:
    if codec == "mov_text":
        # The length of the text, the text, and boxes with its styles.
        return data[2 : 2 + int.from_bytes(data[:2], "big")].decode(errors="replace")
    text = data.decode(errors="replace")
    if codec not in ("ass", "ssa"):
        return re.sub(r"\{\\[^}]*\}", "", text)
    # ReadOrder, Layer, Style, Name, three margins, Effect, Text
    said = text.split(",", 8)[-1]
    shown, drawing = "", False
    for part in re.split(r"(\{[^{}]*\})", said):
        if part.startswith("{"):
            # What follows \p1 is a drawing, up to \p0.
            drawing = (re.findall(r"\\p(\d)", part) or ["0" if not drawing else "1"])[-1] != "0"
        elif not drawing:
            shown += part
    return re.sub(r"\\[Nn]", "\n", shown).replace("\\h", " ")


def _bounded(lines: Iterable[Line], should_stop: ShouldStop) -> Lines:
    """Read lines up to the bounds, the end, or an error of the demultiplexer."""
    found: list[Line] = []
    size, lost = 0, ""
    try:
        for line in lines:
            size += len(line.text)
            if should_stop() or len(found) == MOST_LINES or size > MOST_BYTES:
                lost = "" if len(found) == MOST_LINES else f"only its first {MOST_BYTES >> 20} MiB are read"
                break
            found.append(line)
    except Exception as error:  # PyAV raises more than its own errors on a damaged file
        lost = f"it breaks off: {reason(error)}"
    return Lines(tuple(found), lost)
