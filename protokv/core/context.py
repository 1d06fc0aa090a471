"""`Context`: the tokens that a memory lets the model attend to, as `KVSegment`s of keys, values and
a logit bias.

Equation 3 of the paper: a slot that stands for `n` tokens has the bias `log n`, an exact token 0, a
free slot none. Softmax does not depend on order, so slots are never moved and a context has one
shape for the life of a stream. Knows no memory and no model. Letters: L layers, H KV heads, N
slots, F far slots, D head size, P position components.

Compact positions show a stream of any length at the positions that a model was trained on. The near
window moves as a block and keeps the distances inside it; older tokens stand before it, every
distinct time one position apart, the newest next to the window. Near keys stay as they are: queries
are rotated by one angle instead. Far keys are rotated in each layer as it is read. Only the device
knows how far anything moves, and nothing waits for it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor

from protokv.core.rotary import Angles, PreciseRotary, mark_moving_components, rotate_by_moves_
from protokv.device.arrays import KeysValues, concat_rows
from protokv.device.slots import widen

# The bias of a free slot where attention reads it. Finite, so that slots that are all free have a
# log-sum-exp, and so low that its exponential is 0 beside that of any slot in use.
EMPTY_BIAS = -1e30


@dataclass(frozen=True, slots=True)
class KVSegment:
    """Slots of one layer that attention reads in one product."""

    # `[H, N, D]`, model dtype, finite even in free slots; may be wider (`protokv.device.slots`)
    keys: Tensor
    values: Tensor  # the same
    # `[H, N]` float32, added to the logits: `EMPTY_BIAS` free, `0` exact token, `log n_k`
    # pseudo-token
    bias: Tensor
    # cos and sin, `[D]` float32; queries are rotated by it before they meet these keys
    query_rotation: Angles | None = None


@dataclass(frozen=True, slots=True)
class PositionFacts:
    """Facts of the model and the stream that compact positions need."""

    rotary: PreciseRotary  # angles that add up at any position
    origin: int  # position of the first visual token of the stream
    # the position after everything seen, above 0; `[]` int64 where the device knows it
    end: int | Tensor
    # position components that grow with the stream, first time (or the index of a token)
    moving: Sequence[int] = (0,)
    # time at which the near window begins, if other layers determined it; None: these do
    near: int | None = None


class Context:
    """The tokens that layers may attend to besides those being forwarded. This base class is the
    empty context, which the prompt prefix has.
    """

    # Both are `[]` int64 tensors if only the device knows them.
    # how much less than in the stream the moving components of tokens forwarded after it are
    shift: int | Tensor = 0
    # where text after the video starts; None: after the stream
    next_position: int | Tensor | None = None
    # keys and values of all layers as the device holds them (`SlotRows.read`), if they are all
    wide: KeysValues | None = None

    def at(self, layer: int, query: Tensor) -> tuple[KVSegment, ...]:
        """Return what one layer reads.

        A retrieval memory chooses by `query` `[Hq, T, D]`, rotated, of the tokens being forwarded.
        Layers are asked in order, each once a forward.
        """
        return ()

    def positions_at(self, layer: int) -> Tensor | None:
        """Return stream positions `[H, N, P]` int64 of the slots that `at` returns, any of free
        ones; None: unknown.
        """
        return None

    def before(self, time: int) -> Context:
        """Return the context without the exact tokens whose first position component is `time` or
        later.
        """
        raise NotImplementedError

    def far_span(self) -> int | Tensor:
        """Return the number of distinct times older than the near window, in the layer and head
        that has most.
        """
        raise NotImplementedError

    def compact(self, anchoring: PositionFacts, span: int | Tensor | None = None) -> Context:
        """Return the same tokens at consecutive positions; `span` are set aside for older ones,
        None: those needed.
        """
        raise NotImplementedError

    def visible_tokens(self) -> int:
        """Return the number of slots in use, in the layer and head that has most."""
        return 0


class CachedContext(Context):
    """Another context whose segments are made once: an answer reads each once a token."""

    def __init__(self, context: Context) -> None:
        """Hold what does not depend on queries."""
        self._context = context
        self._segments = dict[int, tuple[KVSegment, ...]]()
        self.shift = context.shift
        self.next_position = context.next_position
        self.wide = context.wide

    def at(self, layer: int, query: Tensor) -> tuple[KVSegment, ...]:
        """Return what a layer reads."""
        if layer not in self._segments:
            self._segments[layer] = self._context.at(layer, query)
        return self._segments[layer]

    def positions_at(self, layer: int) -> Tensor | None:
        """Return those of the context."""
        return self._context.positions_at(layer)

    def visible_tokens(self) -> int:
        """Return those of the context."""
        return self._context.visible_tokens()


@dataclass(frozen=True, slots=True)
class SlotContext(Context):
    """`N` slots `[sink | far | near]`; every layer reads all of its own, whatever the query."""

    keys: Tensor  # `[L, H, N, D]`, model dtype, rotated to their positions
    values: Tensor  # `[L, H, N, D]`, model dtype
    # `[L, H, N]` float32, added to the logits: `-inf` free, `0` exact token, `log n_k` pseudo-token
    bias: Tensor
    # the slots of pseudo-tokens, or of tokens that each head chose for itself. The prompt prefix
    # (sink) lies before them, and behind them the near window, whose tokens are the same in all
    # heads
    far: slice
    # returns the stream positions of all slots, `[L, H, N, P]` int64. A function, because they are
    # seldom asked for
    positions: Callable[[], Tensor]
    # where tokens follow that were hidden by `before`, their earliest time
    until: int | None = None
    # what is read: a CPU leaves out far slots that never held anything
    parts: tuple[slice, ...] = (slice(None),)
    # as in `Context`; its bias is that of the slots
    wide: KeysValues | None = None

    def at(self, layer: int, query: Tensor) -> tuple[KVSegment, ...]:
        """Return the slots of this layer."""
        return self._segments[layer]

    # Made once for all layers and all tokens of an answer.
    @cached_property
    def _segments(self) -> list[tuple[KVSegment, ...]]:
        L, _, N = self.bias.shape
        keys, values = self.wide or widen(self.keys, self.values, self.bias)
        bias = self.bias.clamp(min=EMPTY_BIAS)
        slots = [(keys[i, :, :N], values[i, :, :N], bias[i]) for i in range(L)]
        return [
            tuple(KVSegment(k[:, part], v[:, part], b[:, part]) for part in self.parts)
            for k, v, b in slots
        ]

    def positions_at(self, layer: int) -> Tensor:
        """Return the stream positions of this layer's slots."""
        places = self.positions()[layer]
        return concat_rows([places[:, part] for part in self.parts], 1)

    def before(self, time: int) -> SlotContext:
        """Hide later tokens. A prototype of several tokens stays; its bias is the logarithm of
        their number.
        """
        later = (self.positions()[..., 0] >= time) & (self.bias == 0)
        later[..., : self.far.start] = False
        return replace(self, bias=self.bias.masked_fill(later, -torch.inf), until=time, wide=None)

    def visible_tokens(self) -> int:
        """Return the number of slots in use, in the layer and head that has most."""
        return int((self.bias > -torch.inf).sum(-1).max()) if self.bias.numel() else 0

    def far_span(self) -> int | Tensor:
        """Return the number of distinct times older than the near window, in the layer and head
        that has most.
        """
        _, older, rank = self._find_older(self.positions())
        return _highest(rank, older, -1) + 1

    def compact(self, anchoring: PositionFacts, span: int | Tensor | None = None) -> Context:
        """Return the same tokens at consecutive positions.

        With a prompt prefix of 3 tokens, far slots of the times 10, 40 and 40, and a near window
        that begins at 90, the times of these slots become 3, 4 and 4, and the window begins at 5:

            time in the stream   0 1 2 | 10 40 40 | 90 91
            time that is shown   0 1 2 |  3  4  4 |  5  6

        The window moves by `shift`, 85 here. Its keys stay as they are, and queries are rotated.
        """
        places = self.positions()
        live = self.bias > -torch.inf
        far = self.far
        never = torch.iinfo(torch.int64).min
        near, older, rank = self._find_older(places)
        span = _highest(rank, older, -1) + 1 if span is None else span
        near = near if anchoring.near is None else torch.full_like(near, anchoring.near)
        # The near window stays, or moves back to right after the prompt prefix and the older
        # tokens.
        begins = torch.minimum(near, torch.as_tensor(anchoring.origin + span, device=places.device))
        shift = near - begins
        moving = mark_moving_components(anchoring.moving, places.shape[-1], places.device)
        own = places[..., far, :]
        moves = torch.where(
            older, torch.where(shift > 0, begins - 1 - rank - own[..., 0], 0), -shift
        )
        # The highest position of a slot after the prompt prefix, where it is shown.
        shown = torch.cat(
            (own + moves[..., None] * moving, places[..., far.stop :, :] - moving * shift), -2
        )
        highest = _highest(shown.amax(-1), live[..., far.start :], never)
        after = highest.clamp(min=anchoring.origin - 1) + 1
        next_position = torch.where(shift > 0, after, anchoring.end)
        slots = replace(self, parts=(slice(None),))
        return CompactContext(
            slots, anchoring, moves, anchoring.rotary(moving * shift), shift, next_position
        )

    def _find_older(self, places: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return what stands before the near window, without waiting for the device.

        The window begins with its oldest exact token; if it has none, at `until`, or after all
        slots if that is None.

        Returns:
            The time at which it begins, `[]` int64; which far slots in use are older, `[L, H, F]`
            bool; and the dense rank of their times, 0 for the newest, `[L, H, F]` int64, any number
            in other slots.
        """
        time = places[..., 0]
        live = self.bias > -torch.inf
        far = self.far
        never = torch.iinfo(torch.int64).min
        newest = _highest(time[..., far.start :], live[..., far.start :], never)
        after = torch.where(newest == never, 0, newest + 1)
        begins = after if self.until is None else torch.full_like(newest, self.until)
        exact = live[..., far.stop :]
        near = torch.where(exact.any(), -_highest(-time[..., far.stop :], exact, never), begins)
        older = live[..., far] & (time[..., far] < near)
        # Equal times have one rank.
        ordered, order = (
            time[..., far].masked_fill(~older, never).sort(dim=-1, descending=True, stable=True)
        )
        new = (ordered[..., 1:] != ordered[..., :-1]) & (ordered[..., 1:] != never)
        rank = torch.cat((torch.zeros_like(ordered[..., :1]), new.cumsum(-1)), -1)
        return near, older, torch.zeros_like(order).scatter_(-1, order, rank)


def _highest(values: Tensor, chosen: Tensor, never: int) -> Tensor:
    """Return the highest chosen value, `[]`; `never` if there is none."""
    found = values.masked_fill(~chosen, never)
    return found.amax() if found.numel() else found.new_full((), never)


@dataclass(frozen=True, slots=True)
class CompactContext(Context):
    """Slots at consecutive positions; at stream positions while these are no more than are
    needed.
    """

    slots: SlotContext  # the slots at their stream positions
    anchoring: PositionFacts  # the model and the stream
    moves: Tensor  # `[L, H, F]` int64, added to the moving components of each far slot
    # cos and sin `[D]` of `shift` positions, for queries of the near window
    near_rotation: Angles
    shift: Tensor  # `[]` int64
    next_position: Tensor  # `[]` int64

    def at(self, layer: int, query: Tensor) -> tuple[KVSegment, ...]:
        """Return older slots, rotated to where they are shown, and the near window."""
        (whole,) = self.slots.at(layer, query)
        far = self.slots.far
        older, near = (
            KVSegment(whole.keys[:, part], whole.values[:, part], whole.bias[:, part])
            for part in (slice(0, far.stop), slice(far.stop, None))
        )
        if far.stop > far.start:
            keys = older.keys.clone(memory_format=torch.contiguous_format)
            rotate_by_moves_(
                keys[:, far], self.moves[layer], self.anchoring.rotary, self.anchoring.moving
            )
            older = replace(older, keys=keys)
        return older, replace(near, query_rotation=self.near_rotation)

    def positions_at(self, layer: int) -> Tensor | None:
        """Return the stream positions of the slots, not where they are shown."""
        return self.slots.positions_at(layer)

    def visible_tokens(self) -> int:
        """Return those of the slots."""
        return self.slots.visible_tokens()
