"""`PrototypeBank`: the stacked tensors of the far memory and what is true of them.

Owns the prototypes of every layer and KV head and the counters of what happened to them; rules (`policy`)
change it. Prototypes are addressed by their row in the flat view `[L * H * K]`. Invariants
(`check`): masses are whole and not negative; a slot of mass 0 is free, and all zeros besides its `last_step`;
Sigma is symmetric and positive semidefinite; mass only comes from absorbed, opened and recycled tokens.

`Policy`: a rule by which evicted tokens enter a bank of prototypes, and what it is told and tells.

Owns the interface alone; each rule is a file in `policies`. A rule changes the bank in place and notes what changed
(`PrototypeBank.touch_`). State of its own beside the bank it declares and holds as any part of a memory does
(`protokv.core.tensors`). Knows nothing of rotation, contexts or files.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol

import torch
from torch import Tensor

from protokv.core.arrays import draw_rows_, write_rows_
from protokv.core.memory import MemoryShape
from protokv.core.tensors import LAYER, Clock, StatePart, TensorSpec
from protokv.errors import StateCorrupt


class PrototypeBank(StatePart):
    """K prototypes for each of L layers and H KV heads.

    Attributes:
        key_center: `[L, H, K, D]` float32, c_k, rotation removed.
        value_center: `[L, H, K, D]` float32, p_k.
        mass: `[L, H, K]` int64, n_k, exact for any stream; 0 is a free slot.
        mean: `[L, H, K, 2]` float32, mu_k.
        covariance: `[L, H, K, 2, 2]` float32, Sigma_k; there is none under a rule that has no use for it.
        position: `[L, H, K, P]` float64, the rotary anchor, exact for any stream.
        last_step: `[L, H, K]` int64, the step that last touched the slot; -1 where none ever did.
        opened, absorbed, merged, expired, recycled: `[L, H]` int64, how many tokens opened a slot or were
            absorbed, how many slots were merged away, died of age or were opened again with a near token.
        moved: `[L, H, K]` bool, centres that changed since the last search for merges. Not state: all True is
            safe.
        stale: `[L, H, K]` bool, prototypes whose pseudo-tokens are out of date. Not state: all True is safe.
        touched: the rows behind `stale` as they were given, for who must not ask the device which these are; None: any
            may be. Not state.
    """

    promise: ClassVar[str] = "bank: masses and counters agree with the tokens that left the near window"
    of_centers: ClassVar[tuple[str, ...]] = ("key_center", "value_center")
    """Where centres are held; in other banks otherwise, and then only `centers` and `put_centers_` know how."""

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

    def __init__(self, shape: MemoryShape, prototypes: int, *, spread: bool = True) -> None:
        """All slots free; `spread`: with Sigma."""
        self._names = []
        for spec in self.declare(shape, prototypes, spread=spread):
            self._names.append(spec.name.removeprefix("bank."))
            setattr(self, self._names[-1], spec.allocate(shape.device))
        self.moved = torch.ones_like(self.mass, dtype=torch.bool)
        self.stale = torch.ones_like(self.moved)
        self.touched: list[Tensor] | None = None

    @classmethod
    def declare_centers(cls, shape: MemoryShape, prototypes: int) -> tuple[TensorSpec, ...]:
        """Centres of K prototypes."""
        dims = (LAYER, "kv_head", "prototype", "feature")
        size = (shape.layers, shape.kv_heads, prototypes, shape.head_size)
        return (
            TensorSpec("bank.key_center", dims, size, torch.float32, "centre of its keys, rotation removed"),
            TensorSpec("bank.value_center", dims, size, torch.float32, "centre of its values"),
        )

    @classmethod
    def declare(cls, shape: MemoryShape, prototypes: int, *, spread: bool = True) -> tuple[TensorSpec, ...]:
        """A bank of K prototypes."""
        L, H, K, P = shape.layers, shape.kv_heads, prototypes, shape.position_components
        head, slot = (LAYER, "kv_head"), (LAYER, "kv_head", "prototype")
        floats, whole = torch.float32, torch.int64
        counters = {
            "opened": "tokens that opened a slot",
            "absorbed": "tokens that a prototype absorbed",
            "merged": "slots that were merged away",
            "expired": "slots that died of age",
            "recycled": "slots that were opened again with a near token",
        }
        sigma = TensorSpec(
            "bank.covariance", (*slot, "xy", "xy_other"), (L, H, K, 2, 2), floats, "covariance of its coordinates"
        )
        return (
            *cls.declare_centers(shape, prototypes),
            TensorSpec("bank.mass", slot, (L, H, K), whole, "tokens in it; 0: a free slot", "tokens"),
            TensorSpec(
                "bank.mean", (*slot, "xy"), (L, H, K, 2), floats, "mean coordinates of its tokens", "share of the image"
            ),
            *([sigma] if spread else []),
            TensorSpec(
                "bank.position", (*slot, "component"), (L, H, K, P), torch.float64, "its rotary anchor", "position"
            ),
            TensorSpec(
                "bank.last_step", slot, (L, H, K), whole, "step that last touched it; -1: none", "step", fill=-1
            ),
            *(
                TensorSpec(f"bank.{name}", head, (L, H), whole, meaning, "tokens" if "tokens" in meaning else "")
                for name, meaning in counters.items()
            ),
        )

    def open_(
        self, rows: Tensor, keys: Tensor, values: Tensor, seen: TokenPositions, step: int, opened: Tensor | None = None
    ) -> None:
        """Initialise free slots `rows` `[..., n]` from one token each: centres `[..., n, D]`, mass 1, Sigma = I.

        Where `opened` `[..., n]` bool is given, the others stay as they are.
        """
        given = {
            "mass": torch.ones_like(rows),
            "mean": seen.coordinates,
            "covariance": torch.eye(2, device=rows.device).expand(*rows.shape, 2, 2),
            "position": seen.positions,
            "last_step": torch.full_like(rows, step),
        }
        if opened is not None:
            centers = zip((keys, values), self.centers(rows), strict=True)
            keys, values = (torch.where(opened[..., None], new, held) for new, held in centers)
        for name, new in given.items():
            held = getattr(self, name).flatten(0, 2)
            if opened is not None:
                new = torch.where(opened.view(*rows.shape, *[1] * (held.ndim - 1)), new, held[rows])
            held[rows] = new
        self.put_centers_(rows.flatten(), keys.flatten(0, -2), values.flatten(0, -2))
        self.touch_(rows)

    def free_(self, rows: Tensor) -> None:
        """Empty slots `rows`; they remember that they were used."""
        for tensor in self._contents():
            tensor.flatten(0, 2)[rows] = 0
        self.touch_(rows)

    def free_where_(self, gone: Tensor) -> None:
        """Empty the slots that are set in `gone` `[L, H, K]` bool."""
        for tensor in self._contents():
            tensor.masked_fill_(gone.view(*gone.shape, *[1] * (tensor.ndim - 3)), 0)
        self.stale |= gone
        self.touched = None

    def _contents(self) -> list[Tensor]:
        return [getattr(self, name) for name in (*self.of_centers, "mass", "mean", "covariance", "position")]

    def centers(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        """Keys and values `[..., D]` float32 of prototypes `rows` `[...]`."""
        keys, values = (
            center.flatten(0, 2).index_select(0, rows.flatten()).view(*rows.shape, center.shape[3])
            for center in (self.key_center, self.value_center)
        )
        return keys, values

    def centers_of(self, heads: slice) -> tuple[Tensor, Tensor]:
        """Keys and values `[h, K, D]` float32 of some of the L * H heads."""
        return self.key_center.flatten(0, 1)[heads], self.value_center.flatten(0, 1)[heads]

    def put_centers_(self, rows: Tensor, keys: Tensor, values: Tensor) -> None:
        """Replace the centres of `rows` `[n]` by keys and values `[n, D]`; their masses are written before."""
        write_rows_(self.key_center.flatten(0, 2), rows, keys)
        write_rows_(self.value_center.flatten(0, 2), rows, values)

    def draw_centers_(self, moves: Tensor, share: Tensor) -> None:
        """Move the centres of rows `moves[0]` `[n]` by `share` `[n, 1]` of the way to those of rows `moves[1]`, all at
        once; what is several times among the first is none of the others. Masses are written before."""
        for center in (self.key_center, self.value_center):
            draw_rows_(center.flatten(0, 2), moves, share)

    def touch_(self, rows: Tensor) -> None:
        """Note that the centres of `rows` changed."""
        self.moved.view(-1)[rows] = True
        self.stale.view(-1)[rows] = True
        self.note_(rows)

    def note_(self, rows: Tensor) -> None:
        """Note that what `rows` show changed, for memories without residual statistics, which read `stale`; that is
        enough where no centre moved, and for a rule that never reads `moved`."""
        if self.touched is not None:
            self.touched.append(rows.reshape(-1))
            if sum(map(len, self.touched)) > self.stale.numel():
                self.touched = None

    def collect_touched_(self) -> Tensor:
        """The rows touched since this was last called, some more than once; all where that is not known."""
        touched, self.touched = self.touched, []
        if touched is None or not touched:
            return torch.arange(self.stale.numel() if touched is None else 0, device=self.stale.device)
        return touched[0] if len(touched) == 1 else torch.cat(touched)

    def check(self, tensors: Mapping[str, Tensor], clock: Clock | None) -> None:
        """Masses, counters and moments that a stream can leave."""
        mass, last_step = tensors["bank.mass"], tensors["bank.last_step"]
        free = mass == 0
        if ((last_step < 0) & ~free).any():
            raise StateCorrupt("state: tensor bank.last_step must be at least 0 where a slot is in use")
        for name in (*self.of_centers, "mean", "covariance", "position"):
            if name in self._names and ((tensors[f"bank.{name}"].flatten(3) != 0).any(3) & free).any():
                raise StateCorrupt(f"state: tensor bank.{name} must be 0 where a slot is free")
        if "bank.covariance" in tensors:
            _check_covariance(tensors["bank.covariance"])
        came = tensors["bank.opened"] + tensors["bank.absorbed"]
        if (mass.sum(-1) > came + tensors["bank.recycled"]).any():
            raise StateCorrupt("state: tensor bank.mass sums to more tokens than ever came into the bank")
        if clock is None or not mass.shape[2]:
            return
        left = clock.tokens_seen - int(tensors["near.ring"][1])
        # Some of the dropped tokens are still in the window.
        left -= int(tensors["sanitize.dropped"]) - int((~tensors["near.usable"]).sum())
        if (came != left).any():
            raise StateCorrupt(
                f"state: tensors bank.opened and bank.absorbed do not sum to the {left} tokens that left"
            )

    def report(self, step: int) -> list[dict[str, Any]]:
        """For each layer, over its heads: slots in use, quantiles of mass and age, counters."""
        alive = self.mass > 0
        return [
            {
                "slots": alive[layer].numel(),
                "slots_in_use": int(alive[layer].sum()),
                "mass_quantiles": _quantiles(self.mass[layer][alive[layer]].double()),
                "age_quantiles_steps": _quantiles((step - self.last_step[layer])[alive[layer]].float()),
                **{name: int(getattr(self, name)[layer].sum()) for name in _COUNTERS},
            }
            for layer in range(self.mass.shape[0])
        ]

    def held(self) -> dict[str, Tensor]:
        """Its part of the state."""
        return {f"bank.{name}": getattr(self, name) for name in self._names}

    def take(self, tensors: Mapping[str, Tensor]) -> None:
        """Take a checked state."""
        for name in self._names:
            getattr(self, name).copy_(tensors[f"bank.{name}"])
        self.moved.fill_(True)
        self.stale.fill_(True)
        self.touched = None

    def buffers(self) -> Mapping[str, Sequence[Tensor]]:
        """What is noted of the prototypes."""
        return {"bank": (self.moved, self.stale)}


@dataclass(frozen=True, slots=True)
class TokenPositions:
    """Where tokens were: coordinates `[n, 2]` float32 and stream positions `[n, P]` float64."""

    coordinates: Tensor
    positions: Tensor

    def at(self, tokens: Tensor | slice) -> TokenPositions:
        """Those of some of the tokens."""
        return TokenPositions(self.coordinates[tokens], self.positions[tokens])


def first_of(flags: Tensor, n: int) -> Tensor:
    """Where `flags` `[B, K]` are set, ascending, and then others: `[B, n]`."""
    return flags.to(torch.uint8).argsort(dim=1, descending=True, stable=True)[:, :n]


def _check_covariance(covariance: Tensor) -> None:
    (xx, xy), (yx, yy) = (row.unbind(-1) for row in covariance.unbind(-2))
    # Sigma is a sum of outer products; rounding leaves its determinant below 0 by a few units at most.
    if (xy != yx).any() or (xx < 0).any() or (yy < 0).any() or (xx * yy - xy * xy < -1e-5 * xx * yy).any():
        raise StateCorrupt("state: tensor bank.covariance must be symmetric and positive semidefinite")


def _quantiles(values: Tensor) -> list[float]:
    """Minimum, quartiles and maximum; empty where there are no values."""
    if not values.numel():
        return []
    ordered = values.sort().values
    last = len(ordered) - 1
    return [float(ordered[round(share * last)]) for share in (0.0, 0.25, 0.5, 0.75, 1.0)]


_COUNTERS = ("opened", "absorbed", "merged", "expired", "recycled")


@dataclass(frozen=True, slots=True)
class FarTokens:
    """Tokens on their way into the bank, flat over `B = L * H`.

    Attributes:
        keys: `[B, T, D]` float32, rotation removed.
        values: `[B, T, D]` float32.
        seen: their coordinates and positions, shared by all heads.
        usable: `[T]` bool; the others were dropped: they are zeros, and must change nothing. None: all.
    """

    keys: Tensor
    values: Tensor
    seen: TokenPositions
    usable: Tensor | None = None

    def usable_only(self) -> FarTokens:
        """Those that may change something; this waits for the device."""
        if self.usable is None:
            return self
        kept = self.usable.nonzero().squeeze(1)
        return FarTokens(self.keys[:, kept], self.values[:, kept], self.seen.at(kept))


@dataclass(frozen=True, slots=True)
class Assigned:
    """Which prototypes T tokens went to, and what these do not say of them.

    Attributes:
        prototype: `[B, T]` int64, the prototype of that head that absorbed the token; -1 where it stands for itself.
        key_residual, value_residual: `[B, T, D]` float32, against the centre after the update; undefined at -1.
    """

    prototype: Tensor
    key_residual: Tensor
    value_residual: Tensor

    @classmethod
    def none(cls, tokens: FarTokens) -> Assigned:
        """Every token stands for itself."""
        return cls(tokens.keys.new_full(tokens.keys.shape[:2], -1, dtype=torch.int64), tokens.keys, tokens.values)


def asks_freely(tensor: Tensor) -> bool:
    """Whether the host may ask for numbers of a tensor at no cost: on a CPU there is no one to wait for."""
    return tensor.is_cpu


class BankListener(Protocol):
    """Who keeps statistics by prototype row, flat over `L * H * K`, and follows what happens to it."""

    def freed_(self, rows: Tensor) -> None:
        """Rows that are set in `rows` `[L * H * K]` bool hold nothing any more."""

    def merged_(self, into: Tensor, gone: Tensor) -> None:
        """Row `into[x]` takes over what row `gone[x]` has, which is then free; where both are one row, nothing happens.
        Several may go into one, and none that others go into goes itself."""


class Policy(StatePart):
    """A rule over one bank; `needs_spread` says whether it reads the Sigma of prototypes."""

    needs_spread: ClassVar[bool] = True

    @classmethod
    def declare(cls, config: Any, shape: MemoryShape) -> tuple[TensorSpec, ...]:
        """The tensors of its own; most rules have none."""
        return ()

    @abstractmethod
    def __init__(self, bank: PrototypeBank, config: Any, shape: MemoryShape) -> None:
        """The rule over an empty bank of K >= 1 prototypes for each of the heads of `shape`."""

    @abstractmethod
    def absorb_(self, tokens: FarTokens, listeners: Sequence[BankListener], step: int) -> Assigned:
        """Put evicted tokens into the bank at time `step`, the one that is being appended."""

    def maintain_(self, newest: Callable[[], FarTokens], listeners: Sequence[BankListener], step: int) -> None:
        """What is done to the bank once a step, after its tokens and their residuals. `newest` gives the tokens of the
        newest step that are in the near window."""

    def held(self) -> dict[str, Tensor]:
        """Its part of the state."""
        return {}

    def take(self, tensors: Mapping[str, Tensor]) -> None:
        """Take its part of a checked state; the bank has taken its own before, so whatever is derived is void."""
