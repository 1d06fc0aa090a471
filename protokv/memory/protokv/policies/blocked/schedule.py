"""`Schedule`: which heads plan in which step, and how far each has carried its plan out.

Heads take turns, so that every step plans for as many: of the model's heads, counted through its layers, every G-th.
A plan holds K / 20 merges, enough for G steps; in a small bank K / 14, which is a step of 196 tokens from K = 2,744
on. Everything here is whole numbers on the host that depend on the lengths of the steps alone, and it is the same for
every part of a model that is spread over devices.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

SHARE, SMALL_SHARE = 20, 14
"""A plan is one part of the bank in so many."""
LARGE = 4096
"""Prototypes of a large bank. A smaller one is searched more widely (`nearest`), once a step if that is enough."""


def is_large(prototypes: int) -> bool:
    """Whether a bank of K prototypes is."""
    return prototypes >= LARGE


def merges_of(prototypes: int) -> int:
    """M, the merges of a plan: so few that what is new, and in no plan yet, is a small part of the bank."""
    return max(1, prototypes // (SHARE if is_large(prototypes) else SMALL_SHARE))


def pieces_of(tokens: int, most: int) -> Iterator[slice]:
    """Slices of as equal length as can be, none longer than `most`."""
    count = -(-tokens // most)
    for piece in range(count):
        yield slice(tokens * piece // count, tokens * (piece + 1) // count)


@dataclass(slots=True)
class Schedule:
    """Turns of the heads of a model.

    Attributes:
        prototypes: K.
        heads: of the whole model, over all layers.
        filled: slots in use, the first ones; the same in all heads.
        turn: how often heads took turns.
        done: of each head, how many merges of its plan were carried out; M where it has none.
    """

    prototypes: int
    heads: int
    filled: int = 0
    turn: int = 0
    done: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        if not self.done:
            self.done = [self.merges] * self.heads

    @property
    def merges(self) -> int:
        """M."""
        return merges_of(self.prototypes)

    def open(self, tokens: int) -> slice:
        """Take free slots for some of `tokens`: as many as there are."""
        slots = slice(self.filled, min(self.filled + tokens, self.prototypes))
        self.filled = slots.stop
        return slots

    def next_turn(self, tokens: int) -> slice | None:
        """Heads that plan before `tokens` are taken; None while the bank is not nearly full."""
        if self.filled + self.merges <= self.prototypes and self.filled + tokens <= self.prototypes:
            return None
        needed = max(0, self.filled + tokens - self.prototypes)
        groups = max(1, self.merges // tokens)
        while self.heads % groups:
            groups -= 1
        heads = slice(self.turn % groups, None, groups)
        self.turn += 1
        rest = self.done.copy()
        rest[heads] = [0] * len(rest[heads])
        if max(rest) + needed > self.merges:
            heads = slice(0, None, 1)
        self.done[heads] = [0] * len(self.done[heads])
        return heads

    def carry_out(self, merges: int) -> None:
        """Count merges that every head makes."""
        self.done = [done + merges for done in self.done]

    def numbers(self) -> list[int]:
        """What `of_numbers` takes: `[2 + heads]`."""
        return [self.filled, self.turn, *self.done]

    @classmethod
    def of_numbers(cls, prototypes: int, numbers: Sequence[int]) -> Schedule:
        """A schedule as it was.

        Raises:
            ValueError: no schedule has these numbers.
        """
        filled, turn, *done = numbers
        most = merges_of(prototypes)
        if not (0 <= filled <= prototypes and turn >= 0 and done and min(done) >= 0 and max(done) <= most):
            raise ValueError(f"no schedule of {prototypes} prototypes has the numbers {filled}, {turn}, ...")
        return cls(prototypes, len(done), filled, turn, done)
