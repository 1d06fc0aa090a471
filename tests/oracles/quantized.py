"""Literal rounding of centres to 8 bits, number by number; the fast rounding must equal it bit for
bit.
"""

import math

import torch
from torch import Tensor


def round_center(key: Tensor, value: Tensor, mass: int) -> tuple[Tensor, Tensor]:
    """Return the centre `[D]`, `[D]` of a prototype of `mass` tokens, rounded to 8 bits."""
    numbers = [*key.tolist(), *value.tolist()]
    D = len(key)
    together = math.gcd(D, 32)
    for start in range(0, 2 * D, together):
        group = range(start, start + together)
        unit = 2.0**-126
        most = max(abs(numbers[feature]) for feature in group)
        while most > 127 * unit:
            unit *= 2
        for feature in group:
            sequence = (mass * 3242174889 + feature * 2447445414) % 2**32
            up = sequence // 2**15 / 2**17 if mass > 1 else 0.5
            # What is too small for a unit is 0.
            code = math.floor(numbers[feature] / unit + up) if most >= 2.0**-121 else 0
            numbers[feature] = code * unit
    return torch.tensor(numbers[:D]), torch.tensor(numbers[D:])
