"""The product quantizer against plain loops."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from protokv.core.tensors import MemoryShape
from protokv.memories import PaperConfig
from protokv.memories.paper import residuals as quantizer
from tests.core.streams import PlainRotary
from tests.oracles.paper import NaiveProtoKV
from tests.tolerance import near, tolerance


@pytest.mark.parametrize("seed", range(3))
def test_a_fit_is_a_fixed_point_of_lloyd_s_rule(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(quantizer, "ITERATIONS", 100)
    torch.manual_seed(seed)
    samples = torch.randn(61, 12)
    codebook = quantizer.fit_codebook(samples, 3, 5)
    for g in range(3):
        part = samples[:, g * 4 : g * 4 + 4]
        code = torch.cdist(part, codebook[g]).argmin(1)
        assert code.unique().tolist() == [0, 1, 2, 3, 4]
        for c in range(5):
            own = part[code == c]
            torch.testing.assert_close(codebook[g, c], own.mean(0), **near(own, len(own)))


def test_well_separated_clusters_are_found() -> None:
    torch.manual_seed(1)
    centers = torch.randn(7, 8) * 10
    # All samples of one cluster come first: a start from the first samples, or from evenly spaced ones,
    # misses some.
    which = torch.cat((torch.zeros(200, dtype=torch.int64), torch.arange(7).repeat(8)))
    samples = centers[which] + 0.01 * torch.randn(len(which), 8)
    codebook = quantizer.fit_codebook(samples, 1, 7)[0]
    assert torch.cdist(centers, codebook).min(1).values.max() < 0.05


def test_samples_that_are_all_one_vector_give_that_vector() -> None:
    samples = torch.tensor([[1.0, 2.0, 3.0, 4.0]]).repeat(9, 1)
    codebook = quantizer.fit_codebook(samples, 2, 4)
    assert torch.equal(codebook, torch.tensor([[[1.0, 2.0]], [[3.0, 4.0]]]).expand(2, 4, 2))
    assert quantizer.encode_residuals(codebook[None], samples[None]).unique().numel() == 1


@pytest.mark.parametrize(("heads", "tokens", "parts", "codes", "size"), [(1, 1, 1, 2, 3), (3, 7, 4, 5, 12)])
def test_a_code_names_the_nearest_codeword(heads: int, tokens: int, parts: int, codes: int, size: int) -> None:
    torch.manual_seed(0)
    codebook, vectors = torch.randn(heads, parts, codes, size // parts), torch.randn(heads, tokens, size)
    found = quantizer.encode_residuals(codebook, vectors)
    for b, t, g in itertools.product(range(heads), range(tokens), range(parts)):
        part = vectors[b, t, g * (size // parts) : (g + 1) * (size // parts)]
        assert int(found[b, t, g]) == int((codebook[b, g] - part).square().sum(1).argmin())


@given(
    st.integers(1, 4).flatmap(
        lambda parts: st.lists(st.lists(st.integers(0, 3), min_size=3, max_size=3), min_size=parts, max_size=parts)
    ),
    st.integers(1, 9),
)
def test_the_modes_are_the_likeliest_of_all_code_tuples(counts: list[list[int]], modes: int) -> None:
    G, C, epsilon = len(counts), 3, quantizer.SMOOTHING
    found = quantizer.top_modes(torch.tensor([counts], dtype=torch.int32), modes)[0].tolist()

    def score(codes: tuple[int, ...]) -> float:
        return sum(math.log((counts[g][c] + epsilon) / (sum(counts[g]) + C * epsilon)) for g, c in enumerate(codes))

    best = sorted((score(codes) for codes in itertools.product(range(C), repeat=G)), reverse=True)
    expected = [best[s % len(best)] if len(best) < modes else best[s] for s in range(modes)]
    # Tuples whose logarithms add up to the same in float32 may change places.
    allowed = tolerance(torch.float32, 2 * G, -min(best))
    assert [score(tuple(codes)) for codes in found] == pytest.approx(expected, rel=0, abs=allowed)
    assert len({tuple(codes) for codes in found}) == min(modes, C**G)


@given(
    st.integers(0, 2**31),
    st.integers(1, 5),
    st.integers(2, 17),
    st.integers(1, 40),
    st.sampled_from((2, 9, 2**28)),
)
def test_modes_are_those_of_the_paper_s_beam_ties_included(
    seed: int, parts: int, codes: int, modes: int, most: int
) -> None:
    generator = torch.Generator().manual_seed(seed)
    counts = torch.randint(0, most, (3, parts, codes), generator=generator, dtype=torch.int32)
    shape = MemoryShape(1, 1, 8, 1, 0, torch.float32, torch.device("cpu"))
    memory = NaiveProtoKV(PaperConfig(budget=64), shape, PlainRotary(8))
    expected = [memory._top_modes(one, modes) for one in counts]
    found = quantizer.top_modes(counts, modes)
    assert [[tuple(codes) for codes in one] for one in found.tolist()] == expected


@given(st.integers(0, 999), st.integers(1, 3), st.integers(1, 30))
def test_fewer_modes_are_the_first_of_more(seed: int, parts: int, modes: int) -> None:
    # With few different counts there are ties; with more modes than tuples these repeat.
    counts = torch.randint(0, 3, (5, parts, 3), generator=torch.Generator().manual_seed(seed))
    most = quantizer.top_modes(counts, 30)
    assert torch.equal(quantizer.top_modes(counts, modes), most[:, :modes])


def test_decoding_joins_the_codewords_of_a_tuple() -> None:
    codebook = torch.arange(2 * 3 * 4 * 2.0).view(2, 3, 4, 2)
    found = quantizer.decode_residuals(codebook, torch.tensor([1]), torch.tensor([[[0, 3, 1], [2, 2, 2]]]))
    expected = torch.tensor([[[24.0, 25, 38, 39, 42, 43], [28, 29, 36, 37, 44, 45]]])
    assert torch.equal(found, expected)
