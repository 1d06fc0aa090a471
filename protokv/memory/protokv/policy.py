"""`Policy`: a rule by which evicted tokens enter a bank of prototypes, and what it is told and tells.

Owns the interface alone; each rule is a file in `policies`. A rule changes the bank in place and notes what changed
(`PrototypeBank.touch_`). State of its own beside the bank it declares and holds as any part of a memory does
(`protokv.memory.state`). Knows nothing of rotation, contexts or files.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol

import torch
from torch import Tensor

from protokv.memory.base import MemoryShape
from protokv.memory.protokv.bank import PrototypeBank, Seen
from protokv.memory.state import StatePart, TensorSpec


@dataclass(frozen=True, slots=True)
class FarTokens:
    """Tokens on their way into the bank, flat over `B = L * H`.

    Attributes:
        keys: `[B, T, D]` float32, rotation removed.
        values: `[B, T, D]` float32.
        seen: their coordinates and positions, shared by all heads.
        usable: `[T]` bool; the others were dropped: they are zeros, and must change nothing. None: all.
    """

    keys: Tensor
    values: Tensor
    seen: Seen
    usable: Tensor | None = None

    def usable_only(self) -> FarTokens:
        """Those that may change something; this waits for the device."""
        if self.usable is None:
            return self
        kept = self.usable.nonzero().squeeze(1)
        return FarTokens(self.keys[:, kept], self.values[:, kept], self.seen.at(kept))


@dataclass(frozen=True, slots=True)
class Assigned:
    """Which prototypes T tokens went to, and what these do not say of them.

    Attributes:
        prototype: `[B, T]` int64, the prototype of that head that absorbed the token; -1 where it stands for itself.
        key_residual, value_residual: `[B, T, D]` float32, against the centre after the update; undefined at -1.
    """

    prototype: Tensor
    key_residual: Tensor
    value_residual: Tensor

    @classmethod
    def none(cls, tokens: FarTokens) -> Assigned:
        """Every token stands for itself."""
        return cls(tokens.keys.new_full(tokens.keys.shape[:2], -1, dtype=torch.int64), tokens.keys, tokens.values)


def asks_freely(tensor: Tensor) -> bool:
    """Whether the host may ask for numbers of a tensor at no cost: on a CPU there is no one to wait for."""
    return tensor.is_cpu


class Follower(Protocol):
    """Who keeps statistics by prototype row, flat over `L * H * K`, and follows what happens to it."""

    def freed_(self, rows: Tensor) -> None:
        """Rows that are set in `rows` `[L * H * K]` bool hold nothing any more."""

    def merged_(self, into: Tensor, gone: Tensor) -> None:
        """Row `into[x]` takes over what row `gone[x]` has, which is then free; where both are one row, nothing happens.
        Several may go into one, and none that others go into goes itself."""


class Policy(StatePart):
    """A rule over one bank; `needs_spread` says whether it reads the Sigma of prototypes."""

    needs_spread: ClassVar[bool] = True

    @classmethod
    def declare(cls, config: Any, shape: MemoryShape) -> tuple[TensorSpec, ...]:
        """The tensors of its own; most rules have none."""
        return ()

    @abstractmethod
    def __init__(self, bank: PrototypeBank, config: Any, shape: MemoryShape) -> None:
        """The rule over an empty bank of K >= 1 prototypes for each of the heads of `shape`."""

    @abstractmethod
    def absorb_(self, tokens: FarTokens, followers: Sequence[Follower], step: int) -> Assigned:
        """Put evicted tokens into the bank at time `step`, the one that is being appended."""

    def maintain_(self, newest: Callable[[], FarTokens], followers: Sequence[Follower], step: int) -> None:
        """What is done to the bank once a step, after its tokens and their residuals. `newest` gives the tokens of the
        newest step that are in the near window."""

    def held(self) -> dict[str, Tensor]:
        """Its part of the state."""
        return {}

    def take(self, tensors: Mapping[str, Tensor]) -> None:
        """Take its part of a checked state; the bank has taken its own before, so whatever is derived is void."""
