"""Rotary position embedding: rotate keys to a position, and back.

Follows the half-split convention of transformers: component `i` of a key is paired with `i + D / 2`. The angles of a
position are the model's; a `Rotary` returns them.
"""

from __future__ import annotations

from typing import Protocol

from torch import Tensor


class Rotary(Protocol):
    """The rotary embedding of a model: positions `[..., P]` int64 -> (cos, sin), each `[..., D]` float32."""

    def __call__(self, positions: Tensor, /) -> tuple[Tensor, Tensor]:
        """Return cos and sin of the angles of the positions."""


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate `[..., D]` by angles; in float32, the dtype of the angles."""
    return _rotate(x, cos, sin, 1)


def unrotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Undo `rotate`."""
    return _rotate(x, cos, sin, -1)


def rerotate(keys: Tensor, here: Tensor, there: Tensor, rotary: Rotary) -> Tensor:
    """Move keys `[..., D]` from positions `here` `[..., P]` to `there`; in float32, rounded once."""
    unrotated = unrotate(keys.float(), *rotary(here))
    return rotate(unrotated, *rotary(there)).to(keys.dtype)


def _rotate(x: Tensor, cos: Tensor, sin: Tensor, sign: int) -> Tensor:
    half = x.shape[-1] // 2
    rotated = x * cos
    # Half by half, in place: no copy of x with its halves exchanged.
    rotated[..., :half].sub_(x[..., half:] * sin[..., :half], alpha=sign)
    rotated[..., half:].add_(x[..., :half] * sin[..., half:], alpha=sign)
    return rotated
