"""`Archive`: every token of the stream, exact, outside the device, in blocks that are found by a key each.

A block is one step, or the part of a step that the block size allows. Owns the blocks, their keys (which stay on the
device) and what is saved of both; who chooses blocks, and by what, is not its business. It grows with the stream unless
it is capped, in which case the oldest blocks are dropped for new ones.

Blocks are separate allocations of `[L, 2, H, T, D]`: nothing is ever moved when the archive grows, no room is held
ready, and what one layer reads of a block is one contiguous piece. They lie in pinned memory where the device is CUDA.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from protokv.errors import StateCorrupt
from protokv.memory.base import MemoryShape, StepKV
from protokv.memory.state import LAYER, Clock, StatePart, TensorSpec, size_of
from protokv.rotary import Rotary, unrotate

# Blocks that the table of keys has room for at first; it doubles.
_ROOM = 16


@dataclass(frozen=True, slots=True)
class Block:
    """Some consecutive tokens of one step, on the host.

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

    def reach(self, components: Sequence[int]) -> tuple[int, int]:
        """Least and greatest position over some of the components."""
        return min(self.low[c] for c in components), max(self.high[c] for c in components)


class Archive(StatePart):
    """Blocks in stream order, newest last."""

    promise: ClassVar[str] = "archive: its blocks cut its tokens, and its counts agree with them"

    def __init__(self, shape: MemoryShape, rotary: Rotary, *, block_tokens: int, capacity: int) -> None:
        """An empty archive.

        Args:
            shape: of keys and values, and the device.
            rotary: of the model.
            block_tokens: tokens that a block may have.
            capacity: tokens that may be held, at least `block_tokens`; 0: any number.
        """
        self._shape, self._rotary = shape, rotary
        self._block_tokens, self._capacity = block_tokens, capacity
        self.blocks: deque[Block] = deque()
        self.tokens = 0
        self.dropped = 0
        self.next_position = shape.sink_tokens
        self._table = self._empty_table(_ROOM)
        self._first = 0

    @property
    def block_keys(self) -> Tensor:
        """`[B, L, H, D]` float32 on the device: the mean of each block's keys, rotation removed."""
        return self._table[self._first : self._first + len(self.blocks)]

    def append(self, step: StepKV) -> None:
        """Take one step."""
        self.next_position = max(self.next_position, int(step.positions.max()) + 1)
        step = step.usable_only()
        bare = unrotate(step.keys.float(), *self._rotary(step.positions))
        for start in range(0, step.positions.shape[0], self._block_tokens):
            rows = slice(start, start + self._block_tokens)
            self._make_room()
            self._table[self._first + len(self.blocks)] = bare[:, :, rows].mean(2)
            self._add(step.keys[:, :, rows], step.values[:, :, rows], step.positions[rows])
        while self._capacity and self.tokens > self._capacity:
            oldest = self.blocks.popleft()
            self._first += 1
            self.tokens -= len(oldest)
            self.dropped += len(oldest)

    def read(self, layer: int, indices: Sequence[int], keys: Tensor, values: Tensor) -> None:
        """Copy the tokens of some blocks, one behind the other, to the front of `[H, N, D]` on the device."""
        start = 0
        for index in indices:
            block = self.blocks[index]
            rows = slice(start, start + len(block))
            keys[:, rows].copy_(block.kv[layer, 0], non_blocking=True)
            values[:, rows].copy_(block.kv[layer, 1], non_blocking=True)
            start += len(block)

    @staticmethod
    def declare(shape: MemoryShape) -> tuple[TensorSpec, ...]:
        """As many tokens and blocks as there are."""
        L, H, D, P = shape.layers, shape.kv_heads, shape.head_size, shape.position_components
        kv = (LAYER, "kv_head", "archived_token", "feature")
        return (
            TensorSpec("archive.keys", kv, (L, H, None, D), shape.dtype, "keys of the archive, rotated"),
            TensorSpec("archive.values", kv, (L, H, None, D), shape.dtype, "values of the archive"),
            TensorSpec(
                "archive.positions",
                ("archived_token", "component"),
                (None, P),
                torch.int64,
                "stream position of each token of the archive",
                "position",
            ),
            TensorSpec("archive.lengths", ("block",), (None,), torch.int64, "tokens of each block", "tokens"),
            TensorSpec(
                "archive.block_keys",
                ("block", LAYER, "kv_head", "feature"),
                (None, L, H, D),
                torch.float32,
                "mean of each block's keys, rotation removed",
            ),
            TensorSpec("archive.count", ("field",), (2,), torch.int64, "tokens dropped, position of the next token"),
        )

    def held(self) -> dict[str, Tensor]:
        """The state, its blocks copied into one tensor."""
        shape = self._shape
        size = (shape.layers, shape.kv_heads, 0, shape.head_size)
        nothing, nowhere = torch.zeros(size, dtype=shape.dtype), torch.zeros(0, shape.position_components).long()
        return {
            "archive.keys": torch.cat([nothing, *(block.kv[:, 0] for block in self.blocks)], 2),
            "archive.values": torch.cat([nothing, *(block.kv[:, 1] for block in self.blocks)], 2),
            "archive.positions": torch.cat([nowhere, *(block.positions for block in self.blocks)]),
            "archive.lengths": torch.tensor([len(block) for block in self.blocks], dtype=torch.int64),
            "archive.block_keys": self.block_keys.clone(),
            "archive.count": torch.tensor([self.dropped, self.next_position]),
        }

    def check(self, tensors: Mapping[str, Tensor], clock: Clock | None) -> None:
        """Lengths, counts and positions agree with each other and with the settings."""
        lengths, n = tensors["archive.lengths"], tensors["archive.positions"].shape[0]
        in_bounds = not lengths.numel() or bool((lengths >= 1).all() & (lengths <= self._block_tokens).all())
        if not in_bounds or int(lengths.sum()) != n:
            raise StateCorrupt(f"state: tensor archive.lengths does not cut {n} tokens into blocks of this memory")
        if self._capacity and n > self._capacity:
            raise StateCorrupt(f"state: tensor archive.lengths has {n} tokens where {self._capacity} are the most")
        dropped, following = tensors["archive.count"].tolist()
        highest = int(tensors["archive.positions"].max()) if n else -1
        if dropped < 0 or following < max(self._shape.sink_tokens, highest + 1) or (dropped and not self._capacity):
            raise StateCorrupt(f"state: tensor archive.count holds {dropped}, {following}, which no stream leaves")

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
        self._first = 0
        self.dropped, self.next_position = tensors["archive.count"].tolist()

    def nbytes(self) -> dict[str, int]:
        """Bytes on the host, `archive`, and of the table of keys on the device, its spare room included, `block_keys`;
        both grow with the stream."""
        held = sum(size_of(block.kv, block.positions) for block in self.blocks)
        return {"archive": held, "block_keys": size_of(self._table)}

    def _add(self, keys: Tensor, values: Tensor, positions: Tensor) -> None:
        L, H, T, D = keys.shape
        pinned = self._shape.device.type == "cuda"
        kv = torch.empty((L, 2, H, T, D), dtype=keys.dtype, pin_memory=pinned)
        kv[:, 0], kv[:, 1] = keys, values
        places = positions.cpu().clone()
        block = Block(kv, places, places.amin(0).tolist(), places.amax(0).tolist())
        self.blocks.append(block)
        self.tokens += T
        self.next_position = max(self.next_position, max(block.high) + 1)

    def _make_room(self) -> None:
        """Have a free row in the table of keys; rows of dropped blocks are given up when it is full."""
        if self._first + len(self.blocks) == self._table.shape[0]:
            live = self.block_keys
            self._table = self._empty_table(max(_ROOM, 2 * len(live)))
            self._table[: len(live)] = live
            self._first = 0

    def _empty_table(self, rows: int) -> Tensor:
        shape = self._shape
        size = (rows, shape.layers, shape.kv_heads, shape.head_size)
        return torch.zeros(size, dtype=torch.float32, device=shape.device)
