"""The text tracks of a container with PyAV, and their lines at the times of the pictures.

Packets are taken as they are, since FFmpeg's decoders drop the times of words. Markup stays in the
lines, except what only ASS has. Sizes are bounded: all text of a container is untrusted. Files of
subtitles use it too, without PyAV.
"""

from __future__ import annotations

import codecs
import re
from pathlib import Path
from typing import Any

from protokv.video.source import SubtitleLine, SubtitleLines, TextTrack

# The codecs of text in packets.
_CODECS = {"srt", "subrip", "ass", "ssa", "webvtt", "mov_text", "text"}

# AV_DISPOSITION
_DEFAULT = 1 << 0
_FORCED = 1 << 6

# Bounds of one line, and of all lines of a track or a file together. A day of speech is a megabyte.
_MOST_OF_LINE = 1 << 13
MOST_TRACK_LINES = 100_000
MOST_CHARACTERS = 16 << 20

# The markup of codecs; a line has that of WebVTT in the end. All patterns take a time that grows
# with the text alone.
_MARKUP = {"srt": "srt", "subrip": "srt", "ass": "ass", "ssa": "ass", "webvtt": "webvtt"}
_ATTRIBUTE = r"\s{1,9}[\w-]{1,20}\s{0,9}="
_SRT_TAG = re.compile(
    rf"\{{\\[^{{}}]*\}}|</?(?:[abipsu]|font|span|br)(?:{_ATTRIBUTE}[^<>]*|\s?/)?>", re.IGNORECASE
)
_ASS_OVERRIDE = re.compile(r"\{([^{}]*)\}")
_ASS_DRAWING = re.compile(r"\\p(\d)")

# A line without an end stays this long, in seconds.
_STAYS_S = 3.0


def find_text_tracks(container: Any) -> tuple[TextTrack, ...]:
    """Return the text tracks of PyAV's open container. Tracks of pictures, as on discs, are
    none.
    """
    found = []
    for stream in container.streams.subtitles:
        if (codec := _name_codec(stream)) in _CODECS:
            language = str(stream.metadata.get("language", ""))[:32]
            default = bool(stream.disposition & _DEFAULT)
            forced = bool(stream.disposition & _FORCED)
            found.append(TextTrack(stream.index, codec, language, default, forced))
    return tuple(found)


def _name_codec(stream: Any) -> str:
    """Return the codec of a subtitle stream; empty for one that FFmpeg does not know.

    In Matroska that is WebVTT as MKVToolNix writes it (S_TEXT/WEBVTT), whose packets are bare text.
    """
    if stream.codec_context is not None:
        return str(stream.codec_context.name)
    return "webvtt" if "matroska" in stream.container.format.name else ""


def read_text_track(path: Path, number: int, origin_s: float) -> SubtitleLines:
    """Read the text track with this number from a video file, whose pictures FFmpeg skips where it
    can.

    `origin_s` is the time stamp at which the video begins.
    """
    from protokv.video.container import discard_other_streams, explain_ffmpeg_error, open_container

    found: list[SubtitleLine] = []
    lost = ""
    size = packets = 0
    with open_container(path) as container:
        stream = container.streams[number]
        discard_other_streams(container, stream)
        try:
            for packet in container.demux(stream):
                packets += packet.size > 2  # shorter ones only end a line
                if (line := _read_packet(packet, stream, origin_s)) is None:
                    continue
                size += len(line.text)
                if len(found) == MOST_TRACK_LINES or size > MOST_CHARACTERS:
                    lost = f"only the first {len(found):,} lines are read; the rest is left out"
                    break
                found.append(line)
        except Exception as error:  # PyAV raises more than its own errors on a damaged file
            lost = f"it breaks off: {explain_ffmpeg_error(error)}"
    if packets and not (found or lost):
        lost = f"none of its {packets:,} packets holds text"
    return SubtitleLines(tuple(found), lost)


def _read_packet(packet: Any, stream: Any, origin_s: float) -> SubtitleLine | None:
    """Return the line in a packet, at its time minus `origin_s`; None if there is none in it."""
    if packet.pts is None or not packet.size:
        return None
    start_s = float(packet.pts * stream.time_base) - origin_s
    long_s = float(packet.duration * stream.time_base) if packet.duration else 0.0
    data = bytes(packet)[: 4 * _MOST_OF_LINE]
    codec = _name_codec(stream)
    if codec == "mov_text":
        # The length of the text, the text in UTF-8 or with the mark of UTF-16, and boxes with its
        # styles.
        data = data[2 : 2 + int.from_bytes(data[:2], "big")]
    marked = data.startswith((codecs.BOM_UTF16_BE, codecs.BOM_UTF16_LE))
    text = data.decode("utf-16" if marked else "utf-8", "replace").partition("\0")[0]
    if codec in ("ass", "ssa"):
        # ReadOrder, Layer, Style, Name, three margins, Effect, Text
        text = text.split(",", 8)[-1]
    return make_subtitle(start_s, long_s, text, _MARKUP.get(codec, ""))


def make_subtitle(start_s: float, long_s: float, text: str, markup: str) -> SubtitleLine | None:
    """Return a line of at most `_MOST_OF_LINE` characters; None without text.

    `markup` is `webvtt`, `srt` or `ass`; in any other text each character stands for itself.
    """
    text = text[: 4 * _MOST_OF_LINE]
    if markup == "ass":
        text = _strip_ass(text)
    elif markup == "srt":
        text = _SRT_TAG.sub("", text)
    if markup != "webvtt":
        text = text.replace("<", "&lt;")
    text = text.strip()[:_MOST_OF_LINE]
    end_s = start_s + (long_s if long_s > 0 else _STAYS_S)
    return SubtitleLine(start_s, end_s, text) if text else None


def _strip_ass(text: str) -> str:
    r"""Leave out the drawings and the overrides of ASS; `\N` becomes a new line."""
    shown = ""
    drawing = False
    for n, part in enumerate(_ASS_OVERRIDE.split(text)):
        if n % 2:
            # A drawing follows \p1, up to \p0.
            modes = _ASS_DRAWING.findall(part)
            drawing = modes[-1] != "0" if modes else drawing
        elif not drawing:
            shown += part
    return re.sub(r"\\[Nn]", "\n", shown).replace("\\h", " ")
