"""`ReKV`: all keys and values are kept outside the device; each layer retrieves blocks of them for a question.

Source: ReKV (Di et al., ICLR 2025), arXiv 2503.00540, and its released code. The same: a block is one frame (here a
step); a new step attends to the prompt prefix and the most recent tokens, and is filed at once; the key of a block is
the mean of its keys before rotation; the query of a question is the mean over its tokens before rotation; the score is
the plain dot product over all query heads; each layer retrieves the best blocks, puts them in stream order and, with
`positions="compact"`, shows them packed after the prefix in place of the recent tokens; the answer's tokens read what
the question chose. What differs:

- The budget sets the number of blocks: attention reads at most `budget` tokens of the stream, where the source takes 64
  frames. The local window, 15,000 tokens in the source, is no larger than the budget. A step larger than the budget is
  filed as several blocks.
- The question is forwarded once, and each layer chooses when its query arrives. The source forwards it once to choose,
  drops its keys and values, and forwards it again in the whole prompt. Here the mean is over all tokens after the
  video, including the template's. A query arrives rotated; this memory sets the question's position
  (`Retrieval.next_position`), so it can remove the rotation.
- Steps are encoded one at a time. In the source the prefix stands at one fixed distance from all tokens; here it keeps
  its positions.
- With M-RoPE, which the source does not know, the moving components of a block are packed.

Its bytes are NOT bounded: they grow with the stream.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, Final

import torch
from torch import Tensor

from protokv.core import kernels
from protokv.core.compact import Anchoring
from protokv.core.context import EMPTY, Context, Segment
from protokv.core.rotary import Rotary, rerotate, unrotate
from protokv.core.settings import MemoryConfig, Positions
from protokv.core.step import StepKV
from protokv.core.tensors import LAYER, MemoryShape, StatePart, TensorSpec, count_bytes
from protokv.errors import StateCorrupt
from protokv.memories.exact import ExactMemory

LOCAL_TOKENS: Final = 15_000
"""The local window of ReKV's released code."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReKVConfig(MemoryConfig):
    """ReKV: every token is kept outside the device, and each layer retrieves blocks for a question.

    Attributes:
        positions: as for every memory. "compact", as published, packs the retrieved tokens after the prompt prefix.
    """

    name: ClassVar[str] = "rekv"

    positions: Positions = "compact"

    @property
    def near_tokens(self) -> int:
        """W, tokens of the window that new steps attend to."""
        return min(LOCAL_TOKENS, self.budget)


class ReKV(ExactMemory):
    """A local window on the device for encoding, and an archive of everything for questions."""

    bounded = False
    hides_recent = False

    def __init__(self, config: ReKVConfig, shape: MemoryShape, rotary: Rotary) -> None:
        super().__init__(config, shape, rotary)
        self._archive = Archive(shape, rotary, block_tokens=config.budget)

    @classmethod
    def declare(cls, config: Any, shape: MemoryShape) -> tuple[TensorSpec, ...]:
        """Declare the local window and the archive."""
        return (*super().declare(config, shape), *Archive.declare(shape))

    def parts(self) -> Sequence[StatePart]:
        """Return the parts of the window, and the archive."""
        return (*super().parts(), self._archive)

    def append(self, step: StepKV) -> None:
        """File one step and append it to the local window."""
        step = self._admit(step, self._near.last_step)
        self._archive.append(step)
        self._near.append(step)

    def recall(self) -> Context:
        """Return the prefix and the blocks that a question will choose. Valid until `append`, for one question each."""
        sink = self._slots.sink
        return Retrieval(
            archive=self._archive,
            sink_keys=self._slots.keys[:, :, sink],
            sink_values=self._slots.values[:, :, sink],
            budget=self._config.budget,
            rotary=self._rotary,
            next_position=self._archive.next_position,
        )

    def report(self) -> dict[str, Any]:
        """Return the tokens in the local window and in the archive."""
        counts = {"archive_tokens_in_use": self._archive.tokens, "archive_blocks": len(self._archive.blocks)}
        return super().report() | counts


# The table of block keys has this many rows at first, and doubles.
_ROOM = 16


@dataclass(frozen=True, slots=True)
class Block:
    """Consecutive tokens of one step, on the host.

    Attributes:
        kv: `[L, 2, H, T, D]` model dtype, keys rotated at their stream positions, then values.
        positions: `[T, P]` int64.
        low, high: least and greatest position of each component.
    """

    kv: Tensor
    positions: Tensor
    low: Sequence[int]
    high: Sequence[int]

    def __len__(self) -> int:
        return self.positions.shape[0]

    def span(self, components: Sequence[int]) -> tuple[int, int]:
        """Return the least and the greatest position over some of the components."""
        return min(self.low[c] for c in components), max(self.high[c] for c in components)


class Archive(StatePart):
    """Every token of the stream, exact, outside the device, in blocks in stream order with one key each.

    A block is one step, or a part of a step larger than the block size. Each block is a separate allocation of
    `[L, 2, H, T, D]` (pinned for CUDA), so nothing moves when the archive grows, and what one layer reads of a block is
    contiguous. The keys of the blocks stay on the device.
    """

    def __init__(self, shape: MemoryShape, rotary: Rotary, *, block_tokens: int) -> None:
        """Make an empty archive for blocks of at most `block_tokens` tokens."""
        self._shape, self._rotary, self._block_tokens = shape, rotary, block_tokens
        self.blocks: list[Block] = []
        self.tokens = 0
        self.next_position = shape.sink_tokens
        self._table = self._empty_table(_ROOM)

    @property
    def block_keys(self) -> Tensor:
        """Return `[B, L, H, D]` float32 on the device: the mean of each block's keys before rotation."""
        return self._table[: len(self.blocks)]

    def append(self, step: StepKV) -> None:
        """Take one step."""
        self.next_position = max(self.next_position, int(step.positions.max()) + 1)
        step = step.usable_only()
        bare = unrotate(step.keys.float(), *self._rotary(step.positions))
        for start in range(0, step.positions.shape[0], self._block_tokens):
            rows = slice(start, start + self._block_tokens)
            if len(self.blocks) == len(self._table):
                self._table = torch.cat((self._table, self._empty_table(len(self._table))))
            self._table[len(self.blocks)] = bare[:, :, rows].mean(2)
            self._add(step.keys[:, :, rows], step.values[:, :, rows], step.positions[rows])

    def read(self, layer: int, indices: Sequence[int], keys: Tensor, values: Tensor) -> None:
        """Copy the tokens of some blocks in order to the front of `keys` and `values` `[H, N, D]` on the device."""
        start = 0
        for index in indices:
            block = self.blocks[index]
            rows = slice(start, start + len(block))
            keys[:, rows].copy_(block.kv[layer, 0], non_blocking=True)
            values[:, rows].copy_(block.kv[layer, 1], non_blocking=True)
            start += len(block)

    @staticmethod
    def declare(shape: MemoryShape) -> tuple[TensorSpec, ...]:
        """Declare any number of tokens and blocks."""
        L, H, D, P = shape.layers, shape.kv_heads, shape.head_size, shape.position_components
        token, block, i64 = ("archived_token",), ("block",), torch.int64
        kv, size = (LAYER, "kv_head", *token, "feature"), (L, H, None, D)
        keys, means = (*block, LAYER, "kv_head", "feature"), "mean of each block's keys, rotation removed"
        return (
            TensorSpec("archive.keys", kv, size, shape.dtype, "keys of the archive, rotated"),
            TensorSpec("archive.values", kv, size, shape.dtype, "values of the archive"),
            TensorSpec(
                "archive.positions", (*token, "component"), (None, P), i64, "their stream positions", "position"
            ),
            TensorSpec("archive.lengths", block, (None,), i64, "tokens of each block", "tokens"),
            TensorSpec("archive.block_keys", keys, (None, L, H, D), torch.float32, means),
            TensorSpec("archive.next_position", (), (), i64, "position of the next token"),
        )

    def live_tensors(self) -> dict[str, Tensor]:
        """Return the state; keys and values are copied into one tensor each."""
        shape = self._shape
        size = (shape.layers, shape.kv_heads, 0, shape.head_size)
        no_kv, no_positions = torch.zeros(size, dtype=shape.dtype), torch.zeros(0, shape.position_components).long()
        return {
            "archive.keys": torch.cat([no_kv, *(block.kv[:, 0] for block in self.blocks)], 2),
            "archive.values": torch.cat([no_kv, *(block.kv[:, 1] for block in self.blocks)], 2),
            "archive.positions": torch.cat([no_positions, *(block.positions for block in self.blocks)]),
            "archive.lengths": torch.tensor([len(block) for block in self.blocks], dtype=torch.int64),
            "archive.block_keys": self.block_keys.clone(),
            "archive.next_position": torch.tensor(self.next_position),
        }

    def check(self, tensors: Mapping[str, Tensor]) -> None:
        """Check that the lengths divide the tokens into blocks."""
        lengths, n = tensors["archive.lengths"], tensors["archive.positions"].shape[0]
        if (lengths < 1).any() or (lengths > self._block_tokens).any() or int(lengths.sum()) != n:
            raise StateCorrupt(f"state: tensor archive.lengths does not cut {n} tokens into blocks of this memory")

    def take(self, tensors: Mapping[str, Tensor]) -> None:
        """Take a checked state."""
        lengths = tensors["archive.lengths"].tolist()
        self.blocks.clear()
        self.tokens = 0
        keys, values, positions = (tensors[f"archive.{name}"] for name in ("keys", "values", "positions"))
        for length in lengths:
            rows = slice(self.tokens, self.tokens + length)
            self._add(keys[:, :, rows], values[:, :, rows], positions[rows])
        self._table = self._empty_table(max(_ROOM, len(lengths)))
        self._table[: len(lengths)] = tensors["archive.block_keys"]
        self.next_position = int(tensors["archive.next_position"])

    def nbytes(self) -> dict[str, int]:
        """Return the bytes on the host, `archive`, and of the table of block keys on the device, `block_keys`."""
        held = sum(count_bytes(block.kv, block.positions) for block in self.blocks)
        return {"archive": held, "block_keys": count_bytes(self._table)}

    def _add(self, keys: Tensor, values: Tensor, positions: Tensor) -> None:
        L, H, T, D = keys.shape
        pinned = self._shape.device.type == "cuda"
        kv = torch.empty((L, 2, H, T, D), dtype=keys.dtype, pin_memory=pinned)
        kv[:, 0], kv[:, 1] = keys, values
        held = positions.cpu().clone()
        block = Block(kv, held, held.amin(0).tolist(), held.amax(0).tolist())
        self.blocks.append(block)
        self.tokens += T
        self.next_position = max(self.next_position, max(block.high) + 1)

    def _empty_table(self, rows: int) -> Tensor:
        shape = self._shape
        size = (rows, shape.layers, shape.kv_heads, shape.head_size)
        return torch.zeros(size, dtype=torch.float32, device=shape.device)


@dataclass(slots=True, kw_only=True)
class Retrieval(Context):
    """The prompt prefix and, in each layer, the blocks with the highest scores for the question.

    The first forward is the question. Its tokens stand at `next_position` and the following positions, the same in
    every component, so its rotation can be removed. The answer's tokens read the blocks that the question chose.

    Attributes:
        archive: the blocks; they must not change while this is in use.
        sink_keys, sink_values: `[L, H, P0, D]`.
        budget: the most tokens of all chosen blocks of a layer.
        rotary: the model's angles.
        next_position: where the question starts.
        shift: see `protokv.core.compact.Compactable`.
        packed: how chosen blocks are packed, so that the newest ends right below `packed_end`; None: they stay at their
            stream positions.
    """

    archive: Archive
    sink_keys: Tensor
    sink_values: Tensor
    budget: int
    rotary: Rotary
    next_position: int
    shift: int = 0
    packed: Anchoring | None = None
    packed_end: int = 0
    _chosen: dict[int, list[int]] = field(default_factory=dict, init=False)
    _shown: dict[int, Segment] = field(default_factory=dict, init=False)

    def at(self, layer: int, query: Tensor) -> tuple[Segment, ...]:
        """Return the prefix and the chosen blocks in stream order; the remaining slots are free.

        Every layer has `N = P0 + min(budget, tokens of the archive)` slots.
        """
        if layer not in self._shown:
            self._chosen[layer] = self._choose(layer, query)
            self._shown[layer] = self._read(layer, self._chosen[layer])
        return (self._shown[layer],)

    def positions_at(self, layer: int) -> Tensor | None:
        """Return the stream positions `[H, N, P]` of prefix and chosen blocks; None before the layer was asked."""
        if layer not in self._shown:
            return None
        H, N, _ = self._shown[layer].keys.shape
        chosen = [self.archive.blocks[index].positions for index in self._chosen[layer]]
        P0, P = self.sink_keys.shape[2], chosen[0].shape[1] if chosen else 1
        positions = torch.zeros(N, P, dtype=torch.int64)
        positions[:P0] = torch.arange(P0)[:, None]
        if chosen:
            found = torch.cat(chosen)
            positions[P0 : P0 + len(found)] = found
        return positions.expand(H, N, P)

    def visible_tokens(self) -> int:
        """Return the most slots that a layer sees; before any layer was asked, an upper bound."""
        counts = (sum(len(self.archive.blocks[index]) for index in chosen) for chosen in self._chosen.values())
        return self.sink_keys.shape[2] + max(counts, default=min(self.budget, self.archive.tokens))

    def far_span(self) -> int:
        """Return an upper bound of the distinct times of the chosen blocks, for any choice."""
        return self._most_positions((0,))

    def compact(self, anchoring: Anchoring, span: int | Tensor) -> Retrieval:
        """Return the same context with chosen blocks packed: each takes only the positions that its tokens span.

        Blocks keep their stream positions while all of them are shown. Layers choose different blocks, but text has one
        position in all layers: so room is set aside for the longest choice, and each layer's blocks end where the room
        ends. Blocks of one size fill the room.
        """
        if self.archive.tokens <= self.budget:
            return self
        moving = tuple(anchoring.moving)
        end = anchoring.origin + max(int(span), self._most_positions(moving))
        # Components that do not move, such as rows and columns, keep their highest position.
        highs = [max(component) for component in zip(*(block.high for block in self.archive.blocks), strict=True)]
        still = [high for component, high in enumerate(highs) if component not in moving]
        return replace(
            self,
            packed=anchoring,
            packed_end=end,
            shift=highs[0] + 1 - end,
            next_position=max([end, *(high + 1 for high in still)]),
        )

    def _choose(self, layer: int, query: Tensor) -> list[int]:
        """Return the indices of the best blocks that fit the budget, in stream order."""
        T, blocks, keys = query.shape[1], self.archive.blocks, self.archive.block_keys
        line = torch.arange(self.next_position, self.next_position + T, device=query.device)
        components = len(blocks[-1].high) if blocks else 1
        bare = unrotate(query.float(), *self.rotary(line[:, None].expand(T, components)))
        # Adding up the query heads of a KV head gives the same product as repeating block keys for every query head.
        wanted = bare.mean(1).reshape(keys.shape[2], -1, keys.shape[3]).sum(1)
        scores = keys[:, layer].flatten(1) @ wanted.flatten()
        room, chosen = self.budget, []
        for index in scores.argsort(descending=True, stable=True).tolist():
            room -= len(blocks[index])
            if room < 0:
                break
            chosen.append(index)
        return sorted(chosen)

    def _read(self, layer: int, chosen: Sequence[int]) -> Segment:
        H, P0, D = self.sink_keys.shape[1:]
        blocks = [self.archive.blocks[index] for index in chosen]
        n = sum(map(len, blocks))
        keys = self.sink_keys.new_zeros((H, P0 + min(self.budget, self.archive.tokens), D))
        values, bias = torch.zeros_like(keys), keys.new_zeros(keys.shape[:2], dtype=torch.float32)
        keys[:, :P0], values[:, :P0] = self.sink_keys[layer], self.sink_values[layer]
        self.archive.read(layer, chosen, keys[:, P0:], values[:, P0:])
        bias[:, P0 + n :] = EMPTY
        if self.packed is not None and blocks:
            before = torch.cat([block.positions for block in blocks])
            after = before.clone()
            moving = tuple(self.packed.moving)
            stop, end = n, self.packed_end
            for block in reversed(blocks):
                low, high = block.span(moving)
                after[stop - len(block) : stop, list(moving)] += end - 1 - high
                stop, end = stop - len(block), end - (high + 1 - low)
            seen = slice(P0, P0 + n)
            device = keys.device
            keys[:, seen] = rerotate(keys[:, seen], before.to(device), after.to(device), self.packed.rotary)
        if kernels.takes_columns(D, keys.dtype, keys.device):
            # Once for all tokens of an answer.
            keys, values = kernels.with_columns(keys, values, kernels.bias_columns(bias, D**-0.5, keys.dtype))
        return Segment(keys, values, bias)

    def _most_positions(self, components: Sequence[int]) -> int:
        """Return an upper bound of the positions that the chosen blocks take; exact if all blocks have one size.

        The number of blocks is bounded by the shortest blocks that fit, the positions per token by the widest block.
        """
        lengths = [len(block) for block in self.archive.blocks]
        ends = [block.span(components) for block in self.archive.blocks]
        spans = [high + 1 - low for low, high in ends]
        fitting, room = 0, self.budget
        for length in sorted(lengths):
            room -= length
            fitting += room >= 0
        most = (self.budget * span // length for span, length in zip(spans, lengths, strict=True))
        return min(sum(sorted(spans, reverse=True)[:fitting]), max(most, default=0))


ReKVConfig.memory = ReKV
