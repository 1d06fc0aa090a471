"""The sketch: what the search for near prototypes reads, 64 or so small whole numbers for the 2 D of a centre.

A centre [key; value] is folded to the sums of some components each with fixed random signs, which keeps squared
distances in the mean (Achlioptas, 2003; https://doi.org/10.1016/S0022-0000(03)00025-4); what the head's centres have in
common is taken off, and the rest is rounded to whole numbers of at most 127. Whole numbers of that size are exact in
bfloat16, and so are their products and sums in float32: distances do not depend on the order of adding, and so neither
on the device nor on what else is computed beside them. Nothing of it is kept: it is a function of the bank.

A row is `[z, 1, 1, 1, n1, n2, n3, 0 ...]`, where the squared norm |z|^2 = n1 + n2 + n3 in three bfloat16 parts, and
`turned` is `[-2 z, n1, n2, n3, 1, 1, 1, 0 ...]`, so that one product of the two is a squared distance.
"""

from __future__ import annotations

import torch
from torch import Tensor

from protokv.memory.protokv.policies.blocked.parts import parts_of

FREE = 1e30
"""The squared norm of a row that holds nothing: it is far from everything."""
# What half of the rows stay below in every component; rows twice as far out are cut off.
_USUAL = 64.0
_MOST = 127.0
# Rows that tell what is usual and what all have in common, at most; a power of two. Of both the median is taken: it
# does not depend on an order of adding.
_SAMPLE = 512
_SEED = 1


def signs_of(size: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """The signs of keys and of values, `[D]` float32 each; the same for every head of every model."""
    generator = torch.Generator().manual_seed(_SEED)
    signs = torch.randint(0, 2, (2, size), generator=generator).mul_(2).sub_(1).float().to(device)
    return signs[0], signs[1]


def size_of(size: int) -> int:
    """F, numbers of a sketch of heads of `size`: that, halved while at least 64 are left."""
    while size % 2 == 0 and size >= 128:
        size //= 2
    return size


def columns_of(size: int) -> int:
    """Columns of a sketch of F numbers: a multiple of 8, which is what tensor cores want."""
    return -(-(size + 6) // 8) * 8


def sketch_of(keys: Tensor, values: Tensor, free: Tensor, signs: tuple[Tensor, Tensor], rows: int) -> Tensor:
    """The sketch of some heads.

    Args:
        keys: centres, `[n, K, D]` float32.
        values: likewise.
        free: `[n, K]` bool, slots that hold nothing.
        signs: of `signs_of`.
        rows: of the result, at least K; those from K on hold nothing.

    Returns:
        `[n, rows, C]` bfloat16.
    """
    n, K, D = keys.shape
    F = size_of(D)
    some = _some(K)
    sample = _folded(keys[:, some], values[:, some], signs)
    common = sample.median(1, keepdim=True).values
    usual = (sample - common).abs_().amax(2).median(1).values
    scale = _USUAL / usual.clamp_(min=1e-30)[:, None, None]
    sketch = torch.zeros(n, rows, columns_of(F), dtype=torch.bfloat16, device=keys.device)
    norm = torch.full((n, rows), FREE, device=keys.device)
    for part in parts_of(K, keys.device):
        whole = _folded(keys[:, part], values[:, part], signs).sub_(common).mul_(scale).round_().clamp_(-_MOST, _MOST)
        sketch[:, part, :F] = whole
        norm[:, part] = whole.square_().sum(2)
    norm[:, :K].masked_fill_(free, FREE)
    sketch[:, :, F : F + 3] = 1.0
    for column in range(F + 3, F + 6):
        sketch[:, :, column] = norm
        norm -= sketch[:, :, column]
    return sketch


def turned(sketch: Tensor, size: int) -> Tensor:
    """The other factor of a squared distance; `size` is F."""
    other = sketch * -2.0
    other[..., size : size + 3] = sketch[..., size + 3 : size + 6]
    other[..., size + 3 : size + 6] = sketch[..., size : size + 3]
    return other


def _folded(keys: Tensor, values: Tensor, signs: tuple[Tensor, Tensor]) -> Tensor:
    # A sign changes no digit, so it is one rounding whether the product and the sum are fused or not.
    folded = (keys * signs[0]).addcmul_(values, signs[1])
    F = size_of(folded.shape[-1])
    while folded.shape[-1] > F:
        half = folded.shape[-1] // 2
        folded = folded[..., :half] + folded[..., half:]
    return folded


def _some(rows: int) -> slice:
    """Evenly spaced rows, a power of two of them."""
    count = min(_SAMPLE, 1 << (rows.bit_length() - 1))
    return slice(0, rows // count * count, rows // count)
