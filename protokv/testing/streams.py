"""Streams of random steps and a plain rotary embedding, for tests of memories."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from protokv.core.context import EMPTY_BIAS, Context, SlotContext
from protokv.core.memory import Memory
from protokv.core.rotary import Angles, rotate, unrotate
from protokv.core.step import StepKV
from protokv.core.tensors import MemoryShape, TensorDict, Tensors
from protokv.device.arrays import KeysValues


class PlainRotary:
    """RoPE of P components: the frequencies are dealt out to the components in turn."""

    def __init__(self, head_size: int) -> None:
        half = head_size // 2
        self.frequency = 100.0 ** -(torch.arange(half) / half)

    def __call__(self, positions: Tensor) -> Angles:
        """Return cos and sin `[..., D]` float32 of positions `[..., P]`."""
        owner = torch.arange(len(self.frequency)) % positions.shape[-1]
        angles = positions[..., owner] * self.frequency
        angles = torch.cat((angles, angles), -1)
        return angles.cos(), angles.sin()


class ToyStream:
    """A stream that revisits a few things: each token is one of `things` directions of its head,
    with some noise.
    """

    def __init__(
        self,
        shape: MemoryShape,
        seed: int,
        *,
        things: int = 12,
        noise: float = 0.3,
        still: float = 0.0,
        query_heads: int = 0,
    ) -> None:
        """Make a stream in which a share `still` of the tokens is seen again in the next step,
        where they were. Steps bring queries if there are `query_heads`.
        """
        self.shape = shape
        self.noise = noise
        self.still = still
        self.query_heads = query_heads
        self._last: StepKV | None = None
        self.rotary = PlainRotary(shape.head_size)
        self.generator = torch.Generator().manual_seed(seed)
        self._query_generator = torch.Generator().manual_seed(seed)
        self.keys = self._draw(things)
        self.values = self._draw(things)
        self.time = 0

    def _draw(self, tokens: int) -> Tensor:
        """Draw numbers `[L, H, n, D]`."""
        shape = self.shape
        size = (shape.layers, shape.kv_heads, tokens, shape.head_size)
        return torch.randn(size, generator=self.generator)

    def sink(self) -> KeysValues:
        """Return keys and values `[L, H, P0, D]` of a prompt prefix."""
        keys, values = (self._draw(self.shape.sink_tokens).to(self.shape.dtype) for _ in range(2))
        return keys, values

    def step(self, index: int, tokens: int) -> StepKV:
        """Return the next step, of so many tokens."""
        shape = self.shape
        T = tokens
        which = torch.randint(self.keys.shape[2], (T,), generator=self.generator)
        keys = self.keys[:, :, which] + self.noise * self._draw(T)
        values = self.values[:, :, which] + self.noise * self._draw(T)
        line = torch.arange(T)
        positions = self.time + line[:, None]
        if shape.position_components > 1:
            places = torch.stack((torch.full_like(line, index), line // 3, line % 3), 1)
            positions = places + shape.sink_tokens
        self.time += T
        coordinates = torch.rand(T, 2, generator=self.generator)
        last = self._last
        n = 0 if last is None else min(T, len(last.positions))
        if last is not None and self.still:
            again = (torch.rand(n, generator=self.generator) < self.still).nonzero().squeeze(1) - n
            # A value of the first layer, from the embedding alone, is the same; later ones differ.
            values[0, :, again] = last.values[0, :, again].float()
            coordinates[again] = last.coordinates[again]
        cos, sin = self.rotary(positions)
        rotated = rotate(keys, (cos, sin)).to(shape.dtype)
        self._last = StepKV(
            rotated,
            values.to(shape.dtype),
            positions,
            coordinates,
            index,
        )
        if not self.query_heads:
            return self._last
        queries = torch.randn(
            shape.layers, self.query_heads, T, shape.head_size, generator=self._query_generator
        )
        return replace(self._last, queries=queries.to(shape.dtype))


def make_shape(
    *,
    layers: int = 2,
    heads: int = 1,
    size: int = 8,
    components: int = 1,
    sink: int = 2,
    dtype: torch.dtype = torch.float32,
) -> MemoryShape:
    """Return the shape of a small model on the CPU."""
    return MemoryShape(layers, heads, size, components, sink, dtype, torch.device("cpu"))


def feed(memory: Memory, stream: ToyStream, lengths: Sequence[int]) -> list[StepKV]:
    """Start the memory and append one step of each length; return the steps."""
    memory.start(*stream.sink())
    steps = [stream.step(index, tokens) for index, tokens in enumerate(lengths)]
    for step in steps:
        memory.append(step)
    return steps


def read_layer(context: Context, layer: int, query: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return keys and values `[H, N, D]` and bias `[H, N]`, `-inf` where free, of all that a layer
    reads.

    A segment may want its queries turned; its keys are turned back instead: the logits are the
    same.
    """
    segments = context.at(layer, query)
    keys = []
    for one in segments:
        turned = one.keys
        if one.query_rotation is not None:
            cos, sin = one.query_rotation
            turned = unrotate(turned.float(), (cos, sin)).to(turned.dtype)
        keys.append(turned)
    bias = torch.cat([segment.bias for segment in segments], 1)
    free = bias.masked_fill(bias == EMPTY_BIAS, -torch.inf)
    return torch.cat(keys, 1), torch.cat([segment.values for segment in segments], 1), free


def read_slots(memory: Memory) -> SlotContext:
    """Return what a new step attends to, of a memory that shows it as slots."""
    context = memory.context()
    assert isinstance(context, SlotContext)
    return context


def copy_tensors(memory: Memory) -> TensorDict:
    """Return the state, safe from later steps."""
    return {name: tensor.clone() for name, tensor in memory.tensors().items()}


def have_equal_bits(one: Tensors, other: Tensors) -> bool:
    """Return True if two states have the same names and numbers."""
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)
