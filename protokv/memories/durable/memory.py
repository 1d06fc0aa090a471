"""`DurableMemory`: the default memory. A near window, and a bank under a merging rule
(`durable.rule`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from protokv.core.bank import PrototypeBank
from protokv.core.context import Context
from protokv.core.prototypes import PrototypeMemory
from protokv.core.rotary import Rotary
from protokv.core.slots import KVSlots
from protokv.core.step import StepKV
from protokv.core.tensors import MemoryShape, Specs, StateTensors
from protokv.memories.durable.bank import DurableBank, QuantizedBank
from protokv.memories.durable.repeats import RepeatWeights, find_repeats
from protokv.memories.durable.rule import DurableRule
from protokv.memories.durable.settings import DurableConfig
from protokv.memories.durable.words import WordMemory
from protokv.texts import JsonObject


class DurableMemory(PrototypeMemory[DurableConfig]):
    """W exact tokens, and K prototypes a layer and KV head that keep what is distinct and merge
    what is redundant.
    """

    rule = DurableRule

    def __init__(
        self,
        config: DurableConfig,
        shape: MemoryShape,
        rotary: Rotary,
        *,
        within: KVSlots | None = None,
    ) -> None:
        """Make an empty memory, whose slots are some of those of another one if `within` has
        them.
        """
        self._within = within
        super().__init__(config, shape, rotary)
        self._words: WordMemory | None = None
        words = config.of_words()
        if words is not None:
            slots = WordMemory.cut_slots(self._slots, words.prototypes)
            self._words = WordMemory(DurableMemory(words, shape, rotary, within=slots))

    def new_slots(self, config: DurableConfig, shape: MemoryShape) -> KVSlots:
        """Return the slots, with some for words if the stream has any."""
        words = config.of_words()
        if words is None:
            return self._within or super().new_slots(config, shape)
        slots = KVSlots(shape, far=config.prototypes + words.budget, near=config.near_tokens)
        slots.far = slice(slots.far.start, slots.far.start + config.prototypes)
        return slots

    @classmethod
    def declare(cls, config: DurableConfig, shape: MemoryShape) -> Specs:
        """Declare the tensors of every memory of this kind, and the same of words."""
        words = config.of_words()
        return (
            *super().declare(config, shape),
            *(WordMemory.declare(cls.declare(words, shape)) if words else ()),
        )

    def parts(self) -> Sequence[StateTensors]:
        """Return the holders of these."""
        return super().parts() if self._words is None else (*super().parts(), self._words)

    def mark_repeats(self, step: StepKV) -> Tensor | None:
        """Return which tokens repeat those of the step before; None in a shallow model. Words held
        apart do not.
        """
        if not RepeatWeights.acts(self._config, self._shape):
            return None
        words = 0 if self._words is None else step.words
        repeats = find_repeats(
            self._near.newest(), step.tokens(slice(0, len(step.positions) - words))
        )
        return torch.cat((repeats, repeats.new_zeros(words)))

    def append(self, step: StepKV) -> None:
        """Take one step, its words apart."""
        if self._words is None or not step.words:
            super().append(step)
            return
        pictures = len(step.positions) - step.words
        of_words = self._words.memory
        # First what may be refused; then nothing has changed.
        words = of_words._sanitizer.admit(step.tokens(slice(pictures, None)))
        words = replace(words, step=of_words._near.last_step + 1)
        super().append(step.tokens(slice(0, pictures)))
        plan = of_words.plan(words)
        of_words.apply(plan.key, of_words.runs.stage(plan.numbers), words)
        self._words.seen += step.words

    def report(self) -> JsonObject:
        """Return the report of pictures, how many words are held exactly, and their prototypes in
        use, at most.
        """
        found = super().report()
        if self._words is not None:
            words = self._words.memory
            of_words = words.report()
            found["tokens_dropped"] += of_words["tokens_dropped"]
            found["words_tokens_in_use"] = of_words["near_tokens_in_use"]
            found["words_prototypes"] = int((words._bank.mass > 0).sum(2).max())
        return found

    def nbytes(self) -> dict[str, int]:
        """Return bytes by part."""
        found = super().nbytes()
        if self._words is not None:
            found["context"] += self._words.memory.nbytes()["context"]
        return found

    @classmethod
    def bank_type(cls, config: DurableConfig) -> type[PrototypeBank]:
        """Return the class of the bank under these settings."""
        return QuantizedBank if config.center_bits == 8 else DurableBank

    def context(self) -> Context:
        """Return all slots. Far are, in this order, prototypes of pictures, those of words, and
        exact words.
        """
        slots = self._slots
        words = None if self._words is None else self._words.memory

        def anchors() -> Tensor:
            if words is None:
                return self._anchors()
            exact = words._near.positions.expand(*slots.bias.shape[:2], -1, -1)
            return torch.cat((self._anchors(), words._anchors(), exact), 2)

        used = None if self._rule is None else self._rule.prototypes_used
        shown = slots.context(self._near.positions, anchors, used)
        return replace(shown, far=slice(slots.far.start, slots.near.start))


DurableConfig.memory = DurableMemory
