"""`PrototypeMemory`: a near window and a bank of prototypes, shown as one context.

A step enters the near window; the tokens that leave it for this step go into the bank under a
`BankRule`, by which memories of this kind differ. The context has one shape for the life of a
stream, `[sink P0 | K * S | W]`. Pseudo-tokens are centres of prototypes, keys rotated to the
anchor. Only those of prototypes that changed are written again.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Annotated, ClassVar

import torch
from torch import Tensor
from typing_extensions import TypeVar

from protokv.core.bank import BankRule, FarTokens, PrototypeBank
from protokv.core.context import Context
from protokv.core.memory import SingleDeviceMemory
from protokv.core.near import ExactTokens, NearWindow, WindowMove
from protokv.core.rotary import Rotary, rotate, unrotate
from protokv.core.settings import MemoryConfig
from protokv.core.slots import KVSlots
from protokv.core.step import StepKV
from protokv.core.tensors import MemoryShape, Specs, StateTensors, Tensors, count_bytes
from protokv.device.runs import Plan, Runs
from protokv.errors import ConfigError
from protokv.texts import JsonObject

# pseudo-tokens that are written at once: in float32 they take several times their bytes
_TOKENS_AT_ONCE = 2**18


@dataclass(frozen=True, slots=True, kw_only=True)
class PrototypeConfig(MemoryConfig):
    """A near window of W exact tokens and a bank of K prototypes that are shown as S pseudo-tokens
    each.

    Attributes:
        split: near : far, `W : K * S`. (1, 0) is near only, (0, 1) is far only.
    """

    split: Annotated[tuple[int, int], 0, 1_000_000] = (1, 3)

    def check(self) -> None:
        """Refuse a split that leaves nothing, and too small a budget."""
        near, far = self.split
        S = self.slots_per_prototype
        if near + far == 0:
            raise ConfigError(f"split: expected two counts, not both 0, got {near}:{far}")
        if self.near_tokens < (near > 0):
            raise ConfigError(
                f"budget: {self.budget} tokens leave no near window beside one prototype of {S} "
                "pseudo-tokens",
                hint=f"use a budget of at least {S + (near > 0)}",
            )

    @property
    def slots_per_prototype(self) -> int:
        """S."""
        return 1

    @property
    def prototypes(self) -> int:
        """K, prototypes of each layer and KV head: the far share of the budget over S, at least
        1.
        """
        near, far = self.split
        if far == 0:
            return 0
        return max(1, self.merged_budget * far // (near + far) // self.slots_per_prototype)

    @property
    def near_tokens(self) -> int:
        """W, exact tokens of the near window: what the prototypes leave of the budget."""
        return self.merged_budget - self.prototypes * self.slots_per_prototype

    @property
    def merged_budget(self) -> int:
        """What of the budget the near window and the prototypes have."""
        return self.budget


PrototypeT = TypeVar("PrototypeT", bound=PrototypeConfig, default=PrototypeConfig)


class PrototypeMemory(SingleDeviceMemory[PrototypeT]):
    """Two tiers: W exact tokens, and K prototypes a layer and KV head that stand for all older
    ones.
    """

    rule: ClassVar[type[BankRule]]  # by which tokens enter the bank
    context_key: Hashable = "slots"

    def __init__(self, config: PrototypeT, shape: MemoryShape, rotary: Rotary) -> None:
        super().__init__(config, shape, rotary)
        self.runs = Runs(shape.device, beside=True)
        K = config.prototypes
        self._slots = self.new_slots(config, shape)
        self._near = NearWindow(self._slots, shape.position_components)
        self._bank = self.bank_type(config)(shape, K, self._slots)
        self._rule: BankRule | None = self.rule(self._bank, config, shape) if K else None

    @classmethod
    @abstractmethod
    def bank_type(cls, config: PrototypeT) -> type[PrototypeBank]:
        """Return the class of the bank under these settings."""

    def new_slots(self, config: PrototypeT, shape: MemoryShape) -> KVSlots:
        """Return the slots that attention reads, all free."""
        return KVSlots(
            shape, far=config.prototypes * config.slots_per_prototype, near=config.near_tokens
        )

    @classmethod
    def declare(cls, config: PrototypeT, shape: MemoryShape) -> Specs:
        """Declare the near window, the bank and its rule's own besides."""
        K = config.prototypes
        near = NearWindow.declare(shape, config.near_tokens)
        bank = cls.bank_type(config).declare(shape, K)
        return (
            *super().declare(config, shape),
            *near,
            *bank,
            *(cls.rule.declare(config, shape) if K else ()),
        )

    def parts(self) -> Sequence[StateTensors]:
        """Return the holders of these."""
        rule = () if self._rule is None else (self._rule,)
        return (*super().parts(), self._near, self._bank, *rule)

    def plan(self, step: StepKV) -> Plan:
        """Return the move of the near window, with its numbers and those of the rule."""
        plan = self._near.plan(step.step, len(step.positions))
        more = () if self._rule is None else self._rule.plan(step.step, plan.key)
        asks = more is None or step.usable is not None or step.repeats is not None
        return Plan(plan.key, (*plan.numbers, *(more or ())), asks)

    def apply(self, key: WindowMove, numbers: Tensor, step: StepKV) -> None:
        """Take a planned step: what leaves the near window goes into the bank."""
        self._near.begin(key, numbers)
        if self._rule is not None:
            self._rule.see_(self._near.before(), step)
        leaving = self._near.leaving(step)
        self._near.write(step)
        if self._rule is not None and len(leaving):
            changed = self._rule.absorb_(
                self._far_tokens(leaving),
                step.step,
                numbers[2:],
                lambda: self._far_tokens(self._near.newest()),
            )
            self.write_far(*changed)

    def load(self, tensors: Tensors) -> None:
        """Take a state whose form is checked."""
        super().load(tensors)
        self.write_far()

    def _far_tokens(self, tokens: ExactTokens) -> FarTokens:
        """Return tokens as the bank takes them: the rotation of their keys removed."""
        keys = unrotate(tokens.keys, self._rotary(tokens.positions)).flatten(0, 1)
        values = tokens.values.float().flatten(0, 1)
        return FarTokens(keys, values, tokens.coordinates, tokens.positions, tokens.usable.long())

    def context(self) -> Context:
        """Return all slots."""
        return self._slots.context(self._near.positions, self._anchors)

    def write_far(self, changed: Tensor | None = None, *centers: Tensor) -> None:
        """Write the far slots of prototypes `changed` `[n]`, None: of all; `centers` are theirs, if
        they are at hand.
        """
        mass = self._bank.mass
        if changed is None:
            changed = torch.arange(mass.numel(), device=mass.device)
        at_once = max(1, _TOKENS_AT_ONCE // self._config.slots_per_prototype)
        parts = (torch.split(one, at_once) for one in (changed, *centers))
        for rows, *known in zip(*parts, strict=True):
            if len(rows):
                self._write_rows(rows, known or self._bank.centers(rows))
        self._slots.bias[:, :, self._slots.far] = self._compute_bias(mass)

    def _write_rows(self, rows: Tensor, centers: Sequence[Tensor]) -> None:
        """Write the far slots that show prototypes `rows` `[n]` with these centres."""
        keys, *values = centers
        anchors = self._bank.position.flatten(0, 2)[rows].round().long()
        keys = rotate(keys, self._rotary(anchors))
        self._slots.write_far(rows, self._bank.mass.shape[2], [keys, *values])

    def _compute_bias(self, mass: Tensor) -> Tensor:
        """Return the logit bias of far slots, given the `mass` of prototypes; log 0 = -inf hides
        free slots.
        """
        return mass.log()

    def _anchors(self) -> Tensor:
        """Return where far slots stand, `[L, H, K, P]` int64."""
        return self._bank.position.round().long()

    def nbytes(self) -> dict[str, int]:
        """Return bytes by part; `context` is the pseudo-tokens, which are not part of a saved
        state.
        """
        slots = self._slots
        far = (part[:, :, slots.far] for part in (slots.keys, slots.values, slots.bias))
        return super().nbytes() | {"context": count_bytes(*far)}

    def report(self) -> JsonObject:
        """Return tokens held exactly, and for each layer what its prototypes hold and what happened
        to them.
        """
        found = {"near_tokens_in_use": len(self._near)} | super().report()
        return found | {"layers": self._bank.report(self.last_step)}
