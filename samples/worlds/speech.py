"""What is said in the procedural world: captions that tell who owns a shape, which no picture
shows, and small talk.

The evidence is said too: who owns each of its shapes. Other captions are about other shapes, by
other names, or about nothing. A caption is said within one second, and no two are said in the same
one. Draws from a random generator; knows no pictures. Names and shapes are indices.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Final

import numpy as np

from samples.worlds.pictures import SHAPES

NAMES: Final = ("Mara", "Omar", "Lena", "Ivan", "Nora", "Hugo", "Ruth", "Emil")

OWNS: Final = ("The owner of the {shape} is {name}", "The {shape} is {name}'s")
"""The name comes behind the shape in each, so that it can tell both."""

SMALL_TALK: Final = (
    "Hello",
    "This is it",
    "Now look at this",
    "We have seen it before",
    "There is nothing to see here",
    "So it was, and so it is",
)


@dataclass(frozen=True, slots=True)
class Caption:
    """One caption, said in [second, second + 1); `shape` and `name` are None for small talk."""

    second: int
    text: str
    shape: int | None = None
    name: int | None = None

    def later(self, by_s: int) -> Caption:
        """Return the same caption `by_s` seconds later."""
        return replace(self, second=self.second + by_s)


def say_owner(rng: np.random.Generator, second: int, shape: int, name: int) -> Caption:
    """Say who owns a shape, in one of the two wordings."""
    text = OWNS[int(rng.integers(len(OWNS)))].format(shape=SHAPES[shape], name=NAMES[name])
    return Caption(second, text, shape, name)


def say_something(
    rng: np.random.Generator, seconds: Sequence[int], shapes: Sequence[int], names: Sequence[int]
) -> list[Caption]:
    """Say something in each of some seconds: as often small talk as who owns one of the
    `shapes`.
    """
    said = []
    for second in seconds:
        shape, name = (pool[int(rng.integers(len(pool)))] for pool in (shapes, names))
        if rng.random() < 0.5:
            said.append(say_owner(rng, second, shape, name))
        else:
            said.append(Caption(second, SMALL_TALK[int(rng.integers(len(SMALL_TALK)))]))
    return said
