"""Record the queries of a forward, and hand them to a memory that makes room by the queries of texts (HERMES)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor

from protokv.core.context import Context, Segment
from protokv.core.memory import Accompanied
from protokv.core.parts import PositionedStep, SessionListener, SessionView
from protokv.core.rotary import rerotate


@dataclass(frozen=True, slots=True)
class RecordedContext(Context):
    """Shows another context, and keeps the queries that read it.

    Attributes:
        inner: the other context.
        queries: `[Hq, T, D]` of each layer of the forward, in order.
    """

    inner: Context
    queries: list[Tensor] = field(default_factory=list)

    def at(self, layer: int, query: Tensor) -> tuple[Segment, ...]:
        """Keep the query; return the segments of the inner context."""
        self.queries.append(query)
        return self.inner.at(layer, query)

    def positions_at(self, layer: int) -> Tensor | None:
        """Return those of the inner context."""
        return self.inner.positions_at(layer)

    def visible_tokens(self) -> int:
        """Return those of the inner context."""
        return self.inner.visible_tokens()


@runtime_checkable
class Probing(Protocol):
    """A memory that makes room before a step by the attention of some texts."""

    def probes_for(self, tokens: int) -> Sequence[str]:
        """Return the texts whose queries `compact` needs before a step of this many tokens; often none."""

    def compact(self, queries: Sequence[Tensor], tokens: int) -> None:
        """Make room for a step.

        Args:
            queries: of each text, `[L, Hq, t, D]`, rotated to the stream positions behind the video.
            tokens: of the step.
        """


class ProbeListener(SessionListener):
    """Asks a `Probing` memory for its texts before each step, and forwards them as questions without an answer."""

    def before_append(self, session: SessionView, step: PositionedStep) -> None:
        """Let the memory make room for the step."""
        memory = session.memory.inner if isinstance(session.memory, Accompanied) else session.memory
        assert isinstance(memory, Probing)
        tokens = len(step.positions)
        if probes := memory.probes_for(tokens):
            memory.compact([find_queries(session, text) for text in probes], tokens)


def find_queries(session: SessionView, text: str) -> Tensor:
    """Return the queries `[L, Hq, t, D]` of a text behind the video, at stream positions."""
    backbone, placement = session.backbone, session.parts.placement
    ids = backbone.suffix_ids(text)
    placed = placement.place(session.memory.context(), session.clock)
    start = placement.text_start(placed, session.clock)
    context, positions = RecordedContext(placed), backbone.text_positions(start, len(ids))
    backbone.forward(backbone.embed_text(ids), positions, context, session.new_local_kv(len(ids)))
    queries = torch.stack([query.to(backbone.device) for query in context.queries])
    if start == session.clock.next_position:
        return queries
    stream = backbone.text_positions(session.clock.next_position, len(ids))
    return rerotate(queries, positions, stream, backbone.precise_rotary)
