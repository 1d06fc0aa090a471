"""Centres of 8 bits stay close to their tokens however often they move, and take fewer bytes.

`test_rule` compares them with rounding written out.
"""

import pytest
import torch
from torch import Tensor

from protokv.memories.durable.quantized import (
    count_features_per_scale,
    dequantize_vectors,
    make_dither_offsets,
    make_feature_dither,
    quantize_vectors,
)


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
