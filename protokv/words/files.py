"""Read a file of subtitles: SubRip, WebVTT or ASS, as people and programs write them.

A line begins at a row with two times and an arrow, so a missing blank row or a comma in WebVTT
loses nothing. FFmpeg and pysubs2 were tried: FFmpeg leaves out lines without milliseconds or with
such mistakes; pysubs2 takes the times of words in WebVTT for lines, and a number at the end of a
text for a counter.
"""

from __future__ import annotations

import codecs
import re
from collections.abc import Iterator, Sequence
from itertools import islice, takewhile
from pathlib import Path

from protokv.errors import SourceUnreadable
from protokv.texts import format_count
from protokv.video.source import SubtitleLine, SubtitleLines
from protokv.video.text_tracks import MOST_CHARACTERS, MOST_TRACK_LINES, make_subtitle

_TIME = r"(?:(\d{1,4}):)?(\d{1,2}):(\d{1,2})(?:[.,](\d{1,3})\d*)?"
_ARROW = r"-[- ]{0,3}>"  # some are written -> or -- >
_SPAN = re.compile(rf"\s*{_TIME}\s*{_ARROW}\s*{_TIME}(?!\S)")
_MISTAKE = re.compile(rf"\d\s{{0,9}}{_ARROW}|{_ARROW}\s{{0,9}}\d")
_ASS_FIELDS = "layer,start,end,style,name,marginl,marginr,marginv,effect,text"

# The code pages that subtitles have been written in; beyond ASCII, Western text in the first has
# these characters.
_CODE_PAGES = [
    "cp1252",
    "cp1250",
    "cp1251",
    "cp1253",
    "cp1254",
    "cp1255",
    "cp1256",
    "cp1257",
    "cp874",
    "koi8_r",
    "gb18030",
    "big5",
    "cp932",
    "cp949",
]
_WESTERN = "àáâãäåæçèéêëìíîïñòóôõöøœùúûüÿ"
_WESTERN += _WESTERN.upper() + "ß¿¡«»\u2018\u2019\u201c\u201d\u2013\u2014…°€£\xa0"
# Hungarian in cp1250, read as cp1252
_HUNGARIAN = set("áéíóöõúüûÁÉÍÓÖÕÚÜÛ")
_HUNGARIAN_ALONE = set("õûÕÛ")


def read_subtitles(path: Path) -> SubtitleLines:
    """Read a file of subtitles. SourceUnreadable: it cannot be read, or holds no line of a kind
    that is known.
    """
    try:
        with path.open("rb") as file:
            data = file.read(MOST_CHARACTERS + 1)
    except OSError as error:
        raise SourceUnreadable(f"cannot read {path.name}: {error.strerror or error}") from error
    text, note = _decode_text(data[:MOST_CHARACTERS])
    # Bytes of 0 pad some files, and end what is said. A return before "\r\n" comes from a text that
    # was converted twice.
    rows = re.split(r"\r{0,2}\n|\r", text)
    rows = [row.lstrip("\0").partition("\0")[0] for row in rows]
    events = [n for n, row in enumerate(rows) if row.strip().lower() == "[events]"]
    lines = _read_ass(rows[events[0] :]) if events else _read_rows(rows)
    read = list(islice(lines, MOST_TRACK_LINES + 1))
    found = tuple(line for line in read[:MOST_TRACK_LINES] if line is not None)
    unread = read.count(None)
    if not found and (unread or not (events or _is_webvtt(rows))):
        raise SourceUnreadable(
            f"{path.name} holds no subtitles", hint="SubRip, WebVTT and ASS are read"
        )
    lost = ""
    if len(data) > MOST_CHARACTERS:
        lost = "only its first 16 MiB are read"
    elif len(read) > MOST_TRACK_LINES:
        lost = f"only the first {MOST_TRACK_LINES:,} lines are read; the rest is left out"
    elif unread:
        lost = f"the times of {format_count(unread, 'line')} cannot be read"
    return SubtitleLines(found, lost, note)


def _decode_text(data: bytes) -> tuple[str, str]:
    """Return text, and a note on its encoding if that is not certain.

    Text that is UTF-8 for the most part is that, and what is bad in it becomes U+FFFD. Everything
    else is guessed: the Western code page, which is often taken for others, or what fits best.
    """
    if data[:2] in (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE):
        return data.decode("utf-16", "replace"), ""
    text = data.decode("utf-8-sig", "replace")
    beyond = [one for one in text if one > "\x7f"]
    bad = 0 if "\ufffd" in data.decode("utf-8", "ignore") else beyond.count("\ufffd")
    if 2 * bad <= len(beyond):
        return text, f"UTF-8 but for {format_count(bad, 'character')}" if bad else ""
    western = data.decode("cp1252", "replace")
    signs = {one for one in western if one > "\x7f"}
    share = sum(one > "\x7f" for one in western) / max(1, sum(map(str.isalpha, western)))
    encoding = "cp1252"
    if (
        not signs <= set(_WESTERN)
        or share >= 1 / 3
        or (signs <= _HUNGARIAN and signs & _HUNGARIAN_ALONE)
    ):
        import charset_normalizer

        best = charset_normalizer.from_bytes(data, cp_isolation=_CODE_PAGES).best()
        encoding = encoding if best is None else best.encoding
    return data.decode(encoding, "replace"), f"read as {encoding}, which is a guess"


def _is_webvtt(rows: Sequence[str]) -> bool:
    return next((row.strip() for row in rows if row.strip()), "").startswith("WEBVTT")


def _read_rows(rows: Sequence[str]) -> Iterator[SubtitleLine | None]:
    """Give the lines of SubRip and WebVTT: a row with times, then text up to the next one, in
    WebVTT to a blank row.

    None stands for a line whose times cannot be read.
    """
    is_web = _is_webvtt(rows)
    arrows = [
        (n, span)
        for n, row in enumerate(rows)
        if (span := _SPAN.match(row)) or _MISTAKE.search(row)
    ]
    ends = [*(n for n, _ in arrows[1:]), len(rows)]
    for (n, found), end in zip(arrows, ends, strict=False):
        if found is None:
            yield None
            continue
        text = list(takewhile(bool, rows[n + 1 : end])) if is_web else list(rows[n + 1 : end])
        if end < len(rows) and n + 1 + len(text) == end and text and text[-1].strip().isdecimal():
            text.pop()  # the number of the next line
        start_s = _seconds(found.groups()[:4])
        end_s = _seconds(found.groups()[4:])
        markup = "webvtt" if is_web else "srt"
        if line := make_subtitle(start_s, end_s - start_s, "\n".join(text), markup):
            yield line


def _read_ass(rows: Sequence[str]) -> Iterator[SubtitleLine | None]:
    """Give the lines of ASS and SSA, in the order of fields that the file states; None as
    `_read_rows`.
    """
    names = _ASS_FIELDS.split(",")
    for row in rows:
        kind, _, rest = row.partition(":")
        if kind.strip().lower() == "format":
            names = [name.strip().lower() for name in rest.split(",")]
        elif kind.strip().lower() == "dialogue":
            fields = dict(zip(names, rest.split(",", len(names) - 1), strict=False))
            found = [re.fullmatch(_TIME, fields.get(name, "").strip()) for name in ("start", "end")]
            times_s = tuple(_seconds(time.groups()) for time in found if time)
            if len(times_s) < 2:
                yield None
            elif line := make_subtitle(
                times_s[0], times_s[1] - times_s[0], fields.get("text", ""), "ass"
            ):
                yield line


def _seconds(parts: Sequence[str | None]) -> float:
    hours, minutes, seconds, fraction = parts
    milliseconds = int(f"{fraction or 0:0<3}")
    return int(hours or 0) * 3600 + int(minutes or 0) * 60 + int(seconds or 0) + milliseconds / 1000
