"""Compact placement (`positions="compact"`): a stream of any length shown at the positions a model was trained on.

What a memory holds is bounded, so it can be shown at bounded positions: the near window moves as a block and keeps the
distances inside it; what is older stands before it, every distinct time one position apart, newest next to the window.

The near window's keys stay as they are: queries are turned instead, all by one angle. Far times move by one offset
each, so far keys are turned, in each layer when it is first asked and by angles that are looked up (`turning`). Far
out in the stream (`LATE`) the model's float32 angles are coarse, and a key is only exact again if the very angle that
it was rotated by is taken back: from there on near keys are turned too. Knows slots and no memory.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from protokv.context.base import Anchoring, Context, Segment
from protokv.context.turning import Angles, between, moving_pairs, turn_
from protokv.rotary import turn

if TYPE_CHECKING:
    from protokv.context.slots import SlotContext

# Positions by which an angle is rounded by 2**-8: what rounding to bfloat16 does to a key.
LATE = 2**16


@dataclass(frozen=True, slots=True)
class Survey:
    """Where the slots of a context stand.

    Attributes:
        time: `[L, H, F]` int64 of the far slots, the first position component.
        older: `[L, H, F]` bool, far slots in use that are older than the near window.
        rank: `[L, H, F]` int64, dense rank of their times from the newest, 0; anything elsewhere.
        near: time of the oldest exact token of the near window; one past everything where there is none.
        span: distinct older times, in the layer and head that has most.
        still: `[P]`, the highest position of each component among older slots.
        moved: `[P]`, the highest position less time and rank among them: with `moved` known, any move of these is.
        rest: `[P]`, the highest position among all other slots in use behind the prompt prefix.
    """

    time: Tensor
    older: Tensor
    rank: Tensor
    near: int
    span: int
    still: list[int]
    moved: list[int]
    rest: list[int]


def survey(places: Tensor, live: Tensor, far: slice, until: int | None = None) -> Survey:
    """Look at slots at `places` `[L, H, N, P]` int64, `live` `[L, H, N]` where in use; asks the device once.

    Where no exact token is near, the near window begins at `until`, if that is given, and else behind all slots.
    """
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
    components = [
        _highest(far_places, older[..., None], never, keep=1),
        _highest(far_places - (far_time + rank)[..., None], older[..., None], never, keep=1),
        torch.maximum(
            _highest(far_places, (far_live & ~older)[..., None], never, keep=1),
            _highest(places[..., far.stop :, :], near_live[..., None], never, keep=1),
        ),
    ]
    span = _highest(rank, older, -1) + 1
    near_at, distinct, *highs = torch.cat([near[None], span[None], *components]).tolist()
    P = places.shape[-1]
    return Survey(far_time, older, rank, near_at, distinct, highs[:P], highs[P : 2 * P], highs[2 * P :])


def _highest(values: Tensor, chosen: Tensor, never: int, *, keep: int = 0) -> Tensor:
    """The highest chosen value, over all but the last `keep` axes; `never` where there is none."""
    flat = values.masked_fill(~chosen, never).flatten(0, values.ndim - 1 - keep)
    return flat.amax(0) if flat.shape[0] else torch.full(flat.shape[1:], never, device=values.device)


def _rank_from_newest(time: Tensor, chosen: Tensor) -> Tensor:
    """Dense rank of `time` `[..., N]` among the chosen slots, 0 for the newest time; undefined elsewhere."""
    never = torch.iinfo(time.dtype).min
    ordered, order = time.masked_fill(~chosen, never).sort(dim=-1, descending=True, stable=True)
    new = (ordered[..., 1:] != ordered[..., :-1]) & (ordered[..., 1:] != never)
    rank = torch.cat((torch.zeros_like(ordered[..., :1]), new.cumsum(-1)), -1)
    return torch.zeros_like(time).scatter_(-1, order, rank)


@dataclass(frozen=True, slots=True)
class CompactContext(Context):
    """Slots at consecutive positions.

    Attributes:
        slots: where they stood in the stream.
        anchoring: what is known of the model.
        moves: `[L, H, F]` int64, what is added to the moving components of each far slot.
        moving: `[P]` int64, 1 for the components that move, else 0.
        near_turn: cos and sin `[D]`, what queries are turned by for the near window: `shift` positions.
        span: positions set aside for older times.
        shift, next_position: see `Context`.
        hidden: whether far slots are.
    """

    slots: SlotContext
    anchoring: Anchoring
    moves: Tensor
    moving: Tensor
    near_turn: tuple[Tensor, Tensor]
    span: int
    shift: int
    next_position: int
    hidden: bool = False
    _older: dict[int, Segment] = field(default_factory=dict, init=False, repr=False, compare=False)
    # Where slots stood and where they are shown, once that is asked.
    _places: list[Tensor] = field(default_factory=list, init=False, repr=False, compare=False)
    # By what far keys are turned, and what is taken back before; late, by what near ones are.
    _angles: list[tuple[Angles, ...]] = field(default_factory=list, init=False, repr=False, compare=False)

    @classmethod
    def of(cls, slots: SlotContext, anchoring: Anchoring, span: int) -> CompactContext | None:
        """Slots re-anchored, `span` positions set aside for older times; None where that would not move anything."""
        seen = slots.survey()
        near = seen.near if anchoring.near is None else anchoring.near
        shift = near - anchoring.origin - span
        if shift <= 0:
            return None
        moves = torch.where(seen.older, (near - shift - 1) - seen.rank - seen.time, -shift)
        never, highest = torch.iinfo(torch.int64).min, anchoring.origin - 1
        for component, (still, moved, rest) in enumerate(zip(seen.still, seen.moved, seen.rest, strict=True)):
            moves_too = component in anchoring.moving
            if still != never:
                highest = max(highest, moved + near - shift - 1 if moves_too else still)
            if rest != never:
                highest = max(highest, rest - shift if moves_too else rest)
        moving = torch.zeros(len(seen.still), dtype=torch.int64, device=slots.keys.device)
        for component in anchoring.moving:
            moving[component].fill_(1)
        turn = anchoring.rotary(moving * shift)
        return cls(slots, anchoring, moves, moving, turn, span, shift, highest + 1)

    def at(self, layer: int, query: Tensor) -> tuple[Segment, ...]:
        """What is older, as it was turned when this layer was first asked, and the near window as it is."""
        slots, far = self.slots, self.slots.far
        if layer not in self._older:
            self._older[layer] = self._turned(layer)
        if self.shift >= LATE:
            return (self._older[layer],)
        part = slice(far.stop, None)
        near = Segment(*slots.read(layer, part), slots.finite_bias()[layer][:, part], self.near_turn)
        return self._older[layer], near

    def places(self, layer: int) -> Tensor | None:
        """Where the slots stood in the stream, not where they are shown."""
        return None if self.hidden else self.slots.places(layer)

    def without_far(self) -> CompactContext:
        """The same with far slots hidden."""
        return replace(self, slots=self.slots.without_far(), hidden=True)

    def visible_tokens(self) -> int:
        """As before it was re-anchored."""
        return self.slots.visible_tokens()

    def far_span(self) -> int:
        """As before it was re-anchored."""
        return self.slots.far_span()

    def compacted(self, anchoring: Anchoring, span: int) -> CompactContext:
        """Itself."""
        return self

    def positions(self) -> Tensor:
        """Where each slot is shown, `[L, H, N, P]` int64; anything where it is empty."""
        if not self._places:
            assert self.slots.positions is not None
            here, far = self.slots.positions(), self.slots.far
            there = here.clone()
            for component in self.anchoring.moving:
                there[..., far, component] += self.moves
                there[..., far.stop :, component] -= self.shift
            self._places.extend((here, there))
        return self._places[1]

    def _turned(self, layer: int) -> Segment:
        """The prompt prefix and the far slots of a layer, keys turned to where they are shown; late, the near ones."""
        slots, far, late = self.slots, self.slots.far, self.shift >= LATE
        shown = slice(0, None if late else far.start if self.hidden else far.stop)
        (keys, values), bias = slots.read(layer, shown), slots.finite_bias()[layer]
        if keys.shape[1] > far.start:
            keys = keys.clone(memory_format=torch.contiguous_format)
            if late and len(self.anchoring.moving) > 1:
                there, (here, _) = self.positions(), self._places
                old = keys[:, far.start :]
                old.copy_(turn(old, here[layer, :, far.start :], there[layer, :, far.start :], self.anchoring.rotary))
            else:
                if not self._angles:
                    self._angles.extend(self._angles_late() if late else [self._angles_of_moves()])
                for part, angles in zip((far, slice(far.stop, None)), self._angles, strict=False):
                    turn_(keys[:, part], layer, *angles)
        return Segment(keys, values, bias[:, shown])

    def _angles_of_moves(self) -> tuple[Angles]:
        """What far keys are turned by; a move is at least `-shift` and less than `span`."""
        moves, every = self.moves, self.shift + self.span
        if every > moves.numel():
            index = torch.arange(moves.numel(), device=moves.device).view_as(moves)
            return (self._angles_at(moves.reshape(-1), index),)
        index = (moves + self.shift).clamp(0, every - 1)
        return (self._angles_at(torch.arange(-self.shift, self.span, device=moves.device), index),)

    def _angles_late(self) -> list[tuple[Angles, ...]]:
        """Of the times at which far slots are shown and of those at which they stood; what near ones are turned by."""
        assert self.slots.positions is not None
        (time,), far = self.anchoring.moving, self.slots.far
        here = self.slots.positions()[..., time]
        times, index = torch.unique(here[..., far], return_inverse=True)
        # Free slots stand anywhere.
        there = (here[..., far] + self.moves).clamp(0, self.next_position - 1)
        line = torch.arange(self.next_position, device=here.device)
        # Tokens of the near window are the same in all heads and layers.
        near = here[0, 0, far.stop :]
        each = torch.arange(len(near), device=here.device).expand(*here.shape[:2], -1)
        stood, shown = self._angles_at(near, each), self._angles_at(near - self.shift, each)
        cos, sin = between((stood.cos, stood.sin), (shown.cos, shown.sin))
        return [(self._angles_at(line, there), self._angles_at(times, index)), (Angles(cos, sin, each),)]

    def _angles_at(self, times: Tensor, index: Tensor) -> Angles:
        rotary, moving = self.anchoring.rotary, self.moving
        pairs = moving_pairs(rotary, moving, self.anchoring.moving, self.slots.keys.shape[-1])
        return Angles.of(rotary, times[:, None] * moving, index, pairs)
