"""`WordsRegion`: what was said, exact and apart from the bank, in slots of its own that attention reads in place.

Text is not merged: a mean of two words means nothing. So the words of a stream never enter the bank. They are held as
whole cues, the words of one step, in `words_tokens` of the budget. When there is no room, whole cues go by the rule
`words_keep`. Of a cue larger than the region the first tokens stay. Slots have no
order: positions stand beside them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import ClassVar, Literal

import torch
from torch import Tensor

from protokv.core.context import SlotContext
from protokv.core.near import Slots
from protokv.core.sanitize import Sanitizer
from protokv.core.step import StepKV
from protokv.core.tensors import LAYER, Clock, MemoryShape, StatePart, TensorSpec
from protokv.errors import StateCorrupt


class WordSlots(Slots):
    """`[sink | far | words | near]`. A context counts words with the far slots, as they may be from any time."""

    def __init__(self, shape: MemoryShape, *, far: int, near: int, words: int) -> None:
        super().__init__(shape, far=far + words, near=near)
        begin = self.far.start
        self.far, self.words = slice(begin, begin + far), slice(begin + far, begin + far + words)
        self.positions = torch.zeros(words, shape.position_components, dtype=torch.int64, device=shape.device)

    def context(self, near: Tensor, far: Callable[[], Tensor] | None = None) -> SlotContext:
        """Return all slots; arguments as of `Slots.context`."""

        def positions() -> Tensor:
            words = self.positions.expand(*self.keys.shape[:2], *self.positions.shape)
            return words if far is None else torch.cat((far(), words), 2)

        return replace(super().context(near, positions), far=slice(self.far.start, self.words.stop))


class WordsRegion(StatePart):
    """Whole cues in the words part of the slots."""

    promise: ClassVar[str] = "words: exact, in slots of their own"

    def __init__(self, slots: WordSlots, sanitizer: Sanitizer, keep: Literal["newest", "spread"]) -> None:
        """Hold nothing yet; `sanitizer` admits words, and counts apart from that of the pictures."""
        part, device = slots.words, slots.keys.device
        self.keys, self.values, self._bias = (held[:, :, part] for held in (slots.keys, slots.values, slots.bias))
        self.positions, self._sanitizer, self._keep = slots.positions, sanitizer, keep
        self.seen = torch.zeros(1, dtype=torch.int64, device=device)
        self.step = torch.full((len(self.positions),), -1, device=device)
        self.usable = torch.ones(len(self.positions), dtype=torch.bool, device=device)
        # Step and slots of each cue, oldest first, and the free slots. Mirrors `step`: nothing waits for the device.
        self._cues: list[tuple[int, list[int]]] = []
        self._free = list(range(len(self.positions)))

    def __len__(self) -> int:
        return len(self.positions) - len(self._free)

    @property
    def dropped(self) -> int:
        """Tokens of words that were dropped as not finite."""
        return int(self._sanitizer.dropped)

    def append(self, words: StepKV) -> None:
        """Take the words of a step; the cues that make room for them are gone."""
        words = self._sanitizer.admit(words)
        self.seen += len(words.positions)
        T = min(len(words.positions), len(self.positions))
        while len(self._free) < T:
            self._let_go()
        taken, self._free = self._free[:T], self._free[T:]
        slots = torch.tensor(taken, device=self.step.device)
        self.keys.index_copy_(2, slots, words.keys[:, :, :T])
        self.values.index_copy_(2, slots, words.values[:, :, :T])
        self.positions[slots], self.step[slots] = words.positions[:T], words.step
        assert words.usable is not None
        self.usable[slots] = words.usable[:T]
        self._bias[:, :, slots] = words.usable[:T].log()
        self._cues.append((words.step, taken))

    def _let_go(self) -> None:
        """Free the slots of one cue: the oldest, or the one whose neighbours are nearest to each other in time."""
        steps, gone = [-1, *(step for step, _ in self._cues)], 0
        if self._keep == "spread" and len(self._cues) > 1:
            # The newest cue stays; of equal gaps the oldest goes.
            gone = min(range(len(self._cues) - 1), key=lambda at: steps[at + 2] - steps[at])
        slots = self._cues.pop(gone)[1]
        self._free = sorted([*self._free, *slots])
        index = torch.tensor(slots, device=self.step.device)
        self.step[index], self.usable[index] = -1, True
        self._bias[:, :, index] = -torch.inf

    @staticmethod
    def declare(shape: MemoryShape, tokens: int) -> tuple[TensorSpec, ...]:
        """Declare so many tokens."""
        L, H, D, P = shape.layers, shape.kv_heads, shape.head_size, shape.position_components
        kv, word, i64 = (LAYER, "kv_head", "word_token", "feature"), ("word_token",), torch.int64
        return (
            TensorSpec("words.keys", kv, (L, H, tokens, D), shape.dtype, "keys of what was said, rotated"),
            TensorSpec("words.values", kv, (L, H, tokens, D), shape.dtype, "values of what was said"),
            TensorSpec("words.positions", (*word, "component"), (tokens, P), i64, "their stream positions", "position"),
            TensorSpec("words.step", word, (tokens,), i64, "their steps; -1: a free slot", "step", fill=-1),
            TensorSpec("words.usable", word, (tokens,), torch.bool, "False for tokens dropped as not finite", fill=1),
            TensorSpec("words.seen", ("field",), (1,), i64, "tokens of words that came", "tokens"),
            TensorSpec("words.dropped", ("field",), (1,), i64, "of these, tokens dropped as not finite", "tokens"),
        )

    def held(self) -> dict[str, Tensor]:
        """Return its part of the state."""
        return {
            "words.keys": self.keys,
            "words.values": self.values,
            "words.positions": self.positions,
            "words.step": self.step,
            "words.usable": self.usable,
            "words.seen": self.seen,
            "words.dropped": self._sanitizer.dropped,
        }

    def buffers(self) -> Mapping[str, Sequence[Tensor]]:
        """Return the bias of its slots."""
        return {"words": (self._bias,)}

    def check(self, tensors: Mapping[str, Tensor], clock: Clock | None) -> None:
        """Check that no more tokens are held, or were dropped, than came."""
        seen, held = int(tensors["words.seen"]), int((tensors["words.step"] >= 0).sum())
        if max(held, int(tensors["words.dropped"])) > seen:
            raise StateCorrupt(f"state: tensor words.seen counts {seen} tokens, and there are more")

    def take(self, tensors: Mapping[str, Tensor]) -> None:
        """Take a checked state."""
        for name, held in self.held().items():
            held.copy_(tensors[name])
        cues: dict[int, list[int]] = {}
        for slot, step in enumerate(self.step.tolist()):
            cues.setdefault(step, []).append(slot)
        self._free = cues.pop(-1, [])
        self._cues = sorted(cues.items())
        self._bias.copy_(self.usable.log()).masked_fill_(self.step < 0, -torch.inf)
