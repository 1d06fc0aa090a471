"""Compact positions (`positions="compact"`): a stream of any length shown at the positions a model was trained on.

A memory is bounded, so it can be shown at bounded positions. The near window moves as a block and keeps the
distances inside it; older tokens stand before it, every distinct time one position apart, the newest next to the
window. Near keys stay as they are: queries are rotated by one angle instead. Far keys are rotated in each layer when it
is first read. Only the device knows how far anything moves, and nothing waits for it.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor

from protokv.core.backbone import Backbone
from protokv.core.context import Context, Segment, SlotContext
from protokv.core.parts import PositionedStep, SessionListener, SessionView, TokenPlacement
from protokv.core.rotary import PreciseRotary, direction, rotate, rotate_by_moves_
from protokv.core.step import StreamClock
from protokv.errors import PositionWarning


class CompactPlacement(TokenPlacement):
    """Shows a context at consecutive positions, and forwards new tokens after it."""

    def __init__(self, backbone: Backbone) -> None:
        self._rotary, self._moving = backbone.precise_rotary, backbone.moving
        self._origin = len(backbone.prefix_ids)
        self._direction = direction(backbone.moving, backbone.position_components, backbone.device)

    def place(self, context: Context, clock: StreamClock) -> Context:
        """Return the context at consecutive positions."""
        return compact_context(context, Anchoring(self._rotary, self._origin, clock.next_position, self._moving))

    def forward_positions(self, positions: Tensor, context: Context) -> Tensor:
        """Return positions moved with the context."""
        shift = find_shift(context)
        return positions if _is_zero(shift) else positions - self._direction * shift

    def stream_keys(self, keys: Tensor, context: Context) -> Tensor:
        """Return keys rotated from where they were forwarded to their stream positions."""
        shift = find_shift(context)
        if _is_zero(shift):
            return keys
        return rotate(keys, *self._rotary(self._direction * shift)).to(keys.dtype)

    def text_start(self, context: Context, clock: StreamClock) -> int:
        """Return the position after the moved context."""
        after = find_next_position(context)
        return clock.next_position if after is None else int(after)


@dataclass(frozen=True, slots=True)
class Anchoring:
    """Facts of the model and the stream that compact positions need.

    Attributes:
        rotary: angles that add up at any position.
        origin: position of the first visual token of the stream.
        end: the position after everything seen, above 0.
        moving: the position components that grow with the stream. The first one is time (or the index of a token).
        near: time at which the near window begins, if a context of other layers determined it; None: this one does.
    """

    rotary: PreciseRotary
    origin: int
    end: int
    moving: Sequence[int] = (0,)
    near: int | None = None


@runtime_checkable
class Compactable(Protocol):
    """A context that moves itself to compact positions; `SlotContext`s are moved by `compact_context`.

    A moved context has `shift`, by how much the moving components of tokens forwarded after it are less than their
    stream positions, and may have `next_position`, where text after the video starts. Both are `[]` int64 tensors if
    only the device knows them.
    """

    def far_span(self) -> int | Tensor:
        """Return the number of distinct times older than the near window, in the layer and head that has most."""

    def compact(self, anchoring: Anchoring, span: int | Tensor) -> Context:
        """Return the same tokens at consecutive positions; `span` positions are set aside for older ones."""


def compact_context(context: Context, anchoring: Anchoring, span: int | Tensor | None = None) -> Context:
    """Return the tokens of a context at consecutive positions, `span` of them set aside for older ones.

    None sets aside as many as the context needs.
    """
    if isinstance(context, Compactable):
        return context.compact(anchoring, context.far_span() if span is None else span)
    seen = survey_slots(context)
    assert isinstance(context, SlotContext)
    return CompactContext.of(context, anchoring, seen, seen.span if span is None else span)


def far_span(context: Context) -> int | Tensor:
    """Return the number of distinct times older than the near window, in the layer and head that has most."""
    return context.far_span() if isinstance(context, Compactable) else survey_slots(context).span


def find_shift(context: Context) -> int | Tensor:
    """Return by how many positions tokens forwarded with this context stand before their stream positions."""
    shift: int | Tensor = getattr(context, "shift", 0)
    return shift


def find_next_position(context: Context) -> int | Tensor | None:
    """Return where text after a moved context starts; None: after the stream."""
    position: int | Tensor | None = getattr(context, "next_position", None)
    return position


def _is_zero(shift: int | Tensor) -> bool:
    """Return True if the host knows that tokens are forwarded at their stream positions."""
    return isinstance(shift, int) and not shift


@dataclass(frozen=True, slots=True)
class Survey:
    """The positions of a context's slots in the stream.

    Attributes:
        time: `[L, H, F]` int64 of the far slots, the first position component.
        older: `[L, H, F]` bool, far slots in use that are older than the near window.
        rank: `[L, H, F]` int64, dense rank of their times, 0 for the newest; any number in other slots.
        near: `[]` int64, time of the oldest exact token of the near window; after all slots if there is none.
        span: `[]` int64, distinct older times, in the layer and head that has most.
        still: `[P]` int64, the highest position of each component among older slots.
        moved: `[P]`, the highest of position - time - rank among older slots, from which any move of them follows.
        rest: `[P]`, the highest position among all other slots in use after the prompt prefix.
    """

    time: Tensor
    older: Tensor
    rank: Tensor
    near: Tensor
    span: Tensor
    still: Tensor
    moved: Tensor
    rest: Tensor


def survey_slots(context: Context) -> Survey:
    """Find where the slots of a context stand, without waiting for the device.

    If no exact token is near, the near window begins at `until` of the context, or after all slots if that is None.
    """
    if not isinstance(context, SlotContext) or context.positions is None:
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
    """Slots at consecutive positions; at stream positions while these are no more than are needed.

    Attributes:
        slots: the slots at their stream positions.
        anchoring: the model and the stream.
        moves: `[L, H, F]` int64, added to the moving components of each far slot.
        near_rotation: cos and sin `[D]` of `shift` positions; queries are rotated by it for the near window.
        shift, next_position: `[]` int64; see `Compactable`.
    """

    slots: SlotContext
    anchoring: Anchoring
    moves: Tensor
    near_rotation: tuple[Tensor, Tensor]
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

    def positions(self) -> Tensor:
        """Return where each slot is shown, `[L, H, N, P]` int64; any number in free slots."""
        assert self.slots.positions is not None
        there, far = self.slots.positions().clone(), self.slots.far
        for component in self.anchoring.moving:
            there[..., far, component] += self.moves
            there[..., far.stop :, component] -= self.shift
        return there

    def _rotate_far(self, layer: int) -> Segment:
        """Return the prompt prefix and the far slots of a layer, keys rotated to where they are shown."""
        slots, far = self.slots, self.slots.far
        shown = slots.segment(layer, slice(0, far.stop))
        if shown.keys.shape[1] == far.start:
            return shown
        keys = shown.keys.clone(memory_format=torch.contiguous_format)
        rotate_by_moves_(keys[:, far], self.moves[layer], self.anchoring.rotary, self.anchoring.moving)
        return replace(shown, keys=keys)


class PositionLimit(SessionListener):
    """Warns once if steps are forwarded beyond the positions that the model was trained on.

    At compact positions only the device knows how far a step stands, which the size of the memory bounds.
    """

    def __init__(self, limit: int | None, moving: Sequence[int], advice: str = "") -> None:
        """Start at the beginning of a stream.

        Args:
            limit: positions that the model was trained on; None: unknown.
            moving: the position components that grow with the stream.
            advice: appended to the warning.
        """
        self._limit, self._moving, self._advice = limit, moving, advice

    def after_append(self, session: SessionView, step: PositionedStep, context: Context) -> None:
        """Look how far the step was forwarded.

        Warns:
            PositionWarning: it is beyond the limit.
        """
        shift = find_shift(context)
        if self._limit is None or isinstance(shift, Tensor):
            return
        position = max(place - shift * (component in self._moving) for component, place in enumerate(step.highest))
        if position >= self._limit:
            trained, self._limit = self._limit, None
            warnings.warn(
                f"step {session.clock.steps} stands at position {position}, and the model was trained on {trained}"
                f"{self._advice}",
                PositionWarning,
                stacklevel=3,
            )
