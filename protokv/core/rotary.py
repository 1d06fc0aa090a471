"""Rotary position embedding: rotate keys to a position, and back.

Follows the half-split convention of transformers: component `i` of a key is paired with `i + R /
2`. A model rotates the first R components of a key (partial rotary), often all D. A `Rotary`
returns the model's own angles; it multiplies position and rate in float32, so its angle at position
65,536 is off by up to 2**-9.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import tau

import torch
from torch import Tensor

from protokv.device.arrays import slice_rows

Angles = tuple[Tensor, Tensor]
"""The cosines and the sines of rotary angles."""
Rotary = Callable[[Tensor], Angles]
"""The rotary embedding of a model: positions `[..., P]` int64 to cos and sin, each `[..., R]`
float32, `R <= D`.
"""


def keep_still(positions: Tensor) -> Angles:
    """Return the angles of keys that do not rotate: none, `[..., 0]`."""
    still = torch.zeros(*positions.shape[:-1], 0, device=positions.device)
    return still, still


def rotate(x: Tensor, angles: Angles) -> Tensor:
    """Rotate `[..., D]` by angles; in float32, the dtype of the angles."""
    cos, sin = angles
    R = cos.shape[-1]
    if x.shape[-1] > R:
        rotated = rotate(x[..., :R], angles)
        rest = x[..., R:].to(rotated.dtype).expand(*rotated.shape[:-1], -1)
        return torch.cat((rotated, rest), -1)
    rotated = x * cos
    # Half by half, in place: no copy of x with its halves exchanged.
    (first, second), (x1, x2), (sin1, sin2) = (each.chunk(2, -1) for each in (rotated, x, sin))
    first.sub_(x2 * sin1)
    second.add_(x1 * sin2)
    return rotated


def unrotate(x: Tensor, angles: Angles) -> Tensor:
    """Undo `rotate`."""
    cos, sin = angles
    return rotate(x, (cos, -sin))


def rerotate(keys: Tensor, here: Tensor, there: Tensor, rotary: Rotary) -> Tensor:
    """Move keys `[..., D]` from positions `here` `[..., P]` to `there`; in float32, rounded
    once.
    """
    return rotate(unrotate(keys.float(), rotary(here)), rotary(there)).to(keys.dtype)


# Angles are whole multiples of a turn divided by this: products with positions below 2**33 are
# exact in int64.
_TURN = 2**32
# the rate of a pair is read at position 1, 2, 4, ..., 2**12; each doubling doubles its precision
_DOUBLINGS = 12


class PreciseRotary:
    """The angles of a model's rotary embedding without their rounding at large positions.

    The angles of two positions add up to that of their sum, up to the rounding of cos and sin. At
    small positions they are the model's: the rates are read off its own angles at powers of two,
    where its product is exact.
    """

    def __init__(self, rotary: Rotary, components: int) -> None:
        """Read the rates off a model's angles: a pair turns with one of P components, less than
        half a turn a step.
        """
        positions = 2 ** torch.arange(_DOUBLINGS + 1)[:, None, None] * torch.eye(
            components, dtype=torch.int64
        )
        cos, sin = rotary(positions)
        half = cos.shape[-1] // 2
        turns = torch.atan2(sin[..., :half].double(), cos[..., :half].double()) / tau
        rate = turns[0]
        for doubling in range(1, _DOUBLINGS + 1):
            # The angle gives the part of a turn, the rate so far the whole turns.
            rate = (turns[doubling] + (rate * 2**doubling - turns[doubling]).round()) / 2**doubling
        self.components = components
        self.pairs = half
        owner = rate.abs().argmax(0)
        whole = (rate.gather(0, owner[None])[0] * _TURN).round().long()
        self._made = {rate.device: (owner, whole)}
        # The component that each pair rotates with; None if it does not rotate.
        self._owners = [
            own if turns else None
            for own, turns in zip(owner.tolist(), whole.tolist(), strict=True)
        ]

    def __call__(self, positions: Tensor, /) -> Angles:
        """Return cos and sin `[..., D]` float32 of positions `[..., P]` int64 between -2**33 and
        2**33.
        """
        cos, sin = self.of_pairs(positions)
        # Both halves of a key rotate by the same angles.
        return torch.cat((cos, cos), -1), torch.cat((sin, sin), -1)

    def of_pairs(self, positions: Tensor, pairs: int | None = None) -> Angles:
        """Return cos and sin once for each of the first `pairs` pairs, `[..., pairs]`; None: of
        all.
        """
        device = positions.device
        if device not in self._made:
            owner, rate = next(iter(self._made.values()))
            self._made[device] = owner.to(device), rate.to(device)
        owner, rate = (held[:pairs] for held in self._made[device])
        own = positions if positions.shape[-1] == 1 else positions.index_select(-1, owner)
        # the part of a turn, from -1/2 to 1/2
        part = (own * rate + _TURN // 2).bitwise_and(_TURN - 1) - _TURN // 2
        angle = part.float() * (tau / _TURN)
        return angle.cos(), angle.sin()

    def moving_pairs(self, moving: Sequence[int]) -> int:
        """Return how many of the first pairs of a key include all that rotate with these position
        components.
        """
        return max(
            (pair + 1 for pair, owner in enumerate(self._owners) if owner in moving), default=0
        )


def mark_moving_components(moving: Sequence[int], components: int, device: torch.device) -> Tensor:
    """Return `[P]` int64, 1 for the components that move, else 0, without a copy from the host."""
    where = torch.zeros(components, dtype=torch.int64, device=device)
    for component in moving:
        where[component].fill_(1)
    return where


# rows that a CPU rotates at once, so that they stay in its cache; other devices rotate all at once
_ROWS = 1024


def rotate_by_moves_(
    keys: Tensor, moves: Tensor, rotary: PreciseRotary, moving: Sequence[int]
) -> None:
    """Rotate keys `[H, N, D]` in place by moves `[H, N]` along the components `moving`, in the
    pairs that turn.
    """
    H, N, _ = keys.shape
    pairs = rotary.moving_pairs(moving)
    along = mark_moving_components(moving, rotary.components, keys.device)
    for part in slice_rows(N, _ROWS // H if keys.device.type == "cpu" else N):
        cos, sin = rotary.of_pairs(moves[:, part, None] * along, pairs)
        first = keys[:, part, :pairs]
        second = keys[:, part, rotary.pairs : rotary.pairs + pairs]
        a = first.float()
        b = second.float()
        rotated = torch.addcmul(a * cos, b, sin, value=-1)
        second.copy_(torch.addcmul(b * cos, a, sin))
        first.copy_(rotated)
