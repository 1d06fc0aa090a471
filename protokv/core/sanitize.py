"""`Sanitizer`: what a step must be before a memory takes it. Tokens with numbers that cannot be used are dropped.

A half-precision model overflows now and then; one such number in a key would spoil every cost and every centre that it
meets. A token is dropped when any number of its keys or values, in any layer and head, is not finite or beyond
`LARGEST`, up to which squares, weighted with the mass of 10**9 tokens, are finite in float32.

Shapes do not change and the host asks nothing of the device: what is dropped is set to 0 and marked, `StepKV.usable`,
so that it is never shown, weighs nothing, and is counted on the device. Whoever waits for the device in every step
anyway may leave it out instead (`StepKV.usable_only`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Final

import torch
from torch import Tensor

from protokv.config import MemoryConfig
from protokv.core.memory import MemoryShape, StepKV
from protokv.core.tensors import Clock, StatePart, TensorSpec
from protokv.errors import ModelError, StateCorrupt

# A power of two: it is the same number in every dtype that reaches so far.
LARGEST: Final = 2.0**40


class Sanitizer(StatePart):
    """The door of one memory; it counts what it drops."""

    def __init__(self, config: MemoryConfig, shape: MemoryShape) -> None:
        self._refuses = config.non_finite == "refuse"
        (spec,) = self.declare()
        self.dropped = spec.allocate(shape.device)

    @staticmethod
    def declare() -> tuple[TensorSpec, ...]:
        """The counter; states from before it was kept have dropped nothing."""
        return (
            TensorSpec(
                "intake.dropped", ("field",), (1,), torch.int64, "tokens dropped as not finite", "tokens", optional=True
            ),
        )

    def admit(self, step: StepKV) -> StepKV:
        """The step with what cannot be used set to 0 and marked.

        Raises:
            ModelError: the settings say to refuse it, and it has such a token; nothing has changed.
        """
        usable = find_usable(step.keys, step.values) if step.usable is None else step.usable
        if self._refuses:
            bad = int((~usable).sum())
            if bad:
                raise ModelError(
                    f"step {step.step}: the model gave keys or values that are not finite for {bad} of "
                    f"{len(usable)} tokens",
                    hint="use another dtype, or drop such tokens with --set non_finite=drop",
                )
        hidden = ~usable[:, None]
        self.dropped += hidden.sum()
        keys, values = step.keys.masked_fill(hidden, 0), step.values.masked_fill(hidden, 0)
        return replace(step, keys=keys, values=values, usable=usable)

    def held(self) -> dict[str, Tensor]:
        """The counter."""
        return {"intake.dropped": self.dropped}

    def check(self, tensors: Mapping[str, Tensor], clock: Clock | None) -> None:
        """Where dropped tokens are marked they are counted."""
        if "near.usable" in tensors and "intake.dropped" not in tensors:
            raise StateCorrupt("state: tensor intake.dropped is missing, and dropped tokens are marked")
        if clock is not None and "intake.dropped" in tensors and int(tensors["intake.dropped"]) > clock.tokens_seen:
            raise StateCorrupt(f"state: tensor intake.dropped counts more than the {clock.tokens_seen} tokens seen")

    def take(self, tensors: Mapping[str, Tensor]) -> None:
        """Take the counter of a checked state."""
        self.dropped.zero_()
        if "intake.dropped" in tensors:
            self.dropped.copy_(tensors["intake.dropped"])


def find_usable(keys: Tensor, values: Tensor) -> Tensor:
    """Which tokens of keys and values `[L, H, T, D]` hold nothing but numbers that can be used, `[T]` bool."""
    # A comparison with NaN is false.
    largest = torch.maximum(keys.abs(), values.abs()).amax((0, 1, 3))
    return largest <= min(LARGEST, torch.finfo(keys.dtype).max)
