"""Ageing and recycling of prototypes (Algorithm 2), once a step, for all layers and heads at once.

Between the two close ones are merged (`merging`). Knows nothing of residual
histograms; a `Follower` is told what died and what was merged.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from hashlib import sha256

import torch
from torch import Tensor

from protokv.config import PaperConfig
from protokv.memory.protokv.bank import PrototypeBank, first_of
from protokv.memory.protokv.policy import FarTokens, Follower


@dataclass(frozen=True, slots=True)
class Recycler:
    """Where recycled slots take their tokens from.

    Attributes:
        newest: gives the tokens of the newest step that are in the near window; called only when a slot is
            free.
        seed: of what is drawn among them.
        of_model: how many layers the whole model has, and which of them the bank has: a part of a memory draws what
            the whole would. None: the bank has all.
        streams: streams whose heads the bank has; all draw the same.
    """

    newest: Callable[[], FarTokens]
    seed: int
    of_model: tuple[int, slice] | None = None
    streams: int = 1

    def draw(self, step: int, layers: int, heads: int, tokens: int) -> Tensor:
        """Uniform numbers in [0, 1) of each layer, head and token, `[L, H, T]` float32 on the CPU.

        A function of the seed and the step alone, so that nothing of it is state and every device draws the same.
        """
        whole, mine = self.of_model or (layers, slice(None))
        generator = torch.Generator().manual_seed(step_seed(self.seed, step))
        drawn = torch.rand(whole, heads // self.streams, tokens, generator=generator)[mine]
        return drawn.repeat(1, self.streams, 1)


def step_seed(seed: int, step: int) -> int:
    """A seed for what is drawn at one step of a stream: 63 bits of the sha256 of both numbers."""
    return int.from_bytes(sha256(f"{seed} {step}".encode()).digest()[:8], "little") >> 1


def decay_(
    bank: PrototypeBank, followers: Sequence[Follower], step: int, config: PaperConfig, *, dying: bool = True
) -> None:
    """n <- floor((1 - gamma) n) for idle prototypes, in whole numbers; mass 0 frees the slot.

    A prototype is idle when it has absorbed nothing for more than T_idle steps. It decays in each such step, or, with
    `decay="interval"`, in the first step behind each T_idle that pass. Asks the device for nothing; who knows that none
    dies may say so.
    """
    age = step - bank.last_step
    idle = (bank.mass > 0) & (age > config.idle_steps)
    if config.decay == "interval":
        idle &= (age - 1) % max(1, config.idle_steps) == 0
    less = decayed(bank.mass, config)
    bank.mass.copy_(torch.where(idle, less, bank.mass))
    if not dying:
        return
    died = idle & (less == 0)
    bank.expired += died.sum(2)
    bank.free_where_(died)
    for follower in followers:
        follower.freed_(died.view(-1))


def decayed(mass: Tensor, config: PaperConfig) -> Tensor:
    """floor((1 - gamma) n)."""
    kept = config.kept_mass
    return (mass * kept.numerator).div(kept.denominator, rounding_mode="floor")


def recycle_(bank: PrototypeBank, recycler: Recycler, step: int) -> int:
    """Open slots that died or were merged away with distinct tokens of the newest near step, drawn at random.

    Slots that no token has opened yet are left to the evicted tokens. If more slots are free than the step
    has tokens in the window, the highest ones stay free. Returns how many of a head were opened at most.
    """
    L, H, K = bank.mass.shape
    tokens = recycler.newest()
    n = min(tokens.keys.shape[1], K)
    if n == 0:
        return 0
    freed = ((bank.mass == 0) & (bank.last_step >= 0)).view(L * H, K)
    draw = recycler.draw(step, L, H, tokens.keys.shape[1]).flatten(0, 1).argsort(dim=1, stable=True)
    token = draw[:, :n].to(freed.device, non_blocking=True)
    slot = first_of(freed, n)
    opened = freed.gather(1, slot)
    head = torch.arange(L * H, device=slot.device)[:, None]
    bank.open_(
        head * K + slot, tokens.keys[head, token], tokens.values[head, token], tokens.seen.at(token), step, opened
    )
    bank.recycled += opened.sum(1).view(L, H)
    return n
