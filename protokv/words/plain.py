"""Lines with markup become cues of plain text: what was said, each row once.

Notes on sounds go: `[music]`, and `(door slams)` on a row of its own. A speaker that WebVTT names stays, as `Mara: `.
Rows go that the caption before still showed, as in captions that roll up. Knows no files.
"""

from __future__ import annotations

import html
import re
from collections.abc import Iterable, Iterator

from protokv.video.source import Line
from protokv.words.cues import Cue

# A caption that follows the one before within this many seconds may repeat its rows.
AT_ONCE_S = 0.1

# All patterns take a time that grows with the text alone, whatever the text.
_TIME = re.compile(r"<((?:\d{1,4}:)?\d\d:\d\d\.\d{3})>")
_VOICE = re.compile(r"<v(?:\.[^\s<>]*)?\s([^<>]+)>")
_TAG = re.compile(r"</?(?:[abicusv]|font|lang|ruby|rt|span|br|p)(?:[.\s/][^<>]*)?>", re.IGNORECASE)
_NOTE = re.compile(r"(?<!\S)\[[^\[\]\d]*\]:?(?!\w)")
_NOTE_ON_ROWS = re.compile(r"^[- \t]*\([^()]*\)[ \t]*$", re.MULTILINE)
_BEGINNING = re.compile(r"^\s*(?:>{2,}|[-\u2013\u2014](?=\s|[^\W\d]))\s*")

# Notes of music and control characters become spaces; what is not seen and turns the direction of writing goes.
_UNSEEN = dict.fromkeys([0x200B, 0x200E, 0x200F, *range(0x202A, 0x202F), *range(0x2066, 0x206A), 0xFEFF])
_SIGNS = {**_UNSEEN, **dict.fromkeys([*range(32), *range(0x7F, 0xA0), *map(ord, "♪♫♬")], " ")}


class CueMaker:
    """Turns lines, in the order of time, into cues."""

    def __init__(self) -> None:
        self._last: list[str] = []
        self._until_s = -1.0

    def __call__(self, line: Line) -> Cue | None:
        """Return what a line says that the line before it did not; None if that is nothing."""
        rows = map(_split_row, _NOTE_ON_ROWS.sub("", line.text.replace("\r", "")).split("\n"))
        new = [row for row in rows if row]
        texts = [" ".join(word for _, word in row) for row in new]
        before = self._last if line.start_s - self._until_s <= AT_ONCE_S else []
        repeated = next(n for n in range(min(len(before), len(new)), -1, -1) if before[len(before) - n :] == texts[:n])
        self._last, self._until_s = texts, max(self._until_s, line.end_s)
        words = [one for row in new[repeated:] for one in row]
        if not words:
            return None
        timed = any(time_s is not None for time_s, _ in words)
        times = tuple((line.start_s if at is None else at, word) for at, word in words) if timed else ()
        return Cue(line.start_s, line.end_s, " ".join(texts[repeated:]), times)


def make_cues(lines: Iterable[Line]) -> Iterator[Cue]:
    """Give the cues of all lines of a track, in the order of time."""
    return filter(None, map(CueMaker(), sorted(lines)))


def _split_row(text: str) -> list[tuple[float | None, str]]:
    """Return the words of a row, each with its start; one piece without a time if its words have none."""
    pieces: list[tuple[float | None, str]] = []
    time_s: float | None = None
    within = False
    for n, part in enumerate(_TIME.split(_BEGINNING.sub("", text))):
        if n % 2:
            time_s = sum(float(number) * 60**place for place, number in enumerate(reversed(part.split(":"))))
            continue
        named = _VOICE.sub(lambda found: f"{found[1].strip()}: ", part)
        shown = html.unescape(_TAG.sub("", named)).translate(_SIGNS)
        word = " ".join(_NOTE.sub("", shown).split())
        if word and within and not shown[0].isspace():
            # A time within a word, as in karaoke.
            pieces[-1] = (pieces[-1][0], pieces[-1][1] + word)
        elif word:
            pieces.append((time_s, word))
        if shown:
            within = bool(pieces) and not shown[-1].isspace()
    return pieces
