"""`FirstTokensMemory` and `RandomTokensMemory`: exact tokens of the past that nothing chose. Two
baselines that any memory has to beat.

`first-tokens` holds the first M tokens of a stream and takes no other. `random` holds M tokens of
all that came, each with the same chance: a reservoir (Vitter's algorithm R, 1985;
https://doi.org/10.1145/3147.3165). Both hold the same tokens in all layers and heads, in stream
order. Neither gives the newest step a place of its own, so a question about the present finds
little.

The draws of `random` come from a generator that counts (Philox). Its whole state is the seed and
`reservoir.seen`, the number of tokens that came. So a resumed stream draws what the whole stream
would have drawn, and so does each part of a model on several devices.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import torch
from torch import Tensor

from protokv.core.rotary import Rotary
from protokv.core.settings import MemoryConfig
from protokv.core.step import StepKV
from protokv.core.tensors import MemoryShape, Specs, StateTensors, TensorDict, Tensors, TensorSpec
from protokv.errors import StateCorrupt
from protokv.memories.compressed import KeptTokensMemory


@dataclass(frozen=True, slots=True, kw_only=True)
class FirstTokensConfig(MemoryConfig):
    """The first `budget` tokens of a stream. No constants."""

    name: ClassVar[str] = "first-tokens"


class FirstTokensMemory(KeptTokensMemory[FirstTokensConfig]):
    """The first M tokens of a stream."""

    def apply(self, key: None, numbers: Tensor, step: StepKV) -> None:
        """Take one step, as far as there is room."""
        step = step.usable_only()
        room = self._config.budget - len(self.kept)
        self.kept.append(step.tokens(slice(0, room)))


@dataclass(frozen=True, slots=True, kw_only=True)
class RandomTokensConfig(MemoryConfig):
    """A uniform sample of `budget` tokens of the stream, drawn by `seed`."""

    name: ClassVar[str] = "random"


class RandomTokensMemory(KeptTokensMemory[RandomTokensConfig]):
    """A uniform sample of M tokens of the stream."""

    def __init__(self, config: RandomTokensConfig, shape: MemoryShape, rotary: Rotary) -> None:
        super().__init__(config, shape, rotary)
        self._count = _TokenCount()

    @classmethod
    def declare(cls, config: RandomTokensConfig, shape: MemoryShape) -> Specs:
        """Declare the number of tokens besides."""
        return (*super().declare(config, shape), *_TokenCount.declare())

    def parts(self) -> Sequence[StateTensors]:
        """Return the number of tokens besides."""
        return (*super().parts(), self._count)

    def apply(self, key: None, numbers: Tensor, step: StepKV) -> None:
        """Take one step: each token in it replaces a held one by chance."""
        kept = self.kept
        step = step.usable_only()
        held = len(kept)
        T = len(step.positions)
        stay = draw_reservoir(self._config.seed, int(self._count.seen), T, self._config.budget)
        old = [place for place in stay if place < held]
        new = [place - held for place in stay if place >= held]
        device = kept.step.device
        if len(old) < held:
            index = torch.tensor(old, dtype=torch.int64, device=device)
            kept.keep_(index.expand(*kept.step.shape[:2], -1), [])
        kept.append(step.tokens(torch.tensor(new, dtype=torch.int64, device=device)))
        self._count.seen += T

    def load(self, tensors: Tensors) -> None:
        """Take a state whose form is checked."""
        super().load(tensors)
        seen = int(self._count.seen)
        held = len(self.kept)
        if min(seen, self._config.budget) != held:
            raise StateCorrupt(f"state: tensor reservoir.seen holds {seen} beside {held} tokens")


def draw_reservoir(seed: int, seen: int, tokens: int, size: int) -> list[int]:
    """Return which tokens a reservoir of `size` holds after `tokens` more than `seen` came.

    Numbers below `min(seen, size)` are places in it, in stream order. The others are new tokens,
    numbered on from there. They increase.
    """
    held = min(seen, size)
    places = list(range(held))
    numbers = np.random.Philox(key=seed, counter=seen).random_raw(tokens)
    for new, number in enumerate(numbers.tolist()):
        if len(places) < size:
            places.append(held + new)
            continue
        # The number has 64 bits, so the remainder favours no place that one could measure.
        place = number % (seen + new + 1)
        if place < size:
            places[place] = held + new
    return sorted(places)


class _TokenCount(StateTensors):
    """How many tokens came. It is on the CPU, so that no step waits for a device."""

    def __init__(self) -> None:
        self.seen = torch.zeros(1, dtype=torch.int64)

    @staticmethod
    def declare() -> Specs:
        """Declare the number."""
        meaning = "tokens that came, of which the reservoir is a sample"
        return (TensorSpec("reservoir.seen", ("field",), (1,), torch.int64, meaning, "tokens"),)

    def live_tensors(self) -> TensorDict:
        """Return the number."""
        return {"reservoir.seen": self.seen}


FirstTokensConfig.memory = FirstTokensMemory
RandomTokensConfig.memory = RandomTokensMemory
