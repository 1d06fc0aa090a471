"""`BlockedRule`: new tokens take the place of prototypes that a plan has merged away.

For banks that are too large to find the cheapest of all merges after every step. Each head keeps a plan of its next
merges (`plan`), a small part of the bank, and makes as many of them in a step as tokens come in: they are the last ones
to see the merged prototypes apart, and take their slots at once, so no token is ever out of attention's sight. Which
heads plan anew, a `Schedule` says. All shapes are fixed and nothing is asked of the device.

Against exact greedy merging (`agglomerative`), a token can be merged once its head plans again, and a plan looks for
the nearest in two blocks and not everywhere. With one block and one merge a plan, it is greedy Ward of the bank.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from protokv.config import DurableConfig
from protokv.errors import StateCorrupt
from protokv.memory.base import MemoryShape
from protokv.memory.protokv.bank import PrototypeBank
from protokv.memory.protokv.policies.blocked.merge import merge_, place_
from protokv.memory.protokv.policies.blocked.parts import parts_of
from protokv.memory.protokv.policies.blocked.plan import Points, Tables, plan_of
from protokv.memory.protokv.policies.blocked.schedule import Schedule, merges_of, pieces_of
from protokv.memory.protokv.policies.blocked.sketch import fold
from protokv.memory.protokv.policy import Assigned, FarTokens, Follower, Policy
from protokv.memory.rows import write_rows_
from protokv.memory.state import LAYER, Clock, TensorSpec


class BlockedRule(Policy):
    """Absorbs steps into one bank of `[L, H, K]` prototypes, K at least 2."""

    needs_spread = False

    @classmethod
    def declare(cls, config: DurableConfig, shape: MemoryShape) -> tuple[TensorSpec, ...]:
        """The plans, and where they stand in all layers of the model."""
        M = merges_of(config.prototypes)
        dims, size = (LAYER, "kv_head", "planned_merge"), (shape.layers, shape.kv_heads, M)
        heads = shape.of_model[0] * shape.kv_heads
        return (
            TensorSpec("plan.gone", dims, size, torch.int32, "slots that are merged away next"),
            TensorSpec("plan.into", dims, size, torch.int32, "slots that they go into"),
            TensorSpec("plan.schedule", ("schedule",), (2 + heads,), torch.int64, "slots in use, turn, merges made"),
        )

    def __init__(self, bank: PrototypeBank, config: DurableConfig, shape: MemoryShape) -> None:
        L, H, K = bank.mass.shape
        layers, own = shape.of_model
        self._bank, self._config = bank, config
        self._own = slice(own.start * H, own.stop * H)
        self._schedule = Schedule(K, layers * H)
        gone, _, _ = self.declare(config, shape)
        # Slots that others go into, and those that go.
        self._plans = torch.stack([gone.allocate(shape.device)] * 2)
        self._tables = Tables.of(shape.head_size, K, L * H, shape.device)
        self._head = torch.arange(L * H, device=shape.device)[:, None] * K
        self._alone = torch.full((1, 1), -1, device=shape.device)
        self._line = torch.arange(max(K, self._plans.numel()), device=shape.device)
        # Where each plan is read next, and behind that: as far as the schedule says.
        self._next = self._line[: self._schedule.merges].repeat(L * H, 1)
        # What plans read of the centres; of a bank that is all zeros it is.
        self._folded = torch.zeros(L * H, K, self._tables.sketch.size, device=shape.device)

    def absorb_(self, tokens: FarTokens, followers: Sequence[Follower], step: int) -> Assigned:
        """Put evicted tokens into the bank at time `step`; each stands for itself at first. A token that was dropped
        leaves its slot free, and a free slot is the first to go in the next plan."""
        T = tokens.keys.shape[1]
        for part in pieces_of(T, self._schedule.merges):
            self._absorb_part(tokens, part, step)
        return Assigned(self._alone.expand(len(self._head), T), tokens.keys, tokens.values)

    def _absorb_part(self, tokens: FarTokens, part: slice, step: int) -> None:
        bank, schedule = self._bank, self._schedule
        n = part.stop - part.start
        turn = schedule.next_turn(n)
        if turn is not None:
            self._plan(self._of_mine(turn))
        opened = schedule.open(n)
        merges = n - (opened.stop - opened.start)
        rows = self._head + self._line[opened] if merges < n else None
        changed = rows
        if merges:
            moves = self._next_merges(merges)
            merge_(bank, moves, self._config.anchor, self._line[: moves.numel()])
            bank.merged += merges
            changed = moves if rows is None else torch.cat((rows, *moves), 1)
            rows = moves[1] if rows is None else torch.cat((rows, moves[1]), 1)
        assert rows is not None
        assert changed is not None
        place_(bank, rows, tokens, part, step)
        bank.note_(changed.view(-1))
        self._fold_(changed.view(-1))
        bank.opened += n if tokens.usable is None else tokens.usable[part].sum()

    def _of_mine(self, heads: slice) -> slice:
        """Every so many-th of the model's heads, counted among those of this memory."""
        return slice((heads.start - self._own.start) % heads.step, None, heads.step)

    def _plan(self, heads: slice) -> None:
        bank = self._bank
        parts = (part.flatten(0, 1) for part in (bank.mass, bank.mean, bank.last_step))
        points = Points(*(part[heads] for part in (self._folded, *parts)))
        if not len(points.mass):
            return
        merges, power = self._schedule.merges, self._config.merge_mass_power
        plan = plan_of(points, self._schedule.filled, merges, self._tables, power)
        for held, new in zip(self._plans, reversed(plan), strict=True):
            held.flatten(0, 1)[heads] = new
        self._next[heads] = self._line[:merges]

    def _fold_(self, rows: Tensor) -> None:
        """Follow what became of these rows of the bank."""
        keys, values = self._bank.centers(rows)
        write_rows_(self._folded.flatten(0, 1), rows, fold(keys, values, self._tables.sketch))

    def _next_merges(self, n: int) -> Tensor:
        """The rows of the bank that others go into next, and those that go, `[2, B, n]`."""
        moves = self._plans.flatten(1, 2).gather(2, self._next[:, :n].expand(2, -1, -1)) + self._head
        self._next += n
        self._schedule.carry_out(n)
        return moves

    def held(self) -> dict[str, Tensor]:
        """The plans, and `Schedule.numbers`."""
        return {
            "plan.gone": self._plans[1],
            "plan.into": self._plans[0],
            "plan.schedule": torch.tensor(self._schedule.numbers()),
        }

    def check(self, tensors: Mapping[str, Tensor], clock: Clock | None) -> None:
        """Refuse plans that would read beyond the bank, or merge a slot twice."""
        schedule = self._schedule_of(tensors)
        alive = tensors["bank.mass"].flatten(0, 1) > 0
        B, K = alive.shape
        if (alive & (torch.arange(K, device=alive.device) >= schedule.filled)).any():
            raise StateCorrupt("state: tensor bank.mass must be 0 behind as many slots as plan.schedule says")
        gone, into = (tensors[f"plan.{name}"].flatten(0, 1).long() for name in ("gone", "into"))
        for name, plan in (("gone", gone), ("into", into)):
            if (plan < 0).any() or (plan >= K).any():
                raise StateCorrupt(f"state: tensor plan.{name} must hold slots of the bank")
        planned = torch.tensor(schedule.done[self._own], device=alive.device)[:, None] < schedule.merges
        went = torch.zeros(B, K, dtype=torch.int64, device=alive.device)
        went.scatter_add_(1, gone, torch.ones_like(gone))
        if (((went > 1).any(1, keepdim=True) | (went.gather(1, into) > 0)) & planned).any():
            raise StateCorrupt("state: tensor plan.gone must hold each slot once, and none of plan.into")

    def take(self, tensors: Mapping[str, Tensor]) -> None:
        """Take the plans of a checked state; the bank has taken its own before."""
        self._schedule = self._schedule_of(tensors)
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
        """Where the plans are read, and what they are made of."""
        return {"plan": (self._next, self._folded)}
