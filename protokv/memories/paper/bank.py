"""`PaperBank`: prototypes as the paper has them, with the mean place and the covariance of their
tokens in the picture.
"""

from __future__ import annotations

import torch
from torch import Tensor

from protokv.core.bank import FarTokens, PrototypeBank
from protokv.core.slots import KVSlots
from protokv.core.tensors import MemoryShape, Specs
from protokv.device.arrays import write_rows_


class PaperBank(PrototypeBank):
    """A bank whose prototypes have a place in the picture.

    Invariants: a slot of mass 0 is all zeros but for its `last_step`; Sigma is a covariance.
    """

    mean: Tensor  # `[L, H, K, 2]` float32, mu_k
    covariance: Tensor  # `[L, H, K, 2, 2]` float32, Sigma_k

    def __init__(self, shape: MemoryShape, prototypes: int, slots: KVSlots | None = None) -> None:
        super().__init__(shape, prototypes, slots)
        # rows that changed since the last call of `take_touched_`, with repeats
        self._touched: list[Tensor] = []

    @classmethod
    def declare(cls, shape: MemoryShape, prototypes: int) -> Specs:
        """Declare a bank of K prototypes."""
        declare = shape.axes(prototype=prototypes, xy=2, xy_other=2).declare
        dims = "layer kv_head prototype xy"
        share = "share of the image"
        f32 = torch.float32
        keys, values, mass, *others = super().declare(shape, prototypes)
        return (
            keys,
            values,
            mass,
            declare("bank.mean", dims, f32, "mean place of its tokens", share),
            declare("bank.covariance", f"{dims} xy_other", f32, "covariance of their places"),
            *others,
        )

    def open_(
        self, rows: Tensor, tokens: FarTokens, head: Tensor | int, token: Tensor, step: int
    ) -> None:
        """Initialize free slots `rows` `[n]` from a token `[n]` of a head each, with Sigma = I."""
        self.mass.view(-1)[rows] = tokens.mass[token]
        self.mean.flatten(0, 2)[rows] = tokens.coordinates[token]
        self.covariance.flatten(0, 2)[rows] = torch.eye(2, device=rows.device)
        self.position.flatten(0, 2)[rows] = tokens.positions[token].double()
        self.last_step.view(-1).index_fill_(0, rows, step)
        self.put_centers_(rows, tokens.keys[head, token], tokens.values[head, token])
        self.touch_(rows)

    def touch_(self, rows: Tensor) -> None:
        """Note that what `rows` show changed. Waits for nothing."""
        self._touched.append(rows)

    def take_touched_(self) -> Tensor:
        """Return the rows touched since the last call, some more than once; all rows if these are
        more.
        """
        rows = torch.cat([self.mass.new_empty(0), *self._touched])
        self._touched = []
        every = self.mass.numel()
        return rows if len(rows) <= every else torch.arange(every, device=rows.device)

    def free_(self, rows: Tensor) -> None:
        """Empty slots `rows` `[n]`; their `last_step` tells that they were used."""
        for name in ("key_center", "value_center", "mass", "mean", "covariance", "position"):
            getattr(self, name).flatten(0, 2).index_fill_(0, rows, 0)
        self.touch_(rows)

    def put_centers_(self, rows: Tensor, keys: Tensor, values: Tensor) -> None:
        """Replace the centres of `rows` `[n]` by keys and values `[n, D]`. Write their masses
        before.
        """
        write_rows_(self.key_center.flatten(0, 2), rows, keys)
        write_rows_(self.value_center.flatten(0, 2), rows, values)


def leave_out_uncounted(tokens: FarTokens) -> FarTokens:
    """Return the tokens that have a mass. This waits for the device."""
    kept = tokens.mass.nonzero().squeeze(1)
    return FarTokens(
        tokens.keys[:, kept],
        tokens.values[:, kept],
        tokens.coordinates[kept],
        tokens.positions[kept],
        tokens.mass[kept],
    )
