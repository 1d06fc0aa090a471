"""Read a file of subtitles: SubRip, WebVTT or ASS, as people and programs write them.

A line begins at a row with two times and an arrow, so a missing blank row or a comma in WebVTT loses nothing. FFmpeg
and pysubs2 were tried: FFmpeg leaves out lines without milliseconds or with such mistakes; pysubs2 takes the times of
words in WebVTT for lines, and a number at the end of a text for a counter.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from contextlib import suppress
from itertools import takewhile
from pathlib import Path

from protokv.errors import SourceUnreadable
from protokv.video.source import Line, Lines
from protokv.video.text_tracks import MOST_CHARACTERS, MOST_LINES, line_at, without_ass_markup, without_overrides

_TIME = r"(?:(\d{1,4}):)?(\d{1,2}):(\d{1,2})(?:[.,](\d{1,3})\d*)?"
_SPAN = re.compile(rf"\s*{_TIME}\s*-->\s*{_TIME}(?!\S)")
_ASS_FIELDS = "layer,start,end,style,name,marginl,marginr,marginv,effect,text"


def read_subtitles(path: Path) -> Lines:
    """Read a file of subtitles.

    Raises:
        SourceUnreadable: it cannot be read, or holds no line of a kind that is known.
    """
    try:
        with path.open("rb") as file:
            data = file.read(MOST_CHARACTERS + 1)
    except OSError as error:
        raise SourceUnreadable(f"cannot read {path.name}: {error.strerror or error}") from error
    rows = re.split(r"\r\n|\r|\n", decode_text(data[:MOST_CHARACTERS]))
    events = [n for n, row in enumerate(rows) if row.strip().lower() == "[events]"]
    lines: list[Line] = []
    for line in _read_ass(rows[events[0] :]) if events else _read_rows(rows):
        if len(lines) == MOST_LINES:
            return Lines(tuple(lines), f"only the first {MOST_LINES:,} lines are read; the rest is left out")
        lines.append(line)
    if (not lines and any("-->" in row for row in rows)) or not (events or lines or rows[0].startswith("WEBVTT")):
        raise SourceUnreadable(f"{path.name} holds no subtitles", hint="SubRip, WebVTT and ASS are read")
    return Lines(tuple(lines), "" if len(data) <= MOST_CHARACTERS else "only its first 16 MiB are read")


def decode_text(data: bytes) -> str:
    """Return text in UTF-8, UTF-16 or an encoding that its bytes suggest."""
    for encoding in ("utf-8-sig", *(["utf-16"] if data[:2] in (b"\xff\xfe", b"\xfe\xff") else [])):
        with suppress(UnicodeDecodeError):
            return data.decode(encoding)
    import charset_normalizer

    best = charset_normalizer.from_bytes(data).best()
    return data.decode("latin-1") if best is None else str(best)


def _read_rows(rows: Sequence[str]) -> Iterator[Line]:
    """Give the lines of SubRip and WebVTT: a row with times, then text up to the next one, in WebVTT to a blank row."""
    is_web = rows[0].startswith("WEBVTT")
    spans = [(n, found) for n, row in enumerate(rows) if (found := _SPAN.match(row))]
    ends = [*(n for n, _ in spans[1:]), len(rows)]
    for (n, found), end in zip(spans, ends, strict=False):
        text = list(takewhile(bool, rows[n + 1 : end])) if is_web else list(rows[n + 1 : end])
        if end < len(rows) and n + 1 + len(text) == end and text and text[-1].strip().isdecimal():
            text.pop()  # the number of the next line
        start_ms, end_ms = _milliseconds(found.groups()[:4]), _milliseconds(found.groups()[4:])
        line = line_at(start_ms / 1000, (end_ms - start_ms) / 1000, without_overrides("\n".join(text)))
        if line is not None:
            yield line


def _read_ass(rows: Sequence[str]) -> Iterator[Line]:
    """Give the lines of ASS and SSA, in the order of fields that the file states."""
    names = _ASS_FIELDS.split(",")
    for row in rows:
        kind, _, rest = row.partition(":")
        if kind.strip().lower() == "format":
            names = [name.strip().lower() for name in rest.split(",")]
        elif kind.strip().lower() == "dialogue":
            fields = dict(zip(names, rest.split(",", len(names) - 1), strict=False))
            times = [re.fullmatch(_TIME, fields.get(name, "").strip()) for name in ("start", "end")]
            start_ms, end_ms = (_milliseconds(time.groups()) if time else 0 for time in times)
            line = line_at(start_ms / 1000, (end_ms - start_ms) / 1000, without_ass_markup(fields.get("text", "")))
            if line is not None and all(times):
                yield line


def _milliseconds(parts: Sequence[str | None]) -> int:
    hours, minutes, seconds, fraction = parts
    return (int(hours or 0) * 3600 + int(minutes or 0) * 60 + int(seconds or 0)) * 1000 + int(f"{fraction or 0:0<3}")
