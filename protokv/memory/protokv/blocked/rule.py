"""`BlockedRule`: new tokens take the place of prototypes that a plan has merged away.

For banks that are too large to find the cheapest of all merges after every step. Each head keeps a plan of its next
merges (`plan`), a small part of the bank, and makes as many of them in a step as tokens come in: they are the last ones
to see the merged prototypes apart, and take their slots at once, so no token is ever out of attention's sight. Which
heads plan anew, a `Schedule` says. All shapes are fixed and nothing is asked of the device.

Against exact greedy merging (`agglomerative`), a token can be merged once its head plans again, and a plan looks for
the nearest in two blocks and not everywhere. With one block and one merge a plan, it is greedy Ward of the bank.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from protokv.errors import StateCorrupt
from protokv.memory.base import MemoryShape, Spec, size_of
from protokv.memory.protokv.bank import PrototypeBank
from protokv.memory.protokv.blocked.merge import merge_, place_
from protokv.memory.protokv.blocked.plan import Points, plan_of
from protokv.memory.protokv.blocked.schedule import Schedule, merges_of, pieces_of
from protokv.memory.protokv.blocked.sketch import signs_of
from protokv.memory.protokv.continuity import FarTokens


class BlockedRule:
    """Absorbs steps into one bank of `[L, H, K]` prototypes, K at least 2."""

    def __init__(self, bank: PrototypeBank, shape: MemoryShape, *, anchor: str, merge_mass_power: float) -> None:
        L, H, K = bank.mass.shape
        layers, own = shape.of_model
        self._bank, self._anchor, self._power = bank, anchor, merge_mass_power
        self._own = slice(own.start * H, own.stop * H)
        self._schedule = Schedule(K, layers * H)
        M = merges_of(K)
        self._gone = torch.zeros(L, H, M, dtype=torch.int32, device=shape.device)
        self._into = torch.zeros_like(self._gone)
        # As in the schedule, where plans are read.
        self._done = torch.full((L * H, 1), M, device=shape.device)
        self._signs = signs_of(shape.head_size, shape.device)
        self._head = torch.arange(L * H, device=shape.device)[:, None] * K

    def absorb_(self, tokens: FarTokens, step: int) -> Tensor:
        """Put evicted tokens into the bank at time `step`.

        Returns:
            Rows `[L * H * K]` of the bank that changed, `[L * H * m]` int64; some stand there twice.
        """
        pieces = pieces_of(tokens.keys.shape[1], self._schedule.merges)
        return torch.cat([self._absorb_part(tokens, part, step) for part in pieces], 1).view(-1)

    def _absorb_part(self, tokens: FarTokens, part: slice, step: int) -> Tensor:
        schedule = self._schedule
        n = part.stop - part.start
        turn = schedule.next_turn(n)
        if turn is not None:
            self._plan(self._of_mine(turn))
        opened = schedule.open(n)
        count = opened.stop - opened.start
        slots = torch.arange(opened.start, opened.stop, device=self._done.device).expand(len(self._done), -1)
        if count < n:
            gone, into = self._next_merges(n - count)
            merge_(self._bank, gone, into, self._anchor)
            self._bank.merged += n - count
            slots = torch.cat((slots, gone), 1)
        rows = (self._head + slots).view(-1)
        place_(self._bank, rows, tokens, part, step)
        self._bank.opened += n
        if count == n:
            return rows.view(slots.shape)
        return torch.cat((self._head + into, rows.view(slots.shape)), 1)

    def _of_mine(self, heads: slice) -> slice:
        """Every so many-th of the model's heads, counted among those of this memory."""
        return slice((heads.start - self._own.start) % heads.step, None, heads.step)

    def _plan(self, heads: slice) -> None:
        bank = self._bank
        parts = (bank.key_center, bank.value_center, bank.mass, bank.mean, bank.last_step)
        points = Points(*(part.flatten(0, 1)[heads] for part in parts))
        if not len(points.mass):
            return
        gone, into = plan_of(points, self._gone.shape[2], self._signs, self._power)
        self._gone.flatten(0, 1)[heads] = gone.int()
        self._into.flatten(0, 1)[heads] = into.int()
        self._done[heads] = 0

    def _next_merges(self, n: int) -> tuple[Tensor, Tensor]:
        which = self._done + torch.arange(n, device=self._done.device)
        self._done += n
        self._schedule.carry_out(n)
        gone, into = (plan.flatten(0, 1).gather(1, which).long() for plan in (self._gone, self._into))
        return gone, into

    def nbytes(self) -> int:
        """Bytes of what is kept between steps besides the bank."""
        return size_of(self._gone, self._into, self._done)

    def tensors(self) -> dict[str, Tensor]:
        """Its part of the state; `plan.schedule` is that of all layers of the model (`Schedule.numbers`)."""
        return {
            "plan.gone": self._gone,
            "plan.into": self._into,
            "plan.schedule": torch.tensor(self._schedule.numbers()),
        }

    def spec(self) -> Spec:
        """Shapes and dtypes of `tensors`."""
        return {name: (tuple(tensor.shape), tensor.dtype) for name, tensor in self.tensors().items()}

    def load(self, tensors: Mapping[str, Tensor]) -> None:
        """Take a state whose shapes are checked, beside the bank that goes with it.

        Raises:
            StateCorrupt: no stream leaves such a plan; nothing is changed.
        """
        K, M = self._bank.mass.shape[2], self._gone.shape[2]
        try:
            schedule = Schedule.of_numbers(K, tensors["plan.schedule"].tolist())
        except ValueError as error:
            raise StateCorrupt(f"state: tensor plan.schedule: {error}") from error
        device = self._done.device
        done = torch.tensor(schedule.done[self._own], device=device)[:, None]
        gone, into = (tensors[f"plan.{name}"].to(device, copy=True) for name in ("gone", "into"))
        _check(gone, into, self._bank.mass > 0, done < M, schedule.filled)
        self._schedule, self._done, self._gone, self._into = schedule, done, gone, into


def _check(gone: Tensor, into: Tensor, alive: Tensor, planned: Tensor, filled: int) -> None:
    """Refuse plans that would read beyond the bank, or merge a slot twice."""
    B, K = alive.flatten(0, 1).shape
    if not (alive.flatten(0, 1) == (torch.arange(K, device=alive.device) < filled)).all():
        raise StateCorrupt("state: tensor bank.mass must be above 0 in as many slots as plan.schedule says")
    for name, plan in (("gone", gone), ("into", into)):
        if (plan < 0).any() or (plan >= K).any():
            raise StateCorrupt(f"state: tensor plan.{name} must hold slots of the bank")
    went = torch.zeros(B, K, dtype=torch.int64, device=alive.device)
    gone, into = gone.flatten(0, 1).long(), into.flatten(0, 1).long()
    went.scatter_add_(1, gone, torch.ones_like(gone))
    if ((went > 1).any(1, keepdim=True) & planned).any() or ((went.gather(1, into) > 0) & planned).any():
        raise StateCorrupt("state: tensor plan.gone must hold each slot once, and none of plan.into")
