"""Centres of 8 bits stay close to their tokens however often they move, and take fewer bytes.

`test_rule` compares them with rounding written out.
"""

from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from protokv.core.rotary import rotate
from protokv.memories import DurableConfig
from protokv.memories.durable.memory import DurableMemory
from protokv.memories.durable.quantized import (
    count_features_per_scale,
    dequantize_vectors,
    make_dither_offsets,
    make_feature_dither,
    quantize_vectors,
)
from tests.core.streams import World, shape_of, slots_of


def quantize(vectors: Tensor, mass: int) -> tuple[Tensor, Tensor]:
    """Codes and powers of two of centres `[n, D]` of prototypes of this mass."""
    size = vectors.shape[1]
    offsets = make_dither_offsets(
        torch.full((len(vectors),), mass), make_feature_dither(size, vectors.device)
    )
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
    most = vectors.double().abs().view(3, exponents.shape[1], -1).amax(2) / torch.exp2(
        exponents.double() - 127
    )
    assert ((most > 63.5) & (most <= 127)).all()
    # What is rounded stays as it is, whatever its mass becomes.
    assert torch.equal(dequantize_vectors(*quantize(found, mass + 1)), found)


def test_zeros_and_what_is_too_small_for_a_unit_are_zeros() -> None:
    for vectors in (torch.zeros(1, 32), torch.full((1, 32), 1e-40)):
        assert not dequantize_vectors(*quantize(vectors, 1)).any()


@pytest.mark.parametrize("drift", [0.0, 1.0])
def test_a_centre_that_moves_thousands_of_times_stays_where_all_of_its_tokens_are(
    drift: float,
) -> None:
    tokens = drawn(2000, 32, 1) + drift * torch.linspace(-1, 1, 2000)[:, None]
    center = tokens[:1]
    units = []
    for n in range(1, 2000):
        mean = (center.double() * n + tokens[n].double()) / (n + 1)
        codes, exponents = quantize(mean.float(), n + 1)
        center = dequantize_vectors(codes, exponents)
        units.append(2.0 ** (int(exponents) - 127))
    off = (center[0] - tokens.mean(0)).square().mean().sqrt() / max(units[1000:])
    # Rounded to nearest it would have stopped, some thirty of them away.
    assert off < 8


def memory_of(
    budget: int, size: int = 16, *, dtype: torch.dtype = torch.float32, **changes: object
) -> tuple[DurableMemory, World]:
    shape = shape_of(layers=2, heads=3, size=size, components=3, dtype=dtype)
    world = World(shape, 3)
    return DurableMemory(
        DurableConfig(budget=budget).with_fields(changes), shape, world.rotary
    ), world


@pytest.mark.parametrize("bits", [8, 32])
@pytest.mark.parametrize("words", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_attention_reads_what_the_bank_holds_after_every_step(
    bits: int, words: bool, dtype: torch.dtype
) -> None:
    memory, world = memory_of(60, dtype=dtype, center_bits=bits, words=words)
    memory.start(*world.sink())
    for index in range(20):
        memory.append(replace(world.step(index, 7), words=2 * words * (index % 3 > 0)))
        if index == 12:
            state = {name: tensor.clone() for name, tensor in memory.tensors().items()}
            memory, _ = memory_of(60, dtype=dtype, center_bits=bits, words=words)
            memory.load(state)
        context = slots_of(memory)
        state = memory.tensors()
        begin = context.far.start
        for prefix in ("", "words.") if words else ("",):
            held = {name: state[f"{prefix}bank.{name}"] for name in ("mass", "position")}
            for part, shown in (("key", context.keys), ("value", context.values)):
                if bits == 8:
                    codes, exponents = (
                        state[f"{prefix}bank.{part}_{name}"] for name in ("codes", "exponents")
                    )
                    unit = torch.exp2(exponents.float() - 127).masked_fill(exponents == 0, 0)
                    center = codes * unit.repeat_interleave(codes.shape[-1] // unit.shape[-1], -1)
                else:
                    center = state[f"{prefix}bank.{part}_center"]
                if part == "key":
                    center = rotate(center, *world.rotary(held["position"].long()))
                assert torch.equal(shown[:, :, begin : begin + center.shape[2]], center.to(dtype))
            end = begin + held["mass"].shape[2]
            assert torch.equal(context.bias[:, :, begin:end], held["mass"].log())
            assert context.positions is not None
            assert torch.equal(context.positions()[:, :, begin:end], held["position"].long())
            begin = end
