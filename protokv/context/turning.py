"""Keys turned to other positions, each by its own angle: angles are looked up, not computed again for every key.

What is turned are the keys of all layers and heads; whole positions have few angles beside them. Works in float32 on a
thousand rows at a time, in place, and rounds once. Knows no slots.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from protokv.rotary import Rotary

# Rows that a CPU turns at once, so that they stay in its cache; any other device turns all of them.
_ROWS = 1024


@dataclass(frozen=True, slots=True)
class Angles:
    """The angle of every slot: the different ones, and which of them each slot has.

    Attributes:
        cos, sin: `[n, pairs]` float32, of the first `pairs` pairs of a key, of which it has D / 2; the others stay.
        index: `[L, H, N]` int64, below n.
    """

    cos: Tensor
    sin: Tensor
    index: Tensor

    @classmethod
    def of(cls, rotary: Rotary, positions: Tensor, index: Tensor, pairs: int) -> Angles:
        """The angles of `positions` `[n, P]` int64."""
        cos, sin = rotary(positions)
        # Both halves of a key turn by the same angles.
        return cls(cos[:, :pairs].contiguous(), sin[:, :pairs].contiguous(), index)

    def at(self, layer: int, part: slice) -> tuple[Tensor, Tensor]:
        """cos and sin `[H, n, pairs]` of some slots of a layer."""
        rows = self.index[layer, :, part]
        # Many times as fast on a CPU as indexing by a matrix.
        cos, sin = (angles.index_select(0, rows.reshape(-1)) for angles in (self.cos, self.sin))
        return cos.view(*rows.shape, -1), sin.view(*rows.shape, -1)


def moving_pairs(rotary: Rotary, moving: Tensor, components: Sequence[int], head_size: int) -> int:
    """How many of the first pairs of a key turn at all with the moving components, `moving` `[P]` their indicator."""
    if len(components) == len(moving):
        return head_size // 2
    _, sin = rotary(moving)
    return int(sin[: head_size // 2].nonzero().max()) + 1


def turn_(keys: Tensor, layer: int, by: Angles, back: Angles | None = None) -> None:
    """Turn the keys `[H, N, D]` of a layer in place, by their angles and, if that is given, first back by others."""
    H, N, D = keys.shape
    pairs = by.cos.shape[1]
    step = max(1, _ROWS // H) if keys.device.type == "cpu" else max(1, N)
    for start in range(0, N, step):
        part = slice(start, min(start + step, N))
        cos, sin = by.at(layer, part)
        if back is not None:
            cos, sin = between(back.at(layer, part), (cos, sin))
        first, second = keys[:, part, :pairs], keys[:, part, D // 2 : D // 2 + pairs]
        a, b = first.float(), second.float()
        turned = torch.addcmul(a * cos, b, sin, value=-1)
        second.copy_(torch.addcmul(b * cos, a, sin))
        first.copy_(turned)


def between(here: tuple[Tensor, Tensor], there: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    """cos and sin of the angle from one to another."""
    (here_cos, here_sin), (cos, sin) = here, there
    return torch.addcmul(cos * here_cos, sin, here_sin), torch.addcmul(sin * here_cos, cos, here_sin, value=-1)
