"""The sketch: what the search for near prototypes reads, 64 or so small whole numbers for the 2 D of a centre.

A centre [key; value] is folded to the sums of some components each with fixed random signs, which keeps squared
distances in the mean (Achlioptas, 2003; https://doi.org/10.1016/S0022-0000(03)00025-4); what the head's centres have in
common is taken off, and the rest is rounded to whole numbers z of at most 127, a byte each: in a search memory is read
more than anything is computed. Products and sums of so small numbers are exact in float32, also where a device rounds
their factors to 11 bits: distances do not depend on the order of adding, and so neither on the device nor on what else
is computed beside them. Nothing of it is kept: it is a function of the bank.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from protokv.memory.protokv.policies.blocked.parts import parts_of
from protokv.memory.sorting import median_from

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
    """

    size: int
    signs: tuple[Tensor, Tensor]

    @classmethod
    def of(cls, size: int, device: torch.device) -> SketchTables:
        """The constants."""
        F = size
        while F % 2 == 0 and F >= 128:
            F //= 2
        return cls(F, signs_of(size, device))


@dataclass(frozen=True, slots=True)
class Sketch:
    """Of the prototypes of some heads.

    Attributes:
        points: `[n, K, F]` int8, z.
        norms: `[n, K]` float32, |z|^2.
    """

    points: Tensor
    norms: Tensor


def signs_of(size: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """The signs of values, and of upper halves as they are folded over the lower ones; `[D]` float32 each. Keys and
    lower halves have none: a distance takes no notice of the sign of a sum. The same for every head of every model."""
    generator = torch.Generator().manual_seed(_SEED)
    signs = torch.randint(0, 2, (2, size), generator=generator).mul_(2).sub_(1).float().to(device)
    return signs[0], signs[1]


def sketch_of(folded: Tensor) -> Sketch:
    """The sketch of some heads.

    Args:
        folded: centres, `[n, K, F]` (`fold`); zeros where a slot is free.
    """
    n, K, F = folded.shape
    sample = folded[:, _some(K)]
    common = median_from(sample.transpose(1, 2).clone(memory_format=torch.contiguous_format))[:, None].contiguous()
    usual = median_from((sample - common).abs_().amax(2))
    scale = usual.mul_(1 / _USUAL).clamp_(min=1e-30).reciprocal_()[:, None, None]
    points = torch.empty(n, K, F, dtype=torch.int8, device=folded.device)
    norms = torch.empty(n, K, device=folded.device)
    for part in parts_of(K, folded.device):
        whole = (folded[:, part] - common).mul_(scale).round_().clamp_(-_MOST, _MOST)
        points[:, part] = whole
        torch.sum(whole.square_(), 2, out=norms[:, part])
    return Sketch(points, norms)


def fold(keys: Tensor, values: Tensor, tables: SketchTables) -> Tensor:
    """Centres `[..., D]` float32 folded to `[..., F]`. A row depends on nothing but its own centre."""
    # A sign changes no digit, so it is one rounding whether the product and the sum are fused or not.
    folded = torch.addcmul(keys, values, tables.signs[0])
    while folded.shape[-1] > tables.size:
        half = folded.shape[-1] // 2
        folded = torch.addcmul(folded[..., :half], folded[..., half:], tables.signs[1][:half])
    return folded


def _some(rows: int) -> slice:
    """Evenly spaced rows, a power of two of them."""
    count = min(_SAMPLE, 1 << (rows.bit_length() - 1))
    return slice(0, rows // count * count, rows // count)
