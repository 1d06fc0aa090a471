"""Keys turned to other positions, each by its own angle: angles are looked up, not computed again for every key.

What is turned are the keys of all layers and heads, and whole positions have few angles beside them. However far a key
is moved, its angle is composed of two that are looked up: of a multiple of a power of two, and of what is left. So the
tables are small at any length of a stream. Works in float32 on a thousand rows at a time, in place, and rounds once.
Knows no slots.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from protokv.parts import cut
from protokv.rotary import PreciseRotary

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
