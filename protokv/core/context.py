"""`Context`: the tokens that a memory lets the model attend to, as `Segment`s of keys, values and a logit bias.

Equation 3 of the paper: a slot that stands for `n` tokens has the bias `log n`, an exact token 0, a free slot none.
Softmax does not depend on order, so slots are never moved and a context has one shape for the life of a stream. Knows
no memory and no model. Letters: L layers, H KV heads, N slots, F far slots, D head size, P position components.

Compact positions show a stream of any length at the positions that a model was trained on. The near window moves as a
block and keeps the distances inside it; older tokens stand before it, every distinct time one position apart, the
newest next to the window. Near keys stay as they are: queries are rotated by one angle instead. Far keys are rotated in
each layer when it is first read. Only the device knows how far anything moves, and nothing waits for it.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from protokv.core import kernels
from protokv.core.rotary import PreciseRotary, direction, rotate_by_moves_

# The bias of a free slot where attention reads it. Finite, so that slots that are all free have a log-sum-exp, and so
# low that its exponential is 0 beside that of any slot in use.
EMPTY = -1e30


@dataclass(frozen=True, slots=True)
class Segment:
    """Slots of one layer that attention reads in one product."""

    # keys, values: `[H, N, D]`, model dtype, finite even in free slots; may have `kernels.COLUMNS` behind them
    keys: Tensor
    values: Tensor
    bias: Tensor  # `[H, N]` float32, added to the logits: `EMPTY` free, `0` exact token, `log n_k` pseudo-token
    # cos and sin, `[D]` float32; queries are rotated by it before they meet these keys
    query_rotation: tuple[Tensor, Tensor] | None = None


@dataclass(frozen=True, slots=True)
class Anchoring:
    """Facts of the model and the stream that compact positions need."""

    rotary: PreciseRotary  # angles that add up at any position
    origin: int  # position of the first visual token of the stream
    end: int  # the position after everything seen, above 0
    # the position components that grow with the stream. The first one is time (or the index of a token)
    moving: Sequence[int] = (0,)
    # time at which the near window begins, if a context of other layers determined it; None: this one does
    near: int | None = None


class Context(ABC):
    """The tokens that the layers of a model may attend to besides those that are being forwarded.

    Attributes:
        shift: by how much the moving components of tokens forwarded after it are less than their stream positions.
        next_position: where text after the video starts; None: after the stream. Both are `[]` int64 tensors if only
            the device knows them.
    """

    shift: int | Tensor = 0
    next_position: int | Tensor | None = None

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

    def far_span(self) -> int | Tensor:
        """Return the number of distinct times older than the near window, in the layer and head that has most."""
        raise ValueError("this context does not know the positions of its slots")

    def compact(self, anchoring: Anchoring, span: int | Tensor | None = None) -> Context:
        """Return the same tokens at consecutive positions; `span` are set aside for older ones, None: those needed."""
        raise ValueError("this context does not know the positions of its slots")

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
    """`N` slots `[sink | far | near]`; every layer reads all of its own, whatever the query."""

    keys: Tensor  # `[L, H, N, D]`, model dtype, rotated to their positions
    values: Tensor  # `[L, H, N, D]`, model dtype
    bias: Tensor  # `[L, H, N]` float32, added to the logits: `-inf` free, `0` exact token, `log n_k` pseudo-token
    # the slots of pseudo-tokens, or of tokens that each head chose for itself. The prompt prefix (sink) lies before
    # them, and behind them the near window, whose tokens are the same in all heads
    far: slice
    # returns the stream positions of all slots, `[L, H, N, P]` int64. A function, because they are seldom asked for
    positions: Callable[[], Tensor] | None = None
    until: int | None = None  # where tokens follow that were hidden by `before`, their earliest time
    # keys and values with the columns of this bias, as of `kernels.with_columns`, where they are at hand
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

    def far_span(self) -> int | Tensor:
        """Return the number of distinct times older than the near window, in the layer and head that has most."""
        return survey_slots(self).span

    def compact(self, anchoring: Anchoring, span: int | Tensor | None = None) -> Context:
        """Return the same tokens at consecutive positions."""
        seen = survey_slots(self)
        return CompactContext.of(self, anchoring, seen, seen.span if span is None else span)


@dataclass(frozen=True, slots=True)
class Survey:
    """The positions of a context's slots in the stream."""

    time: Tensor  # `[L, H, F]` int64 of the far slots, the first position component
    older: Tensor  # `[L, H, F]` bool, far slots in use that are older than the near window
    rank: Tensor  # `[L, H, F]` int64, dense rank of their times, 0 for the newest; any number in other slots
    near: Tensor  # `[]` int64, time of the oldest exact token of the near window; after all slots if there is none
    span: Tensor  # `[]` int64, distinct older times, in the layer and head that has most
    still: Tensor  # `[P]` int64, the highest position of each component among older slots
    moved: Tensor  # `[P]`, the highest of position - time - rank among older slots, from which any move of them follows
    rest: Tensor  # `[P]`, the highest position among all other slots in use after the prompt prefix


def survey_slots(context: SlotContext) -> Survey:
    """Find where the slots of a context stand, without waiting for the device.

    If no exact token is near, the near window begins at `until` of the context, or after all slots if that is None.
    """
    if context.positions is None:
        raise ValueError("this context does not know the positions of its slots")
    places, live, far, until = context.positions(), context.bias > -torch.inf, context.far, context.until
    never = torch.iinfo(places.dtype).min
    time = places[..., 0]
    near_live, near_time = live[..., far.stop :], time[..., far.stop :]
    far_live, far_time = live[..., far], time[..., far]
    newest = _highest(time[..., far.start :], live[..., far.start :], never)
    oldest_near = -_highest(-near_time, near_live, never)
    begins = torch.where(newest == never, 0, newest + 1) if until is None else torch.full_like(newest, until)
    near = torch.where(near_live.any(), oldest_near, begins)
    older = far_live & (far_time < near)
    rank = _rank_from_newest(far_time, older)
    far_places = places[..., far, :]
    still = _highest(far_places, older[..., None], never, keep=1)
    moved = _highest(far_places - (far_time + rank)[..., None], older[..., None], never, keep=1)
    rest = torch.maximum(
        _highest(far_places, (far_live & ~older)[..., None], never, keep=1),
        _highest(places[..., far.stop :, :], near_live[..., None], never, keep=1),
    )
    return Survey(far_time, older, rank, near, _highest(rank, older, -1) + 1, still, moved, rest)


def _highest(values: Tensor, chosen: Tensor, never: int, *, keep: int = 0) -> Tensor:
    """Return the highest chosen value over all but the last `keep` axes; `never` if there is none."""
    flat = values.masked_fill(~chosen, never).flatten(0, values.ndim - 1 - keep)
    return flat.amax(0) if flat.shape[0] else torch.full(flat.shape[1:], never, device=values.device)


def _rank_from_newest(time: Tensor, chosen: Tensor) -> Tensor:
    """Return the dense rank of `time` `[..., N]` among the chosen slots, 0 for the newest; undefined elsewhere."""
    never = torch.iinfo(time.dtype).min
    ordered, order = time.masked_fill(~chosen, never).sort(dim=-1, descending=True, stable=True)
    new = (ordered[..., 1:] != ordered[..., :-1]) & (ordered[..., 1:] != never)
    rank = torch.cat((torch.zeros_like(ordered[..., :1]), new.cumsum(-1)), -1)
    return torch.zeros_like(time).scatter_(-1, order, rank)


@dataclass(frozen=True, slots=True)
class CompactContext(Context):
    """Slots at consecutive positions; at stream positions while these are no more than are needed."""

    slots: SlotContext  # the slots at their stream positions
    anchoring: Anchoring  # the model and the stream
    moves: Tensor  # `[L, H, F]` int64, added to the moving components of each far slot
    # cos and sin `[D]` of `shift` positions; queries are rotated by it for the near window
    near_rotation: tuple[Tensor, Tensor]
    # shift, next_position: `[]` int64
    shift: Tensor
    next_position: Tensor
    _rotated: dict[int, Segment] = field(default_factory=dict, init=False, repr=False, compare=False)

    @classmethod
    def of(cls, slots: SlotContext, anchoring: Anchoring, seen: Survey, span: int | Tensor) -> CompactContext:
        """Move slots that were surveyed; `span` positions are set aside for older times."""
        device, never, rotary = slots.keys.device, torch.iinfo(torch.int64).min, anchoring.rotary
        near = seen.near if anchoring.near is None else torch.full_like(seen.near, anchoring.near)
        # The near window stays, or moves back to right after the prompt prefix and the older tokens.
        begins = torch.minimum(near, torch.as_tensor(anchoring.origin + span, device=device))
        shift = near - begins
        moving = direction(anchoring.moving, len(seen.still), device)
        older = torch.where(shift > 0, begins - 1 - seen.rank - seen.time, 0)
        moves = torch.where(seen.older, older, -shift)
        highest = torch.where(moving > 0, seen.moved + begins - 1, seen.still)
        highest = torch.maximum(
            torch.where(seen.still > never, highest, never),
            torch.where(seen.rest > never, seen.rest - moving * shift, never),
        )
        after = highest.max().clamp(min=anchoring.origin - 1) + 1
        next_position = torch.where(shift > 0, after, anchoring.end)
        return cls(slots, anchoring, moves, rotary(moving * shift), shift, next_position)

    def at(self, layer: int, query: Tensor) -> tuple[Segment, ...]:
        """Return older slots, rotated when this layer is first read, and the near window as it is."""
        slots, far = self.slots, self.slots.far
        if layer not in self._rotated:
            self._rotated[layer] = self._rotate_far(layer)
        return self._rotated[layer], slots.segment(layer, slice(far.stop, None), self.near_rotation)

    def positions_at(self, layer: int) -> Tensor | None:
        """Return the stream positions of the slots, not where they are shown."""
        return self.slots.positions_at(layer)

    def visible_tokens(self) -> int:
        """Return those of the slots."""
        return self.slots.visible_tokens()

    def _rotate_far(self, layer: int) -> Segment:
        """Return the prompt prefix and the far slots of a layer, keys rotated to where they are shown."""
        slots, far = self.slots, self.slots.far
        shown = slots.segment(layer, slice(0, far.stop))
        if shown.keys.shape[1] == far.start:
            return shown
        keys = shown.keys.clone(memory_format=torch.contiguous_format)
        rotate_by_moves_(keys[:, far], self.moves[layer], self.anchoring.rotary, self.anchoring.moving)
        return replace(shown, keys=keys)
