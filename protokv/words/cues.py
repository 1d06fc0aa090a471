"""`Cue`, one caption as plain text, and `Subtitles`, which give the texts of each step.

A cue belongs to the step that holds its middle. Where its words have times of their own, each word belongs to the step
in which it begins. So a step's texts follow from the cues and the step's interval alone, and a run in parts gives the
same texts as a whole one. Times are seconds of the source.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from itertools import groupby
from typing import Any, NamedTuple

# Characters; a minute of speech has about 1,000.
MOST_OF_STEP = 2000

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
    ) -> None:
        self.record: Mapping[str, Any] = record or {}
        self.lost, self.live, self._take_new = lost, take_new is not None, take_new
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
        takes_earlier = start_s <= 0 or (self.live and self._begun)
        first, end = 0 if takes_earlier else self._find(start_s), self._find(end_s)
        pieces, self._begun = self._pieces[first:end], True
        if self.live:
            self._pieces = self._pieces[end:][:MOST_WAITING]
        texts, left = list[str](), MOST_OF_STEP
        for _, of_cue in groupby(sorted(pieces, key=lambda piece: piece.cue), key=lambda piece: piece.cue):
            text = " ".join(piece.text for piece in of_cue)
            if len(text) > left:
                what = f"a step has more than {MOST_OF_STEP:,} characters at {start_s:.0f} s; the rest is left out"
                self.lost = self.lost or what
                # Cut before a word where there is one.
                head, _, _ = text[: left + 1].rpartition(" ")
                text = (head or text[:left]).rstrip()
            texts += [text] if text else []
            left -= len(text)
        return texts

    def _add(self, cues: Iterable[Cue]) -> None:
        for cue in cues:
            middle_s = (cue.start_s + cue.end_s) / 2
            if math.isfinite(middle_s):
                times = cue.words or ((middle_s, cue.text),)
                self._pieces += [_Piece(_round_time(time_s), self._count, text) for time_s, text in times]
            self._count += 1
        self._pieces.sort(key=lambda piece: piece[:2])

    def _find(self, time_s: float) -> int:
        return bisect_left(self._pieces, _round_time(time_s), key=lambda piece: piece.time_s)


def _round_time(time_s: float) -> float:
    """Return a time to the microsecond: two ways to count to it give one number."""
    return round(time_s, 6)
