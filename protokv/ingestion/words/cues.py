"""`Cue`, a line that was said, and `Words`, which gives the texts of each step.

A cue belongs to the step that holds its middle. Where its words have times of their own, each word belongs to the step
in which it begins. So a step's texts follow from the cues and the step's interval alone, and a run in parts gives the
same texts as a whole one. Sizes are bounded; `Words.lost` says what a bound cut off. Times are seconds of the source.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import groupby, islice
from typing import Any, Protocol

# A cue that people can read has up to 100 characters; a minute of speech has about 1,000.
MOST_OF_CUE, MOST_OF_STEP = 1000, 2000

# A cue a second for more than a day.
MOST_CUES = 100_000


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
    """

    record: Mapping[str, Any]
    lost: str | None

    def between(self, start_s: float, end_s: float) -> list[str]:
        """Return the texts of the step from `start_s` up to `end_s`, in order.

        The step that begins at 0 also takes what was said before it.
        """


class Track:
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
        cues = iter(cues)
        self._cues = sorted(islice(cues, MOST_CUES), key=lambda cue: (cue.start_s, cue.end_s))
        self._most = most_of_step
        self.record, self.lost = record or {}, lost
        if next(cues, None) is not None:
            self._lose(f"only the first {MOST_CUES:,} lines are read")
        pieces = [(time_s, n, word) for n, cue in enumerate(self._cues) for time_s, word in self._pieces(cue)]
        self._pieces_of_all = sorted(pieces, key=lambda piece: piece[:2])
        self._times = [piece[0] for piece in self._pieces_of_all]

    def between(self, start_s: float, end_s: float) -> list[str]:
        """See `Words`."""
        first = bisect_left(self._times, start_s) if start_s > 0 else 0
        inside = self._pieces_of_all[first : bisect_left(self._times, end_s)]
        texts: list[str] = []
        left = self._most
        for _, said in groupby(sorted(inside, key=lambda piece: piece[1]), key=lambda piece: piece[1]):
            text = " ".join(word for _, _, word in said)
            if len(text) > left:
                self._lose(f"a step has more than {self._most:,} characters at {start_s:.0f} s")
                return [*texts, shortened] if (shortened := cut(text, left)) else texts
            texts.append(text)
            left -= len(text)
        return texts

    def _pieces(self, cue: Cue) -> Iterable[tuple[float, str]]:
        """Return what of a cue may go to different steps, each with the time that decides."""
        if not math.isfinite(cue.start_s + cue.end_s):
            return ()
        if len(cue.text) > MOST_OF_CUE:
            self._lose(f"a line has more than {MOST_OF_CUE:,} characters at {cue.start_s:.0f} s")
            return (((cue.start_s + cue.end_s) / 2, cut(cue.text, MOST_OF_CUE)),)
        return cue.words or (((cue.start_s + cue.end_s) / 2, cue.text),)

    def _lose(self, what: str) -> None:
        self.lost = self.lost or f"{what}; the rest is left out"


def cut(text: str, most: int) -> str:
    """Return a text of at most so many characters, cut before a word where there is one."""
    if len(text) <= most:
        return text
    head, _, _ = text[: most + 1].rpartition(" ")
    return (head or text[:most]).rstrip()
