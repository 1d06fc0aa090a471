"""`Cue`, a line that was said, and `Words`, which gives the texts of each step.

A cue belongs to the step that holds its middle. Where its words have times of their own, each word belongs to the step
in which it begins. So a step's texts follow from the cues and the step's interval alone, and a run in parts gives the
same texts as a whole one. Sizes are bounded; `Words.lost` says what a bound cut off. Times are seconds of the source.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from itertools import groupby, islice
from typing import Any, NamedTuple, Protocol

# A cue that people can read has up to 100 characters; a minute of speech has about 1,000.
MOST_OF_CUE, MOST_OF_STEP = 1000, 2000

# A cue a second for more than a day.
MOST_CUES = 100_000

# Pieces of cues of a stream that wait for their step.
MOST_WAITING = 10_000


@dataclass(frozen=True, slots=True)
class Cue:
    """A line of plain text, said from `start_s` to `end_s`.

    `words` has the start of each word and the word, in order; empty if the words have no times of their own.
    """

    start_s: float
    end_s: float
    text: str
    words: tuple[tuple[float, str], ...] = ()


class Words(Protocol):
    """What is said in a source.

    Attributes:
        record: which words these are, as a state keeps it: plain JSON. Equal records are of equal words.
        lost: one sentence on what was cut off or could not be read; None: nothing until now.
        silent: it is known that nothing is said.
    """

    record: Mapping[str, Any]
    lost: str | None
    silent: bool

    def between(self, start_s: float, end_s: float) -> list[str]:
        """Return the texts of the step from `start_s` up to `end_s`, in order.

        The step that begins at 0 also takes what was said before it.
        """


def speak(words: Words | None) -> bool:
    """Return whether words may come, so that a memory needs room for them."""
    return words is not None and bool(words.record) and not words.silent


class Piece(NamedTuple):
    """What of a cue goes to one step: the time that decides which, the number of the cue, and the text."""

    time_s: float
    cue: int
    text: str


class Bounded:
    """The part of `Words` that cuts cues into pieces and pieces to size."""

    silent = False

    def __init__(self, record: Mapping[str, Any], lost: str | None = None, most_of_step: int = MOST_OF_STEP) -> None:
        self.record, self.lost = record, lost
        self._most = most_of_step

    def _pieces(self, n: int, cue: Cue) -> list[Piece]:
        """Return the pieces of the n-th cue."""
        middle_s = (cue.start_s + cue.end_s) / 2
        if not math.isfinite(middle_s):
            return []
        if len(cue.text) > MOST_OF_CUE:
            self._lose(f"a line has more than {MOST_OF_CUE:,} characters at {cue.start_s:.0f} s")
            return [Piece(_exact(middle_s), n, cut(cue.text, MOST_OF_CUE))]
        return [Piece(_exact(time_s), n, word) for time_s, word in cue.words or ((middle_s, cue.text),)]

    def _texts(self, inside: Iterable[Piece], start_s: float) -> list[str]:
        """Join the pieces of a step."""
        texts: list[str] = []
        left = self._most
        for _, said in groupby(sorted(inside, key=lambda piece: piece.cue), key=lambda piece: piece.cue):
            text = " ".join(piece.text for piece in said)
            if len(text) > left:
                self._lose(f"a step has more than {self._most:,} characters at {start_s:.0f} s")
                return [*texts, shortened] if (shortened := cut(text, left)) else texts
            texts.append(text)
            left -= len(text)
        return texts

    def _lose(self, what: str) -> None:
        self.lost = self.lost or f"{what}; the rest is left out"


class Track(Bounded):
    """`Words` of cues that are all known. See there for the contract.

    Args:
        cues: in any order; sorted by time here. Only the first `MOST_CUES` are read.
        record: as in `Words`.
        lost: what is known to be lost already.
        most_of_step: characters that a step may have.
    """

    def __init__(
        self,
        cues: Iterable[Cue],
        record: Mapping[str, Any] | None = None,
        lost: str | None = None,
        most_of_step: int = MOST_OF_STEP,
    ) -> None:
        super().__init__(record or {}, lost, most_of_step)
        cues = iter(cues)
        in_order = sorted(islice(cues, MOST_CUES), key=lambda cue: (cue.start_s, cue.end_s))
        if next(cues, None) is not None:
            self._lose(f"only the first {MOST_CUES:,} lines are read")
        pieces = [piece for n, cue in enumerate(in_order) for piece in self._pieces(n, cue)]
        self._in_time = sorted(pieces, key=lambda piece: piece[:2])
        self._times = [piece.time_s for piece in self._in_time]
        self.silent = not pieces

    def between(self, start_s: float, end_s: float) -> list[str]:
        """See `Words`."""
        first = bisect_left(self._times, _exact(start_s)) if start_s > 0 else 0
        return self._texts(self._in_time[first : bisect_left(self._times, _exact(end_s))], start_s)


class Coming(Bounded):
    """`Words` of cues that come while the source is read. A cue that comes late goes to the next step.

    Args:
        take: returns the cues that came since the last call; called with the interval of the next step.
        record: as in `Words`.
    """

    def __init__(self, take: Callable[[float, float], Iterable[Cue]], record: Mapping[str, Any]) -> None:
        super().__init__(record)
        self._take = take
        self._waiting: list[Piece] = []
        self._n = 0
        self._begun = False

    def between(self, start_s: float, end_s: float) -> list[str]:
        """See `Words`."""
        for cue in self._take(start_s, end_s):
            self._waiting += self._pieces(self._n, cue)
            self._n += 1
        if not self._begun and start_s > 0:
            # An earlier run has watched what was said before.
            self._waiting = [piece for piece in self._waiting if piece.time_s >= _exact(start_s)]
        self._begun = True
        inside = sorted((piece for piece in self._waiting if piece.time_s < _exact(end_s)), key=lambda piece: piece[:2])
        self._waiting = [piece for piece in self._waiting if piece.time_s >= _exact(end_s)][:MOST_WAITING]
        return self._texts(inside, start_s)


def _exact(time_s: float) -> float:
    """Return a time to the microsecond: two ways to count to it give one number."""
    return round(time_s, 6)


def cut(text: str, most: int) -> str:
    """Return a text of at most so many characters, cut before a word where there is one."""
    if len(text) <= most:
        return text
    head, _, _ = text[: most + 1].rpartition(" ")
    return (head or text[:most]).rstrip()
