"""Sorting along the last axis, and medians. Numbers that are all different have one order, whoever sorts them.

A CPU sorts with numpy, whose sort works on vectors: up to ten times as fast as torch's.
"""

from __future__ import annotations

from torch import Tensor


def sorted_from(numbers: Tensor) -> Tensor:
    """The numbers in ascending order along the last axis, in their own place or in another: these are used up."""
    # A fake tensor has no data.
    if numbers.device.type == "cpu" and type(numbers) is Tensor:
        numbers.numpy().sort(axis=-1)
        return numbers
    return numbers.sort(dim=-1).values


def median_from(numbers: Tensor) -> Tensor:
    """The lower median along the last axis of numbers that are used up."""
    return sorted_from(numbers)[..., (numbers.shape[-1] - 1) // 2]
