"""`PositionLimit`: tells once that a stream was forwarded beyond the positions its model was trained on.

Where the device alone knows how far, it is asked when there is a wait for it anyway. Knows no model and no memory.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence

import torch
from torch import Tensor

from protokv.errors import PositionWarning


class PositionLimit:
    """The highest position at which a step was forwarded, against a limit."""

    def __init__(self, limit: int | None, moving: Sequence[int], advice: str) -> None:
        """Start at nothing.

        Args:
            limit: positions that the model was trained on; None: nobody knows.
            moving: the position components that grow with the stream.
            advice: the end of the warning.
        """
        self._limit, self._moving, self._advice = limit, moving, advice
        self._furthest: Tensor | None = None

    def follow(self, step: int, highest: Sequence[int], shift: int | Tensor) -> None:
        """Note a step whose highest stream positions these are `[P]`, moved back by `shift` in the moving ones.

        Warns:
            PositionWarning: it is beyond the limit; now, or when `tell` is called where the shift is a tensor.
        """
        if self._limit is None or max(highest) < self._limit:
            return
        still = max((place for component, place in enumerate(highest) if component not in self._moving), default=0)
        moved = max(highest[component] for component in self._moving) - shift
        if isinstance(moved, int):
            self._warn(step, max(still, moved))
        else:
            reached = moved.clamp(min=still)
            self._furthest = reached if self._furthest is None else torch.maximum(self._furthest, reached)

    def tell(self, step: int) -> None:
        """Warn of what `follow` left open; asks the device."""
        if self._furthest is not None:
            self._warn(step, int(self._furthest))
            self._furthest = None

    def _warn(self, step: int, position: int) -> None:
        if self._limit is None or position < self._limit:
            return
        trained, self._limit = self._limit, None
        warnings.warn(
            f"step {step} stands at position {position}, and the model was trained on {trained}{self._advice}",
            PositionWarning,
            stacklevel=4,
        )
