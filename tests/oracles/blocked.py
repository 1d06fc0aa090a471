"""`NaiveBlocked`: the literal blocked rule, which the fast rule must equal bit for bit.

It takes one head and one prototype at a time, without batches and packed numbers, and its state is lists. Floats of a
step are float32, in the same order of operations; merges are chosen by comparing whole numbers or such floats.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from protokv.memories.durable.nearest import signs_of
from tests.oracles.quantized import round_center
from tests.oracles.ward import first_of

SHARE, WIDTH, PIVOTS, SAMPLE, SIDE, USUAL, MOST = 14, 64, 32, 128, 16, 64.0, 127.0


Proposal = tuple[float, int, int, int]
"""A cost, the place of the target in its block, its slot, and where it was found; unique within a head."""


@dataclass(slots=True)
class Prototype:
    """One slot: centres `[D]`, mean coordinates `[2]`, position `[P]`. Free, with mass 0, all of them are 0."""

    key: Tensor
    value: Tensor
    mass: int
    mean: Tensor
    position: Tensor
    last_step: int


@dataclass(slots=True)
class Head:
    """The opened slots of one head, and the rest of its plan: pairs of a slot and the slot that it is merged into."""

    slots: list[Prototype]
    plan: list[tuple[int, int]] | None = None
    # Which part of the newest tokens is kept from merging.
    share: float = 0.0


class NaiveBlocked:
    """Heads of a model, K prototypes each."""

    def __init__(
        self,
        prototypes: int,
        heads: int,
        *,
        merge_mass_power: float = 1.0,
        quantized: bool = False,
        near: int = 0,
        budget: int | None = None,
        shares: Sequence[float] = (),
    ) -> None:
        self.K, self.power, self.quantized = prototypes, merge_mass_power, quantized
        self.M = max(1, prototypes // SHARE)
        self.near, self.budget = near, prototypes if budget is None else budget
        self.heads = [Head([], share=share) for share in shares or [0.0] * heads]
        self.turn = 0
        # Plans with chains of merges, steps in which only some heads planned, and proposals that were barred.
        self.lines, self.turns, self.barred = 0, 0, 0

    def absorb(
        self,
        keys: Tensor,
        values: Tensor,
        coordinates: Tensor,
        positions: Tensor,
        step: int,
        mass: Tensor,
    ) -> None:
        """Take tokens: `[B, T, D]`, for all `[T, 2]`, `[T, P]` and `[T]`. A token of no mass leaves its slot free."""
        T = keys.shape[1]
        start = 0
        while start < T:
            # A long step is cut where plans end.
            left = min(len(head.plan or []) for head in self.heads) or self.M
            some = range(start, T if T <= self.M else min(start + left, T))
            start = some.stop
            tokens = [
                [
                    Prototype(keys[b, t], values[b, t], int(mass[t]), coordinates[t], positions[t], step)
                    if mass[t]
                    else _free(keys.shape[2], positions.shape[1])
                    for t in some
                ]
                for b in range(len(self.heads))
            ]
            for token in itertools.chain.from_iterable(tokens):
                self._round(token)
            self._absorb(tokens, step, T)

    def _absorb(self, tokens: list[list[Prototype]], step: int, T: int) -> None:
        n, filled = len(tokens[0]), len(self.heads[0].slots)
        merges = max(0, filled + n - self.K)
        groups, due, rest = self.M // T, [], self.heads
        if groups > 1 and (merges or filled > self.K - self.M):
            due = [head for number, head in enumerate(self.heads) if number % groups == self.turn % groups]
            rest = [head for number, head in enumerate(self.heads) if number % groups != self.turn % groups]
            self.turn += 1
            self.turns += 1
        if any(len(head.plan or []) < merges for head in rest):
            due = self.heads
        present = max(self.budget / 2, (step + 1) * T / 8) - self.near
        room = max(0, filled - 2 * self.M)
        present = max(0.0, min(present, room))
        for head in due:
            share = torch.tensor(head.share)
            first = int(share * min(self.K / 2, room - present)) if self.budget > T else 0
            head.plan = self.plan_of(head, float(step - share * (present / T)), first)
        for head, new in zip(self.heads, tokens, strict=True):
            opening = new[: n - merges]
            head.slots.extend(opening)
            if merges:
                assert head.plan is not None
                now, head.plan = head.plan[:merges], head.plan[merges:]
                self._merge(head, now)
                for (gone, _), token in zip(now, new[n - merges :], strict=True):
                    head.slots[gone] = token

    def _merge(self, head: Head, merges: list[tuple[int, int]]) -> None:
        """Do all merges of one step: collect the prototypes of each target, then take one mean."""
        slots = head.slots
        at_mean = head.share > 0
        for target in dict.fromkeys(into for _, into in merges):
            held = slots[target]
            joining = [slots[gone] for gone, into in merges if into == target]
            mass = held.mass + sum(other.mass for other in joining)
            shares = [torch.tensor(other.mass).float() / max(mass, 1) for other in joining]
            for name in ("key", "value", "mean", "position") if at_mean else ("key", "value", "mean"):
                center = getattr(held, name)
                moved = center
                for other, share in zip(joining, shares, strict=True):
                    moved = moved + (getattr(other, name) - center) * share.to(center.dtype)
                setattr(held, name, moved)
            for other in joining if not at_mean else []:
                if not other.mass:
                    continue
                time, newest = float(other.position[0]), float(held.position[0])
                if time > newest:
                    held.position = other.position
            held.mass = mass
            self._round(held)
            held.last_step = max(held.last_step, *(other.last_step for other in joining))

    def _round(self, held: Prototype) -> None:
        if self.quantized:
            held.key, held.value = round_center(held.key, held.value, held.mass)

    def plan_of(self, head: Head, since: float, first: int) -> list[tuple[int, int]]:
        """Return M merges, cheapest first. What came after step `since`, or is one of the `first` in the first steps,
        counts as lightest, and goes last unless it repeats another."""
        filled = len(head.slots)
        slots = head.slots + [_free(len(head.slots[0].key), len(head.slots[0].position))] * (self.K - filled)
        squares, norms = self._squares(slots)
        costs = self._costs(slots, squares)
        some = sorted(_some(norms))
        repeat = torch.tensor(some[(len(some) - 1) // 2]) * 0.25
        early = first_of([slot.last_step for slot in slots], first)
        kept = [slot.last_step > since or number in early for number, slot in enumerate(slots)]
        weights = [0 if is_kept else slot.mass for slot, is_kept in zip(slots, kept, strict=True)]
        place, content = self._by_place(slots), self._by_content(squares)
        proposals: dict[int, Proposal] = {}
        for number, order in enumerate((place, content)):
            for slot, proposal in self._nearest_heavier(weights, costs, order, number):
                if slot < filled:
                    proposals[slot] = min(proposal, proposals.get(slot, proposal))
        barred = {slot for slot, (cost, *_) in proposals.items() if kept[slot] and not cost < repeat}
        self.barred += len(barred)
        free = {slot: proposal for slot, proposal in proposals.items() if slot not in barred}
        comes: dict[int, Proposal] = {}
        for proposal in free.values():
            comes[proposal[2]] = min(proposal, comes.get(proposal[2], proposal))

        def turn(slot: int) -> tuple[int, tuple[float, ...]]:
            own = proposals[slot]
            if slot in barred:
                return 2, own[2:]
            # At a lower cost its target is merged itself, or another slot is merged into it.
            waits = free.get(own[2], own) < own or comes.get(slot, own) < own
            return int(waits), own

        cheapest = sorted(proposals, key=turn)[: self.M]
        goes = {slot: proposals[slot][2] for slot in cheapest}
        assert len(goes) == self.M

        def end(slot: int) -> int:
            return end(goes[slot]) if slot in goes else slot

        self.lines += any(target in goes for target in goes.values())
        return [(slot, end(slot)) for slot in goes]

    def sketch_of(self, slots: list[Prototype]) -> list[Tensor]:
        """Return whole numbers `[F]` float64 for each slot, free ones too."""
        signs = signs_of(len(slots[0].key), torch.device("cpu"))
        folded = [slot.key + slot.value * signs[0] for slot in slots]
        while len(folded[0]) >= 128 and len(folded[0]) % 2 == 0:
            half = len(folded[0]) // 2
            folded = [point[:half] + point[half:] * signs[1][:half] for point in folded]
        sample = _some(folded)
        columns = zip(*(point.tolist() for point in sample), strict=True)
        common = torch.tensor([sorted(column)[(len(sample) - 1) // 2] for column in columns])
        folded = [point - common for point in folded]
        sizes = sorted((point - common).abs().max() for point in sample)
        scale = 1 / (sizes[(len(sizes) - 1) // 2] / USUAL).clamp(min=1e-30)
        return [(point * scale).round().clamp(-MOST, MOST).double() for point in folded]

    def _by_place(self, slots: list[Prototype]) -> list[int]:
        def place(slot: int) -> tuple[int, int]:
            cell = [int(min(max(float(part), 0.0), SIDE - 1.0)) for part in slots[slot].mean * SIDE]
            bits = [(cell[axis] >> bit & 1) << (2 * bit + axis) for bit in range(4) for axis in range(2)]
            # The step of a free slot is -1, so it sorts to the end of the cell before.
            return (sum(bits) << 40) + slots[slot].last_step, slot

        return sorted(range(len(slots)), key=place)

    def _by_content(self, squares: list[list[float]]) -> list[int]:
        count = min(PIVOTS, self.K)
        pivots = [index * (self.K // count) for index in range(count)]

        def near(slot: int) -> tuple[int, float, int]:
            square, number = min((squares[slot][pivot], number) for number, pivot in enumerate(pivots))
            return number, square, slot

        return sorted(range(self.K), key=near)

    def _nearest_heavier(
        self, mass: list[int], costs: list[list[float]], order: list[int], number: int
    ) -> Iterator[tuple[int, Proposal]]:
        """Yield each slot with the least cost in its block; of equal costs, the heaviest partner wins.

        The last block is as long as the others, so some slots are in two.
        """
        width = self._width()
        for start in range(0, len(order), width):
            last = start + width >= len(order)
            block = sorted(
                order[-width:] if last else order[start : start + width], key=lambda slot: (-mass[slot], slot)
            )
            for at, slot in enumerate(block[1:], 1):
                cost, before = min((costs[slot][other], before) for before, other in enumerate(block[:at]))
                yield slot, (cost, before, block[before], at + width * number + 2 * width * last)

    def _squares(self, slots: list[Prototype]) -> tuple[list[list[float]], list[float]]:
        """Return the squared distances of the sketches, and their squared norms: whole numbers."""
        points = torch.stack(self.sketch_of(slots))
        return (points[:, None] - points[None]).square().sum(2).tolist(), points.square().sum(1).tolist()

    def _costs(self, slots: list[Prototype], squares: list[list[float]]) -> list[list[float]]:
        """Return Ward's costs in float32 without the lowest bits, which the fast rule uses for the place in a block."""
        share = torch.stack([1 / self._weight(slot.mass) for slot in slots])
        costs = torch.tensor(squares) / (share[:, None] + share[None])
        bits = (self._width() - 1).bit_length()
        return ((costs.view(torch.int32) >> bits) << bits).view(torch.float32).tolist()

    def _width(self) -> int:
        return min(self.K, WIDTH)

    def _weight(self, mass: int) -> Tensor:
        return torch.tensor(mass).float().pow(self.power) if mass else torch.tensor(0.0)


def _free(size: int, components: int) -> Prototype:
    zeros = torch.zeros(size)
    return Prototype(zeros, zeros, 0, torch.zeros(2), torch.zeros(components, dtype=torch.float64), -1)


def _some(points: list[Any]) -> list[Any]:
    """Return evenly spaced points; their number is a power of two, at most SAMPLE."""
    count = 1
    while 2 * count <= min(SAMPLE, len(points)):
        count *= 2
    return [points[index * (len(points) // count)] for index in range(count)]
