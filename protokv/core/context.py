"""`Context`: the tokens that a memory lets the model attend to, as `Segment`s of keys, values and a logit bias.

Equation 3 of the paper: a slot that stands for `n` tokens has the bias `log n`, an exact token 0, a free slot none.
Softmax does not depend on order, so slots are never compacted and a context has one shape for the life of a stream.
Knows no memory and no model. Letters: L layers, H KV heads, N slots, D head size, P position components.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from protokv.core import kernels

# The bias of a free slot where attention reads it. Finite, so that slots that are all free have a log-sum-exp, and so
# low that its exponential is 0 beside that of any slot in use.
EMPTY = -1e30


@dataclass(frozen=True, slots=True)
class Segment:
    """Slots of one layer that attention reads in one product.

    Attributes:
        keys, values: `[H, N, D]`, model dtype, finite even in free slots; may have `kernels.COLUMNS` behind them.
        bias: `[H, N]` float32, added to the logits: `EMPTY` free, `0` exact token, `log n_k` pseudo-token.
        query_rotation: cos and sin, `[D]` float32; queries are rotated by it before they meet these keys.
    """

    keys: Tensor
    values: Tensor
    bias: Tensor
    query_rotation: tuple[Tensor, Tensor] | None = None


class Context(ABC):
    """The tokens that the layers of a model may attend to besides those that are being forwarded."""

    @abstractmethod
    def at(self, layer: int, query: Tensor) -> tuple[Segment, ...]:
        """Return what one layer reads.

        A retrieval memory chooses by `query` `[Hq, T, D]`, rotated, of the tokens being forwarded. Layers are asked in
        order, each once a forward.
        """

    def positions_at(self, layer: int) -> Tensor | None:
        """Return stream positions `[H, N, P]` int64 of the slots that `at` returns, in that order.

        Free slots hold any number. None: the context has no slots or does not know their positions.
        """
        return None

    def before(self, time: int) -> Context:
        """Return the context without the exact tokens whose first position component is `time` or later."""
        raise NotImplementedError

    @abstractmethod
    def visible_tokens(self) -> int:
        """Return the number of slots in use, in the layer and head that has most."""


class EmptyContext(Context):
    """No slots: the context of the prompt prefix."""

    def at(self, layer: int, query: Tensor) -> tuple[Segment, ...]:
        """Return nothing."""
        return ()

    def visible_tokens(self) -> int:
        """Return 0."""
        return 0


@dataclass(frozen=True, slots=True)
class SlotContext(Context):
    """`N` slots `[sink | far | near]`; every layer reads all of its own, whatever the query.

    Attributes:
        keys: `[L, H, N, D]`, model dtype, rotated to their positions.
        values: `[L, H, N, D]`, model dtype.
        bias: `[L, H, N]` float32, added to the logits: `-inf` free, `0` exact token, `log n_k` pseudo-token.
        far: the slots of pseudo-tokens, or of tokens that each head chose for itself. The prompt prefix (sink) lies
            before them, and behind them the near window, whose tokens are the same in all heads.
        positions: returns the stream positions of all slots, `[L, H, N, P]` int64. A function, because they are
            seldom asked for.
        until: where tokens follow that were hidden by `before`, their earliest time.
        rows: keys and values with the columns of this bias, as of `kernels.with_columns`, where they are at hand.
    """

    keys: Tensor
    values: Tensor
    bias: Tensor
    far: slice
    positions: Callable[[], Tensor] | None = None
    until: int | None = None
    rows: tuple[Tensor, Tensor] | None = None
    # Computed once for all layers and all tokens of an answer.
    _finite: list[Tensor] = field(default_factory=list, init=False, repr=False, compare=False)
    _columns: list[Tensor] = field(default_factory=list, init=False, repr=False, compare=False)

    def at(self, layer: int, query: Tensor) -> tuple[Segment, ...]:
        """Return the slots of this layer."""
        return (self.segment(layer),)

    def segment(
        self, layer: int, part: slice = slice(None), query_rotation: tuple[Tensor, Tensor] | None = None
    ) -> Segment:
        """Return some slots of a layer as attention reads them."""
        keys, values = self.read(layer, part)
        if self.rows is not None:
            keys, values = (held[layer][:, part] for held in self.rows)
        elif kernels.takes_columns(keys.shape[-1], keys.dtype, keys.device):
            if not self._columns:
                self._columns.append(kernels.bias_columns(self.bias, keys.shape[-1] ** -0.5, keys.dtype))
            keys, values = kernels.with_columns(keys, values, self._columns[0][layer][:, part])
        return Segment(keys, values, self.finite_bias()[layer][:, part], query_rotation)

    def read(self, layer: int, part: slice = slice(None)) -> tuple[Tensor, Tensor]:
        """Return keys and values `[H, n, D]` of some slots of a layer."""
        return self.keys[layer][:, part], self.values[layer][:, part]

    def finite_bias(self) -> Tensor:
        """Return the bias `[L, H, N]` float32 with `EMPTY` in place of `-inf`."""
        if not self._finite:
            self._finite.append(self.bias.clamp(min=EMPTY))
        return self._finite[0]

    def positions_at(self, layer: int) -> Tensor | None:
        """Return the stream positions of this layer's slots."""
        return None if self.positions is None else self.positions()[layer]

    def before(self, time: int) -> SlotContext:
        """Hide later tokens. A prototype of several tokens stays; its bias is the logarithm of their number."""
        if self.positions is None:
            raise ValueError("this context does not know the positions of its slots")
        later = (self.positions()[..., 0] >= time) & (self.bias == 0)
        later[..., : self.far.start] = False
        return replace(self, bias=self.bias.masked_fill(later, -torch.inf), until=time, rows=None)

    def visible_tokens(self) -> int:
        """Return the number of slots in use, in the layer and head that has most."""
        return int((self.bias > -torch.inf).sum(-1).max()) if self.bias.numel() else 0
