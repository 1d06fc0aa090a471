"""Attention over a biased context and a causal tail, against a dense softmax written out."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from protokv.attention import Tail, attend
from protokv.context import SlotContext


def dense(query: Tensor, context: tuple[Tensor, Tensor, Tensor], tail: tuple[Tensor, Tensor], scaling: float) -> Tensor:
    """Equation 3 of the paper, one query head and one query at a time, in float64."""
    keys, values, bias = (t.double() for t in context)
    tail_keys, tail_values = (t.double() for t in tail)
    heads, T, D = query.shape
    groups = heads // keys.shape[0]
    out = torch.zeros(heads, T, D, dtype=torch.float64)
    for head in range(heads):
        h = head // groups
        for i in range(T):
            seen = tail_keys.shape[1] - T + i + 1
            k = torch.cat([keys[h], tail_keys[h, :seen]])
            v = torch.cat([values[h], tail_values[h, :seen]])
            b = torch.cat([bias[h], torch.zeros(seen, dtype=torch.float64)])
            logits = k @ query[head, i].double() * scaling + b
            out[head, i] = logits.softmax(0) @ v
    return out


@st.composite
def cases(draw: st.DrawFn) -> tuple[int, int, int, int, int, int, int]:
    T = draw(st.integers(1, 7))
    return (
        draw(st.integers(1, 3)),
        draw(st.sampled_from([1, 4, 7])),
        draw(st.integers(0, 13)),
        T + draw(st.integers(0, 5)),
        T,
        draw(st.sampled_from([2, 6, 16])),
        draw(st.integers(0, 99)),
    )


@given(cases())
def test_equals_a_dense_softmax_at_every_grouping_and_odd_size(case: tuple[int, ...]) -> None:
    H, groups, N, n, T, D, seed = case
    g = torch.Generator().manual_seed(seed)
    query = torch.randn(H * groups, T, D, generator=g)
    bias = torch.rand(H, N, generator=g) * 6
    bias[torch.rand(H, N, generator=g) < 0.3] = -torch.inf
    context = (torch.randn(H, N, D, generator=g), torch.randn(H, N, D, generator=g), bias)
    tail = (torch.randn(H, n, D, generator=g), torch.randn(H, n, D, generator=g))
    out = attend(query, context, tail, D**-0.5)
    torch.testing.assert_close(out.double(), dense(query, context, tail, D**-0.5), rtol=1e-5, atol=1e-5)


def test_a_slot_with_bias_log_n_weighs_as_much_as_n_copies() -> None:
    g = torch.Generator().manual_seed(3)
    query, key, value = (torch.randn(2, 1, 8, generator=g) for _ in range(3))
    other = torch.randn(2, 3, 8, generator=g)
    tail = (torch.randn(2, 1, 8, generator=g), torch.randn(2, 1, 8, generator=g))

    def context(copies: int, bias: float) -> tuple[Tensor, Tensor, Tensor]:
        keys = torch.cat([key.expand(-1, copies, -1), other], 1)
        values = torch.cat([value.expand(-1, copies, -1), -other], 1)
        return keys, values, torch.tensor([bias] * copies + [0.0] * 3).expand(2, -1)

    one = attend(query, context(1, math.log(5)), tail, 0.5)
    torch.testing.assert_close(one, attend(query, context(5, 0.0), tail, 0.5), rtol=1e-5, atol=1e-6)


def test_an_empty_slot_is_invisible_whatever_it_holds() -> None:
    g = torch.Generator().manual_seed(4)
    query, keys, values = (torch.randn(2, 4, 8, generator=g) for _ in range(3))
    tail = (query.clone(), values.clone())
    bias = torch.zeros(2, 4)
    bias[:, 2] = -torch.inf
    before = attend(query, (keys, values, bias), tail, 0.3)
    keys[:, 2], values[:, 2] = 1e4, -1e4
    assert torch.equal(before, attend(query, (keys, values, bias), tail, 0.3))


def test_half_precision_keeps_a_float32_softmax() -> None:
    g = torch.Generator().manual_seed(5)
    query, keys, values = (torch.randn(1, n, 32, generator=g).bfloat16() for n in (1, 300, 300))
    bias = torch.full((1, 300), math.log(1000.0)) + torch.rand(1, 300, generator=g) * 1e-2
    tail = (torch.randn(1, 1, 32, generator=g).bfloat16(), torch.randn(1, 1, 32, generator=g).bfloat16())
    out = attend(query, (keys, values, bias), tail, 32**-0.5)
    assert out.dtype == torch.bfloat16
    expected = dense(query, (keys, values, bias), tail, 32**-0.5).bfloat16()
    # One rounding of the result is allowed, none of the logits: 2 ** -8 is bfloat16's relative step.
    torch.testing.assert_close(out, expected, rtol=2**-7, atol=2**-10)


def test_a_tail_shows_each_layer_all_tokens_so_far() -> None:
    tail = Tail(2, 1, 5, 4, dtype=torch.float32, device=torch.device("cpu"))
    first, second = torch.randn(1, 2, 4), torch.randn(1, 3, 4)
    for layer in range(2):
        keys, _ = tail.append(layer, first + layer, first)
        assert torch.equal(keys, first + layer)
    for layer in range(2):
        keys, _ = tail.append(layer, second + layer, second)
        assert torch.equal(keys, torch.cat([first, second], 1) + layer)
    assert tail.length == 5
    assert tail.keys.shape == (2, 1, 5, 4)


def test_a_tail_refuses_more_tokens_than_it_was_made_for() -> None:
    tail = Tail(1, 1, 2, 4, dtype=torch.float32, device=torch.device("cpu"))
    with pytest.raises(ValueError, match="a tail of 2 tokens cannot take 3"):
        tail.append(0, torch.zeros(1, 3, 4), torch.zeros(1, 3, 4))


def test_hiding_the_far_slots_leaves_the_context_alone() -> None:
    keys = torch.randn(1, 2, 6, 4)
    context = SlotContext(keys, keys, torch.zeros(1, 2, 6), far=slice(1, 4))
    hidden = context.without_far()
    assert torch.isinf(hidden.bias[..., 1:4]).all()
    assert not torch.isinf(hidden.bias[..., [0, 4, 5]]).any()
    assert not torch.isinf(context.bias).any()
