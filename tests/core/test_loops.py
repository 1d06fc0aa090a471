"""Compiled loops give what tensor operations give; `test_oracle` and `test_quantizer` have the oracles of both."""

from __future__ import annotations

import sys
from collections.abc import Callable
from importlib.util import find_spec
from typing import TypeVar

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch._subclasses import FakeTensorMode

from protokv.core import loops, quantizer
from protokv.core import prototypes as pseudo_tokens
from protokv.core.loops import compiling

Result = TypeVar("Result")


def by_both(compute: Callable[[bool], Result]) -> tuple[Result, Result]:
    """What loops make of it, and what tensor operations do."""
    return compute(True), compute(False)


@given(
    seed=st.integers(0, 999),
    heads=st.integers(1, 3),
    vectors=st.integers(0, 9),
    parts=st.integers(1, 3),
    words=st.integers(1, 17),
    kinds=st.sampled_from([2, 99]),
)
def test_codes_are_the_same_and_of_equal_codewords_the_first(
    seed: int, heads: int, vectors: int, parts: int, words: int, kinds: int
) -> None:
    generator = torch.Generator().manual_seed(seed)
    codebook = torch.randn(heads, parts, words, 4, generator=generator)
    codebook = codebook[:, :, torch.arange(words) % kinds]
    given = torch.randn(heads, vectors, parts * 4, generator=generator)
    looped, plain = by_both(lambda looped: quantizer.encode(codebook, given, looped=looped))
    assert torch.equal(looped, plain)
    assert not (looped >= kinds).any()


@given(
    seed=st.integers(0, 999),
    parts=st.integers(1, 9),
    codes=st.integers(2, 40),
    modes=st.integers(1, 12),
    most=st.sampled_from([1, 2, 9, 200, 2**26]),
)
def test_modes_are_the_same_ties_included(seed: int, parts: int, codes: int, modes: int, most: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    counts = torch.randint(0, most, (7, parts, codes), generator=generator, dtype=torch.int32)
    # As in a bank: every subspace has counted the same residuals, or (a row of its own) any number.
    counts[:6, :, 0] += counts[:6].sum(2).amax(1, keepdim=True) - counts[:6].sum(2)
    looped, plain = by_both(lambda looped: quantizer.top_modes(counts, modes, 1e-5, looped=looped))
    assert torch.equal(looped, plain)


@given(
    seed=st.integers(0, 999),
    size=st.sampled_from([2, 8, 36]),
    parts=st.sampled_from([1, 2]),
    rows=st.integers(0, 7),
    many=st.integers(1, 5),
    dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.float16]),
    is_turned=st.booleans(),
    is_partly_shown=st.booleans(),
)
def test_pseudo_tokens_are_the_same_bits(
    seed: int,
    size: int,
    parts: int,
    rows: int,
    many: int,
    dtype: torch.dtype,
    is_turned: bool,
    is_partly_shown: bool,
) -> None:
    generator = torch.Generator().manual_seed(seed)
    center, cos, sin = torch.randn(3, rows, size, generator=generator)
    words = torch.randn(11, size // parts, generator=generator)
    modes = torch.randint(0, 11, (rows, many, parts), generator=generator)
    places = torch.randperm(rows * many + 3, generator=generator)[: rows * many].view(rows, many)
    shown = None
    if is_partly_shown:
        shown = torch.arange(many) < torch.randint(1, many + 1, (rows, 1), generator=generator)

    def write(looped: bool) -> Tensor:
        slots = torch.full((rows * many + 3, size), 7.0, dtype=dtype)
        turn = (cos, sin) if is_turned else None
        pseudo_tokens.write_pseudo_tokens_(slots, places, shown, center, words, modes, turn, looped=looped)
        return slots

    looped, plain = by_both(write)
    assert torch.equal(looped, plain)
    written = places.numel() if shown is None else int(shown.sum())
    assert int((looped != 7).any(1).sum()) == written


def test_loops_serve_large_banks_where_numba_is_and_the_numbers_are_at_hand(monkeypatch: pytest.MonkeyPatch) -> None:
    mass = torch.zeros(2, 3, loops.LEAST)
    assert loops.serve(mass)
    assert not loops.serve(mass[..., 1:])
    assert loops.serve(mass, start=False)
    with monkeypatch.context() as patch:
        patch.delitem(sys.modules, "numba")
        assert not loops.serve(mass, start=False)
    with FakeTensorMode():
        assert not loops.serve(torch.zeros(loops.LEAST))
    assert not loops.serve(mass.to("meta"))
    monkeypatch.setenv("NUMBA_DISABLE_JIT", "1")
    assert not loops.serve(mass)
    monkeypatch.delenv("NUMBA_DISABLE_JIT")
    monkeypatch.setattr(loops, "find_spec", lambda name: None if name == "numba" else find_spec(name))
    loops._is_installed.cache_clear()
    assert not loops.serve(mass)
    monkeypatch.undo()
    loops._is_installed.cache_clear()
    assert loops.serve(mass)


def test_a_loop_is_compiled_where_no_cache_can_be_kept() -> None:
    # A function without a file has no folder for its cache.
    names: dict[str, Callable[[np.ndarray], int]] = {}
    exec("def total(numbers):\n    return numbers.sum()", names)
    total = compiling.compiled(names["total"])
    assert total(np.arange(5)) == 10
    assert total.stats.cache_path is None  # type: ignore[attr-defined]
