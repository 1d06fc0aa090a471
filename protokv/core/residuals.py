"""`Residuals`: what a centre averages away, as product-quantiser histograms of each prototype.

Owns the histograms H^K and H^V (or their joint form H^KV), the update counts n_res, the codebooks of each layer and
head, and the bounded reservoir that they are fitted to. Until a head's reservoir is full, its residuals wait there with
the prototype that they belong to; then its codebooks are fitted, once, and the waiting residuals are counted.
Invariant: for every prototype of a fitted head, the counts of each subspace sum to n_res. Knows nothing of how
prototypes are chosen.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor

from protokv.config import PrototypeConfig
from protokv.core import quantizer
from protokv.core.bank import Assigned
from protokv.core.memory import MemoryShape
from protokv.core.tensors import LAYER, Clock, StatePart, TensorSpec
from protokv.errors import ConfigError, StateCorrupt


class Residuals(StatePart):
    """Residual statistics of `[L, H, K]` prototypes; rows are flat over `L * H * K`."""

    promise: ClassVar[str] = "residuals: every subspace counts the updates of its prototype"

    def __init__(self, config: PrototypeConfig, shape: MemoryShape, prototypes: int) -> None:
        L, H, D, K = shape.layers, shape.kv_heads, shape.head_size, prototypes
        G = config.subquantizers
        if D % G:
            raise ConfigError(
                f"subquantizers: {G} parts do not divide the head size {D} of this model",
                hint="choose a divisor of the head size, or turn residual off",
            )
        self._config = config
        self._size = (L, H, K, D)
        state = {spec.name: spec.allocate(shape.device) for spec in self.declare(config, shape, prototypes)}
        self._counts = {name: state[name] for name in _COUNTS if name in state}
        self.updates, self.fitted = state["residual.updates"], state["codebook.fitted"]
        self.key_codebook, self.value_codebook = state["codebook.keys"], state["codebook.values"]
        self._warmup = {name: state[name] for name in _WARMUP}
        self._warmup["warmup.count"].zero_()
        self._any_fitted = False

    @staticmethod
    def declare(config: PrototypeConfig, shape: MemoryShape, prototypes: int) -> tuple[TensorSpec, ...]:
        """Statistics of K prototypes. The reservoir is gone once all heads are fitted."""
        L, H, D, K = shape.layers, shape.kv_heads, shape.head_size, prototypes
        G, C, R = config.subquantizers, config.codewords, config.warmup_residuals
        head, slot, part = (LAYER, "kv_head"), (LAYER, "kv_head", "prototype"), "subquantizer"
        if config.histograms == "joint":
            dims, size = (*slot, part, "key_codeword", "value_codeword"), (L, H, K, G, C, C)
            counts = [TensorSpec("residual.joint_counts", dims, size, torch.int32, "pairs of codes counted", "tokens")]
        else:
            counts = [
                TensorSpec(
                    f"residual.{kind}_counts",
                    (*slot, part, "codeword"),
                    (L, H, K, G, C),
                    torch.int32,
                    f"{kind} codes counted",
                    "tokens",
                )
                for kind in ("key", "value")
            ]
        words = (*head, part, "codeword", "part_feature")
        waiting = (*head, "residual")
        return (
            *counts,
            TensorSpec("residual.updates", slot, (L, H, K), torch.int32, "residuals counted or waiting", "tokens"),
            TensorSpec("codebook.keys", words, (L, H, G, C, D // G), torch.float32, "codewords of key residuals"),
            TensorSpec("codebook.values", words, (L, H, G, C, D // G), torch.float32, "codewords of value residuals"),
            TensorSpec("codebook.fitted", head, (L, H), torch.bool, "whether a head has its codebooks"),
            *(
                TensorSpec(
                    f"warmup.{kind}",
                    (*waiting, "feature"),
                    (L, H, R, D),
                    torch.float32,
                    f"{kind[:-1]} residuals that wait for the codebooks",
                    optional=True,
                )
                for kind in ("keys", "values")
            ),
            TensorSpec(
                "warmup.owner", waiting, (L, H, R), torch.int64, "their prototype; -1: none", fill=-1, optional=True
            ),
            # A head that is fitted has had all of them.
            TensorSpec(
                "warmup.count", head, (L, H), torch.int64, "residuals that came", "tokens", fill=R, optional=True
            ),
        )

    def record_(self, assigned: Assigned) -> Tensor:
        """Take the residuals of one step; return which heads `[L * H]` bool were fitted by it."""
        L, H, K, _ = self._size
        valid = assigned.prototype >= 0
        heads = torch.arange(L * H, device=valid.device)[:, None]
        rows = heads * K + assigned.prototype.clamp(min=0)
        self.updates.view(-1).index_add_(0, rows.view(-1), valid.int().view(-1))
        before = self.fitted.view(-1).clone()
        if self._warmup and valid.shape[1]:
            valid = valid & ~self._reserve(assigned, valid)
        self._count(assigned.key_residual, assigned.value_residual, assigned.prototype, valid)
        return self.fitted.view(-1) & ~before

    def _reserve(self, assigned: Assigned, valid: Tensor) -> Tensor:
        """Put residuals of heads not yet fitted into their reservoirs; return which, `[L * H, T]` bool."""
        R, D = self._config.warmup_residuals, self._size[3]
        count = self._warmup["warmup.count"].view(-1)
        place = count[:, None] + valid.cumsum(1) - 1
        waits = valid & ~self.fitted.view(-1, 1) & (place < R)
        # Of each place of the reservoir the token that takes it; one place more is for those that wait nowhere.
        token = torch.full((len(count), R + 1), -1, device=count.device)
        order = torch.arange(waits.shape[1], device=count.device).expand_as(waits)
        token = token.scatter_(1, torch.where(waits, place, R), order)[:, :R]
        comes, token = token >= 0, token.clamp(min=0)
        for name, given in (("warmup.keys", assigned.key_residual), ("warmup.values", assigned.value_residual)):
            held = self._warmup[name].view(-1, R, D)
            held.copy_(torch.where(comes[..., None], given.gather(1, token[..., None].expand_as(held)), held))
        owner = self._warmup["warmup.owner"].view(-1, R)
        owner.copy_(torch.where(comes, assigned.prototype.gather(1, token), owner))
        count += waits.sum(1)
        ready = ~self.fitted.view(-1) & (count == R)
        if ready.any():
            self._fit(ready.nonzero().squeeze(1))
        return waits

    def _fit(self, heads: Tensor) -> None:
        config = self._config
        keys, values = (self._warmup[name].flatten(0, 1) for name in ("warmup.keys", "warmup.values"))
        # One head at a time, so that a codebook does not depend on which heads happen to be ready together.
        for head in heads.tolist():
            for samples, codebook in ((keys, self.key_codebook), (values, self.value_codebook)):
                codebook.flatten(0, 1)[head] = quantizer.fit(
                    samples[head], config.subquantizers, config.codewords, config.kmeans_iterations
                )
        self.fitted.view(-1)[heads] = self._any_fitted = True
        owner = self._warmup["warmup.owner"].flatten(0, 1)
        waiting = (owner >= 0) & torch.zeros_like(owner, dtype=torch.bool).index_fill(0, heads, True)
        self._count(keys, values, owner, waiting)
        # What has been counted is not kept, so that the state does not depend on how long other heads take.
        for tensor, empty in ((keys, 0.0), (values, 0.0), (owner, -1)):
            tensor[heads] = empty
        if self.fitted.all():
            self._warmup = {}

    def _count(self, keys: Tensor, values: Tensor, prototype: Tensor, valid: Tensor) -> None:
        """Count residuals `[B, n, D]` of prototypes `[B, n]` where `valid` and the head is fitted."""
        K, G, C = self._size[2], self._config.subquantizers, self._config.codewords
        counted = (valid & self.fitted.view(-1, 1)).int()[..., None]
        codes = [
            quantizer.encode(codebook.flatten(0, 1), residuals)
            for residuals, codebook in ((keys, self.key_codebook), (values, self.value_codebook))
        ]
        if self._config.histograms == "joint":
            codes = [codes[0] * C + codes[1]]
        head = torch.arange(len(prototype), device=prototype.device)[:, None]
        start = (head * K + prototype.clamp(min=0))[..., None] * G + torch.arange(G, device=head.device)
        for counts, code in zip(self._counts.values(), codes, strict=True):
            flat = (start * counts[0, 0, 0, 0].numel() + code).view(-1)
            counts.view(-1).index_add_(0, flat, counted.expand(-1, -1, G).reshape(-1))

    def freed_(self, rows: Tensor) -> None:
        """These prototypes hold nothing any more; what waits for them serves the codebooks only."""
        for tensor in (*self._counts.values(), self.updates):
            flat = tensor.flatten(0, 2)
            flat.masked_fill_(rows.view(-1, *[1] * (flat.ndim - 1)), 0)
        if self._warmup:
            self._warmup["warmup.owner"].masked_fill_(torch.cat((rows, rows[:1] & False))[self._owner_rows()], -1)

    def merged_(self, into: Tensor, gone: Tensor) -> None:
        """Prototype `into[x]` takes over the statistics of `gone[x]`."""
        K = self._size[2]
        stays = into == gone
        for tensor in (*self._counts.values(), self.updates):
            flat = tensor.flatten(0, 2)
            held, kept = flat[gone], stays.view(-1, *[1] * (flat.ndim - 1))
            flat.index_add_(0, into, held.masked_fill(kept, 0))
            flat[gone] = torch.where(kept, flat[gone], 0)
        if self._warmup:
            target = torch.full((self.updates.numel() + 1,), -1, device=into.device)
            target[gone] = into % K
            heir = target[self._owner_rows()]
            self._warmup["warmup.owner"].copy_(torch.where(heir >= 0, heir, self._warmup["warmup.owner"]))

    def _owner_rows(self) -> Tensor:
        """The owner's row of each waiting residual, `[L, H, R]`; one past the last row where it has none."""
        L, H, K, _ = self._size
        owner = self._warmup["warmup.owner"]
        head = torch.arange(L * H, device=owner.device).view(L, H, 1)
        return torch.where(owner >= 0, head * K + owner, L * H * K)

    def modes(self, rows: Tensor, modes: int) -> tuple[Tensor, Tensor]:
        """The S likeliest modes of prototypes `rows` `[n]`: codewords `[w, D / G]` float32, and which of these make up
        each key and each value residual, `[2, n, S, G]` int64.

        Independent histograms are decoded apart and paired by rank; a joint one is decoded to pairs. Zeros where a
        prototype has no residual updates, or its head no codebooks yet.
        """
        L, H, K, D = self._size
        S, G, C = modes, self._config.subquantizers, self._config.codewords
        books = self.key_codebook.view(-1, D // G), self.value_codebook.view(-1, D // G)
        words = torch.cat((*books, books[0].new_zeros(1, D // G)))
        if not self._any_fitted:
            return words, rows.new_full((2, len(rows), S, G), len(words) - 1)
        heads = rows // K
        known = self.fitted.view(-1)[heads] & (self.updates.view(-1)[rows] > 0)
        held = [counts.flatten(0, 2).index_select(0, rows).flatten(2) for counts in self._counts.values()]
        codes = quantizer.top_modes(torch.cat(held), S, self._config.smoothing)
        if self._config.histograms == "joint":
            codes = torch.cat((codes // C, codes % C))
        which = quantizer.rows_of(torch.cat((heads, heads + L * H)), codes, C).view(2, len(rows), S, G)
        return words, torch.where(known[:, None, None], which, len(words) - 1)

    def variances(self, heads: Tensor) -> Tensor:
        """Var(H_k) of all prototypes of `heads` `[n]`, flat over `L * H`: `[n, K]` float64.

        The paper names it and leaves its form open. Here: the mean squared distance of the counted residuals from their
        mean, each residual read as its codeword, keys and values and all subspaces added up. 0 without updates. Half
        the mean squared distance between two of them drawn apart is the same number, and exactly 0 where all are one.
        """
        counts = [held.flatten(0, 1)[heads] for held in self._counts.values()]
        if self._config.histograms == "joint":
            counts = [counts[0].sum(4), counts[0].sum(3)]
        updates = self.updates.flatten(0, 1)[heads].double().clamp(min=1)
        total = torch.zeros_like(updates)
        for count, codebook in zip(counts, (self.key_codebook, self.value_codebook), strict=True):
            words = codebook.flatten(0, 1)[heads].double()
            apart = (words[:, :, :, None] - words[:, :, None]).square().sum(4)
            share = count.double().transpose(1, 2)
            total += (share @ apart * share).sum((1, 3))
        return total / (2 * updates.square())

    def report(self) -> list[dict[str, Any]]:
        """For each layer: residual updates held, how far the codebooks are, and their usage."""
        R = self._config.warmup_residuals
        count = self._warmup["warmup.count"] if self._warmup else torch.full_like(self.fitted, R, dtype=torch.int64)
        return [
            {
                "residual_updates": int(self.updates[layer].sum()),
                "codebooks": "fitted" if bool(fitted.all()) else "warming up",
                "warmup_residuals": int(count[layer].min()),
                "warmup_target": R,
                "key_usage_entropy_bits": _usage_entropy(key_counts),
                "value_usage_entropy_bits": _usage_entropy(value_counts),
            }
            for layer, fitted in enumerate(self.fitted)
            for key_counts, value_counts in [self._usage(layer)]
        ]

    def _usage(self, layer: int) -> tuple[Tensor, Tensor]:
        """How often a layer's prototypes together chose each key and value codeword, `[H, G, C]` int64 each."""
        held = [counts[layer].sum(1) for counts in self._counts.values()]
        return (held[0].sum(3), held[0].sum(2)) if self._config.histograms == "joint" else (held[0], held[1])

    def held(self) -> dict[str, Tensor]:
        """Its part of the state. The `warmup.*` tensors are gone once all heads are fitted."""
        return {
            **self._counts,
            "residual.updates": self.updates,
            "codebook.keys": self.key_codebook,
            "codebook.values": self.value_codebook,
            "codebook.fitted": self.fitted,
        } | self._warmup

    def take(self, tensors: Mapping[str, Tensor]) -> None:
        """Take a checked state; a reservoir that no head waits for is left out."""
        fitted = bool(tensors["codebook.fitted"].all())
        self._any_fitted = bool(tensors["codebook.fitted"].any())
        device = self.updates.device
        self._warmup = {} if fitted else {name: tensors[name].to(device, copy=True) for name in _WARMUP}
        for name, tensor in self.held().items():
            if name not in _WARMUP:
                tensor.copy_(tensors[name])

    def nbytes(self) -> dict[str, int]:
        """Bytes by group; a reservoir that is gone counts as 0."""
        return {"warmup": 0} | super().nbytes()

    def check(self, tensors: Mapping[str, Tensor], clock: Clock | None) -> None:
        """Every subspace of a fitted head counts the updates; a reservoir is there while a head waits for it."""
        updates, fitted = tensors["residual.updates"], tensors["codebook.fitted"]
        if updates[tensors["bank.mass"] == 0].any():
            raise StateCorrupt("state: tensor residual.updates must be 0 where a slot is free")
        counted = torch.where(fitted[..., None], updates, 0)[..., None]
        for name in _COUNTS:
            if name in tensors and (tensors[name].flatten(4).sum(4) != counted).any():
                raise StateCorrupt(f"state: tensor {name} must sum to residual.updates in every subspace")
        waiting = [name for name in _WARMUP if name in tensors]
        if not waiting and bool(fitted.all()):
            return
        missing = set(_WARMUP).difference(waiting)
        if missing:
            raise StateCorrupt(f"state: tensor {min(missing)} is missing while heads wait for their codebooks")
        R, K = self._config.warmup_residuals, self._size[2]
        owner, count = tensors["warmup.owner"], tensors["warmup.count"]
        if (count > R).any() or ((count == R) != fitted).any():
            raise StateCorrupt(f"state: tensor warmup.count must be from 0 to {R}, and {R} where a head is fitted")
        if (owner < -1).any() or (owner >= K).any():
            raise StateCorrupt(f"state: tensor warmup.owner must name one of {K} prototypes")


def _usage_entropy(used: Tensor) -> float:
    """Bits in a choice of codeword, mean over heads and subspaces of counts `[H, G, C]`; at most log2 C."""
    share = used.double() / used.sum(2, keepdim=True).clamp(min=1)
    return float(torch.special.entr(share).sum(2).mean()) / math.log(2)


_COUNTS = ("residual.key_counts", "residual.value_counts", "residual.joint_counts")
_WARMUP = ("warmup.keys", "warmup.values", "warmup.owner", "warmup.count")
