"""`PrototypeBank`: K prototypes a layer and head, by their row in `[L * H * K]`; `BankRule`: how
tokens enter it.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Generic

import torch
from torch import Tensor
from typing_extensions import TypeVar

from protokv.core.near import ExactTokens, WindowMove
from protokv.core.slots import KVSlots
from protokv.core.step import StepKV
from protokv.core.tensors import MemoryShape, Specs, StateTensors, TensorDict
from protokv.texts import JsonObject

_COUNTERS = {
    "opened": "tokens that opened a slot",
    "absorbed": "tokens that a prototype absorbed, and repeats",
    "merged": "slots that were merged away",
    "expired": "slots that died of age",
    "recycled": "slots that were opened again with a near token",
}


@dataclass(frozen=True, slots=True)
class FarTokens:
    """Tokens on their way into the bank, flat over `B = L * H`. All heads share places and
    masses.
    """

    keys: Tensor  # `[B, T, D]` float32, rotation removed
    values: Tensor  # `[B, T, D]` float32
    coordinates: Tensor  # `[T, 2]` float32 in the image
    positions: Tensor  # `[T, P]` int64 in the stream
    mass: Tensor  # `[T]` int64, of how many tokens each counts; one of mass 0 must change nothing


class PrototypeBank(StateTensors):
    """K prototypes for each of L layers and H KV heads.

    Invariants: a slot of mass 0 is free; mass comes from opened, absorbed and recycled tokens
    alone. Counters are `[L, H]` int64, see `_COUNTERS`; what a rule never does counts 0.
    """

    key_center: Tensor  # `[L, H, K, D]` float32, c_k, rotation removed
    value_center: Tensor  # `[L, H, K, D]` float32, p_k
    mass: Tensor  # `[L, H, K]` int64, n_k; 0 is a free slot
    position: Tensor  # `[L, H, K, P]` float64, tau_k, the rotary anchor
    last_step: Tensor  # `[L, H, K]` int64, the step that last touched the slot; -1: none did
    opened: Tensor
    absorbed: Tensor
    merged: Tensor
    expired: Tensor
    recycled: Tensor

    def __init__(self, shape: MemoryShape, prototypes: int, slots: KVSlots | None = None) -> None:
        """Make a bank of free prototypes; `slots` are those that show it."""
        self._names = []
        for spec in self.declare(shape, prototypes):
            self._names.append(spec.name.removeprefix("bank."))
            setattr(self, self._names[-1], spec.allocate(shape.device))

    @classmethod
    def declare_centers(cls, shape: MemoryShape, prototypes: int) -> Specs:
        """Declare the centres of K prototypes."""
        declare = shape.axes(prototype=prototypes).declare
        dims = "layer kv_head prototype feature"
        keys = "centre of its keys, rotation removed"
        return (
            declare("bank.key_center", dims, torch.float32, keys),
            declare("bank.value_center", dims, torch.float32, "centre of its values"),
        )

    @classmethod
    def declare(cls, shape: MemoryShape, prototypes: int) -> Specs:
        """Declare a bank of K prototypes."""
        declare = shape.axes(prototype=prototypes).declare
        head = "layer kv_head"
        slot = f"{head} prototype"
        i64 = torch.int64
        touched = "step that last touched it; -1: none"
        counters = [
            (name, what, "tokens" if "tokens" in what else "slots")
            for name, what in _COUNTERS.items()
        ]
        return (
            *cls.declare_centers(shape, prototypes),
            declare("bank.mass", slot, i64, "tokens in it; 0: a free slot", "tokens"),
            declare(
                "bank.position",
                f"{slot} component",
                torch.float64,
                "its rotary anchor",
                "position",
            ),
            declare("bank.last_step", slot, i64, touched, "step", -1),
            *(declare(f"bank.{name}", head, i64, what, unit) for name, what, unit in counters),
        )

    def centers(self, rows: Tensor) -> tuple[Tensor, ...]:
        """Return keys and values `[n, D]` float32 of prototypes `rows` `[n]`; keys alone if the far
        slots hold the values.
        """
        centers = self.key_center, self.value_center
        return tuple(center.flatten(0, 2).index_select(0, rows) for center in centers)

    def report(self, step: int) -> list[JsonObject]:
        """Return for each layer, over its heads: slots in use, quantiles of mass and age,
        counters.
        """
        alive = self.mass > 0
        return [
            {
                "slots": alive[layer].numel(),
                "slots_in_use": int(alive[layer].sum()),
                "mass_quantiles": _quantiles(self.mass[layer][alive[layer]]),
                "age_quantiles_steps": _quantiles((step - self.last_step[layer])[alive[layer]]),
                **{name: int(getattr(self, name)[layer].sum()) for name in _COUNTERS},
            }
            for layer in range(self.mass.shape[0])
        ]

    def live_tensors(self) -> TensorDict:
        """Return its part of the state."""
        return {f"bank.{name}": getattr(self, name) for name in self._names}


def _quantiles(values: Tensor) -> list[float]:
    """Return minimum, quartiles and maximum; nothing where there are no values."""
    if not values.numel():
        return []
    shares = torch.arange(5, dtype=torch.float64, device=values.device) / 4
    return [float(one) for one in values.double().quantile(shares, interpolation="nearest")]


RuleConfigT = TypeVar("RuleConfigT", default=Any)
"""The settings of a rule: those of its memory."""


class BankRule(StateTensors, Generic[RuleConfigT]):
    """A rule over one bank: how tokens enter it, and how it is kept. It changes the bank in
    place.
    """

    prototypes_used: int | None = None  # of each head, from the first on; None: any may be in use

    @classmethod
    def declare(cls, config: RuleConfigT, shape: MemoryShape) -> Specs:
        """Declare the rule's own tensors; many rules have none."""
        return ()

    @abstractmethod
    def __init__(self, bank: PrototypeBank, config: RuleConfigT, shape: MemoryShape) -> None:
        """Make the rule over an empty bank of K >= 1 prototypes for each of the heads of
        `shape`.
        """

    def plan(self, step: int, move: WindowMove) -> Sequence[float] | None:
        """Return the numbers that `absorb_` reads in a step, on the host alone; None: it asks the
        device.
        """
        return None

    def see_(self, before: ExactTokens, step: StepKV) -> None:
        """See a step before it enters the near window, and what that holds of the step `before`."""
        return

    @abstractmethod
    def absorb_(
        self, tokens: FarTokens, step: int, numbers: Tensor, newest: Callable[[], FarTokens]
    ) -> tuple[Tensor, ...]:
        """Put evicted tokens into the bank while a step is taken, given the float64 numbers of
        `plan`; a rule that has some reads no `step`. `newest` returns what the near window has of
        the step.

        Return the rows `[n]` that changed, and behind these, where the rule has them at hand, what
        `PrototypeBank.centers` returns for these rows.
        """

    def live_tensors(self) -> TensorDict:
        """Return its part of the state."""
        return {}
