"""Compact positions (`positions="compact"`) of a session, and the warning where a stream leaves the trained ones.

`protokv.core.context` moves what a memory shows; here new tokens are put after it, and their keys back.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence

from torch import Tensor

from protokv.core.backbone import Backbone
from protokv.core.context import Anchoring, Context
from protokv.core.parts import PositionedStep, SessionListener, SessionView, TokenPlacement
from protokv.core.rotary import direction, rotate
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
        return context.compact(Anchoring(self._rotary, self._origin, clock.next_position, self._moving))

    def forward_positions(self, positions: Tensor, context: Context) -> Tensor:
        """Return positions moved with the context."""
        return positions if _stays(context) else positions - self._direction * context.shift

    def stream_keys(self, keys: Tensor, context: Context) -> Tensor:
        """Return keys rotated from where they were forwarded to their stream positions."""
        if _stays(context):
            return keys
        return rotate(keys, *self._rotary(self._direction * context.shift)).to(keys.dtype)

    def text_start(self, context: Context, clock: StreamClock) -> int:
        """Return the position after the moved context."""
        return clock.next_position if context.next_position is None else int(context.next_position)


def _stays(context: Context) -> bool:
    """Return True if the host knows that tokens are forwarded at their stream positions."""
    return isinstance(context.shift, int) and not context.shift


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
        shift = context.shift
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
