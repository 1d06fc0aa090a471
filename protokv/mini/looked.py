"""What the frames of a stream were, counted: pictures of the procedural world, or others; and what follows from that.

`protokv.mini.recognition` looks at the frames. The counts are part of a state. Needs neither torch nor numpy.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Final, Literal

Look = Literal["shapes", "empty", "other"]
"""A picture of the world with shapes or without, or another picture."""

LONELY: Final = 60
"""Pictures without any shape before they decide. In 750 worlds the longest wait for the first shape was 58 s."""

EVERY: Final = 8
"""After the first `LONELY` steps of a source, one in `EVERY` is looked at: that costs next to nothing."""


def is_looked_at(index: int) -> bool:
    """Return whether the step `index` of a source is looked at. It depends on nothing else, so resuming is exact."""
    return index < LONELY or index % EVERY == 0


@dataclass(frozen=True, slots=True)
class Looked:
    """The number of looked-at pictures of each kind."""

    shapes: int = 0
    empty: int = 0
    other: int = 0

    def add(self, look: Look) -> Looked:
        """Count one more picture."""
        return replace(self, **{look: getattr(self, look) + 1})

    @property
    def is_world(self) -> bool | None:
        """Whether they are of the procedural world; None: too few tell.

        They are of another video if other pictures are more than an eighth, and more than those with shapes. So are
        `LONELY` pictures without a shape: no world is empty for so long.
        """
        n = self.shapes + self.empty + self.other
        if self.other > max(self.shapes, n / 8):
            return False
        if self.shapes:
            return True
        return False if n >= LONELY else None

    @classmethod
    def of(cls, record: object) -> Looked | None:
        """Return the counts in a record made by `asdict`; None if it is none."""
        if not isinstance(record, Mapping) or record.keys() != {"shapes", "empty", "other"}:
            return None
        counts: dict[str, Any] = dict(record)
        return cls(**counts) if all(type(n) is int and n >= 0 for n in counts.values()) else None
