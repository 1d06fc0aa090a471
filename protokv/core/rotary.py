"""Rotary position embedding: rotate keys to a position, and back.

Follows the half-split convention of transformers: component `i` of a key is paired with `i + R / 2`. A model rotates
the first R components of a key (partial rotary), often all D. The angles of a position are the model's; a `Rotary`
returns them.
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor


class Rotary(Protocol):
    """The rotary embedding of a model: positions `[..., P]` int64 -> (cos, sin), each `[..., R]` float32, `R <= D`."""

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
    R = cos.shape[-1]
    if x.shape[-1] > R:
        rotated = _rotate(x[..., :R], cos, sin, sign)
        rest = x[..., R:].to(rotated.dtype).expand(*rotated.shape[:-1], -1)
        return torch.cat((rotated, rest), -1)
    half = R // 2
    rotated = x * cos
    # Half by half, in place: no copy of x with its halves exchanged.
    rotated[..., :half].sub_(x[..., half:] * sin[..., :half], alpha=sign)
    rotated[..., half:].add_(x[..., :half] * sin[..., half:], alpha=sign)
    return rotated
