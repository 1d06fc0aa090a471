"""Text tracks of a container with PyAV: which there are, and their lines.

Packets are taken as they are, since FFmpeg's decoders drop the times of words. Markup is left in the lines, except what
only ASS has. Sizes are bounded.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import av

from protokv.video.container import discard_others, explain_error, open_container
from protokv.video.source import Line, Lines, TextTrack

CODECS = {"srt", "subrip", "ass", "ssa", "webvtt", "mov_text", "text"}

# Bounds of one line, in characters, and of all lines of a track together. A day of speech is a megabyte.
MOST_CHARACTERS, MOST_BYTES, MOST_LINES = 1 << 13, 16 << 20, 100_001

# A line without an end stays this long, in seconds.
STAYS_S = 3.0


def find_text_tracks(container: Any) -> tuple[TextTrack, ...]:
    """Return the text tracks of PyAV's open container. Tracks of pictures, as on discs, are none."""
    found = []
    for stream in container.streams.subtitles:
        if stream.codec_context is not None and stream.codec_context.name in CODECS:
            flags = av.stream.Disposition
            language = str(stream.metadata.get("language", ""))[:32]
            default, forced = (bool(stream.disposition & flag) for flag in (flags.default, flags.forced))
            found.append(TextTrack(stream.index, stream.codec_context.name, language, default, forced))
    return tuple(found)


def read_text_track(path: Path, number: int, origin_s: float) -> Lines:
    """Read the text track with this number from a video file, whose pictures FFmpeg skips where it can.

    `origin_s` is the time stamp at which the video begins.
    """
    with open_container(path) as (container, _):
        stream = container.streams[number]
        discard_others(container, stream)
        return read_lines(container, stream, origin_s)


def read_lines(container: Any, stream: Any, origin_s: float = 0.0) -> Lines:
    """Read the lines of a stream up to the bounds, the end, or an error of the demultiplexer.

    `origin_s` is the time stamp at which the video begins.
    """
    found: list[Line] = []
    size, lost = 0, ""
    try:
        for packet in container.demux(stream):
            line = line_from(packet, stream, origin_s)
            size += 0 if line is None else len(line.text)
            if len(found) == MOST_LINES or size > MOST_BYTES:
                lost = "" if len(found) == MOST_LINES else f"only its first {MOST_BYTES >> 20} MiB are read"
                break
            if line is not None:
                found.append(line)
    except Exception as error:  # PyAV raises more than its own errors on a damaged file
        lost = f"it breaks off: {explain_error(error)}"
    return Lines(tuple(found), lost)


def line_from(packet: Any, stream: Any, origin_s: float = 0.0) -> Line | None:
    """Return the line of a packet; None if there is none in it."""
    if packet.pts is None or not packet.size:
        return None
    start_s = float(packet.pts * stream.time_base) - origin_s
    long_s = float(packet.duration * stream.time_base) if packet.duration else 0.0
    text = _text_from(bytes(packet)[: 4 * MOST_CHARACTERS], stream.codec_context.name).strip()
    return Line(start_s, start_s + (long_s if long_s > 0 else STAYS_S), text[:MOST_CHARACTERS]) if text else None


def _text_from(data: bytes, codec: str) -> str:
    if codec == "mov_text":
        # The length of the text, the text, and boxes with its styles.
        return data[2 : 2 + int.from_bytes(data[:2], "big")].decode(errors="replace")
    text = data.decode(errors="replace")
    if codec not in ("ass", "ssa"):
        return re.sub(r"\{\\[^}]*\}", "", text)
    # ReadOrder, Layer, Style, Name, three margins, Effect, Text
    marked = text.split(",", 8)[-1]
    visible, drawing = "", False
    for part in re.split(r"(\{[^{}]*\})", marked):
        if part.startswith("{"):
            # What follows \p1 is a drawing, up to \p0.
            drawing = (re.findall(r"\\p(\d)", part) or ["0" if not drawing else "1"])[-1] != "0"
        elif not drawing:
            visible += part
    return re.sub(r"\\[Nn]", "\n", visible).replace("\\h", " ")
