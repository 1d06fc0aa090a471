"""Vectors at a byte a feature (`center_bits=8`).

32 features share a power of two, and each is a whole number from -127 to 127 times it, as in MXINT8
(OCP Microscaling Formats 1.0, 2023), which needs no fitted codebook.

A centre that has moved is rounded again. A heavy one moves by less than half a unit at a time, so
rounding to nearest would stop it. So from mass 2 on a number is rounded up as often as its fraction
says, by a sequence over mass and feature that fills the unit interval evenly (R2: Roberts, 2018).
The unit is a power of two: any other would change with the centre, and all of its numbers would be
rounded again. `samples/studies/harder/` measures what this keeps.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from protokv.device.arrays import find_greatest, multiply_codes

_SHARED_FEATURES = 32
"""Numbers that share a power of two, or fewer where a head is no multiple of it."""
# The unit is the smallest power of two with greatest number / unit <= 127. Its exponent is that of
# the greatest number less 6, or less 5 if the mantissa is above 127 / 64. `_TO_UNIT` is added to
# the bits of the float32, whose exponent stands above 23 bits: the carry handles both cases.
_SHIFT = 23
_TO_UNIT = (1 << _SHIFT) - (63 << (_SHIFT - 6)) - 1 - (6 << _SHIFT)
_EXPONENT = 255 << _SHIFT
_INVERSE = 254 << _SHIFT
# The steps of R2, 1 / g and 1 / g**2 with g**3 = g + 1, in units of 2**-32. Sums wrap around in
# int32, in which the first one is below 0.
_BY_MASS = 3242174889 - 2**32
_BY_FEATURE = 2447445414
# The mask of the highest 17 bits: a float32 below 127 has as many after the point. With more bits a
# sum would be rounded up.
_LEVELS = -(1 << 15)


def count_features_per_scale(size: int) -> int:
    """Return how many of the D features of a head share a power of two."""
    return math.gcd(size, _SHARED_FEATURES)


def quantize_vectors(
    vectors: Tensor, together: int, offsets: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Return codes `[..., F]` float32 of finite `vectors` `[..., F]` float32, and powers of two
    `[..., F / together]`: their exponents in uint8, and their bits in int32.

    `offsets`, from 0 to below 1, are added before a number is rounded down. Numbers below 2**-121
    become 0.
    """
    parts = vectors.reshape(*vectors.shape[:-1], -1, together)
    greatest = find_greatest(parts)
    powers = (greatest.view(torch.int32) + _TO_UNIT).clamp_(min=0) & _EXPONENT
    one_over = (_INVERSE - powers).view(torch.float32)
    codes = torch.addcmul(offsets.view_as(parts), parts, one_over[..., None]).floor_()
    exponents = torch.empty_like(powers, dtype=torch.uint8)
    torch.bitwise_right_shift(powers, _SHIFT, out=exponents)
    return codes.view(vectors.shape), exponents, powers


def dequantize_vectors(codes: Tensor, exponents: Tensor) -> Tensor:
    """Return vectors `[..., F]` float32, exactly."""
    return scale_codes(codes, exponents.int() << _SHIFT)


def scale_codes(codes: Tensor, powers: Tensor) -> Tensor:
    """Return codes `[..., F]`, int8 or float32 that may change, times the powers of two with these
    bits: a device may round a computed power. The power 0 is 0."""
    parts = codes.view(*powers.shape, -1)
    return multiply_codes(parts, powers.view(torch.float32)[..., None]).view(codes.shape)


def make_feature_dither(features: int, device: torch.device) -> Tensor:
    """Return the part of `make_dither_offsets` that is of the features, `[features]` int32, less a
    half.
    """
    return (torch.arange(features, device=device) * _BY_FEATURE - 2**31).int()


def make_dither_offsets(mass: Tensor, features: Tensor) -> Tensor:
    """Return the offsets of centres of `mass` `[n]`, `[n, F]` float32: a half for a token alone."""
    sequence = torch.add(features, mass.int()[:, None], alpha=_BY_MASS).bitwise_and_(_LEVELS)
    return torch.add(0.5, sequence.masked_fill_(mass[:, None] == 1, 0), alpha=2.0**-32)
