"""`ReKV`: all keys and values are kept outside the device; each layer retrieves blocks of them for
a question.

Source: ReKV (Di et al., ICLR 2025), arXiv 2503.00540, and its released code. The same: a block is
one frame (here a step); a new step attends to the prompt prefix and the most recent tokens, and is
filed at once; the key of a block is the mean of its keys before rotation; the query of a question
is the mean over its tokens before rotation; the score is the plain dot product over all query
heads; each layer retrieves the best blocks, puts them in stream order and, with
`positions="compact"`, shows them packed after the prefix in place of the recent tokens; the
answer's tokens read what the question chose. What differs:

- Attention reads at most `budget` tokens of the stream, where the source takes 64 blocks, and the
  local window, 15,000 tokens in the source, is no larger. A step larger than the budget is filed as
  several blocks.
- Each layer chooses when the query of the question arrives, a mean over all tokens after the video,
  the template's included. The source forwards the question once to choose, and again in the whole
  prompt. A query arrives rotated; this memory sets the question's position
  (`RetrievalContext.next_position`), so it can remove the rotation.
- Steps are encoded one at a time, and the prefix keeps its positions; in the source it stands at
  one fixed distance.
- With M-RoPE, which the source does not know, the moving components of a block are packed.

Its bytes are NOT bounded: they grow with the stream.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate
from typing import ClassVar

import torch
from torch import Tensor

from protokv.core.context import EMPTY_BIAS, Context, KVSegment, PositionFacts
from protokv.core.near import WindowMove
from protokv.core.rotary import Rotary, rerotate, unrotate
from protokv.core.settings import MemoryConfig, PositionMode
from protokv.core.step import StepKV
from protokv.core.tensors import (
    MemoryShape,
    Specs,
    StateTensors,
    TensorDict,
    Tensors,
    count_bytes,
)
from protokv.device.arrays import KeysValues, make_host_buffer
from protokv.device.slots import widen
from protokv.errors import StateCorrupt
from protokv.memories.window import SlidingWindow
from protokv.texts import JsonObject

_LOCAL_TOKENS = 15_000
"""The local window of ReKV's released code."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReKVConfig(MemoryConfig):
    """ReKV: every token is kept outside the device, and each layer retrieves blocks for a
    question.
    """

    name: ClassVar[str] = "rekv"

    positions: PositionMode = "compact"

    @property
    def near_tokens(self) -> int:
        """W, tokens of the window that new steps attend to."""
        return min(_LOCAL_TOKENS, self.budget)


class ReKV(SlidingWindow[ReKVConfig]):
    """A local window on the device for encoding, and an archive of everything for questions."""

    bounded = False
    retrieves = True

    def __init__(self, config: ReKVConfig, shape: MemoryShape, rotary: Rotary) -> None:
        super().__init__(config, shape, rotary)
        self._archive = _Archive(shape, rotary, config.budget)

    @classmethod
    def declare(cls, config: ReKVConfig, shape: MemoryShape) -> Specs:
        """Declare the local window and the archive."""
        return (*super().declare(config, shape), *_Archive.declare(shape))

    def parts(self) -> Sequence[StateTensors]:
        """Return the parts of the window, and the archive."""
        return (*super().parts(), self._archive)

    def apply(self, key: WindowMove, numbers: Tensor, step: StepKV) -> None:
        """File one step and append it to the local window."""
        self._archive.append(step)
        super().apply(key, numbers, step)

    def recall(self) -> Context:
        """Return the prefix and the blocks that a question will choose. Valid until `append`, for
        one question each.
        """
        sink = self._slots.sink
        archive = self._archive
        prefix = self._slots.keys[:, :, sink], self._slots.values[:, :, sink]
        return RetrievalContext(
            archive, archive.block_keys, prefix, next_position=archive.next_position
        )

    def report(self) -> JsonObject:
        """Return the tokens in the local window and in the archive."""
        counts = {
            "archive_tokens_in_use": self._archive.tokens,
            "archive_blocks": len(self._archive.blocks),
        }
        return super().report() | counts


@dataclass(frozen=True, slots=True)
class _Block:
    """Consecutive tokens of one step, on the host."""

    kv: Tensor  # `[L, 2, H, T, D]` model dtype, keys rotated at their stream positions, then values
    positions: Tensor  # `[T, P]` int64
    key: Tensor  # `[L, H, D]` float32 on the device, the mean of its keys before rotation
    low: Sequence[int]  # least position of each component
    high: Sequence[int]  # greatest position of each component

    def __len__(self) -> int:
        return self.positions.shape[0]

    def span(self, components: Sequence[int]) -> tuple[int, int]:
        """Return the least and the greatest position over some of the components."""
        return min(self.low[c] for c in components), max(self.high[c] for c in components)


class _Archive(StateTensors):
    """Every token of the stream, exact, outside the device, in blocks in stream order with one key
    each.

    Each block is a separate allocation, so nothing moves when the archive grows, and what one layer
    reads of a block is contiguous.
    """

    def __init__(self, shape: MemoryShape, rotary: Rotary, budget: int) -> None:
        """Make an empty archive; a question reads at most `budget` tokens of it."""
        self._shape = shape
        self.rotary = rotary
        self.budget = budget
        self.blocks: list[_Block] = []
        self.next_position = shape.sink_tokens

    @property
    def tokens(self) -> int:
        """Tokens of all blocks."""
        return sum(map(len, self.blocks))

    @property
    def block_keys(self) -> Tensor:
        """The keys of all blocks, `[B, L, H, D]` float32 on the device."""
        shape = self._shape
        none = torch.zeros(0, shape.layers, shape.kv_heads, shape.head_size, device=shape.device)
        return torch.stack([block.key for block in self.blocks]) if self.blocks else none

    def append(self, step: StepKV) -> None:
        """Take one step."""
        self.next_position = max(self.next_position, int(step.positions.max()) + 1)
        step = step.usable_only()
        cos, sin = self.rotary(step.positions)
        bare = unrotate(step.keys.float(), (cos, sin))
        for start in range(0, len(step.positions), self.budget):
            rows = slice(start, start + self.budget)
            self._add(
                step.keys[:, :, rows],
                step.values[:, :, rows],
                step.positions[rows],
                bare[:, :, rows].mean(2),
            )

    def _add(self, keys: Tensor, values: Tensor, positions: Tensor, key: Tensor) -> None:
        L, H, T, D = keys.shape
        kv = make_host_buffer((L, 2, H, T, D), keys.dtype, self._shape.device)
        kv[:, 0], kv[:, 1] = keys, values
        held = positions.cpu().clone()
        self.blocks.append(_Block(kv, held, key, held.amin(0).tolist(), held.amax(0).tolist()))

    @staticmethod
    def declare(shape: MemoryShape) -> Specs:
        """Declare any number of tokens and blocks."""
        declare = shape.axes(archived_token=None, block=None).declare
        kv = "layer kv_head archived_token feature"
        i64 = torch.int64
        means = "mean of each block's keys, rotation removed"
        return (
            declare("archive.keys", kv, shape.dtype, "keys of the archive, rotated"),
            declare("archive.values", kv, shape.dtype, "values of the archive"),
            declare(
                "archive.positions",
                "archived_token component",
                i64,
                "their stream positions",
                "position",
            ),
            declare("archive.lengths", "block", i64, "tokens of each block", "tokens"),
            declare("archive.block_keys", "block layer kv_head feature", torch.float32, means),
            declare("archive.next_position", "", i64, "position of the next token"),
        )

    def live_tensors(self) -> TensorDict:
        """Return the state; keys and values are copied into one tensor each."""
        shape = self._shape
        kv = torch.zeros(shape.layers, 2, shape.kv_heads, 0, shape.head_size, dtype=shape.dtype)
        positions = torch.zeros(0, shape.position_components, dtype=torch.int64)
        if self.blocks:
            kv = torch.cat([block.kv for block in self.blocks], 3)
            positions = torch.cat([block.positions for block in self.blocks])
        return {
            "archive.keys": kv[:, 0],
            "archive.values": kv[:, 1],
            "archive.positions": positions,
            "archive.lengths": torch.tensor(list(map(len, self.blocks)), dtype=torch.int64),
            "archive.block_keys": self.block_keys,
            "archive.next_position": torch.tensor(self.next_position),
        }

    def take(self, tensors: Tensors) -> None:
        """Take the blocks of a state."""
        lengths = tensors["archive.lengths"].tolist()
        n = len(tensors["archive.positions"])
        if sum(lengths) != n or any(not 1 <= length <= self.budget for length in lengths):
            raise StateCorrupt(
                f"state: tensor archive.lengths does not cut {n} tokens into blocks of this memory"
            )
        keys, values = (
            torch.split(tensors[f"archive.{name}"], lengths, 2) for name in ("keys", "values")
        )
        positions = torch.split(tensors["archive.positions"], lengths)
        means = tensors["archive.block_keys"]
        for part in zip(
            keys, values, positions, means.to(self._shape.device, copy=True), strict=True
        ):
            self._add(*part)
        self.next_position = int(tensors["archive.next_position"])

    def nbytes(self) -> dict[str, int]:
        """Return the bytes on the host, `archive`, and of block keys on the device,
        `block_keys`.
        """
        held = sum(count_bytes(block.kv, block.positions) for block in self.blocks)
        return {"archive": held, "block_keys": sum(count_bytes(block.key) for block in self.blocks)}


@dataclass(slots=True)
class RetrievalContext(Context):
    """The prompt prefix and, in each layer, the blocks with the highest scores for the question.

    The first forward is the question, whose tokens stand at `next_position` and the following
    positions, the same in every component. The answer's tokens read the blocks that it chose.
    """

    archive: _Archive  # the blocks; they must not change while this is in use
    block_keys: Tensor  # theirs, `[B, L, H, D]`
    prefix: KeysValues  # its keys and values, `[L, H, P0, D]` each
    next_position: int
    shift: int = 0
    # how chosen blocks are packed; None: they stay at their stream positions
    packed: PositionFacts | None = None
    packed_end: int = 0  # right above the newest of them
    _chosen: dict[int, list[_Block]] = field(default_factory=dict, init=False)
    _shown: dict[int, KVSegment] = field(default_factory=dict, init=False)

    def at(self, layer: int, query: Tensor) -> tuple[KVSegment, ...]:
        """Return prefix and chosen blocks in stream order, in `P0 + min(budget, tokens of the
        archive)` slots.
        """
        if layer not in self._shown:
            self._chosen[layer] = [
                self.archive.blocks[index] for index in self._choose(layer, query)
            ]
            self._shown[layer] = self._read(layer, self._chosen[layer])
        return (self._shown[layer],)

    def positions_at(self, layer: int) -> Tensor | None:
        """Return the stream positions `[H, N, P]` of prefix and chosen blocks; None before the
        layer was asked.
        """
        if layer not in self._shown:
            return None
        (H, N, _), blocks = self._shown[layer].keys.shape, self._chosen[layer]
        P0 = self.prefix[0].shape[2]
        P = blocks[0].positions.shape[1] if blocks else 1
        found = torch.cat(
            [torch.arange(P0)[:, None].expand(P0, P), *(block.positions for block in blocks)]
        )
        return torch.cat([found, found.new_zeros(N - len(found), P)]).expand(H, N, P)

    def visible_tokens(self) -> int:
        """Return the most slots that a layer sees; before any layer was asked, an upper bound."""
        counts = (sum(map(len, blocks)) for blocks in self._chosen.values())
        return self.prefix[0].shape[2] + max(
            counts, default=min(self.archive.budget, self.archive.tokens)
        )

    def far_span(self) -> int:
        """Return an upper bound of the distinct times of the chosen blocks, for any choice."""
        return self._most_positions((0,))

    def compact(
        self, anchoring: PositionFacts, span: int | Tensor | None = None
    ) -> RetrievalContext:
        """Return the same context with chosen blocks packed: each takes only the positions that its
        tokens span.

        Blocks keep their stream positions while all of them are shown. Text has one position in all
        layers: so room is set aside for the longest choice, and each layer's blocks end where the
        room ends.
        """
        if self.archive.tokens <= self.archive.budget:
            return self
        moving = tuple(anchoring.moving)
        end = anchoring.origin + max(self._most_positions(moving), self._most_positions((0,)))
        # Components that do not move, such as rows and columns, keep their highest position.
        highs = [
            max(component)
            for component in zip(*(block.high for block in self.archive.blocks), strict=True)
        ]
        after = max(
            [end, *(high + 1 for component, high in enumerate(highs) if component not in moving)]
        )
        return replace(
            self, packed=anchoring, packed_end=end, shift=highs[0] + 1 - end, next_position=after
        )

    def _choose(self, layer: int, query: Tensor) -> list[int]:
        """Return the indices of the best blocks that fit the budget, in stream order."""
        blocks = self.archive.blocks
        keys = self.block_keys
        line = torch.arange(
            self.next_position, self.next_position + query.shape[1], device=query.device
        )
        components = len(blocks[-1].high) if blocks else 1
        cos, sin = self.archive.rotary(line[:, None].expand(-1, components))
        bare = unrotate(query.float(), (cos, sin))
        # Adding up the query heads of a KV head gives the same product as repeating block keys for
        # every query head.
        wanted = bare.mean(1).reshape(keys.shape[2], -1, keys.shape[3]).sum(1)
        scores = keys[:, layer].flatten(1) @ wanted.flatten()
        room = self.archive.budget
        chosen = []
        for index in scores.argsort(descending=True, stable=True).tolist():
            room -= len(blocks[index])
            if room < 0:
                break
            chosen.append(index)
        return sorted(chosen)

    def _read(self, layer: int, blocks: Sequence[_Block]) -> KVSegment:
        sink = self.prefix[0][layer]
        n = sum(map(len, blocks))
        H, P0, D = sink.shape
        held = sink.new_zeros((2, H, P0 + min(self.archive.budget, self.archive.tokens), D))
        held[0, :, :P0], held[1, :, :P0] = sink, self.prefix[1][layer]
        start = P0
        for block in blocks:
            held[:, :, start : start + len(block)].copy_(block.kv[layer], non_blocking=True)
            start += len(block)
        keys, values = held
        bias = torch.zeros(keys.shape[:2], device=keys.device)
        bias[:, P0 + n :] = EMPTY_BIAS
        if self.packed is not None and blocks:
            before = torch.cat([block.positions for block in blocks])
            after = before.clone()
            moving = tuple(self.packed.moving)
            stop = n
            end = self.packed_end
            for block in reversed(blocks):
                low, high = block.span(moving)
                after[stop - len(block) : stop, list(moving)] += end - 1 - high
                stop = stop - len(block)
                end = end - (high + 1 - low)
            moved = rerotate(
                keys[:, P0 : P0 + n],
                before.to(sink.device),
                after.to(sink.device),
                self.packed.rotary,
            )
            keys[:, P0 : P0 + n] = moved
        # Once for all tokens of an answer.
        keys, values = widen(keys, values, bias)
        return KVSegment(keys, values, bias)

    def _most_positions(self, components: Sequence[int]) -> int:
        """Return an upper bound of the positions that the chosen blocks take; exact if all blocks
        have one size.
        """
        lengths = [len(block) for block in self.archive.blocks]
        ends = [block.span(components) for block in self.archive.blocks]
        spans = [high + 1 - low for low, high in ends]
        # No more blocks than the shortest that fit, and no more positions a token than in the
        # widest block.
        fitting = sum(total <= self.archive.budget for total in accumulate(sorted(lengths)))
        most = (
            self.archive.budget * span // length
            for span, length in zip(spans, lengths, strict=True)
        )
        return min(sum(sorted(spans, reverse=True)[:fitting]), max(most, default=0))


ReKVConfig.memory = ReKV
