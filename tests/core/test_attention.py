"""Attention over biased slots and a causal tail: the fused one, and the plain one."""

import math
from dataclasses import replace
from unittest.mock import patch

import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from protokv.core.attention import TokenCache, attend
from protokv.core.context import EMPTY_BIAS, KVSegment, SlotContext
from protokv.core.tensors import count_bytes
from protokv.device import kernels
from protokv.device.answers import AnswerBuffer
from protokv.device.slots import ANSWER_ROWS, SlotRows
from protokv.stream.evidence import measure_attention_weights
from tests.core.streams import PlainRotary
from tests.oracles import attention as plain
from tests.tolerance import Tolerance, check_near, tolerance

CPU = torch.device("cpu")
# A query, the segments and the tail that it attends to, and the factor on the logits.
Case = tuple[Tensor, list[KVSegment], tuple[Tensor, Tensor], float]


def allowed(case: Case, dtype: torch.dtype) -> Tolerance:
    """What an order of sums leaves of a weighted mean: products over a head, and values of all
    tokens by their weights.

    Logits are of order one here, and so is what their rounding changes of a weight.
    """
    query, segments, (_, values), _ = case
    shown = [*(segment.values for segment in segments), values]
    # What is rounded to a shorter dtype: turned queries, weights, the parts that are merged and
    # what comes out.
    terms = 4 if dtype != torch.float32 else query.shape[2] + sum(part.shape[1] for part in shown)
    scale = max(float(part.abs().max()) for part in shown if part.numel())
    return {"rtol": 0.0, "atol": tolerance(dtype, terms, scale)}


@st.composite
def cases(draw: st.DrawFn) -> Case:
    """Any grouping, number and size of segments and dtype, some slots free, some heads with no slot
    in use.
    """
    H = draw(st.integers(1, 3))
    groups = draw(st.integers(1, 7))
    T = draw(st.integers(1, 7))
    D = draw(st.sampled_from([2, 6, 16, 34]))
    n = T + draw(st.integers(0, 5))
    dtype = draw(st.sampled_from([torch.float32, torch.bfloat16, torch.float16]))
    g = torch.Generator().manual_seed(draw(st.integers(0, 99)))
    normal = lambda *size: torch.randn(size, generator=g).to(dtype)  # noqa: E731
    segments = []
    for N in draw(st.lists(st.integers(0, 67), max_size=3)):
        bias = torch.rand(H, N, generator=g) * 6
        bias[torch.rand(H, N, generator=g) < 0.3] = EMPTY_BIAS
        bias[: draw(st.integers(0, H))] = EMPTY_BIAS
        turn = (
            PlainRotary(D)(torch.tensor([draw(st.integers(-99, 99))]))
            if draw(st.booleans())
            else None
        )
        segments.append(KVSegment(normal(H, N, D), normal(H, N, D), bias, turn))
    # Keys of attention are as often parts of larger tensors as not.
    tail = normal(H, n + 3, D)[:, :n], normal(H, n + 3, D)[:, :n]
    query = normal(T, H * groups, D).transpose(0, 1)
    return query, segments, tail, D**-0.5


@given(cases())
def test_the_fused_form_is_the_plain_one(case: Case) -> None:
    query, segments, tail, scaling = case
    out = attend(query, segments, tail, scaling)
    assert out.dtype == query.dtype
    expected = plain.attend(query, segments, tail, scaling)
    torch.testing.assert_close(out, expected, **allowed(case, query.dtype))


@given(st.integers(1, 3), st.integers(1, 5), st.integers(1, 40), st.booleans(), st.integers(0, 9))
def test_every_kernel_returns_the_same_output_and_log_sum_exp(
    H: int, M: int, N: int, shared: bool, seed: int
) -> None:
    g = torch.Generator().manual_seed(seed)
    query, keys, values = (torch.randn(H, size, 16, generator=g) for size in (M, N, N))
    mask = torch.randn(*((1, M, N) if shared else (H, 1, N)), generator=g)
    out, lse = kernels.compute_attention(query, keys, values, mask, 0.25)
    logits = (query @ keys.transpose(1, 2)).double() * 0.25 + mask
    largest = max(float(part.abs().max()) for part in (values, logits, lse))
    torch.testing.assert_close(
        lse.double(), logits.logsumexp(-1), rtol=0, atol=tolerance(lse.dtype, 16 + N, largest)
    )
    for mine, other in zip(
        kernels._by_products(query, keys, values, mask, 0.25), (out, lse), strict=True
    ):
        check_near(mine, other, 16 + N, largest)


@st.composite
def masses(draw: st.DrawFn) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Query, keys, values and bias of odd sizes in half precision: masses to 10^6, some slots or
    whole heads free.
    """
    H = draw(st.integers(1, 3))
    M = draw(st.integers(1, 9))
    N = draw(st.integers(1, 67))
    D = draw(st.sampled_from([8, 16, 24, 64, 128]))
    dtype = draw(st.sampled_from([torch.bfloat16, torch.float16]))
    g = torch.Generator().manual_seed(draw(st.integers(0, 99)))
    query, keys, values = (torch.randn(H, size, D, generator=g).to(dtype) for size in (M, N, N))
    bias = torch.rand(H, N, generator=g) * math.log(draw(st.sampled_from([2.0, 1e3, 1e6])))
    bias[torch.rand(H, N, generator=g) < draw(st.sampled_from([0.0, 0.4]))] = EMPTY_BIAS
    bias[: draw(st.integers(0, H))] = EMPTY_BIAS
    return query, keys, values, bias


@given(masses())
def test_a_bias_in_the_columns_of_the_keys_is_a_bias(
    case: tuple[Tensor, Tensor, Tensor, Tensor],
) -> None:
    query, keys, values, bias = case
    D = keys.shape[2]
    columns = kernels.make_bias_columns(bias, D**-0.5, keys.dtype)
    out, lse = kernels.compute_biased_attention(
        query, *kernels.append_bias_columns(keys, values, columns), bias, D**-0.5
    )
    used = bias > EMPTY_BIAS
    # Of a bias up to 14 three parts keep what float32 keeps.
    added = columns.double().sum(-1) * D**-0.5
    torch.testing.assert_close(added[used], bias[used].double(), rtol=0, atol=2e-6)
    exact = (query.double() @ keys.double().transpose(1, 2) * D**-0.5 + bias[:, None]).logsumexp(-1)
    head = used.any(1)
    # The exponentials of the CPU's kernel keep 14 bits; a bias in half precision would be off by
    # 0.03.
    torch.testing.assert_close(lse[head].double(), exact[head], rtol=0, atol=2**-13)
    expected, _ = kernels._by_products(query, keys, values, bias[:, None], D**-0.5)
    spread = tolerance(keys.dtype, 4, float(values.abs().max()))
    torch.testing.assert_close(out[head], expected[head], rtol=0, atol=spread)
    # A head whose slots are all free has a finite result, which counts for nothing beside any
    # token.
    assert out.isfinite().all()
    assert (lse[~head] < -8000).all()


@given(cases())
def test_attention_by_columns_is_the_plain_one(case: Case) -> None:
    query, segments, local, scaling = case
    with patch.object(
        kernels, "uses_bias_columns", lambda size, dtype, _: dtype in kernels.HALF_DTYPES
    ):
        out = attend(query, segments, local, scaling)
        # Another scale than the columns were made for.
        other = attend(query, [widened(one) for one in segments], local, 2 * scaling)
    torch.testing.assert_close(out, plain.attend(*case), **allowed(case, query.dtype))
    expected = plain.attend(query, segments, local, 2 * scaling)
    torch.testing.assert_close(other, expected, **allowed(case, query.dtype))


def widened(segment: KVSegment) -> KVSegment:
    """Return a segment with columns, where its dtype has any."""
    if segment.keys.dtype == torch.float32:
        return segment
    columns = kernels.make_bias_columns(
        segment.bias, segment.keys.shape[2] ** -0.5, segment.keys.dtype
    )
    keys, values = kernels.append_bias_columns(segment.keys, segment.values, columns)
    return replace(segment, keys=keys, values=values)


def rms(values: Tensor) -> float:
    return float(values.double().pow(2).mean().sqrt())


def test_half_precision_keeps_the_float32_bias() -> None:
    g = torch.Generator().manual_seed(5)
    # Large masses that differ by less than bfloat16 can tell apart, over keys that are all alike:
    # only the bias counts.
    keys = torch.ones(1, 300, 32).bfloat16()
    values = torch.randn(1, 300, 32, generator=g).bfloat16()
    bias = math.log(50_000.0) + torch.rand(1, 300, generator=g) * 2e-2
    assert bias.bfloat16().unique().numel() == 1
    values[0, bias[0] > bias.median()] += 1
    values[0, bias[0] <= bias.median()] -= 1
    query = torch.ones(1, 1, 32).bfloat16()
    tail = (keys[:, :1], values[:, :1])
    segment = KVSegment(keys, values, bias)
    asked = query.float()
    expected = plain.attend(asked, [segment], tail, 0.0)
    flat = plain.attend(asked, [replace(segment, bias=bias.bfloat16().float())], tail, 0.0)
    # Accumulated and rounded once in the dtype; without the bias's low bits the mean would be off
    # by ten times that.
    assert rms(attend(query, [segment], tail, 0.0) - expected) < 0.3 * rms(flat - expected)


@given(masses(), st.integers(1, 7), st.integers(1, 9), st.integers(0, 3))
def test_a_token_sees_slots_and_answer_as_one(
    case: tuple[Tensor, Tensor, Tensor, Tensor], groups: int, asked: int, padding: int
) -> None:
    _, keys, values, bias = case
    (H, N, D), dtype, g = keys.shape, keys.dtype, torch.Generator().manual_seed(asked)
    with patch.object(kernels, "uses_bias_columns", lambda *_: True):
        rows = SlotRows((1, H, N, D), dtype, CPU)
    rows.keys.copy_(keys)
    rows.values.copy_(values)
    rows.bias.copy_(bias)
    wide = rows.read()
    assert wide is not None
    # what an earlier answer has left
    for held in wide:
        left = held[..., N:, :D]
        left.copy_(torch.randn(left.shape, generator=g))
    assert torch.equal(rows.values[0], values)
    # A value has no columns of its own.
    numbers = wide[0].numel() + wide[1][..., :D].numel() + kernels.BIAS_COLUMNS
    assert count_bytes(rows.keys, rows.values, *rows.beside()) == numbers * dtype.itemsize
    context = SlotContext(
        rows.keys, rows.values, rows.bias, slice(0), lambda: torch.arange(N), wide=wide
    )
    room = AnswerBuffer(ANSWER_ROWS, CPU, context.wide)
    cache = TokenCache(1)
    said: list[Tensor] = []
    cache.context = context
    cache.layers[0].answer = room
    # A question with padding behind it, and three tokens, each over what nobody sees.
    for count in (asked, 1, 1, 1):
        more = padding if not said else 0
        new, query = (
            torch.randn(n, count + more, D, generator=g).to(dtype) for n in (2 * H, H * groups)
        )
        with patch.object(kernels, "uses_bias_columns", lambda *_: True):
            room.enter(count + more)
            out = cache.attend(0, query, (new[:H], new[H:]), D**-0.5)
        said.append(new[:, :count])
        tail = torch.cat(said, 1)
        asks = query[:, :count], [KVSegment(keys, values, bias)], (tail[:H], tail[H:]), D**-0.5
        torch.testing.assert_close(out[:, :count], plain.attend(*asks), **allowed(asks, dtype))
        room.begin += count


@given(cases())
def test_shares_are_the_weights_of_the_last_token_over_a_group_of_heads(case: Case) -> None:
    query, segments, (keys, _), scaling = case
    slots, tail = measure_attention_weights(query[:, -1], segments, keys, scaling)
    H = keys.shape[0]
    N = sum(segment.keys.shape[1] for segment in segments)
    expected = (
        plain.weights(query, segments, keys, scaling)[:, -1].view(H, -1, N + keys.shape[1]).mean(1)
    )
    # In whatever dtype the model is, logits and weights are float32.
    terms = query.shape[2] + N + keys.shape[1]
    check_near(torch.cat((slots, tail), 1), expected, terms)
    assert slots.shape == (H, N)
