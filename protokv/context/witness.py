"""`Witness`: a context that keeps in mind who read it, so that what an answer stood on can be told afterwards.

It shows what the context behind it shows. Of the layers that it watches it keeps the last query of each forward, and
what that query was shown. Nothing is computed while a model reads; a context without a witness costs nothing.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from torch import Tensor

from protokv.context.base import Anchoring, Context, Segment


@dataclass(frozen=True, slots=True)
class Reading:
    """What one layer was asked and shown.

    Attributes:
        layer: which.
        query: `[Hq, D]`, rotated, of the last token that was forwarded.
        segments: what it was shown.
    """

    layer: int
    query: Tensor
    segments: Sequence[Segment]


class Witness(Context):
    """A context under another's eyes."""

    def __init__(self, context: Context, layers: Collection[int]) -> None:
        """Watch these layers read `context`."""
        self._context, self._layers = context, frozenset(layers)
        self._readings: list[Reading] = []
        self.shift, self.next_position = context.shift, context.next_position

    def at(self, layer: int, query: Tensor) -> tuple[Segment, ...]:
        """What the context shows."""
        segments = self._context.at(layer, query)
        if layer in self._layers:
            self._readings.append(Reading(layer, query[:, -1], segments))
        return segments

    def take(self) -> list[Reading]:
        """What was read since this was last asked, layer by layer."""
        readings, self._readings = self._readings, []
        return readings

    def places(self, layer: int) -> Tensor | None:
        """Of the context."""
        return self._context.places(layer)

    def without_far(self) -> Witness:
        """The same eyes on the context without what is far."""
        return Witness(self._context.without_far(), self._layers)

    def visible_tokens(self) -> int:
        """Of the context."""
        return self._context.visible_tokens()

    def far_span(self) -> int:
        """Of the context."""
        return self._context.far_span()

    def compacted(self, anchoring: Anchoring, span: int) -> Witness:
        """The same eyes on the context re-anchored."""
        return Witness(self._context.compacted(anchoring, span), self._layers)
