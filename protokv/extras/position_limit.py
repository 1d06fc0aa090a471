"""`PositionLimit`: warns once if steps are forwarded beyond the positions that the model was trained on.

At compact positions only the device knows how far a step stands; it is asked when there is a wait for it anyway.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence

import torch
from torch import Tensor

from protokv.core.context import Context
from protokv.core.parts import PositionedStep, SessionListener
from protokv.core.session import Session
from protokv.errors import PositionWarning
from protokv.extras.compact import shift_of


class PositionLimit(SessionListener):
    """Compares the highest position of each step with a limit."""

    def __init__(self, limit: int | None, moving: Sequence[int], advice: str = "") -> None:
        """Start at the beginning of a stream.

        Args:
            limit: positions that the model was trained on; None: unknown.
            moving: the position components that grow with the stream.
            advice: appended to the warning.
        """
        self._limit, self._moving, self._advice = limit, moving, advice
        self._furthest: Tensor | None = None

    def after_append(self, session: Session, step: PositionedStep, context: Context) -> None:
        """Follow a step of a session."""
        self.follow(session.clock.steps, step.highest, shift_of(context))

    def before_read(self, session: Session) -> None:
        """Warn of steps whose positions only the device knew."""
        if self._furthest is not None:
            self._warn(session.clock.steps, int(self._furthest))
            self._furthest = None

    def follow(self, step: int, highest: Sequence[int], shift: int | Tensor) -> None:
        """Note a step with highest stream positions `[P]`, forwarded `shift` positions earlier.

        Warns:
            PositionWarning: it is beyond the limit; now, or at `before_read` if the shift is a tensor.
        """
        if self._limit is None or max(highest) < self._limit:
            return
        fixed = max((place for component, place in enumerate(highest) if component not in self._moving), default=0)
        moved = max(highest[component] for component in self._moving) - shift
        if isinstance(moved, int):
            self._warn(step, max(fixed, moved))
        else:
            reached = moved.clamp(min=fixed)
            self._furthest = reached if self._furthest is None else torch.maximum(self._furthest, reached)

    def _warn(self, step: int, position: int) -> None:
        if self._limit is None or position < self._limit:
            return
        trained, self._limit = self._limit, None
        warnings.warn(
            f"step {step} stands at position {position}, and the model was trained on {trained}{self._advice}",
            PositionWarning,
            stacklevel=5,
        )
