"""`RecordedContext`: any context, and the queries that met it, for a memory that ranks what it holds by them."""

from __future__ import annotations

from dataclasses import dataclass, field

from torch import Tensor

from protokv.context.base import Anchoring, Context, Segment


@dataclass(frozen=True, slots=True)
class RecordedContext(Context):
    """Shows what another context shows.

    Attributes:
        shown: that context.
        queries: `[Hq, T, D]` of each layer of the forward, in order.
    """

    shown: Context
    queries: list[Tensor] = field(default_factory=list)

    @property
    def shift(self) -> int | Tensor:  # type: ignore[override]
        """As the other's."""
        return self.shown.shift

    @property
    def next_position(self) -> int | Tensor | None:  # type: ignore[override]
        """As the other's."""
        return self.shown.next_position

    def at(self, layer: int, query: Tensor) -> tuple[Segment, ...]:
        """What the other shows; the query is kept."""
        self.queries.append(query)
        return self.shown.at(layer, query)

    def places(self, layer: int) -> Tensor | None:
        """As the other knows them."""
        return self.shown.places(layer)

    def without_far(self) -> RecordedContext:
        """The other without what is far."""
        return RecordedContext(self.shown.without_far(), self.queries)

    def visible_tokens(self) -> int:
        """As the other's."""
        return self.shown.visible_tokens()

    def far_span(self) -> int | Tensor:
        """As the other's."""
        return self.shown.far_span()

    def compacted(self, anchoring: Anchoring, span: int | Tensor) -> RecordedContext:
        """The other, compacted."""
        return RecordedContext(self.shown.compacted(anchoring, span), self.queries)
