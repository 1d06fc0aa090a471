"""Rotary position embedding as memories and contexts need it: turning keys to a position, and back.

Knows the half-split convention of transformers and nothing of any model; which angle a position has is the model's,
handed around as a `Rotary`.
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor


class Rotary(Protocol):
    """The model's rotary embedding: positions `[..., P]` int64 -> (cos, sin), each `[..., D]` float32."""

    def __call__(self, positions: Tensor, /) -> tuple[Tensor, Tensor]:
        """Angles of the positions."""


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate `[..., D]` float32 in the half-split convention of transformers."""
    return x * cos + _rotate_half(x) * sin


def unrotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """The inverse of `rotate`."""
    return x * cos - _rotate_half(x) * sin


def turn(keys: Tensor, here: Tensor, there: Tensor, rotary: Rotary) -> Tensor:
    """Keys `[..., D]` that stand at positions `here` `[..., P]`, moved to `there`; in float32, rounded once."""
    bare = unrotate(keys.float(), *rotary(here))
    return rotate(bare, *rotary(there)).to(keys.dtype)


def _rotate_half(x: Tensor) -> Tensor:
    half = x.shape[-1] // 2
    return torch.cat((-x[..., half:], x[..., :half]), -1)
