"""Centres of 8 bits stay close to their tokens however often they move, and take fewer bytes.

`test_rule` compares them with rounding written out.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from protokv.core.context import Context, SlotContext
from protokv.memories import DurableConfig
from protokv.memories.durable import memory as memory_module
from protokv.memories.durable.memory import DurableMemory
from protokv.memories.durable.quantized import (
    DecodedContext,
    count_features_per_scale,
    dequantize_vectors,
    make_dither_offsets,
    make_feature_dither,
    quantize_vectors,
)
from tests.core.streams import World, anchored, feed, shape_of


def quantize(vectors: Tensor, mass: int) -> tuple[Tensor, Tensor]:
    """Codes and powers of two of centres `[n, D]` of prototypes of this mass."""
    size = vectors.shape[1]
    offsets = make_dither_offsets(torch.full((len(vectors),), mass), make_feature_dither(size, vectors.device))
    codes, exponents, _ = quantize_vectors(vectors, count_features_per_scale(size), offsets)
    return codes.to(torch.int8), exponents


def drawn(rows: int, size: int, seed: int, scale: float = 1.0) -> Tensor:
    return torch.randn(rows, size, generator=torch.Generator().manual_seed(seed)) * scale


@given(
    size=st.sampled_from([2, 12, 32, 80, 128]),
    mass=st.integers(1, 2**40),
    scale=st.sampled_from([1e-30, 1e-3, 1.0, 1e4, 1e37]),
    seed=st.integers(0, 2**16),
)
def test_a_number_is_off_by_half_a_unit_where_it_is_alone_and_by_less_than_one_otherwise(
    size: int, mass: int, scale: float, seed: int
) -> None:
    vectors = drawn(3, size, seed, scale)
    codes, exponents = quantize(vectors, mass)
    unit = torch.exp2(exponents.double() - 127).repeat_interleave(size // exponents.shape[1], 1)
    found = dequantize_vectors(codes, exponents)
    off = (found.double() - vectors.double()).abs() / unit
    assert off.max() <= 0.5 if mass == 1 else off.max() < 1
    most = vectors.double().abs().view(3, exponents.shape[1], -1).amax(2) / torch.exp2(exponents.double() - 127)
    assert ((most > 63.5) & (most <= 127)).all()
    # What is rounded stays as it is, whatever its mass becomes.
    assert torch.equal(dequantize_vectors(*quantize(found, mass + 1)), found)


def test_zeros_and_what_is_too_small_for_a_unit_are_zeros() -> None:
    for vectors in (torch.zeros(1, 32), torch.full((1, 32), 1e-40)):
        assert not dequantize_vectors(*quantize(vectors, 1)).any()


@pytest.mark.parametrize("drift", [0.0, 1.0])
def test_a_centre_that_moves_thousands_of_times_stays_where_all_of_its_tokens_are(drift: float) -> None:
    tokens = drawn(2000, 32, 1) + drift * torch.linspace(-1, 1, 2000)[:, None]
    center, units = tokens[:1], []
    for n in range(1, 2000):
        mean = (center.double() * n + tokens[n].double()) / (n + 1)
        codes, exponents = quantize(mean.float(), n + 1)
        center = dequantize_vectors(codes, exponents)
        units.append(2.0 ** (int(exponents) - 127))
    off = (center[0] - tokens.mean(0)).square().mean().sqrt() / max(units[1000:])
    # Rounded to nearest it would have stopped, some thirty of them away.
    assert off < 8


def memory_of(budget: int = 41, size: int = 16, **changes: object) -> tuple[DurableMemory, World]:
    shape = shape_of(layers=2, heads=3, size=size, components=3)
    world = World(shape, 3)
    return DurableMemory(DurableConfig(budget=budget).with_fields(changes), shape, world.rotary), world


def same_segments(one: Context, other: Context) -> bool:
    query = torch.ones(6, 2, 16)
    pairs = [(one.at(layer, query), other.at(layer, query)) for layer in range(2)]
    return all(
        torch.equal(getattr(a, name), getattr(b, name))
        for found, expected in pairs
        for a, b in zip(found, expected, strict=True)
        for name in ("keys", "values", "bias")
    )


def compare_places(one: Context, other: Context) -> None:
    for layer in range(2):
        places, expected = one.positions_at(layer), other.positions_at(layer)
        assert places is not None
        assert expected is not None
        assert torch.equal(places, expected)


@pytest.mark.parametrize("begins", [0, 2**17])
def test_what_is_decoded_where_it_is_read_is_moved_hidden_and_cut_as_if_it_were_held(
    begins: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    memory, world = memory_of(center_bits=8)
    memory.start(*world.sink())
    for index in range(14):
        step = world.step(index, 7)
        memory.append(replace(step, positions=step.positions + begins))
    # Few prototypes are decoded at once.
    held = memory.context()
    assert type(held) is SlotContext
    monkeypatch.setattr(memory_module, "_DECODED_AT_ONCE", 0)
    context = memory.context()
    assert isinstance(context, DecodedContext)
    moving = anchored(world, 2)
    pairs = [
        (context, held),
        (context.compact(moving), held.compact(moving)),
        (context.before(begins + 30), held.before(begins + 30)),
    ]
    assert type(pairs[1][0]) is not DecodedContext
    for one, other in pairs:
        assert same_segments(one, other)
        compare_places(one, other)


def test_a_prototype_takes_a_quarter_of_the_bytes_and_the_declaration_says_so() -> None:
    sizes = {}
    for bits in (8, 32):
        bytes_of = [memory_of(budget, 128, center_bits=bits, split=(0, 1))[0] for budget in (40, 120)]
        sizes[bits] = [(memory.bytes_held, memory.most_bytes) for memory in bytes_of]
        memory, world = memory_of(120, 128, center_bits=bits, split=(0, 1))
        feed(memory, world, [7] * 30)
        assert memory.bytes_held == bytes_of[1].bytes_held
    (held, saved), (held_float, saved_float) = (
        [after - before for before, after in zip(*sizes[bits], strict=True)] for bits in (8, 32)
    )
    assert held * 4 < held_float
    assert saved * 3 < saved_float
