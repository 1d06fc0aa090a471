"""`Cue`, one caption as plain text, and `Subtitles`, which give the texts of each step.

A cue belongs to the step that holds its middle. Where its words have times of their own, each word belongs to the step
in which it begins. So a step's texts follow from the cues and the step's interval alone, and a run in parts gives the
same texts as a whole one. Sizes are bounded; `Subtitles.lost` says what a bound cut off. Times are seconds of the
source.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from itertools import groupby
from typing import Any, NamedTuple

# Characters. A cue that people can read has up to 100; a minute of speech has about 1,000.
MOST_OF_CUE, MOST_OF_STEP = 1000, 2000

# Pieces of cues of a stream that wait for their step.
MOST_WAITING = 10_000


@dataclass(frozen=True, slots=True)
class Cue:
    """A caption from `start_s` to `end_s`, as plain text.

    `words` has the start of each word and the word, in order; empty if the words have no times of their own.
    """

    start_s: float
    end_s: float
    text: str
    words: tuple[tuple[float, str], ...] = ()


class _Piece(NamedTuple):
    """What of a cue goes to one step: the time that decides which, the number of the cue, and the text."""

    time_s: float
    cue: int
    text: str


class Subtitles:
    """The subtitles of a source; with an empty record and no cues: none.

    Args:
        cues: those that are known, in any order.
        record: which subtitles these are, as a state keeps it: plain JSON. Equal records are of equal subtitles.
        lost: one sentence on what could not be read.
        take_new: where cues come while the source is read: returns those that came since the last call. One that comes
            late goes to the next step.
        most_of_step: characters that a step may have.

    Attributes:
        record: as given; that of a live source may change.
        lost: one sentence on what was cut off or could not be read; None: nothing until now.
        live: cues come while the source is read.
    """

    def __init__(
        self,
        cues: Iterable[Cue] = (),
        record: Mapping[str, Any] | None = None,
        lost: str | None = None,
        *,
        take_new: Callable[[], Iterable[Cue]] | None = None,
        most_of_step: int = MOST_OF_STEP,
    ) -> None:
        self.record: Mapping[str, Any] = record or {}
        self.lost, self.live = lost, take_new is not None
        self._take_new, self._most_of_step = take_new, most_of_step
        self._begun, self._count = False, 0
        self._pieces: list[_Piece] = []
        self._add(sorted(cues, key=lambda cue: (cue.start_s, cue.end_s)))

    @property
    def may_come(self) -> bool:
        """Whether there may be a line, so that a memory needs room for words."""
        return bool(self.record) and (self.live or bool(self._pieces))

    def between(self, start_s: float, end_s: float) -> list[str]:
        """Return the texts of the step from `start_s` up to `end_s`, in order.

        The step that begins at 0 also takes what comes before it. A live source is asked for each step once, in order.
        """
        if self._take_new is not None:
            self._add(self._take_new())
        # What comes before the first step of a run that goes on was in steps of an earlier one.
        late = self.live and self._begun
        first = (
            0
            if late or start_s <= 0
            else bisect_left(self._pieces, _round_time(start_s), key=lambda piece: piece.time_s)
        )
        end = bisect_left(self._pieces, _round_time(end_s), key=lambda piece: piece.time_s)
        of_step = self._pieces[first:end]
        self._begun = True
        if self.live:
            self._pieces = self._pieces[end:][:MOST_WAITING]
        return self._join(of_step, start_s)

    def _add(self, cues: Iterable[Cue]) -> None:
        for cue in cues:
            self._pieces += self._cut_into_pieces(self._count, cue)
            self._count += 1
        self._pieces.sort(key=lambda piece: piece[:2])

    def _cut_into_pieces(self, number: int, cue: Cue) -> list[_Piece]:
        middle_s = (cue.start_s + cue.end_s) / 2
        if not math.isfinite(middle_s):
            return []
        if len(cue.text) > MOST_OF_CUE:
            self._lose(f"a line has more than {MOST_OF_CUE:,} characters at {cue.start_s:.0f} s")
            return [_Piece(_round_time(middle_s), number, shorten(cue.text, MOST_OF_CUE))]
        return [_Piece(_round_time(time_s), number, word) for time_s, word in cue.words or ((middle_s, cue.text),)]

    def _join(self, pieces: Iterable[_Piece], start_s: float) -> list[str]:
        """Return the texts of the pieces of one step: one of each cue, in the order of the cues."""
        texts: list[str] = []
        left = self._most_of_step
        for _, of_cue in groupby(sorted(pieces, key=lambda piece: piece.cue), key=lambda piece: piece.cue):
            text = " ".join(piece.text for piece in of_cue)
            if len(text) > left:
                self._lose(f"a step has more than {self._most_of_step:,} characters at {start_s:.0f} s")
                return [*texts, shortened] if (shortened := shorten(text, left)) else texts
            texts.append(text)
            left -= len(text)
        return texts

    def _lose(self, what: str) -> None:
        self.lost = self.lost or f"{what}; the rest is left out"


def _round_time(time_s: float) -> float:
    """Return a time to the microsecond: two ways to count to it give one number."""
    return round(time_s, 6)


def shorten(text: str, most: int) -> str:
    """Return a text of at most so many characters, cut before a word where there is one."""
    if len(text) <= most:
        return text
    head, _, _ = text[: most + 1].rpartition(" ")
    return (head or text[:most]).rstrip()
