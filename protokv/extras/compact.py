"""Compact placement (`positions="compact"`): a stream of any length shown at the positions a model was trained on.

What a memory holds is bounded, so it can be shown at bounded positions: the near window moves as a block and keeps the
distances inside it; what is older stands before it, every distinct time one position apart, newest next to the window.

The near window's keys stay as they are: queries are turned instead, all by one angle. Far times move by one offset
each, so far keys are turned, in each layer when it is first asked and by angles that are looked up (`turning`). By how
much anything moves is known to the device alone, and nothing waits for it. Knows slots and no memory.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from protokv.core.context import Anchoring, Context, Segment
from protokv.core.rotary import Angles, direction, turn_

if TYPE_CHECKING:
    from protokv.core.context import SlotContext


@dataclass(frozen=True, slots=True)
class Survey:
    """Where the slots of a context stand.

    Attributes:
        time: `[L, H, F]` int64 of the far slots, the first position component.
        older: `[L, H, F]` bool, far slots in use that are older than the near window.
        rank: `[L, H, F]` int64, dense rank of their times from the newest, 0; anything elsewhere.
        near: `[]` int64, time of the oldest exact token of the near window; one past everything where there is none.
        span: `[]` int64, distinct older times, in the layer and head that has most.
        still: `[P]` int64, the highest position of each component among older slots.
        moved: `[P]`, the highest position less time and rank among them: with `moved` known, any move of these is.
        rest: `[P]`, the highest position among all other slots in use behind the prompt prefix.
    """

    time: Tensor
    older: Tensor
    rank: Tensor
    near: Tensor
    span: Tensor
    still: Tensor
    moved: Tensor
    rest: Tensor


def survey(places: Tensor, live: Tensor, far: slice, until: int | None = None) -> Survey:
    """Look at slots at `places` `[L, H, N, P]` int64, `live` `[L, H, N]` where in use.

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
    still = _highest(far_places, older[..., None], never, keep=1)
    moved = _highest(far_places - (far_time + rank)[..., None], older[..., None], never, keep=1)
    rest = torch.maximum(
        _highest(far_places, (far_live & ~older)[..., None], never, keep=1),
        _highest(places[..., far.stop :, :], near_live[..., None], never, keep=1),
    )
    return Survey(far_time, older, rank, near, _highest(rank, older, -1) + 1, still, moved, rest)


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
    """Slots at consecutive positions; at those of the stream while these are no more than are needed.

    Attributes:
        slots: where they stood in the stream.
        anchoring: what is known of the model.
        moves: `[L, H, F]` int64, what is added to the moving components of each far slot.
        angles: of these moves.
        near_turn: cos and sin `[D]`, what queries are turned by for the near window: `shift` positions.
        shift, next_position: `[]` int64; see `Context`.
        hidden: whether far slots are.
    """

    slots: SlotContext
    anchoring: Anchoring
    moves: Tensor
    angles: Angles
    near_turn: tuple[Tensor, Tensor]
    shift: Tensor
    next_position: Tensor
    hidden: bool = False
    _older: dict[int, Segment] = field(default_factory=dict, init=False, repr=False, compare=False)

    @classmethod
    def of(cls, slots: SlotContext, anchoring: Anchoring, span: int | Tensor) -> CompactContext:
        """Slots re-anchored, `span` positions set aside for older times."""
        seen = slots.survey()
        device, never, rotary = slots.keys.device, torch.iinfo(torch.int64).min, anchoring.rotary
        near = seen.near if anchoring.near is None else torch.full_like(seen.near, anchoring.near)
        # Where the near window begins; right behind the prompt prefix and what is older, if that is before.
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
        behind = highest.max().clamp(min=anchoring.origin - 1) + 1
        next_position = torch.where(shift > 0, behind, anchoring.end)
        angles = Angles.of(rotary, moving, rotary.moving_pairs(anchoring.moving), anchoring.end)
        return cls(slots, anchoring, moves, angles, rotary(moving * shift), shift, next_position)

    def at(self, layer: int, query: Tensor) -> tuple[Segment, ...]:
        """What is older, as it was turned when this layer was first asked, and the near window as it is."""
        slots, far = self.slots, self.slots.far
        if layer not in self._older:
            self._older[layer] = self._turned(layer)
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

    def far_span(self) -> Tensor:
        """As before it was re-anchored."""
        return self.slots.far_span()

    def compacted(self, anchoring: Anchoring, span: int | Tensor) -> CompactContext:
        """Itself."""
        return self

    def positions(self) -> Tensor:
        """Where each slot is shown, `[L, H, N, P]` int64; anything where it is empty."""
        assert self.slots.positions is not None
        there, far = self.slots.positions().clone(), self.slots.far
        for component in self.anchoring.moving:
            there[..., far, component] += self.moves
            there[..., far.stop :, component] -= self.shift
        return there

    def _turned(self, layer: int) -> Segment:
        """The prompt prefix and the far slots of a layer, keys turned to where they are shown."""
        slots, far = self.slots, self.slots.far
        shown = slice(0, far.start if self.hidden else far.stop)
        (keys, values), bias = slots.read(layer, shown), slots.finite_bias()[layer]
        if keys.shape[1] > far.start:
            keys = keys.clone(memory_format=torch.contiguous_format)
            turn_(keys[:, far], self.moves[layer], self.angles)
        return Segment(keys, values, bias[:, shown])
