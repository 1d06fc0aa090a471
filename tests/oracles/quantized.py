"""Centres of 8 bits written out number by number: what `quantized` must equal bit for bit. For tests."""

from __future__ import annotations

import math

import torch
from torch import Tensor


def round_center(key: Tensor, value: Tensor, mass: int) -> tuple[Tensor, Tensor]:
    """The centre `[D]`, `[D]` of a prototype of `mass` tokens as 8 bits hold it."""
    numbers = [*key.tolist(), *value.tolist()]
    D = len(key)
    together = math.gcd(D, 32)
    for start in range(0, 2 * D, together):
        group = range(start, start + together)
        unit, most = 2.0**-126, max(abs(numbers[feature]) for feature in group)
        while most > 127 * unit:
            unit *= 2
        for feature in group:
            up = (mass * 3242174889 + feature * 2447445414) % 2**32 / 2**32 if mass > 1 else 0.5
            numbers[feature] = math.floor(numbers[feature] / unit + up) * unit
    return torch.tensor(numbers[:D]), torch.tensor(numbers[D:])
