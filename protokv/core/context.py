"""`Context`: what a memory shows to the model.

Owns the interface that attention reads, layer by layer, as `Segment`s. Knows no memory, no model and no file.

`SlotContext`: a fixed set of slots with a logit bias each, shown where they stood in the stream.

Knows the parts of a memory by the order of its slots, and no memory.

`RecordedContext`: any context, and the queries that met it, for a memory that ranks what it holds by them.

`DecodedContext`: slots of which the far ones are made when a layer reads them, and are held by nobody.

For memories that keep them in fewer bits: what is shown in full is one layer at a time. Knows no code.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Self

import torch
from torch import Tensor

from protokv.core.rotary import PreciseRotary

if TYPE_CHECKING:
    from protokv.extras.compact import Survey

# The bias of a free slot where attention reads it. Finite, so that slots that are all free have a log-sum-exp; so low
# that no logit brings it back: its exponential is 0 beside that of any slot in use.
EMPTY = -1e30


@dataclass(frozen=True, slots=True)
class Segment:
    """Slots of one layer that queries meet alike.

    Attributes:
        keys, values: `[H, N, D]`, model dtype; finite where a slot is free.
        bias: `[H, N]` float32, added to the logits: `EMPTY` free, `0` exact token, `log n_k` pseudo-token.
        turn: cos and sin, `[D]` float32, by which a query is turned before it meets these keys; None: not at all.
    """

    keys: Tensor
    values: Tensor
    bias: Tensor
    turn: tuple[Tensor, Tensor] | None = None


@dataclass(frozen=True, slots=True)
class Anchoring:
    """What re-anchoring must know of the model.

    Attributes:
        rotary: its angles, such that they add up at any position.
        origin: position of the first visual token of the stream.
        end: the position behind everything that was seen, above 0.
        moving: the position components that grow with the stream. The first one is time (or the index of a token).
        near: time at which the near window begins, where a context of other layers has told; None: as this one finds.
    """

    rotary: PreciseRotary
    origin: int
    end: int
    moving: Sequence[int] = (0,)
    near: int | None = None


class Context(ABC):
    """What the layers of a model may read besides the tokens that are being forwarded.

    Attributes:
        shift: by how much the moving components of tokens forwarded after this context are less than their stream
            positions; 0 unless the context was re-anchored. A tensor `[]` where the device knows and the host does not.
        next_position: where text behind the video starts if the context was re-anchored, likewise; None: behind the
            stream.
    """

    shift: int | Tensor
    next_position: int | Tensor | None

    @abstractmethod
    def at(self, layer: int, query: Tensor) -> tuple[Segment, ...]:
        """What one layer reads.

        A retrieval memory chooses by `query` `[Hq, T, D]`, rotated, of the tokens being forwarded. Layers are asked in
        order, each once a forward.
        """

    def places(self, layer: int) -> Tensor | None:
        """Stream positions `[H, N, P]` int64 of the slots that `at` shows this layer, in that order.

        Anything where a slot is free. None: a context that does not know them, or has none.
        """
        return None

    @abstractmethod
    def without_far(self) -> Context:
        """The same with everything hidden but the prompt prefix and the exact tokens of the near window."""

    def before(self, time: int) -> Context:
        """The same without the tokens that stand at this time or behind it; prototypes of several tokens stay."""
        raise NotImplementedError

    @abstractmethod
    def visible_tokens(self) -> int:
        """Slots that attention can see, in the layer and head that sees most."""

    @abstractmethod
    def far_span(self) -> int | Tensor:
        """Distinct times among what is older than the near window, in the layer and head that has most; as `shift`."""

    @abstractmethod
    def compacted(self, anchoring: Anchoring, span: int | Tensor) -> Context:
        """The same tokens at consecutive positions; `span` positions are set aside for what is older."""


@dataclass(frozen=True, slots=True)
class EmptyContext(Context):
    """No slots, for what is forwarded before there is a memory: the prompt prefix."""

    shift: int | Tensor = 0
    next_position: int | Tensor | None = None

    def at(self, layer: int, query: Tensor) -> tuple[Segment, ...]:
        """Nothing."""
        return ()

    def without_far(self) -> EmptyContext:
        """Itself."""
        return self

    def visible_tokens(self) -> int:
        """None."""
        return 0

    def far_span(self) -> int:
        """None."""
        return 0

    def compacted(self, anchoring: Anchoring, span: int | Tensor) -> EmptyContext:
        """Itself."""
        return self


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
        from protokv.extras.compact import CompactContext

        return CompactContext.of(self, anchoring, span)

    def survey(self) -> Survey:
        """Where its slots stand; nothing waits for it."""
        if self.positions is None:
            raise ValueError("this context does not know the positions of its slots")
        if not self._survey:
            from protokv.extras.compact import survey

            self._survey.append(survey(self.positions(), self.bias > -torch.inf, self.far, self.until))
        return self._survey[0]


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


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodedContext(SlotContext):
    """`N` slots `[sink | far | near]`, of which `keys` and `values` have no far ones.

    Attributes:
        decode: gives keys and values `[h, F, D]`, model dtype, of the far slots of one layer and some of its heads.
        heads: which of the heads these slots are of.
    """

    decode: Callable[[int, slice], tuple[Tensor, Tensor]]
    heads: slice = field(default_factory=lambda: slice(None))

    def read(self, layer: int, part: slice = slice(None)) -> tuple[Tensor, Tensor]:
        """Slots of a layer; without far ones among them nothing is decoded."""
        far = self.far
        if (part.start or 0) >= far.stop:
            exact = slice(part.start - far.stop + far.start, None)
            return self.keys[layer][:, exact], self.values[layer][:, exact]
        pairs = zip((self.keys[layer], self.values[layer]), self.decode(layer, self.heads), strict=True)
        keys, values = (torch.cat((held[:, : far.start], new, held[:, far.start :]), 1)[:, part] for held, new in pairs)
        return keys, values

    def of_heads(self, heads: slice) -> Self:
        """The same slots of some heads alone; only these are decoded."""
        return replace(super(DecodedContext, self).of_heads(heads), heads=heads)
