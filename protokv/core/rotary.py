"""Rotary position embedding as memories and contexts need it: turning keys to a position, and back.

Knows the half-split convention of transformers and nothing of any model; which angle a position has is the model's,
handed around as a `Rotary`. What is turned from one position to another far from it needs angles that add up: these
are a `PreciseRotary`'s.

Keys turned to other positions, each by its own angle: angles are looked up, not computed again for every key.

What is turned are the keys of all layers and heads, and whole positions have few angles beside them. However far a key
is moved, its angle is composed of two that are looked up: of a multiple of a power of two, and of what is left. So the
tables are small at any length of a stream. Works in float32 on a thousand rows at a time, in place, and rounds once.
Knows no slots.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import tau
from typing import Protocol

import torch
from torch import Tensor

from protokv.core.arrays import cut


class Rotary(Protocol):
    """The model's rotary embedding: positions `[..., P]` int64 -> (cos, sin), each `[..., D]` float32."""

    def __call__(self, positions: Tensor, /) -> tuple[Tensor, Tensor]:
        """Angles of the positions."""


# Angles are whole multiples of this part of a turn: products with positions below 2**33 are exact in int64.
_TURN = 2**32
# How often the position is doubled that tells the rate of a pair; each time the rate is known twice as well.
_DOUBLINGS = 12


class PreciseRotary:
    """The angles of a model's rotary embedding, and none of their rounding at large positions.

    A model multiplies position and rate in float32, so that its angle at position 65,536 is off by up to 2**-9, and in
    each pair otherwise. Here they are multiplied as integers: the angles of two positions add up to that of their sum,
    up to the rounding of cos and sin. At small positions they are the model's: the rates are read off its own angles
    at powers of two, where its product is exact, to within 2**-33 of a turn a position.
    """

    def __init__(self, rotary: Rotary, components: int) -> None:
        """Read the rates of a rotary embedding.

        Args:
            rotary: the model's. Each pair turns with one component, in proportion and by less than half a turn a
                position.
            components: P.
        """
        positions = 2 ** torch.arange(_DOUBLINGS + 1)[:, None, None] * torch.eye(components, dtype=torch.int64)
        cos, sin = rotary(positions)
        half = cos.shape[-1] // 2
        turns = torch.atan2(sin[..., :half].double(), cos[..., :half].double()) / tau
        rate = turns[0]
        for doubling in range(1, _DOUBLINGS + 1):
            # The angle tells the part of a turn, what is known so far the whole turns.
            rate = (turns[doubling] + (rate * 2**doubling - turns[doubling]).round()) / 2**doubling
        owner = rate.abs().argmax(0)
        whole = (rate.gather(0, owner[None])[0] * _TURN).round().long()
        self._made = {rate.device: (owner, whole)}
        # Of each pair that turns, the component with which it does.
        self._owners = [own if turns else None for own, turns in zip(owner.tolist(), whole.tolist(), strict=True)]

    def __call__(self, positions: Tensor, /) -> tuple[Tensor, Tensor]:
        """cos and sin `[..., D]` float32 of positions `[..., P]` int64, from -2**33 to 2**33."""
        cos, sin = self.of_pairs(positions)
        # Both halves of a key turn by the same angles.
        return torch.cat((cos, cos), -1), torch.cat((sin, sin), -1)

    def of_pairs(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """The same of each pair once, `[..., D / 2]`."""
        device = positions.device
        if device not in self._made:
            owner, rate = next(iter(self._made.values()))
            self._made[device] = owner.to(device), rate.to(device)
        owner, rate = self._made[device]
        own = positions if positions.shape[-1] == 1 else positions.index_select(-1, owner)
        # The part of a turn, from minus a half to a half.
        part = (own * rate + _TURN // 2).bitwise_and(_TURN - 1) - _TURN // 2
        angle = part.float() * (tau / _TURN)
        return angle.cos(), angle.sin()

    def moving_pairs(self, moving: Sequence[int]) -> int:
        """How many of the first pairs of a key hold all that turn with these position components."""
        return max((pair + 1 for pair, owner in enumerate(self._owners) if owner in moving), default=0)


def direction(moving: Sequence[int], components: int, device: torch.device) -> Tensor:
    """`[P]` int64, 1 for the components that move, else 0; made without a copy from the host."""
    where = torch.zeros(components, dtype=torch.int64, device=device)
    for component in moving:
        where[component].fill_(1)
    return where


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate `[..., D]` in the half-split convention of transformers; in float32, the dtype of angles."""
    return _turned(x, cos, sin, 1)


def unrotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """The inverse of `rotate`."""
    return _turned(x, cos, sin, -1)


def turn(keys: Tensor, here: Tensor, there: Tensor, rotary: Rotary) -> Tensor:
    """Keys `[..., D]` that stand at positions `here` `[..., P]`, moved to `there`; in float32, rounded once."""
    bare = unrotate(keys.float(), *rotary(here))
    return rotate(bare, *rotary(there)).to(keys.dtype)


def _turned(x: Tensor, cos: Tensor, sin: Tensor, sign: int) -> Tensor:
    half = x.shape[-1] // 2
    turned = x * cos
    # Half by half, in place: no copy of x with its halves exchanged.
    turned[..., :half].sub_(x[..., half:] * sin[..., :half], alpha=sign)
    turned[..., half:].add_(x[..., :half] * sin[..., half:], alpha=sign)
    return turned


# Rows that a CPU turns at once, so that they stay in its cache; any other device turns all of them.
_ROWS = 1024


@dataclass(frozen=True, slots=True)
class Angles:
    """The angles of all moves of less than `reach` positions, forwards or backwards.

    Attributes:
        coarse: cos and sin `[n, pairs]` float32 of every multiple of `2 ** bits`, from `-reach` on, of the first
            `pairs` pairs of a key, of which it has D / 2; the others stay.
        fine: the same of the positions from 0 to `2 ** bits`.
        bits: see there.
        reach: a power of two.
    """

    coarse: tuple[Tensor, Tensor]
    fine: tuple[Tensor, Tensor]
    bits: int
    reach: int

    @classmethod
    def of(cls, rotary: PreciseRotary, moving: Tensor, pairs: int, end: int) -> Angles:
        """Angles of moves of less than `end` positions along `moving` `[P]` int64, which turn the first `pairs`."""
        # Powers of two, so that the tables seldom change their size; and of the same size, which is the least together.
        bits = (end.bit_length() + 1) // 2
        reach = 1 << max(end.bit_length(), bits)

        def table(start: int, stop: int, step: int) -> tuple[Tensor, Tensor]:
            moves = torch.arange(start, stop, step, device=moving.device)
            cos, sin = rotary.of_pairs(moves[:, None] * moving)
            return cos[:, :pairs].contiguous(), sin[:, :pairs].contiguous()

        return cls(table(-reach, reach, 1 << bits), table(0, 1 << bits, 1), bits, reach)

    def at(self, moves: Tensor) -> tuple[Tensor, Tensor]:
        """cos and sin `[..., pairs]` of moves `[...]` int64."""
        steps = (moves + self.reach).view(-1)
        # Many times as fast on a CPU as indexing by a matrix.
        high, low = steps >> self.bits, steps & ((1 << self.bits) - 1)
        (cos, sin), (more_cos, more_sin) = (
            tuple(angles.index_select(0, rows) for angles in table)
            for table, rows in ((self.coarse, high), (self.fine, low))
        )
        both = (cos * more_cos).addcmul_(sin, more_sin, value=-1), sin.mul_(more_cos).addcmul_(cos, more_sin)
        return both[0].view(*moves.shape, -1), both[1].view(*moves.shape, -1)


def turn_(keys: Tensor, moves: Tensor, angles: Angles) -> None:
    """Turn keys `[H, N, D]` in place, each by its move `[H, N]`."""
    H, N, D = keys.shape
    pairs = angles.fine[0].shape[1]
    for part in cut(N, _ROWS // H, keys.device):
        cos, sin = angles.at(moves[:, part].contiguous())
        first, second = keys[:, part, :pairs], keys[:, part, D // 2 : D // 2 + pairs]
        a, b = first.float(), second.float()
        turned = torch.addcmul(a * cos, b, sin, value=-1)
        second.copy_(torch.addcmul(b * cos, a, sin))
        first.copy_(turned)
