"""`RepeatWeights`: what stays in view enters the bank once, exactly, and weighs more than the rest.

A token repeats the one that the step before had in the same place, if their values in the first
layer are equal. These values come from the embedding alone. Deep in a model a second sight is
another token, as the model has read the first, and a mean of both is neither. So repeats stay in
the near window and never enter the bank. Their first sight enters with mass `_SEEN_AGAIN`, or with
mass 2 if tokens of this stream were seen 2.5 times at most, on average; more would do harm.
`samples/studies/language/` measures what this brings.

In a shallow model a second sight is the first but for .003 of its norm, and merges with it at no
loss. So the rule acts from `DEEP_MODEL_LAYERS` layers on.

The weights of the tokens in the near window wait here, in the order of the stream, until the tokens
leave it.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor
from torch.nn.functional import pad

from protokv.core.bank import FarTokens, PrototypeBank
from protokv.core.near import ExactTokens
from protokv.core.step import StepKV
from protokv.core.tensors import MemoryShape, Specs, TensorDict, Tensors, TensorSpec
from protokv.memories.durable.settings import DurableConfig

_SEEN_AGAIN = 4
"""What a token weighs in the bank, at most, if the next step repeats it."""
DEEP_MODEL_LAYERS = 12
"""The rule acts in models of so many layers, or more. Values of a second sight differ from those of
the first by up to .003 of their squared norm in the embedded models, which have 4 and 8 layers, and
by .05 to .6 from the fourth layer of SmolLM2 on, which has 30."""
# Values are equal but for rounding if they differ by at most this share of their norm.
_ROUNDING = 2.0**-12


class RepeatWeights:
    """The most that tokens in a near window of W weigh: 0 for a repeat, `_SEEN_AGAIN` for what is
    repeated, else 1.
    """

    def __init__(self, near_tokens: int, shape: MemoryShape) -> None:
        self._most = near_tokens
        # One weight for each token in the window.
        self._weights = self._rest = torch.ones(0, dtype=torch.int64, device=shape.device)

    @staticmethod
    def acts(config: DurableConfig, shape: MemoryShape) -> bool:
        """Return whether the rule acts: in deep models, and not on words."""
        return config.keeps == "newest" and is_deep(shape)

    @staticmethod
    def declare(near_tokens: int) -> Specs:
        """Declare the weights."""
        meaning = "most mass in the bank of each token of the near window, oldest first"
        return (
            TensorSpec(
                "repeats.weight", ("near_token",), (near_tokens,), torch.int64, meaning, fill=1
            ),
        )

    def see_(self, before: ExactTokens, step: StepKV) -> None:
        """Weigh the tokens of a step, and those `before`, of the last step, that it repeats."""
        repeats = find_repeats(before, step) if step.repeats is None else step.repeats
        usable = torch.ones_like(repeats) if step.usable is None else step.usable
        n = min(len(before), len(repeats))
        old = self._weights[len(self._weights) - n :]
        old.copy_(torch.where(repeats[len(repeats) - n :] & (old > 0), _SEEN_AGAIN, old))
        self._weights = torch.cat((self._weights, (usable & ~repeats).long()))

    def weigh_(self, tokens: FarTokens, bank: PrototypeBank) -> FarTokens:
        """Return the tokens that leave the window with their weights as masses; count repeats as
        absorbed.
        """
        leaving = tokens.keys.shape[1]
        mass = self._weights[:leaving]
        left = self._weights[leaving:]
        # If their number is unchanged, the buffer is used again: what was captured knows its
        # address.
        self._weights = self._rest = (
            self._rest.copy_(left) if len(left) == len(self._rest) else left.clone()
        )
        # The counts start as if one step had been seen `_SEEN_AGAIN` times (a prior): the first
        # step of a stream tells nothing yet.
        entered = bank.opened[0, 0] + leaving
        repeats = bank.absorbed[0, 0] + leaving * (_SEEN_AGAIN - 1)
        most = torch.where(repeats * 2 > entered * 3, _SEEN_AGAIN, 2)
        bank.absorbed += (tokens.mass > mass).sum()
        return replace(tokens, mass=torch.minimum(mass, most))

    def live_tensors(self) -> TensorDict:
        """Return the weights."""
        return {"repeats.weight": pad(self._weights, (0, self._most - len(self._weights)), value=1)}

    def take(self, tensors: Tensors) -> None:
        """Take the weights of a checked state."""
        held = tensors["repeats.weight"][: int(tensors["near.ring"][1])]
        self._weights = self._rest = held.to(self._weights.device, copy=True)


def is_deep(shape: MemoryShape) -> bool:
    """Return whether a second sight is another token in most layers of a model."""
    return shape.model_layers >= DEEP_MODEL_LAYERS


def find_repeats(before: ExactTokens, step: StepKV) -> Tensor:
    """Return which tokens of a step repeat those of the last one, `[T]` bool.

    The last tokens of both are compared: a near window that is smaller than a step holds no more.
    """
    T = len(step.positions)
    n = min(len(before), len(step.positions))
    old = slice(len(before) - n, None)
    new = slice(T - n, None)
    then = before.values[0, :, old].float()
    now = step.values[0, :, new].float()
    equal = (now - then).square().sum((0, 2)) <= _ROUNDING**2 * now.square().sum((0, 2))
    equal &= (before.coordinates[old] == step.coordinates[new]).all(1) & before.usable[old]
    if step.usable is not None:
        equal &= step.usable[new]
    return equal if n == T else pad(equal, (T - n, 0))
