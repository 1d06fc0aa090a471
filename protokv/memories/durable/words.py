"""`WordMemory`: what was said, in a memory of its own inside that of pictures.

Merged with pictures, words take room from them and lose their own. So words have a near window and
a bank of their own, under the same rules, in `words_tokens` of the budget: the last ones are exact,
and older ones merge with words alone, when there is no more room. To this memory a cue, the words
of one step, is a step. Where nothing that is said comes again, it keeps whole cues, spread over the
stream (`durable.novelty`). Its slots lie before the near ones of pictures.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from copy import copy
from dataclasses import replace
from typing import Any

import torch

from protokv.core.prototypes import PrototypeMemory
from protokv.core.slots import KVSlots
from protokv.core.tensors import SLOTS, StateTensors, TensorDict, TensorGroups, Tensors, TensorSpec
from protokv.errors import StateCorrupt

_PREFIX = "words."


class WordMemory(StateTensors):
    """The memory of words as a part of that of pictures; `seen` counts the tokens of words that
    came, `[1]` int64.
    """

    def __init__(self, memory: PrototypeMemory[Any]) -> None:
        self.memory = memory
        self.seen = torch.zeros(1, dtype=torch.int64)

    @staticmethod
    def cut_slots(slots: KVSlots, far: int) -> KVSlots:
        """Return what lies between far and near slots as slots of their own, `far` of them for
        pseudo-tokens.
        """
        own = copy(slots)
        begin = slots.far.stop
        own.far = slice(begin, begin + far)
        own.near = slice(begin + far, slots.near.start)
        # The prompt prefix is that of pictures, whose memory takes every step first.
        own.started = True
        return own

    @staticmethod
    def declare(specs: Iterable[TensorSpec]) -> Iterator[TensorSpec]:
        """Declare the tensors of a memory as those of words."""
        for spec in specs:
            if not spec.name.startswith("sink."):
                dims = tuple(f"word_{dim}" if dim in SLOTS else dim for dim in spec.dims)
                yield replace(
                    spec, name=_PREFIX + spec.name, dims=dims, meaning=f"of words: {spec.meaning}"
                )
        yield TensorSpec(
            "words.seen", ("field",), (1,), torch.int64, "tokens of words that came", "tokens"
        )

    def _parts(self) -> Sequence[StateTensors]:
        """Return the holders of the state, but for the first: that of the prompt prefix."""
        return self.memory.parts()[1:]

    def live_tensors(self) -> TensorDict:
        """Return its part of the state."""
        held = {
            _PREFIX + name: tensor
            for part in self._parts()
            for name, tensor in part.live_tensors().items()
        }
        return held | {"words.seen": self.seen}

    def buffers(self) -> TensorGroups:
        """Return those of its parts."""
        return {
            "words": [
                one for part in self._parts() for some in part.buffers().values() for one in some
            ]
        }

    def take(self, tensors: Tensors) -> None:
        """Take its part of a state."""
        own = {
            name.removeprefix(_PREFIX): one
            for name, one in tensors.items()
            if name.startswith(_PREFIX)
        }
        self.seen.copy_(own["seen"])
        try:
            for part in self._parts():
                part.take(own)
            self.memory.write_far()
        except StateCorrupt as error:
            raise StateCorrupt(f"{error}, of words") from error
