"""`Novelty`: which heads see new tokens almost only, and how many of the newest and the first these keep from merging.

Ward's rule keeps what is distinct while distinct tokens fit. Where nothing repeats they never fit: the rule would
average tokens that have nothing in common, and lose the present without winning the past. So each head counts how many
tokens of a step come again in the next one: where the squared distance to the nearest value of the next step is at most
`NEAR` of the mean square of those values. A camera gives the last view again; a text does not. The counts know nothing
of the bank: a small bank forgets what a stream repeats.

Where more than `SOME_NEW` of the tokens are new, the newest ones merge with their repeats alone: an eighth of the
stream so far, at least half of the budget, and less of it below `ALL_NEW`. The tokens of the first steps merge with
their repeats alone, too. They get the room that is left, and at most half of the bank. A token that stays exact is
worth more than a mean of tokens that have nothing in common. All others merge by Ward's rule. There a merged prototype
stands at the mean position of its tokens, which have no other place in common. Where the stream repeats itself, as
video does, none of this happens. `samples/studies/language/` measures what it brings.

For words (`keeps` is "spread") the rule keeps whole cues from all of the stream, not the newest tokens. It takes as
many as there is room for: first cue 0, then the cues whose numbers a high power of two divides. When there is less
room, every other cue goes. So a spread needs no record.

A budget of one step or less has no room for a past next to the present: there the newest tokens always stay.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Final

import torch
from torch import Tensor

from protokv.core.bank import FarTokens, PrototypeBank, Rule
from protokv.core.near import Tokens
from protokv.core.step import MOST_COUNT, StepKV
from protokv.core.tensors import LAYER, MemoryShape, TensorSpec
from protokv.errors import StateCorrupt
from protokv.memories.durable.repeats import Repeats
from protokv.memories.durable.settings import DurableConfig

# Merging with a repeat costs less than so much of what merging two tokens of a step usually costs.
REPEATS: Final = 0.25
NEAR: Final = 0.8
SOME_NEW, ALL_NEW = 0.2, 0.3
_PRESENT: Final = 8
# Above the exponent of any step.
_FIRST: Final = 50
# Counts begin as if so many repeats had been seen: a few steps say little.
AT_FIRST: Final = 128


class Novelty:
    """Counts of B = L * H heads. In deep models it also holds the weights of the near window (`Repeats`)."""

    def __init__(self, config: DurableConfig, shape: MemoryShape) -> None:
        self._config = config
        seen, repeated, *_ = self.declare(config, shape)
        self._seen, self._repeated = seen.allocate(shape.device), repeated.allocate(shape.device)
        self._repeats = Repeats(config.near_tokens, shape) if Repeats.acts(config, shape) else None

    @staticmethod
    def declare(config: DurableConfig, shape: MemoryShape) -> tuple[TensorSpec, ...]:
        """Declare the counts, and the weights of the tokens in the near window."""
        dims, size = (LAYER, "kv_head"), (shape.layers, shape.kv_heads)
        held = {"seen": "tokens compared with the next step", "repeated": "of these, tokens that came again"}
        return (
            *(TensorSpec(f"novelty.{name}", dims, size, torch.int64, text, "tokens") for name, text in held.items()),
            *(Repeats.declare(config.near_tokens) if Repeats.acts(config, shape) else ()),
        )

    def count_(self, before: Tokens, step: StepKV) -> None:
        """Count the tokens `before`, of the step before this one. Steps of which a token was dropped do not count."""
        again = come_again(before.values.flatten(0, 1), step.values.flatten(0, 1)).sum(1)
        whole = before.usable.all() if step.usable is None else before.usable.all() & step.usable.all()
        self._seen += whole * len(before)
        self._repeated += (again * whole).view_as(self._repeated)
        if self._repeats is not None:
            self._repeats.see_(before, step)

    def weigh_(self, tokens: FarTokens, bank: PrototypeBank) -> FarTokens:
        """Return tokens that left the near window with the masses that they have in the bank."""
        return tokens if self._repeats is None else self._repeats.weigh_(tokens, bank)

    def share(self) -> Tensor:
        """Return which part of the present is kept from merging, `[B]` float32: 0 where the stream repeats itself."""
        seen, repeated = self._seen.view(-1), self._repeated.view(-1)
        return ((seen - repeated) / (seen + AT_FIRST)).sub_(SOME_NEW).div_(ALL_NEW - SOME_NEW).clamp_(0, 1)

    def present(self, step: int, tokens: int, most: int) -> float:
        """Return how many of the newest tokens in the bank are the present, up to `most`; a step has `tokens`."""
        config = self._config
        if config.keeps == "spread":
            return most
        present = max(config.merged_budget / 2, (step + 1) * tokens / _PRESENT) - config.near_tokens
        return max(0.0, min(present, most))

    def kept(self, step: int, tokens: int, most: int) -> Tensor:
        """Return how many of the newest tokens merge with repeats alone, `[B]` int64; `most` in a budget of a step."""
        if tokens >= self._config.merged_budget:
            return torch.full_like(self._seen.view(-1), max(0, most))
        return (self.share() * self.present(step, tokens, most)).long()

    def first(self, share: Tensor, step: int, tokens: int, most: int, last_step: Tensor) -> Tensor:
        """Return which prototypes belong to the first steps, which merge with repeats alone, `[n, K]` bool.

        These are whole steps, as many as fit with the present in `most`, times the `share` `[n]`. The prototypes have
        `last_step` `[n, K]`, -1 where a slot is free.
        """
        config = self._config
        if config.keeps == "spread" or tokens >= config.merged_budget:
            return torch.zeros_like(last_step, dtype=torch.bool)
        room = min(config.prototypes / 2, max(0, most - self.present(step, tokens, most)))
        came = last_step.masked_fill(last_step < 0, MOST_COUNT)
        return came < came.sort(1).values.gather(1, (share * room).long()[:, None])

    def turn(self, last_step: Tensor, mass: Tensor) -> Tensor:
        """Return int64 numbers, the higher the longer a prototype is kept, the lowest for one that is no token."""
        if self._config.keeps == "newest":
            return last_step
        power = torch.frexp((last_step & -last_step).double()).exponent.long().masked_fill_(last_step == 0, _FIRST)
        return torch.where(mass == 1, power * MOST_COUNT + last_step, -1)

    def since(self, share: Tensor, step: int, tokens: int, most: int, came: Tensor) -> Tensor:
        """Return the `turn` above which the `share` `[B]` of the present is kept, `[B]` float32; `came` `[L, H]` counts
        the tokens so far."""
        present = self.present(step, tokens, most)
        if self._config.keeps == "newest":
            return step - share * (present / tokens)
        return (came.view(-1) / (share * present)).log2().ceil().clamp(min=0).add(0.5).mul(MOST_COUNT)

    def live_tensors(self) -> dict[str, Tensor]:
        """Return the counts and the weights."""
        weights = {} if self._repeats is None else self._repeats.live_tensors()
        return {"novelty.seen": self._seen, "novelty.repeated": self._repeated} | weights

    def take(self, tensors: Mapping[str, Tensor]) -> None:
        """Take those of a checked state."""
        self._seen.copy_(tensors["novelty.seen"])
        self._repeated.copy_(tensors["novelty.repeated"])
        if self._repeats is not None:
            self._repeats.take(tensors)


class NoveltyRule(Rule):
    """What both rules of `durable` share: they count what comes again, and hold what `Novelty` holds."""

    @classmethod
    def declare(cls, config: DurableConfig, shape: MemoryShape) -> tuple[TensorSpec, ...]:
        """Declare what `Novelty` holds."""
        return Novelty.declare(config, shape)

    def __init__(self, bank: PrototypeBank, config: DurableConfig, shape: MemoryShape) -> None:
        self._bank, self._config, self._novelty = bank, config, Novelty(config, shape)

    def see_(self, before: Callable[[], Tokens], step: StepKV) -> None:
        """Count the tokens that come again."""
        self._novelty.count_(before(), step)

    def live_tensors(self) -> dict[str, Tensor]:
        """Return what `Novelty` holds."""
        return self._novelty.live_tensors()

    def check(self, tensors: Mapping[str, Tensor]) -> None:
        """Refuse counts that would choose prototypes beyond the bank."""
        if (tensors["novelty.repeated"] < 0).any() or (tensors["novelty.repeated"] > tensors["novelty.seen"]).any():
            raise StateCorrupt("state: tensor novelty.repeated must hold 0 to novelty.seen")

    def take(self, tensors: Mapping[str, Tensor]) -> None:
        """Take what `Novelty` holds."""
        self._novelty.take(tensors)


def come_again(values: Tensor, step: Tensor) -> Tensor:
    """Return which of the tokens with values `[B, n, D]` come again in a step `[B, T, D]`, `[B, n]` bool."""
    old, new = values.double(), step.double()
    own, norms = (some.square().sum(2) for some in (old, new))
    nearest = torch.baddbmm(norms[:, None], old, new.mT, alpha=-2).amin(2)
    return nearest + own <= NEAR * norms.mean(1, keepdim=True)
