"""`Cue`, one caption as plain text, and `Subtitles`, which give the texts of each step.

A cue belongs to the step that holds its middle. Where its words have times of their own, each word belongs to the step
in which it begins. So a step's texts follow from the cues and the step's interval alone, and a run in parts gives the
same texts as a whole one. Sizes are bounded; `Subtitles.lost` says what a bound cut off. Times are seconds of the
source.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
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


class Subtitles(ABC):
    """The subtitles of a source.

    Attributes:
        record: which these are, as a state keeps it: plain JSON, empty if there are none. Equal records are of equal
            subtitles.
        lost: one sentence on what was cut off or could not be read; None: nothing until now.
        empty: it is known that there is no line.
        most_of_step: characters that a step may have.
    """

    empty = False

    def __init__(self, record: Mapping[str, Any], lost: str | None = None, most_of_step: int = MOST_OF_STEP) -> None:
        self.record, self.lost, self.most_of_step = record, lost, most_of_step

    @property
    def may_come(self) -> bool:
        """Whether there may be a line, so that a memory needs room for words."""
        return bool(self.record) and not self.empty

    @abstractmethod
    def between(self, start_s: float, end_s: float) -> list[str]:
        """Return the texts of the step from `start_s` up to `end_s`, in order.

        The step that begins at 0 also takes what comes before it.
        """

    def _cut_into_pieces(self, number: int, cue: Cue) -> list[_Piece]:
        middle_s = (cue.start_s + cue.end_s) / 2
        if not math.isfinite(middle_s):
            return []
        if len(cue.text) > MOST_OF_CUE:
            self._lose(f"a line has more than {MOST_OF_CUE:,} characters at {cue.start_s:.0f} s")
            return [_Piece(_exact(middle_s), number, shorten(cue.text, MOST_OF_CUE))]
        return [_Piece(_exact(time_s), number, word) for time_s, word in cue.words or ((middle_s, cue.text),)]

    def _join(self, pieces: Iterable[_Piece], start_s: float) -> list[str]:
        """Return the texts of the pieces of one step: one of each cue, in the order of the cues."""
        texts: list[str] = []
        left = self.most_of_step
        for _, of_cue in groupby(sorted(pieces, key=lambda piece: piece.cue), key=lambda piece: piece.cue):
            text = " ".join(piece.text for piece in of_cue)
            if len(text) > left:
                self._lose(f"a step has more than {self.most_of_step:,} characters at {start_s:.0f} s")
                return [*texts, shortened] if (shortened := shorten(text, left)) else texts
            texts.append(text)
            left -= len(text)
        return texts

    def _lose(self, what: str) -> None:
        self.lost = self.lost or f"{what}; the rest is left out"


class KnownSubtitles(Subtitles):
    """Subtitles whose cues are all known, in any order."""

    def __init__(
        self,
        cues: Iterable[Cue],
        record: Mapping[str, Any] | None = None,
        lost: str | None = None,
        most_of_step: int = MOST_OF_STEP,
    ) -> None:
        super().__init__(record or {}, lost, most_of_step)
        in_order = sorted(cues, key=lambda cue: (cue.start_s, cue.end_s))
        pieces = [piece for n, cue in enumerate(in_order) for piece in self._cut_into_pieces(n, cue)]
        self._pieces = sorted(pieces, key=lambda piece: piece[:2])
        self._times = [piece.time_s for piece in self._pieces]
        self.empty = not pieces

    def between(self, start_s: float, end_s: float) -> list[str]:
        """See `Subtitles`."""
        first = bisect_left(self._times, _exact(start_s)) if start_s > 0 else 0
        return self._join(self._pieces[first : bisect_left(self._times, _exact(end_s))], start_s)


class LiveSubtitles(Subtitles):
    """Subtitles whose cues come while the source is read. A cue that comes late goes to the next step.

    Args:
        take_new: returns the cues that came since the last call.
        record: as in `Subtitles`.
    """

    def __init__(self, take_new: Callable[[], Iterable[Cue]], record: Mapping[str, Any]) -> None:
        super().__init__(record)
        self._take_new = take_new
        self._waiting: list[_Piece] = []
        self._count = 0
        self._begun = False

    def between(self, start_s: float, end_s: float) -> list[str]:
        """See `Subtitles`."""
        for cue in self._take_new():
            self._waiting += self._cut_into_pieces(self._count, cue)
            self._count += 1
        if not self._begun and start_s > 0:
            # An earlier run has watched the steps of these.
            self._waiting = [piece for piece in self._waiting if piece.time_s >= _exact(start_s)]
        self._begun = True
        of_step = sorted((piece for piece in self._waiting if piece.time_s < _exact(end_s)), key=lambda one: one[:2])
        self._waiting = [piece for piece in self._waiting if piece.time_s >= _exact(end_s)][:MOST_WAITING]
        return self._join(of_step, start_s)


def _exact(time_s: float) -> float:
    """Return a time to the microsecond: two ways to count to it give one number."""
    return round(time_s, 6)


def shorten(text: str, most: int) -> str:
    """Return a text of at most so many characters, cut before a word where there is one."""
    if len(text) <= most:
        return text
    head, _, _ = text[: most + 1].rpartition(" ")
    return (head or text[:most]).rstrip()
