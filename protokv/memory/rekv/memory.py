"""`ReKV`: all keys and values are kept outside the device; each layer retrieves blocks of them for a question.

Source: ReKV (Di et al., ICLR 2025), arXiv 2503.00540, and its released code. The same: a block is one frame (here a
step); a new step attends to the prompt prefix and the most recent tokens, and is filed at once; a block's key is the
mean of its keys before rotation; a question's query is the mean over its tokens before rotation; the score is the plain
dot product over all query heads; each layer retrieves the best blocks, puts them in stream order and, with
`positions="compact"`, shows them packed behind the prefix in place of the recent tokens; the answer's tokens read what
the question chose.

What differs:
- The number of blocks follows from the budget: attention reads no more than `budget` tokens of the stream, where the
  source takes 64 frames. The local window, 15,000 tokens there, is no larger than the budget either. A step larger than
  the budget is filed as several blocks.
- The question is forwarded once, and each layer chooses when its query arrives. The source forwards it once to choose,
  drops its keys and values, and forwards it again inside the whole prompt; what is averaged here are all tokens behind
  the video, the template's included. A query arrives rotated: since this memory says where the question stands
  (`Retrieval.next_position`), its rotation is removed first.
- Steps are encoded one at a time; the source embeds 64 frames together, which the language model then also takes one by
  one. There the prefix stands at one fixed distance from all tokens; here it keeps its positions.
- Keys are kept as the model rotated them and turned when they are packed; the source keeps them unrotated.
- Chosen blocks are copied to the device for each question; the source keeps 128 recently used ones there.
- With M-RoPE, of which the source knows nothing, the moving components of a block are packed.

Its bytes are NOT bounded: they grow with the stream, unless `archive_tokens` says where the oldest steps are dropped.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

from protokv.config import ReKVConfig
from protokv.context import Context
from protokv.errors import StateCorrupt
from protokv.memory.base import MemoryShape, StepKV
from protokv.memory.exact import ExactMemory
from protokv.memory.rekv.archive import Archive
from protokv.memory.rekv.retrieval import Retrieval
from protokv.memory.state import Clock, StatePart, TensorSpec
from protokv.rotary import Rotary


class ReKV(ExactMemory):
    """A local window on the device for encoding, and an archive of everything for questions."""

    bounded = False

    hides_recent = False

    def __init__(self, config: ReKVConfig, shape: MemoryShape, rotary: Rotary) -> None:
        super().__init__(config, shape, rotary)
        self._archive = Archive(shape, rotary, block_tokens=config.budget, capacity=config.archive_tokens)

    @classmethod
    def declare(cls, config: Any, shape: MemoryShape) -> tuple[TensorSpec, ...]:
        """The local window and the archive."""
        return (*super().declare(config, shape), *Archive.declare(shape))

    def parts(self) -> Sequence[StatePart]:
        """Those of the window, and the archive."""
        return (*super().parts(), self._archive)

    def append(self, step: StepKV) -> None:
        """File one step, and let it enter the local window."""
        step = self._admit(step, self._near.last_step)
        self._archive.append(step)
        self._near.append(step)

    def recall(self) -> Context:
        """The prefix and what the question will choose. Valid until `append`; each call is for one question."""
        sink = self._slots.sink
        return Retrieval(
            archive=self._archive,
            sink_keys=self._slots.keys[:, :, sink],
            sink_values=self._slots.values[:, :, sink],
            budget=self._config.budget,
            rotary=self._rotary,
            next_position=self._archive.next_position,
        )

    def _check(self, tensors: Mapping[str, Tensor], clock: Clock | None) -> None:
        super()._check(tensors, clock)
        seen, archived = int(tensors["near.ring"][2]) >= 0, tensors["archive.lengths"].numel() > 0
        # A stream of which every token was dropped has steps and no block.
        dropped = "intake.dropped" in tensors and int(tensors["intake.dropped"]) > 0
        if archived != seen and not (seen and dropped):
            raise StateCorrupt("state: tensor archive.lengths does not agree with near.ring")

    def report(self) -> dict[str, Any]:
        """Tokens in the local window, in the archive, and dropped from it."""
        counts = {
            "archive_tokens_in_use": self._archive.tokens,
            "archive_blocks": len(self._archive.blocks),
            "archive_tokens_dropped": self._archive.dropped,
        }
        return super().report() | counts
