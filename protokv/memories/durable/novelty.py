"""`NoveltyCounts`: finds heads that see almost only new tokens, and keeps some of these exact.

The merging rule keeps distinct tokens while they fit. If nothing repeats they never fit: the rule
would average tokens that have nothing in common, and lose the present without winning the past. So
each head counts how many tokens of a step come again in the next one. A token comes again if its
squared distance to the nearest value of the next step is at most `SAME_TOKEN_SHARE` of the mean
square of those values. A camera gives the last view again; a text does not. The counts do not
depend on the bank, since a small bank forgets what a stream repeats.

If more than `_SOME_NEW` of the tokens are new, the newest ones do not merge while others are left:
an eighth of the stream so far, at least half of the budget, and less of it below `_ALL_NEW`. The
tokens of the first steps do not merge either. They get the room that is left, and at most half of
the bank. A token that stays exact is worth more than a mean of tokens that have nothing in common.
In such a head a merged prototype stands at the mean position of its tokens. None of this happens if
the stream repeats itself, as video does. `samples/studies/language/` measures what it brings.

For words (`keeps` is "spread") the rule keeps whole cues from all of the stream, not the newest
tokens. It takes as many as there is room for: first cue 0, then the cues whose numbers a high power
of two divides. When there is less room, every other cue goes. So a spread needs no record.

A budget of one step or less has no room for a past next to the present: the newest tokens always
stay.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from protokv.core.near import ExactTokens, WindowMove
from protokv.core.step import MOST_STREAM_COUNT, StepKV
from protokv.core.tensors import MemoryShape, Specs, StateTensors, TensorDict, Tensors
from protokv.errors import StateCorrupt
from protokv.memories.durable.settings import DurableConfig

SAME_TOKEN_SHARE = 0.8
_SOME_NEW = 0.2
_ALL_NEW = 0.3
_PRESENT = 8
# Counts start as if so many repeats had been seen (a prior), since a few steps say little.
_AT_FIRST = 128


@dataclass(frozen=True, slots=True)
class MergeExclusions:
    """Which points of B heads a step keeps from merging.

    Attributes:
        step: `[]` int64, the number of the step.
        share: `[B, 1]` float64, the part of the present that is kept; 0 if the stream repeats
            itself.
        first: `[B, 1]`, points of this step or an earlier one are kept.
        newest: `[B, 1]`, points of a later step than this are kept, or words of a higher turn.
        spread: whether the points are words, which have turns.
    """

    step: Tensor
    share: Tensor
    first: Tensor
    newest: Tensor
    spread: bool


class NoveltyCounts(StateTensors):
    """Counts, of B = L * H heads, tokens compared with the next step, and how many came again."""

    def __init__(self, config: DurableConfig, shape: MemoryShape) -> None:
        self._spreads = config.keeps == "spread"
        self._prototypes = config.prototypes
        self._near_tokens = config.near_tokens
        self._budget = config.merged_budget
        self._heads = (shape.layers, shape.kv_heads)
        self._seen = 0
        self._repeated = torch.zeros(
            shape.layers * shape.kv_heads, dtype=torch.float64, device=shape.device
        )

    @staticmethod
    def declare(shape: MemoryShape) -> Specs:
        """Declare the counts."""
        declare = shape.axes(field=1).declare
        compared = "tokens compared with the next step"
        again = "of these, tokens that came again"
        return (
            declare("novelty.seen", "field", torch.int64, compared, "tokens"),
            declare("novelty.repeated", "layer kv_head", torch.int64, again, "tokens"),
        )

    def see_(self, before: ExactTokens, step: StepKV) -> None:
        """Count the tokens `before`, of the step before this one."""
        again = find_recurring_tokens(before.values.flatten(0, 1), step.values.flatten(0, 1))
        self._repeated += again.sum(1)

    def plan(self, step: int, move: WindowMove) -> Sequence[float]:
        """Return the numbers that `limits` reads; count the tokens that `see_` compares."""
        self._seen += move.before
        leaving = move.leaving + move.surplus
        return self._numbers(step, leaving) if leaving else ()

    def limits(
        self, numbers: Tensor, tokens: int, came: Tensor, parts: Sequence[slice]
    ) -> list[MergeExclusions]:
        """Return what is kept, in each of these parts of the heads, while so many `tokens` enter
        the bank.

        Args:
            numbers: those of `plan`, on the device.
            tokens: how many enter.
            came: `[B]` int64, how many entered before.
            parts: slices of the B heads.
        """
        share = torch.addcmul(numbers[1], self._repeated, numbers[0], value=-1).clamp_(0, 1)[
            :, None
        ]
        # The share of one token among those that came so far.
        pace = share / (came[:, None] + tokens)
        first, newest = torch.addcmul(numbers[3:5], pace, numbers[5:]).chunk(2, 1)
        if self._spreads:
            newest = (
                (came[:, None] / (share * -numbers[6]))
                .log2()
                .ceil()
                .clamp(min=0)
                .add(0.5)
                .mul(MOST_STREAM_COUNT)
            )
        step = numbers[2].long()
        return [
            MergeExclusions(step, share[heads], first[heads], newest[heads], self._spreads)
            for heads in parts
        ]

    def _numbers(self, step: int, tokens: int) -> tuple[float, ...]:
        """Return seven numbers: scale and offset of the share; the step; the bounds for first and
        for newest steps at pace 0; and the slopes of these two bounds over the pace.
        """
        K = self._prototypes
        scale = 1 / ((self._seen + _AT_FIRST) * (_ALL_NEW - _SOME_NEW))
        share = scale, self._seen * scale - _SOME_NEW / (_ALL_NEW - _SOME_NEW), step
        most = max(0, K - tokens)
        if self._spreads:
            return *share, -1, 0, 0, -most
        if tokens >= self._budget:
            return *share, -1, step - max(1, K // tokens), 0, 0
        present = max(self._budget / 2, (step + 1) * tokens / _PRESENT) - self._near_tokens
        present = max(0.0, min(present, most))
        # The first step entered the bank when the near window was full.
        begin = self._near_tokens // tokens
        steps = step - begin + 2
        return *share, begin - 1, step, min(K / 2, most - present) * steps, -present * steps

    def live_tensors(self) -> TensorDict:
        """Return the counts."""
        return {
            "novelty.seen": torch.tensor([self._seen]),
            "novelty.repeated": self._repeated.long().view(self._heads),
        }

    def take(self, tensors: Tensors) -> None:
        """Take those of a state; refuse more repeats than there were tokens."""
        repeated = tensors["novelty.repeated"]
        if (
            repeated.numel()
            and not 0 <= repeated.min() <= repeated.max() <= tensors["novelty.seen"].max()
        ):
            raise StateCorrupt("state: tensor novelty.repeated must hold 0 to novelty.seen")
        self._seen = int(tensors["novelty.seen"])
        self._repeated.copy_(tensors["novelty.repeated"].flatten())


def find_recurring_tokens(values: Tensor, step: Tensor) -> Tensor:
    """Return which of the tokens with values `[B, n, D]` come again in a step `[B, T, D]`, `[B, n]`
    bool.
    """
    old = values.float()
    new = step.float()
    own, norms = (some.square().sum(2) for some in (old, new))
    nearest = torch.baddbmm(norms[:, None], old, new.mT, alpha=-2).amin(2)
    return nearest.add_(own) <= norms.mean(1, keepdim=True).mul_(SAME_TOKEN_SHARE)
