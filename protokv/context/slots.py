"""`SlotContext`: a fixed set of slots with a logit bias each, shown where they stood in the stream.

Knows the parts of a memory by the order of its slots, and no memory.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Self

import torch
from torch import Tensor

from protokv.context.base import EMPTY, Anchoring, Context, Segment
from protokv.context.compact import CompactContext, Survey, survey


@dataclass(frozen=True, slots=True)
class SlotContext(Context):
    """`N` slots `[sink | far | near]`; every layer reads its own, whatever the query.

    Attributes:
        keys: `[L, H, N, D]`, model dtype, rotated to the positions they stand for.
        values: `[L, H, N, D]`, model dtype.
        bias: `[L, H, N]` float32, added to the logits: `-inf` empty, `0` exact token, `log n_k` pseudo-token.
        far: the slots that hold pseudo-tokens, or tokens that each head chose for itself. Before it stands the prompt
            prefix, behind it the near window, whose tokens are the same in all heads.
        positions: gives the stream positions of all slots, `[L, H, N, P]` int64, anything where a slot is empty. A
            function, since only re-anchoring asks for them.
        until: time at which tokens begin that are shown behind these slots and are not among them.
    """

    keys: Tensor
    values: Tensor
    bias: Tensor
    far: slice
    positions: Callable[[], Tensor] | None = None
    until: int | None = None
    shift: int | Tensor = 0
    next_position: int | Tensor | None = None
    # What is worked out once for all layers and all tokens of an answer.
    _finite: list[Tensor] = field(default_factory=list, init=False, repr=False, compare=False)
    _survey: list[Survey] = field(default_factory=list, init=False, repr=False, compare=False)

    def at(self, layer: int, query: Tensor) -> tuple[Segment, ...]:
        """The slots of this layer."""
        return (Segment(*self.read(layer), self.finite_bias()[layer]),)

    def read(self, layer: int, part: slice = slice(None)) -> tuple[Tensor, Tensor]:
        """Keys and values `[H, n, D]` of a part of the slots of a layer."""
        return self.keys[layer][:, part], self.values[layer][:, part]

    def places(self, layer: int) -> Tensor | None:
        """As they were given."""
        return None if self.positions is None else self.positions()[layer]

    def of_heads(self, heads: slice) -> Self:
        """The same slots of some heads alone; nothing is copied."""
        places = self.positions
        return replace(
            self,
            keys=self.keys[:, heads],
            values=self.values[:, heads],
            bias=self.bias[:, heads],
            positions=None if places is None else lambda: places()[:, heads],
        )

    def finite_bias(self) -> Tensor:
        """`[L, H, N]` float32, `EMPTY` where a slot is."""
        if not self._finite:
            self._finite.append(self.bias.clamp(min=EMPTY))
        return self._finite[0]

    def without_far(self) -> SlotContext:
        """The same slots with the far ones hidden; keys and values are shared, not copied."""
        bias = self.bias.clone()
        bias[..., self.far] = -torch.inf
        return replace(self, bias=bias)

    def before(self, time: int) -> SlotContext:
        """The same slots with later tokens hidden; keys and values are shared, not copied."""
        if self.positions is None:
            raise ValueError("this context does not know the positions of its slots")
        # A prototype of several tokens has the logarithm of their number as its bias.
        later = (self.positions()[..., 0] >= time) & (self.bias == 0)
        later[..., : self.far.start] = False
        return replace(self, bias=self.bias.masked_fill(later, -torch.inf), until=time)

    def visible_tokens(self) -> int:
        """Slots that attention can see, in the layer and head that sees most."""
        return int((self.bias > -torch.inf).sum(-1).max()) if self.bias.numel() else 0

    def far_span(self) -> Tensor:
        """Distinct times of far slots that are older than the near window, `[]` int64."""
        return self.survey().span

    def compacted(self, anchoring: Anchoring, span: int | Tensor) -> Context:
        """The same slots at consecutive positions."""
        return CompactContext.of(self, anchoring, span)

    def survey(self) -> Survey:
        """Where its slots stand; nothing waits for it."""
        if self.positions is None:
            raise ValueError("this context does not know the positions of its slots")
        if not self._survey:
            self._survey.append(survey(self.positions(), self.bias > -torch.inf, self.far, self.until))
        return self._survey[0]
