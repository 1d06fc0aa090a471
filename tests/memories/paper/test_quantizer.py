"""The product quantizer against plain loops."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from protokv.core.tensors import MemoryShape
from protokv.memories import PaperConfig
from protokv.memories.paper import residuals as quantizer
from tests.core.streams import PlainRotary
from tests.oracles.paper import NaiveProtoKV
from tests.tolerance import near


@pytest.mark.parametrize("seed", range(3))
def test_a_fit_is_a_fixed_point_of_lloyd_s_rule(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(quantizer, "CODEBOOK_ITERATIONS", 100)
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
    # All samples of one cluster come first: a start from the first samples, or from evenly spaced
    # ones, misses some.
    which = torch.cat((torch.zeros(200, dtype=torch.int64), torch.arange(7).repeat(8)))
    samples = centers[which] + 0.01 * torch.randn(len(which), 8)
    codebook = quantizer.fit_codebook(samples, 1, 7)[0]
    assert torch.cdist(centers, codebook).min(1).values.max() < 0.05


@given(
    st.integers(0, 2**31),
    st.integers(1, 5),
    st.integers(2, 17),
    st.integers(1, 40),
    st.sampled_from((2, 9, 2**28)),
)
def test_modes_are_those_of_the_beam_ties_included(
    seed: int, parts: int, codes: int, modes: int, most: int
) -> None:
    generator = torch.Generator().manual_seed(seed)
    counts = torch.randint(0, most, (3, parts, codes), generator=generator, dtype=torch.int32)
    shape = MemoryShape(1, 1, 8, 1, 0, torch.float32, torch.device("cpu"))
    memory = NaiveProtoKV(PaperConfig(budget=64), shape, PlainRotary(8))
    expected = [memory._top_modes(one, modes) for one in counts]
    found = quantizer.find_likeliest_codes(counts, modes)
    assert [[tuple(codes) for codes in one] for one in found.tolist()] == expected
