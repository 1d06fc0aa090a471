"""Tensors of states of format 1 and 2 in today's dtypes.

Until format 2 the mass of a prototype was float32, which stops counting at 2**24, and so was its position.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

_DTYPES = {"bank.mass": torch.int64, "bank.position": torch.float64}


def migrate(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The tensors of a state of any format as they are now; those that were never float32 stay as they are.

    A mass that is no whole number, which no stream leaves, stays as well, so that it is refused for its dtype.
    """
    migrated = dict(tensors)
    for name, dtype in _DTYPES.items():
        old = tensors.get(name)
        if old is None or old.dtype != torch.float32:
            continue
        new = old.to(dtype)
        if torch.equal(new.to(old.dtype), old):
            migrated[name] = new
    return migrated


def migrate_shapes(
    found: Mapping[str, tuple[Sequence[int], torch.dtype]],
) -> dict[str, tuple[Sequence[int], torch.dtype]]:
    """Shapes and dtypes as `migrate` would leave them, of tensors that were not read."""
    return {
        name: (shape, _DTYPES[name] if name in _DTYPES and dtype == torch.float32 else dtype)
        for name, (shape, dtype) in found.items()
        if name != "bank.generator"
    }
