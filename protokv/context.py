"""`Context`: what a memory shows to the model, and how it is re-anchored to consecutive positions.

Owns the interface that attention reads (`Segment`), its plain form `SlotContext` (a fixed set of slots with a logit
bias each), and the compact placement. Knows no memory, no model and no file.

Compact placement (`positions="compact"`): a stream of any length leaves the positions that a model was trained on.
What a memory holds is bounded, so it can be shown at bounded positions: the near window moves as a block and keeps the
distances inside it; what is older stands before it, every distinct time one position apart, newest next to the window.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from protokv.rotary import Rotary, turn

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
        rotary: its rotary embedding.
        origin: position of the first visual token of the stream.
        moving: the position components that grow with the stream. The first one is time (or the index of a token).
        near: time at which the near window begins, where a context of other layers has told; None: as this one finds.
    """

    rotary: Rotary
    origin: int
    moving: Sequence[int] = (0,)
    near: int | None = None


class Context(ABC):
    """What the layers of a model may read besides the tokens that are being forwarded.

    Attributes:
        shift: by how much the moving components of tokens forwarded after this context are less than their stream
            positions; 0 unless the context was re-anchored.
        next_position: where text behind the video starts if the context was re-anchored; None: behind the stream.
    """

    shift: int
    next_position: int | None

    @abstractmethod
    def at(self, layer: int, query: Tensor) -> tuple[Segment, ...]:
        """What one layer reads.

        A retrieval memory chooses by `query` `[Hq, T, D]`, rotated, of the tokens being forwarded. Layers are asked in
        order, each once a forward.
        """

    @abstractmethod
    def without_far(self) -> Context:
        """The same with everything hidden but the prompt prefix and the exact tokens of the near window."""

    @abstractmethod
    def visible_tokens(self) -> int:
        """Slots that attention can see, in the layer and head that sees most."""

    @abstractmethod
    def far_span(self) -> int:
        """Distinct times among what is older than the near window, in the layer and head that has most."""

    @abstractmethod
    def compacted(self, anchoring: Anchoring, span: int) -> Context:
        """The same tokens at consecutive positions; `span` positions are set aside for what is older."""


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
    """

    keys: Tensor
    values: Tensor
    bias: Tensor
    far: slice
    positions: Callable[[], Tensor] | None = None
    shift: int = 0
    next_position: int | None = None
    _finite: list[Tensor] = field(default_factory=list, init=False, repr=False, compare=False)

    def at(self, layer: int, query: Tensor) -> tuple[Segment, ...]:
        """The slots of this layer."""
        if not self._finite:
            # Once for all layers and all tokens of an answer.
            self._finite.append(self.bias.clamp(min=EMPTY))
        return (Segment(self.keys[layer], self.values[layer], self._finite[0][layer]),)

    def without_far(self) -> SlotContext:
        """The same slots with the far ones hidden; keys and values are shared, not copied."""
        bias = self.bias.clone()
        bias[..., self.far] = -torch.inf
        return replace(self, bias=bias)

    def visible_tokens(self) -> int:
        """Slots that attention can see, in the layer and head that sees most."""
        return int((self.bias > -torch.inf).sum(-1).max()) if self.bias.numel() else 0

    def far_span(self) -> int:
        """Distinct times of far slots that are older than the near window."""
        time, older = self._times()
        return int(_rank_from_newest(time, older).max()) + 1 if older.any() else 0

    def compacted(self, anchoring: Anchoring, span: int) -> SlotContext:
        """The same slots, keys turned to consecutive positions; itself while that would not move anything."""
        if self.positions is None:
            raise ValueError("this context does not know the positions of its slots")
        places = self.positions()
        time, older = self._times()
        near = self._near_start(time) if anchoring.near is None else anchoring.near
        shift = near - anchoring.origin - span
        if shift <= 0:
            return self
        rank = _rank_from_newest(time, older)
        new_time = torch.where(older, near - shift - 1 - rank, time - shift)
        moved = places.clone()
        seen = slice(self.far.start, None)
        for component in anchoring.moving:
            moved[:, :, seen, component] += (new_time - time)[:, :, seen]
        keys = self.keys.clone()
        # Layer by layer: in float32 all layers at once would take several times the bytes of the memory.
        for layer, here, there in zip(keys, places, moved, strict=True):
            layer[:, seen] = turn(layer[:, seen], here[:, seen], there[:, seen], anchoring.rotary)
        live = (self.bias > -torch.inf)[:, :, seen]
        last = int(moved[:, :, seen][live].max()) if live.any() else anchoring.origin - 1
        return replace(self, keys=keys, positions=lambda: moved, shift=shift, next_position=last + 1)

    def _times(self) -> tuple[Tensor, Tensor]:
        """The time of each slot, `[L, H, N]`, and which far slots in use are older than the near window."""
        if self.positions is None:
            raise ValueError("this context does not know the positions of its slots")
        time = self.positions()[..., 0]
        older = self.bias > -torch.inf
        older[..., : self.far.start] = False
        older[..., self.far.stop :] = False
        return time, older & (time < self._near_start(time))

    def _near_start(self, time: Tensor) -> int:
        """Time of the oldest exact token of the near window; one past everything where there is none."""
        live = self.bias > -torch.inf
        near = live.clone()
        near[..., : self.far.stop] = False
        if near.any():
            return int(time[near].min())
        live[..., : self.far.start] = False
        return int(time[live].max()) + 1 if live.any() else 0


@dataclass(frozen=True, slots=True)
class EmptyContext(Context):
    """No slots, for what is forwarded before there is a memory: the prompt prefix."""

    shift: int = 0
    next_position: int | None = None

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

    def compacted(self, anchoring: Anchoring, span: int) -> EmptyContext:
        """Itself."""
        return self


def _rank_from_newest(time: Tensor, chosen: Tensor) -> Tensor:
    """Dense rank of `time` `[..., N]` among the chosen slots, 0 for the newest time; undefined elsewhere."""
    never = torch.iinfo(time.dtype).min
    ordered, order = time.masked_fill(~chosen, never).sort(dim=-1, descending=True, stable=True)
    new = (ordered[..., 1:] != ordered[..., :-1]) & (ordered[..., 1:] != never)
    rank = torch.cat((torch.zeros_like(ordered[..., :1]), new.cumsum(-1)), -1)
    return torch.zeros_like(time).scatter_(-1, order, rank)
