"""From lines with markup to the texts of each step: `make_cues` makes `Cue`s of lines, `Subtitles`
give them to steps.

A cue is plain text: what was said, each row once. Notes on sounds are left out: `[music]`, and
`(door slams)` on a row of its own. A speaker that WebVTT names stays, as `Mara: `. Captions that
roll up show a row again; a row that the caption before showed is left out.

A cue belongs to the step that holds its middle. Where its words have times of their own, each word
belongs to the step in which it begins. So a step's texts follow from the cues and the step's
interval alone, and a run in parts gives the same texts as a whole one. Times are seconds of the
source.
"""

from __future__ import annotations

import html
import re
from bisect import bisect_left
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import groupby
from operator import attrgetter
from typing import NamedTuple

from protokv.core.step import SpokenText
from protokv.texts import JsonRecord
from protokv.video.source import SubtitleLine

# Characters; a minute of speech has about 1,000.
_MOST_OF_STEP = 2000

# A caption that follows the one before within this many seconds may repeat its rows.
_AT_ONCE_S = 0.1

# Captions that roll up show no more rows than this.
_MOST_REPEATED = 16

# All patterns take a time that grows with the text alone, whatever the text.
_TIME = re.compile(r"<((?:\d{1,4}:)?\d\d:\d\d\.\d{3})>")
_VOICE = re.compile(r"<v(?:\.[^\s<>]*)?\s([^<>]+)>")
_TAG = re.compile(r"</?(?:[abicusv]|font|lang|ruby|rt|span|br|p)(?:[.\s/][^<>]*)?>", re.IGNORECASE)
_NOTE = re.compile(r"(?<!\S)\[[^\[\]\d]*\]:?(?!\w)")
_NOTE_ON_ROWS = re.compile(r"^[- \t]*\([^()]*\)[ \t]*$", re.MULTILINE)
_BEGINNING = re.compile(r"^\s*(?:>{2,}|[-\u2013\u2014](?=\s|[^\W\d]))\s*")

# Notes of music and control characters become spaces; what is not seen and turns the direction of
# writing goes.
_UNSEEN = dict.fromkeys(
    [0x200B, 0x200E, 0x200F, *range(0x202A, 0x202F), *range(0x2066, 0x206A), 0xFEFF]
)
_SIGNS = {**_UNSEEN, **dict.fromkeys([*range(32), *range(0x7F, 0xA0), *map(ord, "♪♫♬")], " ")}


@dataclass(frozen=True, slots=True)
class Cue:
    """A caption from `start_s` to `end_s`, as plain text.

    `words` has the start of each word and the word, in order; empty if the words have no times of
    their own.
    """

    start_s: float
    end_s: float
    text: str
    words: tuple[tuple[float, str], ...] = ()


def make_cues(lines: Iterable[SubtitleLine]) -> Iterator[Cue]:
    """Give a cue for each line, in the order of time, without the rows that the line before it
    showed.
    """
    last = list[str]()
    until_s = -1.0
    for line in sorted(lines):
        rows = map(_split_row, _NOTE_ON_ROWS.sub("", line.text.replace("\r", "")).split("\n"))
        new = [row for row in rows if row]
        texts = [" ".join(word for _, word in row) for row in new]
        before = last if line.start_s - until_s <= _AT_ONCE_S else []
        most = min(len(before), len(new), _MOST_REPEATED)
        repeated = next(n for n in range(most, -1, -1) if before[len(before) - n :] == texts[:n])
        last = texts
        until_s = max(until_s, line.end_s)
        words = [one for row in new[repeated:] for one in row]
        timed = any(time_s is not None for time_s, _ in words)
        times = (
            tuple((line.start_s if at is None else at, word) for at, word in words) if timed else ()
        )
        if words:
            yield Cue(line.start_s, line.end_s, " ".join(texts[repeated:]), times)


def _split_row(text: str) -> list[tuple[float | None, str]]:
    """Return the words of a row, each with its start. Words without times are one piece."""
    pieces: list[tuple[float | None, str]] = []
    time_s: float | None = None
    within = False
    for n, part in enumerate(_TIME.split(_BEGINNING.sub("", text))):
        if n % 2:
            time_s = sum(
                float(number) * 60**place for place, number in enumerate(reversed(part.split(":")))
            )
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


class _Piece(NamedTuple):
    """A part of a cue for one step: the time that decides which, the number of the cue, the text,
    and from when to when it is said.
    """

    time_s: float
    cue: int
    text: str
    start_s: float
    end_s: float


class Subtitles:
    """The subtitles of a source; with an empty record and no cues: none.

    Args:
        cues: those that are known, in any order.
        record: which subtitles these are, as a state keeps it: plain JSON. Equal records are of
            equal subtitles.
        lost: one sentence on what was cut off or could not be read; None: nothing until now.
    """

    def __init__(
        self,
        cues: Iterable[Cue] = (),
        record: JsonRecord | None = None,
        lost: str | None = None,
    ) -> None:
        self.record: JsonRecord = record or {}
        self.lost = lost
        self._pieces: list[_Piece] = []
        for number, cue in enumerate(sorted(cues, key=lambda cue: (cue.start_s, cue.end_s))):
            middle_s = (cue.start_s + cue.end_s) / 2
            parts = cue.words or ((cue.start_s, cue.text),)
            ends_s = [*(time_s for time_s, _ in parts[1:]), cue.end_s]
            for (from_s, text), to_s in zip(parts, ends_s, strict=True):
                time_s = _round_time(from_s if cue.words else middle_s)
                self._pieces.append(_Piece(time_s, number, text, from_s, to_s))
        self._pieces.sort(key=lambda piece: piece[:2])

    @property
    def has_lines(self) -> bool:
        """Whether there is a line, so that a memory needs room for words."""
        return bool(self.record) and bool(self._pieces)

    def between(self, start_s: float, end_s: float) -> list[SpokenText]:
        """Return the texts of the step from `start_s` up to `end_s`, in order, with their times.

        The step that begins at 0 also takes what comes before it.
        """
        pieces = self._pieces[0 if start_s <= 0 else self._find(start_s) : self._find(end_s)]
        texts = list[SpokenText]()
        left = _MOST_OF_STEP
        by_cue = attrgetter("cue")
        for _, cue_pieces in groupby(sorted(pieces, key=by_cue), by_cue):
            of_cue = list(cue_pieces)
            text = " ".join(piece.text for piece in of_cue)
            if len(text) > left:
                what = (
                    f"a step has more than {_MOST_OF_STEP:,} characters at {start_s:.0f} s; the "
                    "rest is left out"
                )
                self.lost = self.lost or what
                # Cut before a word where there is one.
                head, _, _ = text[: left + 1].rpartition(" ")
                text = (head or text[:left]).rstrip()
            if text:
                from_s = of_cue[0].start_s - start_s
                texts.append(SpokenText(text, from_s, of_cue[-1].end_s - start_s))
            left -= len(text)
        return texts

    def _find(self, time_s: float) -> int:
        return bisect_left(self._pieces, _round_time(time_s), key=lambda piece: piece.time_s)


def _round_time(time_s: float) -> float:
    """Return a time to the microsecond: two ways to count to it give one number."""
    return round(time_s, 6)
