"""`PrototypeBank`: the stacked tensors of the far memory and what is true of them.

Owns the prototypes of every layer and KV head and the counters of what happened to them; `continuity` and
`maintenance` change it. Prototypes are addressed by their row in the flat view `[L * H * K]`. Invariants
(`check`): masses are whole and not negative; a slot of mass 0 is free, and all zeros besides its `last_step`;
Sigma is symmetric and positive semidefinite; mass only comes from absorbed, opened and recycled tokens.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import Tensor

from protokv.errors import StateCorrupt
from protokv.memory.base import MemoryShape, Spec, size_of


@dataclass(slots=True)
class PrototypeBank:
    """K prototypes for each of L layers and H KV heads.

    Attributes:
        key_center: `[L, H, K, D]` float32, c_k, rotation removed.
        value_center: `[L, H, K, D]` float32, p_k.
        mass: `[L, H, K]` float32, n_k; 0 is a free slot. Whole, and exact up to 2**24.
        mean: `[L, H, K, 2]` float32, mu_k.
        covariance: `[L, H, K, 2, 2]` float32, Sigma_k.
        position: `[L, H, K, P]` float32, the rotary anchor.
        last_step: `[L, H, K]` int64, the step that last touched the slot; -1 where none ever did.
        opened, absorbed, merged, expired, recycled: `[L, H]` int64, how many tokens opened a slot or were
            absorbed, how many slots were merged away, died of age or were opened again with a near token.
        moved: `[L, H, K]` bool, centres that changed since the last search for merges. Not state: all True is
            safe.
        stale: `[L, H, K]` bool, prototypes whose pseudo-tokens are out of date. Not state: all True is safe.
    """

    key_center: Tensor
    value_center: Tensor
    mass: Tensor
    mean: Tensor
    covariance: Tensor
    position: Tensor
    last_step: Tensor
    opened: Tensor
    absorbed: Tensor
    merged: Tensor
    expired: Tensor
    recycled: Tensor
    moved: Tensor
    stale: Tensor

    @classmethod
    def empty(cls, shape: MemoryShape, prototypes: int) -> PrototypeBank:
        """All slots free."""
        L, H, K, device = shape.layers, shape.kv_heads, prototypes, shape.device
        D, P = shape.head_size, shape.position_components

        def zeros(*size: int, dtype: torch.dtype = torch.float32) -> Tensor:
            return torch.zeros(L, H, *size, dtype=dtype, device=device)

        return cls(
            key_center=zeros(K, D),
            value_center=zeros(K, D),
            mass=zeros(K),
            mean=zeros(K, 2),
            covariance=zeros(K, 2, 2),
            position=zeros(K, P),
            last_step=zeros(K, dtype=torch.int64) - 1,
            opened=zeros(dtype=torch.int64),
            absorbed=zeros(dtype=torch.int64),
            merged=zeros(dtype=torch.int64),
            expired=zeros(dtype=torch.int64),
            recycled=zeros(dtype=torch.int64),
            moved=zeros(K, dtype=torch.bool).fill_(True),
            stale=zeros(K, dtype=torch.bool).fill_(True),
        )

    def open_(self, rows: Tensor, keys: Tensor, values: Tensor, seen: Seen, step: int) -> None:
        """Initialise free slots `rows` `[n]` from one token each: centres `[n, D]`, mass 1, Sigma = I."""
        self.key_center.view(-1, keys.shape[-1])[rows] = keys
        self.value_center.view(-1, keys.shape[-1])[rows] = values
        self.mass.view(-1)[rows] = 1.0
        self.mean.view(-1, 2)[rows] = seen.coordinates
        self.covariance.view(-1, 2, 2)[rows] = torch.eye(2, device=rows.device)
        self.position.view(-1, self.position.shape[-1])[rows] = seen.positions
        self.last_step.view(-1)[rows] = step
        self.touch_(rows)

    def free_(self, rows: Tensor) -> None:
        """Empty slots `rows`; they remember that they were used."""
        for tensor in (
            self.key_center,
            self.value_center,
            self.mass,
            self.mean,
            self.covariance,
            self.position,
        ):
            tensor.flatten(0, 2)[rows] = 0.0
        self.touch_(rows)

    def touch_(self, rows: Tensor) -> None:
        """Note that the centres of `rows` changed."""
        self.moved.view(-1)[rows] = True
        self.stale.view(-1)[rows] = True

    def check(self) -> None:
        """Refuse a bank that no stream can leave.

        Raises:
            StateCorrupt: naming the tensor.
        """
        free = self.mass == 0
        for name in _STATE:
            if not torch.isfinite(getattr(self, name)).all():
                raise StateCorrupt(f"state: tensor bank.{name} holds a number that is not finite")
        if (self.mass < 0).any() or (self.mass != self.mass.floor()).any():
            raise StateCorrupt("state: tensor bank.mass must hold whole numbers, none negative")
        if (self.last_step < -1).any() or ((self.last_step < 0) & ~free).any():
            raise StateCorrupt("state: tensor bank.last_step must be at least 0 where a slot is in use")
        for name in ("key_center", "value_center", "mean", "covariance", "position"):
            if getattr(self, name).flatten(3)[free].any():
                raise StateCorrupt(f"state: tensor bank.{name} must be 0 where a slot is free")
        (xx, xy), (yx, yy) = (row.unbind(-1) for row in self.covariance.unbind(-2))
        # Sigma is a sum of outer products; rounding leaves its determinant below 0 by a few units at most.
        if (xy != yx).any() or (xx < 0).any() or (yy < 0).any() or (xx * yy - xy * xy < -1e-5 * xx * yy).any():
            raise StateCorrupt("state: tensor bank.covariance must be symmetric and positive semidefinite")

    def report(self, step: int) -> list[dict[str, Any]]:
        """For each layer, over its heads: slots in use, quantiles of mass and age, counters."""
        alive = self.mass > 0
        return [
            {
                "slots": alive[layer].numel(),
                "slots_in_use": int(alive[layer].sum()),
                "mass_quantiles": _quantiles(self.mass[layer][alive[layer]]),
                "age_quantiles_steps": _quantiles((step - self.last_step[layer])[alive[layer]].float()),
                **{name: int(getattr(self, name)[layer].sum()) for name in _COUNTERS},
            }
            for layer in range(self.mass.shape[0])
        ]

    def nbytes(self) -> int:
        """Bytes of all tensors."""
        return size_of(*(getattr(self, field.name) for field in fields(self)))

    def tensors(self) -> dict[str, Tensor]:
        """Its part of the state."""
        return {f"bank.{name}": getattr(self, name) for name in _STATE}

    def spec(self) -> Spec:
        """Shapes and dtypes of `tensors`."""
        return {name: (tuple(tensor.shape), tensor.dtype) for name, tensor in self.tensors().items()}

    def loaded(self, tensors: Mapping[str, Tensor]) -> PrototypeBank:
        """A bank like this one that holds a state whose shapes are checked.

        Raises:
            StateCorrupt: the state breaks an invariant.
        """
        device = self.mass.device
        state = {name: tensors[f"bank.{name}"].to(device, copy=True).contiguous() for name in _STATE}
        fresh = torch.ones_like(self.moved)
        bank = PrototypeBank(**state, moved=fresh, stale=fresh.clone())
        bank.check()
        return bank

    def take(self, other: PrototypeBank) -> None:
        """Become what another bank of the same size is."""
        for field in fields(self):
            getattr(self, field.name).copy_(getattr(other, field.name))


@dataclass(frozen=True, slots=True)
class Seen:
    """Where tokens were: coordinates `[n, 2]` float32 and stream positions `[n, P]` float32."""

    coordinates: Tensor
    positions: Tensor

    def at(self, tokens: Tensor | slice) -> Seen:
        """Those of some of the tokens."""
        return Seen(self.coordinates[tokens], self.positions[tokens])


def _quantiles(values: Tensor) -> list[float]:
    """Minimum, quartiles and maximum; empty where there are no values."""
    if not values.numel():
        return []
    ordered = values.sort().values
    last = len(ordered) - 1
    return [float(ordered[round(share * last)]) for share in (0.0, 0.25, 0.5, 0.75, 1.0)]


_COUNTERS = ("opened", "absorbed", "merged", "expired", "recycled")
_STATE = tuple(field.name for field in fields(PrototypeBank) if field.name not in ("moved", "stale"))
