"""Find the nearest heavier neighbour of each prototype by Ward's cost, for the plans of the blocked rule.

Comparing all pairs is too slow in a large bank. So the prototypes of a head are sorted in two orders that put likely
partners next to each other, and each is compared only with its block of an order:

- by place and time: the cell of a 16 x 16 grid that holds the mean coordinates, in Morton order, then the last step.
  This finds still things.
- by content: the nearest of a few prototypes, the pivots, and the distance to it. This finds things that moved.

Comparisons read a sketch, 64 or so small whole numbers for the 2 D numbers of a centre [key; value]. Components are
summed in groups with fixed random signs, which keeps squared distances in the mean (Achlioptas, 2003;
https://doi.org/10.1016/S0022-0000(03)00025-4). The mean of the head's centres is subtracted, and the rest is rounded to
whole numbers of at most 127. Products and sums of such numbers are exact in float32, so distances do not depend on the
order of adding, the device or the other rows. The sketch is a function of the bank; nothing of it is saved.

A proposal is one whole number: the bits of a cost (a float32 that is not negative, whose bits sort as the number does),
then the slot of the partner. Work is split into cache-sized chunks; results do not depend on their size.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from protokv.core.arrays import chunks, median_from, sorted_from

SLOT_BITS = 20
"""A bank has fewer prototypes than 2 to this power."""
# Rows of a sketch with their costs: up to two megabytes.
_ROWS = 2048


def parts_of(rows: int, device: torch.device, multiple: int = 1) -> Iterator[slice]:
    """Yield slices that make up `rows`; all but the last hold a multiple of `multiple` rows."""
    return chunks(rows, max(1, _ROWS // multiple) * multiple, device)


WIDTH = 64
"""The most prototypes of a block."""
# A proposal: 31 bits of the cost, the slot, the place of origin; the highest bit makes it wait.
_ORIGIN_BITS = 11
_REST = (1 << (SLOT_BITS + _ORIGIN_BITS)) - 1
_ENDLESS = 0x7F800000 << (SLOT_BITS + _ORIGIN_BITS)
_WAITS = 1 << (31 + SLOT_BITS + _ORIGIN_BITS)


def width_of(prototypes: int) -> int:
    """Return the width of a block for K prototypes."""
    return min(WIDTH, prototypes)


def rows_of(prototypes: int) -> int:
    """Return the number of places in the blocks of K prototypes."""
    width = width_of(prototypes)
    return -(-prototypes // width) * width


@dataclass(frozen=True, slots=True)
class BlockTables:
    """Constants of blocks of a width.

    Attributes:
        width: of a block.
        columns: of a block's rows, heaviest first, the number of each column, and above all bits of a cost where that
            is not heavier; `[width, width]` int32.
        starts: of each place of the blocks where its own begins, `[rows]` int64.
        origins: a number for each place of a block in each of two orders, another one in the last, `[2, rows]` int64.
        heads: where the slots of each head begin among those of all, `[heads]` int64.
    """

    width: int
    columns: Tensor
    starts: Tensor
    origins: Tensor
    heads: Tensor

    @classmethod
    def of(cls, prototypes: int, heads: int, device: torch.device) -> BlockTables:
        """The constants of so many heads of K prototypes."""
        width, rows = width_of(prototypes), rows_of(prototypes)
        line = torch.arange(width, dtype=torch.int32)
        columns = torch.where(line < line[:, None], line, line | ~low_bits(width) & 0x7FFFFFFF)
        place = torch.arange(rows)
        # The last block may have some of the one before, with the same partners.
        origins = place % width + (place >= rows - width) * 2 * width + torch.tensor([[0], [width]])
        begin = torch.arange(heads) * prototypes
        tables = (columns, place - place % width, origins, begin)
        return cls(width, *(table.to(device) for table in tables))


def low_bits(width: int) -> int:
    """Return a mask of the lowest bits of a cost, which hold a number below the width of a block."""
    return (1 << (width - 1).bit_length()) - 1


def nearest_heavier(
    sketch: Sketch, mass: Tensor, share: Tensor, orders: Tensor, line: Tensor, tables: BlockTables
) -> Tensor:
    """Search all blocks of two orders.

    Args:
        sketch: of n heads.
        mass: `[n, K]` int64. One is heavier than another if it has more mass, or as much and a lower slot.
        share: `[n, K]` float32, 1 / weight; where that is infinite a merge costs nothing.
        orders: `[n, 2, K]` int64, all slots in each.
        line: `[K]` int64, 0, 1, ...
        tables: of K.

    Returns:
        Proposals `[n, K]` int64: the bits of the least cost and the place in the block of what it is the cost of going
        into, below these its slot, and last what makes no two of a head equal. Of all blocks the least.
        Who meets nobody heavier proposes to go into itself, at a cost above all others.
    """
    n, K = mass.shape
    rows, width, device = len(tables.starts), tables.width, mass.device
    low, whole = low_bits(width), rows - width
    # The last block is whole: it reaches back into the one before.
    orders = torch.cat((orders[:, :, :whole], orders[:, :, K - width :]), 2)
    # Each block from heavy to light, and by slot where masses are equal: in one number, which is sorted.
    heavy = torch.sub(line, mass, alpha=1 << SLOT_BITS)[:, None].expand(n, 2, K).gather(2, orders)
    orders = sorted_from(heavy.view(n, 2, -1, width)).view(n, 2, rows).bitwise_and_((1 << SLOT_BITS) - 1)
    flat = (orders + tables.heads[:n, None, None]).view(-1)
    points, norms, share = sketch.points.flatten(0, 1), sketch.norms.view(-1), share.view(-1)
    best = torch.empty(n * 2 * rows, dtype=torch.int32, device=device)
    for part in parts_of(n * 2 * rows, device, width):
        own = flat[part]
        z = points.index_select(0, own).float().view(-1, width, points.shape[1])
        norm, shares = (given.index_select(0, own).view(-1, width) for given in (norms, share))
        cost = (norm[:, :, None] + norm[:, None]).baddbmm_(z, z.transpose(1, 2), alpha=-2)
        cost.div_(shares[:, :, None] + shares[:, None])
        # One comparison tells the least cost and, of equal ones, the heaviest partner.
        numbers = cost.view(torch.int32).bitwise_and_(~low).bitwise_or_(tables.columns)
        torch.amin(numbers, 2, out=best[part].view(-1, width))
    best = best.view(n, 2, rows)
    partner = orders.gather(2, (best & low) + tables.starts)
    named = torch.add(tables.origins, partner, alpha=1 << _ORIGIN_BITS)
    proposals = torch.add(named, best, alpha=1 << (_ORIGIN_BITS + SLOT_BITS))
    return torch.empty_like(mass).scatter_reduce_(
        1, orders.flatten(1), proposals.flatten(1), "amin", include_self=False
    )


def costs_of(proposals: Tensor) -> Tensor:
    """Return the costs of proposals `[n, K]`, float32; not a number where a prototype would go into itself."""
    return (proposals >> (_ORIGIN_BITS + SLOT_BITS)).int().view(torch.float32)


def in_turn(proposals: Tensor, barred: Tensor, filled: int) -> tuple[Tensor, Tensor]:
    """The proposals `[n, filled]` of the first slots, after all others those that have to wait, and after these those
    that are `barred` `[n, K]` bool; and what they go into.

    If the cheaper one of two merges that share a prototype is made, the other one's cost is not what it was. So a
    prototype waits where what it would go into goes itself at a lower cost, or where something comes into it at a lower
    cost. Among those that do not wait nothing goes and is gone into, and there are always some: the cheapest of all.
    """
    proposals, barred = proposals[:, :filled], barred[:, :filled]
    # Without end, but below who would go into itself.
    proposals = torch.where(barred, proposals & _REST | _ENDLESS, proposals)
    into = (proposals >> _ORIGIN_BITS) & ((1 << SLOT_BITS) - 1)
    cheaper = proposals.gather(1, into).scatter_reduce_(1, into, proposals, "amin")
    # Who proposes to go into itself waits as well: no other proposal is equal to its own.
    return torch.add(proposals, (proposals >= cheaper) | barred, alpha=_WAITS), into


PIVOTS = 32
_SIDE = 16
_PIVOT_BITS = 5
# Squared distances of sketches are below 2 ** 23, steps below 2 ** 35. With those of a slot and of a cell: 63.
_SQUARE_BITS, _STEP_BITS = 23, 35


@dataclass(frozen=True, slots=True)
class OrderTables:
    """Constants.

    Attributes:
        cells: Morton's number of each cell of the grid, the bits of x and y in turn, times 2 ** 35: `[17 * 17]` int64,
            one row of cells after the other, the last of a row and of a column twice: the far edge is theirs.
        numbers: of the pivots, `[32]` int32.
    """

    cells: Tensor
    numbers: Tensor

    @classmethod
    def of(cls, device: torch.device) -> OrderTables:
        """The constants."""
        bits = torch.arange(_SIDE + 1).clamp_(max=_SIDE - 1)
        spread = torch.zeros_like(bits)
        for bit in range(4):
            spread |= (bits >> bit & 1) << 2 * bit
        cells = (spread[None] | spread[:, None] << 1) << _STEP_BITS
        return cls(cells.view(-1).to(device), torch.arange(PIVOTS, dtype=torch.int32, device=device))


def orders_of(sketch: Sketch, mean: Tensor, last_step: Tensor, line: Tensor, tables: OrderTables) -> Tensor:
    """Return both orders.

    Args:
        sketch: of n heads.
        mean: `[n, K, 2]` float32, coordinates in [0, 1].
        last_step: `[n, K]` int64.
        line: `[K]` int64, 0, 1, ...
        tables: constants.

    Returns:
        All slots by place and by content, `[n, 2, K]` int64; of equal ones the first.
    """
    places = torch.empty(len(mean), 2, len(line), dtype=line.dtype, device=line.device)
    _by_place(mean, last_step, tables.cells, places[:, 0])
    _by_content(sketch, tables.numbers, places[:, 1])
    return sorted_from(torch.add(line, places, alpha=1 << SLOT_BITS)).bitwise_and_((1 << SLOT_BITS) - 1)


def _by_place(mean: Tensor, last_step: Tensor, cells: Tensor, out: Tensor) -> None:
    """Write the rank keys of place and time, `[n, K]` int64."""
    x, y = (mean * _SIDE).long().unbind(2)
    cell = torch.add(x, y, alpha=_SIDE + 1)
    torch.add(cells.index_select(0, cell.view(-1)).view_as(cell), last_step, out=out)


def _by_content(sketch: Sketch, numbers: Tensor, out: Tensor) -> None:
    """Where each slot stands in order of its nearest pivot, of equally near ones the first, and of how near it is:
    `[n, K]` int64."""
    K = sketch.points.shape[1]
    count = min(PIVOTS, K)
    every = slice(0, K // count * count, K // count)
    # A squared distance, less what is the same for all pivots, above the number of the pivot: the least tells both.
    norms, pivots = sketch.norms.int(), (sketch.points[:, every] * -float(2 << _PIVOT_BITS)).transpose(1, 2)
    offsets = torch.add(numbers[:count], norms[:, None, every], alpha=1 << _PIVOT_BITS)
    nearest = torch.empty_like(norms)
    for some in chunks(len(norms), max(1, _ROWS // K), norms.device):
        for part in parts_of(K, norms.device):
            distances = torch.bmm(sketch.points[some, part].float(), pivots[some]).int().add_(offsets[some])
            torch.amin(distances, 2, out=nearest[some, part])
    squares = norms.add_(nearest >> _PIVOT_BITS)
    torch.add(squares, nearest.bitwise_and_((1 << _PIVOT_BITS) - 1), alpha=1 << _SQUARE_BITS, out=out)


# What half of the rows stay below in every component; rows twice as far out are cut off. A power of two.
_USUAL = 64.0
_MOST = 127.0
# Rows that tell what is usual and what all have in common, at most; a power of two. Of both the median is taken: it
# does not depend on an order of adding.
_SAMPLE = 128
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
    """Return the sketch of some heads.

    Args:
        folded: centres, `[n, K, F]` (`fold`); zeros where a slot is free.
    """
    n, K, F = folded.shape
    points = torch.empty(n, K, F, dtype=torch.int8, device=folded.device)
    norms = torch.empty(n, K, device=folded.device)
    for some in chunks(n, max(1, _ROWS // K), folded.device):
        own = folded[some]
        sample = own[:, _some(K)]
        common = median_from(sample.transpose(1, 2).clone(memory_format=torch.contiguous_format))[:, None].contiguous()
        usual = median_from((sample - common).abs_().amax(2))
        scale = usual.mul_(1 / _USUAL).clamp_(min=1e-30).reciprocal_()[:, None, None]
        for part in parts_of(K, folded.device):
            whole = (own[:, part] - common).mul_(scale).round_().clamp_(-_MOST, _MOST)
            points[some, part] = whole
            torch.sum(whole.square_(), 2, out=norms[some, part])
    return Sketch(points, norms)


def usual_norm(sketch: Sketch) -> Tensor:
    """Return the median of some of the norms of each head, `[n]`."""
    some = sketch.norms[:, _some(sketch.norms.shape[1])]
    return median_from(some.clone(memory_format=torch.contiguous_format))


def fold(keys: Tensor, values: Tensor, tables: SketchTables) -> Tensor:
    """Fold centres `[..., D]` float32 to `[..., F]`. A row depends on its own centre alone."""
    # A sign changes no digit, so it is one rounding whether the product and the sum are fused or not.
    folded = torch.addcmul(keys, values, tables.signs[0])
    while folded.shape[-1] > tables.size:
        half = folded.shape[-1] // 2
        folded = torch.addcmul(folded[..., :half], folded[..., half:], tables.signs[1][:half])
    return folded


def _some(rows: int) -> slice:
    """Return evenly spaced rows, a power of two of them."""
    count = min(_SAMPLE, 1 << (rows.bit_length() - 1))
    return slice(0, rows // count * count, rows // count)
