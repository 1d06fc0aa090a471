"""`StepSanitizer`: drops tokens whose keys or values hold numbers that cannot be used, before a
memory takes them.

A token is dropped if any number of its keys or values, in any layer and head, is not finite or
above `LARGEST_NUMBER`, up to which squares weighted with a mass of 10**9 tokens are finite in
float32. Dropped tokens are set to 0 and marked (`StepKV.usable`): shapes do not change, and nothing
waits for the device, which counts the drops.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from protokv.core.step import StepKV
from protokv.core.tensors import MemoryShape, Specs, StateTensors, TensorDict, TensorSpec

# a power of two: the same number in every dtype that reaches so far
LARGEST_NUMBER = 2.0**40


class StepSanitizer(StateTensors):
    """Admits the steps of one memory and counts the tokens that it drops."""

    def __init__(self, shape: MemoryShape) -> None:
        self.dropped = torch.zeros(1, dtype=torch.int64, device=shape.device)

    @staticmethod
    def declare() -> Specs:
        """Declare the counter."""
        meaning = "tokens dropped as not finite"
        return (TensorSpec("sanitize.dropped", ("field",), (1,), torch.int64, meaning, "tokens"),)

    def admit(self, step: StepKV) -> StepKV:
        """Return the step with unusable tokens set to 0 and marked."""
        usable = find_finite(step.keys, step.values) if step.usable is None else step.usable
        hidden = ~usable[:, None]
        self.dropped += hidden.sum()
        keys = step.keys.masked_fill(hidden, 0)
        values = step.values.masked_fill(hidden, 0)
        return replace(step, keys=keys, values=values, usable=usable)

    def live_tensors(self) -> TensorDict:
        """Return the counter."""
        return {"sanitize.dropped": self.dropped}


def find_finite(keys: Tensor, values: Tensor) -> Tensor:
    """Return which tokens of keys and values `[L, H, T, D]` hold only usable numbers, `[T]`
    bool.
    """
    # A comparison with NaN is false.
    largest = torch.maximum(keys.abs(), values.abs()).amax((0, 1, 3))
    return largest <= min(LARGEST_NUMBER, torch.finfo(keys.dtype).max)
