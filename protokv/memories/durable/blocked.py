"""`BlockedRule`: the default rule of large banks. New tokens take the slots of prototypes that a plan merges away.

Searching all merges after every step is too slow in a large bank. So each head keeps a plan: its next M merges, all
found at once. A step carries out as many merges as it has tokens, and the tokens take the freed slots, so attention
sees every token at once. A `Schedule` chooses the heads that plan in each step. All shapes are fixed, and no step waits
for the device.

Planning: every prototype proposes to merge into its nearest heavier neighbour, in one of two orders (`nearest`). A free
slot weighs nothing, so it goes first. The M cheapest proposals become the plan, those whose turn it is before all
others (`in_turn`). Several prototypes may merge into one; its growing mass is not charged to the later ones. If a
target merges away itself, both go to the end of that chain.

Merging: the centre c of mass M moves towards x of mass m by c + (m / M) (x - c), with M the mass of all that the step
brings together. The result is the mean of all members, and does not depend on the order in which a device adds.

Compared with exact greedy merging (`agglomerative`), a token can merge only after its head plans again, and a plan
searches two blocks instead of the whole bank. With one block and one merge a plan, it is greedy Ward.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from protokv.core.arrays import add_rows_, draw_rows_, write_rows_
from protokv.core.bank import FarTokens, PrototypeBank
from protokv.core.tensors import LAYER, MemoryShape, TensorSpec
from protokv.errors import StateCorrupt
from protokv.memories.durable.nearest import (
    BlockTables,
    OrderTables,
    SketchTables,
    costs_of,
    fold,
    in_turn,
    nearest_heavier,
    orders_of,
    parts_of,
    sketch_of,
    usual_norm,
)
from protokv.memories.durable.novelty import REPEATS, NoveltyRule
from protokv.memories.durable.settings import DurableConfig


class BlockedRule(NoveltyRule):
    """Absorbs steps into one bank of `[L, H, K]` prototypes, K at least 2."""

    needs_spread = False

    @classmethod
    def declare(cls, config: DurableConfig, shape: MemoryShape) -> tuple[TensorSpec, ...]:
        """Declare the plans, and how far all layers of the model have carried them out."""
        M = merges_of(config.prototypes)
        dims, size = (LAYER, "kv_head", "planned_merge"), (shape.layers, shape.kv_heads, M)
        heads = shape.of_model[0] * shape.kv_heads
        return (
            TensorSpec("plan.gone", dims, size, torch.int32, "slots that are merged away next"),
            TensorSpec("plan.into", dims, size, torch.int32, "slots that they go into"),
            TensorSpec("plan.schedule", ("schedule",), (2 + heads,), torch.int64, "slots in use, turn, merges made"),
            *super().declare(config, shape),
        )

    def __init__(self, bank: PrototypeBank, config: DurableConfig, shape: MemoryShape) -> None:
        L, H, K = bank.mass.shape
        super().__init__(bank, config, shape)
        layers, own = shape.of_model
        self._own = slice(own.start * H, own.stop * H)
        self._schedule = Schedule(K, layers * H)
        gone, *_ = self.declare(config, shape)
        # Slots that others go into, and those that go.
        self._plans = torch.stack([gone.allocate(shape.device)] * 2)
        self._tables = Tables.of(shape.head_size, K, L * H, shape.device)
        self._head = torch.arange(L * H, device=shape.device)[:, None] * K
        self._line = torch.arange(max(K, self._plans.numel()), device=shape.device)
        # Of each plan the merges that are next; the schedule says how many of these are left.
        self._next = self._line[: self._schedule.merges].repeat(L * H, 1)
        # The folded centres that plans read; zeros for an empty bank.
        self._folded = torch.zeros(L * H, K, self._tables.sketch.size, device=shape.device)

    def absorb_(self, tokens: FarTokens, step: int) -> None:
        """Put evicted tokens into the bank at time `step`, each as a prototype of its own.

        A dropped token, or a repeat, leaves its slot free. A free slot is the first to go in the next plan.
        """
        T = tokens.keys.shape[1]
        tokens = self._novelty.weigh_(tokens, self._bank)
        for part in self._schedule.parts_of(T):
            self._absorb_part(tokens, part, step)

    def _absorb_part(self, tokens: FarTokens, part: slice, step: int) -> None:
        bank, schedule = self._bank, self._schedule
        n, T = part.stop - part.start, tokens.keys.shape[1]
        share = self._novelty.share()
        turn = schedule.next_turn(n, T)
        if turn is not None:
            self._plan(self._of_mine(turn), share, step, T)
        opened = schedule.open(n)
        merges = n - (opened.stop - opened.start)
        rows = self._head + self._line[opened] if merges < n else None
        changed = rows
        if merges:
            moves = self._next_merges(merges)
            merge_(bank, moves, share > 0, self._line[: moves.numel()])
            bank.merged += merges
            changed = moves if rows is None else torch.cat((rows, *moves), 1)
            rows = moves[1] if rows is None else torch.cat((rows, moves[1]), 1)
        assert rows is not None
        assert changed is not None
        place_(bank, rows, tokens, part, step)
        bank.touch_(changed.view(-1))
        self._fold_(changed.view(-1))
        bank.opened += (tokens.mass[part] > 0).sum()

    def _of_mine(self, heads: slice) -> slice:
        """Return a stride of the model's heads, counted among those of this memory."""
        return slice((heads.start - self._own.start) % heads.step, None, heads.step)

    def _plan(self, heads: slice, share: Tensor, step: int, tokens: int) -> None:
        bank = self._bank
        parts = (part.flatten(0, 1) for part in (bank.mass, bank.mean, bank.last_step))
        points = Points(*(part[heads] for part in (self._folded, *parts)))
        if not len(points.mass):
            return
        merges, power = self._schedule.merges, self._config.merge_mass_power
        # A plan needs more than its merges: not all proposals can be carried out together.
        most = self._schedule.filled - 2 * merges
        since = self._novelty.since(share, step, tokens, most, bank.opened)
        kept = self._novelty.turn(points.last_step, points.mass) > since[heads, None]
        kept |= self._novelty.first(share[heads], step, tokens, most, points.last_step)
        plan = plan_of(points, kept, self._schedule.filled, merges, self._tables, power)
        for held, new in zip(self._plans, reversed(plan), strict=True):
            held.flatten(0, 1)[heads] = new
        self._next[heads] = self._line[:merges]

    def _fold_(self, rows: Tensor) -> None:
        """Fold the centres of these rows of the bank again."""
        keys, values = self._bank.centers(rows)
        write_rows_(self._folded.flatten(0, 1), rows, fold(keys, values, self._tables.sketch))

    def _next_merges(self, n: int) -> Tensor:
        """Return the rows of the bank that others go into next, and those that go, `[2, B, n]`."""
        moves = self._plans.flatten(1, 2).gather(2, self._next[:, :n].expand(2, -1, -1)) + self._head
        self._next += n
        self._schedule.carry_out(n)
        return moves

    def live_tensors(self) -> dict[str, Tensor]:
        """Return the plans, and `Schedule.numbers`."""
        return {
            "plan.gone": self._plans[1],
            "plan.into": self._plans[0],
            "plan.schedule": torch.tensor(self._schedule.numbers()),
            **super().live_tensors(),
        }

    def check(self, tensors: Mapping[str, Tensor]) -> None:
        """Refuse plans that would read beyond the bank."""
        self._schedule_of(tensors)
        for name in ("plan.gone", "plan.into"):
            if (tensors[name] < 0).any() or (tensors[name] >= self._bank.mass.shape[2]).any():
                raise StateCorrupt(f"state: tensor {name} must hold slots of the bank")

    def take(self, tensors: Mapping[str, Tensor]) -> None:
        """Take the plans of a checked state; the bank has taken its own before."""
        self._schedule = self._schedule_of(tensors)
        super().take(tensors)
        self._next.copy_(self._line[: self._schedule.merges])
        self._next += torch.tensor(self._schedule.done[self._own], device=self._next.device)[:, None]
        for held, name in zip(self._plans, ("plan.into", "plan.gone"), strict=True):
            held.copy_(tensors[name])
        for rows in parts_of(self._folded[..., 0].numel(), self._folded.device):
            self._fold_(torch.arange(rows.start, rows.stop, device=self._folded.device))

    def _schedule_of(self, tensors: Mapping[str, Tensor]) -> Schedule:
        try:
            return Schedule.of_numbers(self._bank.mass.shape[2], tensors["plan.schedule"].tolist())
        except ValueError as error:
            raise StateCorrupt(f"state: tensor plan.schedule: {error}") from error

    def buffers(self) -> Mapping[str, Sequence[Tensor]]:
        """Return where the plans are read, and the folded centres."""
        return {"plan": (self._next, self._folded)}


def merge_(bank: PrototypeBank, moves: Tensor, at_mean: Tensor, line: Tensor) -> None:
    """Merge rows into others. The caller overwrites the merged rows.

    Args:
        bank: changed.
        moves: `[2, B, n]` int64: target rows, and the rows of the same head that merge into them. A target may repeat;
            a merged row appears once and is no target. A free row adds nothing.
        at_mean: `[B]` bool, heads whose merged prototypes stand at the mean position of their members; those of the
            others stand at the newest one.
        line: 0, 1, ... for each of `moves`.
    """
    at_mean = at_mean[:, None].expand(moves.shape[1:]).reshape(-1, 1)
    moves = moves.flatten(1)
    one, other = moves
    mass = bank.mass.view(-1)
    own = mass.index_select(0, other)
    mass.index_add_(0, one, own)
    share = (own / mass.index_select(0, one).clamp_(min=1))[:, None]
    bank.draw_centers_(moves, share)
    draw_rows_(bank.mean.flatten(0, 2), moves, share)
    step = bank.last_step.view(-1)
    step.scatter_reduce_(0, one, step.index_select(0, other), "amax")
    position = bank.position.flatten(0, 2)
    # The first component is time under M-RoPE and the index of the token under RoPE.
    places = position.index_select(0, moves.view(-1))
    times = places[:, 0].long()
    # Time and index share one number, so the least of them names the latest position, and the first of equal ones.
    bits = len(line).bit_length()
    numbers = torch.sub(line, times, alpha=1 << bits)
    least = torch.empty_like(mass)
    least.scatter_reduce_(0, one, numbers.view_as(moves).amin(0), "amin", include_self=False)
    chosen = least.index_select(0, one).bitwise_and_((1 << bits) - 1)
    here, there = places.view(*moves.shape, -1)
    position.index_copy_(0, one, torch.where(at_mean, here, places.index_select(0, chosen)))
    add_rows_(position, one, (there - here).mul_(share * at_mean))


def place_(bank: PrototypeBank, rows: Tensor, tokens: FarTokens, part: slice, step: int) -> None:
    """Write some of the tokens over rows `[B, n]` of the bank, one each. The row of one of no mass is free."""
    mass = tokens.mass[part]
    usable, token_positions = (mass > 0).long(), tokens.token_positions.at(part)
    given = {
        "mean": token_positions.coordinates * usable[:, None],
        "position": token_positions.positions * usable[:, None],
        "mass": mass,
        "last_step": torch.rsub(usable, -1, alpha=-(step + 1)),
    }
    for name, new in given.items():
        getattr(bank, name).flatten(0, 2).index_put_((rows,), new)
    keys, values = ((new[:, part] * usable[:, None]).flatten(0, 1) for new in (tokens.keys, tokens.values))
    bank.put_centers_(rows.view(-1), keys, values)


@dataclass(frozen=True, slots=True)
class Points:
    """The prototypes of some heads.

    Attributes:
        folded: centres, `[n, K, F]` float32 (`fold`).
        mass: `[n, K]` int64; 0 is a free slot, all of whose numbers are 0.
        mean: `[n, K, 2]` float32, coordinates.
        last_step: `[n, K]` int64.
    """

    folded: Tensor
    mass: Tensor
    mean: Tensor
    last_step: Tensor


@dataclass(frozen=True, slots=True)
class Tables:
    """Constants of a head size and a number of prototypes, and the numbers of all slots."""

    sketch: SketchTables
    blocks: BlockTables
    orders: OrderTables
    line: Tensor

    @classmethod
    def of(cls, size: int, prototypes: int, heads: int, device: torch.device) -> Tables:
        """Return the tables for `heads` heads of `size`, with K prototypes each."""
        return cls(
            SketchTables.of(size, device),
            BlockTables.of(prototypes, heads, device),
            OrderTables.of(device),
            torch.arange(prototypes, device=device),
        )


def plan_of(
    points: Points, kept: Tensor, filled: int, merges: int, tables: Tables, power: float
) -> tuple[Tensor, Tensor]:
    """Return the next merges of each head.

    Args:
        points: K in each head.
        kept: `[n, K]` bool, what merges with its repeats alone while others are left to merge.
        filled: the first `filled` of them take part; at least `2 * merges`.
        merges: M.
        tables: for this size and K, and at least this many heads.
        power: a prototype of mass m weighs m ** power in a cost.

    Returns:
        Slots that merge away, and their targets, `[n, M]` int64 each, cheapest first. No slot merges away twice, and no
        target merges away.
    """
    sketch = sketch_of(points.folded)
    orders = orders_of(sketch, points.mean, points.last_step, tables.line, tables.orders)
    share = _share(points.mass, power)
    # A kept prototype is given mass 0 here, so nothing that is not kept may propose to merge into it.
    mass = points.mass.masked_fill(kept, 0)
    proposals = nearest_heavier(sketch, mass, share, orders, tables.line, tables.blocks)
    new = costs_of(proposals) >= REPEATS * usual_norm(sketch)[:, None]
    turns, into = in_turn(proposals, kept & new, filled)
    gone = turns.topk(merges, dim=1, largest=False).indices
    return gone, _ends_of_lines(gone, into.gather(1, gone), tables.line)


def _ends_of_lines(gone: Tensor, into: Tensor, line: Tensor) -> Tensor:
    """Return the last target of each chain of merges; chains lead from light to heavy, so they end."""
    goes = line.expand(len(gone), -1).scatter(1, gone, into)
    for _ in range(gone.shape[1].bit_length()):
        goes = goes.gather(1, goes)
    return goes.gather(1, gone)


def _share(mass: Tensor, power: float) -> Tensor:
    """Return 1 / weight; a free slot weighs nothing, even to the power of 0."""
    return mass.reciprocal() if power == 1.0 else mass.float().pow(power).mul_(mass > 0).reciprocal_()


SHARE = 14
"""A plan holds K / 14 merges: so few that new tokens, which are in no plan, are a small part of the bank."""


def merges_of(prototypes: int) -> int:
    """Return M, the merges of a plan."""
    return max(1, prototypes // SHARE)


@dataclass(slots=True)
class Schedule:
    """The heads that plan in each step, and the progress of each plan.

    A plan holds enough merges for G steps. Where G is above 1, every step plans for every G-th head of the model,
    counted over its layers; else all heads plan when their plans end. All numbers are whole and on the host, and depend
    only on the lengths of the steps, so every part of a model that is spread over devices has the same schedule.

    Attributes:
        prototypes: K.
        heads: number of heads of the whole model, over all layers.
        filled: number of slots in use, from the first on; the same in all heads.
        turn: number of turns taken.
        done: for each head, the number of merges carried out of its plan; M if it has no plan.
    """

    prototypes: int
    heads: int
    filled: int = 0
    turn: int = 0
    done: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        if not self.done:
            self.done = [self.merges] * self.heads

    @property
    def merges(self) -> int:
        """M, the merges of a plan."""
        return merges_of(self.prototypes)

    def open(self, tokens: int) -> slice:
        """Take free slots for up to `tokens` tokens."""
        slots = slice(self.filled, min(self.filled + tokens, self.prototypes))
        self.filled = slots.stop
        return slots

    def parts_of(self, tokens: int) -> Iterator[slice]:
        """Yield a step in parts, each to be taken before the next one: all of it, if it is not longer than a plan; else
        every part ends with a plan."""
        start = 0
        while start < tokens:
            left = self.merges - max(self.done) or self.merges
            stop = tokens if tokens <= self.merges else min(start + left, tokens)
            yield slice(start, stop)
            start = stop

    def next_turn(self, tokens: int, step_tokens: int) -> slice | None:
        """Return the heads that plan before `tokens` of a step are taken; None if none does.

        Where a plan is enough for several steps, heads take turns from when the bank is nearly full.
        """
        needed = max(0, self.filled + tokens - self.prototypes)
        groups, heads = self.merges // step_tokens, None
        if groups > 1 and (needed or self.filled + self.merges > self.prototypes):
            heads = slice(self.turn % groups, None, groups)
            self.turn += 1
            self._begin(heads)
        if max(self.done) + needed > self.merges:
            heads = slice(0, None, 1)
            self._begin(heads)
        return heads

    def _begin(self, heads: slice) -> None:
        self.done[heads] = [0] * len(self.done[heads])

    def carry_out(self, merges: int) -> None:
        """Count merges that every head makes."""
        self.done = [done + merges for done in self.done]

    def numbers(self) -> list[int]:
        """Return the schedule as numbers `[2 + heads]`, for `of_numbers`."""
        return [self.filled, self.turn, *self.done]

    @classmethod
    def of_numbers(cls, prototypes: int, numbers: Sequence[int]) -> Schedule:
        """Return the schedule with these numbers.

        Raises:
            ValueError: no schedule has these numbers.
        """
        filled, turn, *done = numbers
        most = merges_of(prototypes)
        if not (0 <= filled <= prototypes and turn >= 0 and done and min(done) >= 0 and max(done) <= most):
            raise ValueError(f"no schedule of {prototypes} prototypes has the numbers {filled}, {turn}, ...")
        return cls(prototypes, len(done), filled, turn, done)
