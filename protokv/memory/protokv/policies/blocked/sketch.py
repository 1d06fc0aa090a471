"""The sketch: what the search for near prototypes reads, 64 or so small whole numbers for the 2 D of a centre.

A centre [key; value] is folded to the sums of some components each with fixed random signs, which keeps squared
distances in the mean (Achlioptas, 2003; https://doi.org/10.1016/S0022-0000(03)00025-4); what the head's centres have in
common is taken off, and the rest is rounded to whole numbers z of at most 127. Whole numbers of that size are exact in
bfloat16, and so are their products and sums in float32: distances do not depend on the order of adding, and so neither
on the device nor on what else is computed beside them. Nothing of it is kept: it is a function of the bank.

A row stands there twice, as `[z, 1, 1, 1, n1, n2, n3, 0 ...]` and as `[-2 z, n1, n2, n3, 1, 1, 1, 0 ...]`, where the
squared norm |z|^2 = n1 + n2 + n3 in three numbers that are exact in bfloat16. One product of a first and a second form
is a squared distance.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from protokv.memory.protokv.policies.blocked.parts import parts_of

# What half of the rows stay below in every component; rows twice as far out are cut off. A power of two.
_USUAL = 64.0
_MOST = 127.0
# Rows that tell what is usual and what all have in common, at most; a power of two. Of both the median is taken: it
# does not depend on an order of adding.
_SAMPLE = 512
_SEED = 1


@dataclass(frozen=True, slots=True)
class SketchTables:
    """Constants of a head size D.

    Attributes:
        size: F, numbers of a sketch: D, halved while at least 64 are left.
        signs: of `signs_of`.
        empty: a row of no centre in both forms, `[2, 1, 1, C]` bfloat16; C is a multiple of 8: tensor cores want that.
        digits: which bits of a squared norm are its three parts, `[3]` int32.
    """

    size: int
    signs: tuple[Tensor, Tensor]
    empty: Tensor
    digits: Tensor

    @classmethod
    def of(cls, size: int, device: torch.device) -> SketchTables:
        """The constants."""
        F = size
        while F % 2 == 0 and F >= 128:
            F //= 2
        empty = torch.zeros(2, 1, 1, -(-(F + 6) // 8) * 8, dtype=torch.bfloat16)
        empty[0, ..., F : F + 3], empty[1, ..., F + 3 : F + 6] = 1.0, 1.0
        digits = torch.tensor([0xFF0000, 0xFF00, 0xFF], dtype=torch.int32)
        return cls(F, signs_of(size, device), empty.to(device), digits.to(device))


def signs_of(size: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """The signs of values, and of upper halves as they are folded over the lower ones; `[D]` float32 each. Keys and
    lower halves have none: a distance takes no notice of the sign of a sum. The same for every head of every model."""
    generator = torch.Generator().manual_seed(_SEED)
    signs = torch.randint(0, 2, (2, size), generator=generator).mul_(2).sub_(1).float().to(device)
    return signs[0], signs[1]


def sketch_of(keys: Tensor, values: Tensor, tables: SketchTables, rows: int) -> Tensor:
    """The sketch of some heads.

    Args:
        keys: centres, `[n, K, D]` float32; zeros where a slot is free.
        values: likewise.
        tables: of D.
        rows: of the result, at least K; those from K on are of no centre.

    Returns:
        `[2, n, rows, C]` bfloat16.
    """
    n, K, _ = keys.shape
    F = tables.size
    folded = torch.empty(n, K, F, device=keys.device)
    for part in parts_of(K, keys.device):
        _fold(keys[:, part], values[:, part], tables.signs, folded[:, part])
    sample = folded[:, _some(K)]
    common = sample.median(1, keepdim=True).values
    usual = torch.linalg.vector_norm(sample - common, torch.inf, dim=2).median(1).values
    unit = usual.mul_(1 / _USUAL).clamp_(min=1e-30)[:, None, None]
    sketch = tables.empty.expand(2, n, rows, -1).clone()
    for part in parts_of(K, keys.device):
        whole = folded[:, part].sub_(common).div_(unit).round_().clamp_(-_MOST, _MOST)
        sketch[0, :, part, :F] = whole
        torch.mul(sketch[0, :, part, :F], -2.0, out=sketch[1, :, part, :F])
        norm = whole.square_().sum(2).int()[..., None] & tables.digits
        sketch[0, :, part, F + 3 : F + 6] = norm
        sketch[1, :, part, F : F + 3] = norm
    return sketch


def _fold(keys: Tensor, values: Tensor, signs: tuple[Tensor, Tensor], out: Tensor) -> None:
    # A sign changes no digit, so it is one rounding whether the product and the sum are fused or not.
    if out.shape[-1] == keys.shape[-1]:
        torch.addcmul(keys, values, signs[0], out=out)
        return
    folded = torch.addcmul(keys, values, signs[0])
    while folded.shape[-1] > out.shape[-1]:
        half = folded.shape[-1] // 2
        into = out if half == out.shape[-1] else None
        folded = torch.addcmul(folded[..., :half], folded[..., half:], signs[1][:half], out=into)


def _some(rows: int) -> slice:
    """Evenly spaced rows, a power of two of them."""
    count = min(_SAMPLE, 1 << (rows.bit_length() - 1))
    return slice(0, rows // count * count, rows // count)
