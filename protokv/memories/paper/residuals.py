"""`ResidualStats`: what a centre averages away, as product-quantizer histograms of each prototype
(Algorithm 3).

Until a head's reservoir is full, its residuals wait there with the prototype that they belong to;
then its codebooks are fitted, once, and the waiting residuals are counted. Invariant: for every
prototype of a fitted head, the counts of each subspace sum to n_res.

A residual of size D is split into G parts; each part is named by the nearest of its C codewords.
All is deterministic: ties go to the lowest code, and scores of tuples of codes are whole numbers,
so that equal sums are equal.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from protokv.core.tensors import MemoryShape, Specs, StateTensors, TensorDict, Tensors
from protokv.errors import ConfigError, StateCorrupt
from protokv.memories.paper.settings import PaperConfig
from protokv.texts import JsonObject

# The names of keys come before those of values.
_COUNTS = ("residual.key_counts", "residual.value_counts")
_CODEBOOKS = ("codebook.keys", "codebook.values")
_WARMUP = ("warmup.keys", "warmup.values", "warmup.owner", "warmup.count")

# Log probabilities in units of 2**-32: sums are then exact in any order, on any device.
_SCORE_UNIT = 2.0**32
_GOLDEN = (5**0.5 - 1) / 2
CODEBOOK_ITERATIONS = 10
"""Lloyd iterations of a fit."""
CODEBOOK_SMOOTHING = 1e-5
"""epsilon of the histogram probabilities. The paper leaves it open; this is its first author's
value.
"""


class ResidualStats(StateTensors):
    """Residual statistics of `[L, H, K]` prototypes; rows are flat over `L * H * K`. What has an
    axis of two holds that of keys and that of values.
    """

    # residuals that wait for the codebooks, `[2, L * H, R, D]`, their prototypes `[L * H, R]`, and
    # how many came, `[L * H]`; None: all heads are fitted
    _reservoir: tuple[Tensor, Tensor, Tensor] | None

    def __init__(self, config: PaperConfig, shape: MemoryShape, prototypes: int) -> None:
        G = config.subquantizers
        C = config.codewords
        R = config.warmup_residuals
        L = shape.layers
        H = shape.kv_heads
        D = shape.head_size
        if D % G:
            raise ConfigError(
                f"subquantizers: {G} parts do not divide the head size {D} of this model",
                hint="choose a divisor of the head size, or turn residual off",
            )
        self._config = config
        self._size = (L, H, prototypes, D)
        i32 = torch.int32
        i64 = torch.int64
        self.counts = torch.zeros(2, L, H, prototypes, G, C, dtype=i32, device=shape.device)
        self.updates = torch.zeros(L, H, prototypes, dtype=i32, device=shape.device)
        self.codebooks = torch.zeros(2, L, H, G, C, D // G, device=shape.device)
        self.fitted = torch.zeros(L, H, dtype=torch.bool, device=shape.device)
        self._reservoir = (
            torch.zeros(2, L * H, R, D, device=shape.device),
            torch.full((L * H, R), -1, dtype=i64, device=shape.device),
            torch.zeros(L * H, dtype=i64, device=shape.device),
        )

    @staticmethod
    def declare(config: PaperConfig, shape: MemoryShape, prototypes: int) -> Specs:
        """Declare the statistics of K prototypes. The reservoir is gone once all heads are
        fitted.
        """
        R = config.warmup_residuals
        declare = shape.axes(
            prototype=prototypes,
            residual=R,
            subquantizer=config.subquantizers,
            codeword=config.codewords,
            part_feature=shape.head_size // config.subquantizers,
        ).declare
        head = "layer kv_head"
        slot = f"{head} prototype"
        f32 = torch.float32
        i32 = torch.int32
        i64 = torch.int64

        kinds = ("key", "value")
        codes = f"{slot} subquantizer codeword"
        words = f"{head} subquantizer codeword part_feature"
        waits = f"{head} residual"
        whose = "their prototype; -1: none"
        # If the tensors of a warm-up are absent, all heads are fitted, and a fitted head had a full
        # reservoir.
        return (
            *(
                declare(f"residual.{kind}_counts", codes, i32, f"{kind} codes counted", "tokens")
                for kind in kinds
            ),
            declare("residual.updates", slot, i32, "residuals counted or waiting", "tokens"),
            *(
                declare(f"codebook.{kind}s", words, f32, f"codewords of {kind} residuals")
                for kind in kinds
            ),
            declare("codebook.fitted", head, torch.bool, "whether a head has its codebooks"),
            *(
                declare(
                    f"warmup.{kind}s",
                    f"{waits} feature",
                    f32,
                    f"{kind} residuals that wait for the codebooks",
                    optional=True,
                )
                for kind in kinds
            ),
            declare("warmup.owner", waits, i64, whose, fill=-1, optional=True),
            declare(
                "warmup.count", head, i64, "residuals that came", "tokens", fill=R, optional=True
            ),
        )

    def record_(self, residuals: Tensor, prototype: Tensor) -> Tensor:
        """Take the residuals of one step; return the heads `[n]`, flat over `L * H`, that were
        fitted by it.

        Residuals `[2, B, T, D]` float32 are against the centre after the update; `prototype` `[B,
        T]` int64 absorbed the token, -1 where the token is a prototype by itself.
        """
        K = self._size[2]
        valid = prototype >= 0
        rows = torch.arange(len(valid), device=valid.device)[:, None] * K + prototype.clamp(min=0)
        self.updates.view(-1).index_add_(0, rows.view(-1), valid.int().view(-1))
        ready = rows.new_empty(0)
        if self._reservoir is not None:
            # Residuals of heads that are not fitted go into their reservoirs.
            waiting, owner, count = self._reservoir
            most = self._config.warmup_residuals
            place = count[:, None] + valid.cumsum(1) - 1
            waits = valid & ~self.fitted.view(-1, 1) & (place < most)
            head, token = waits.nonzero(as_tuple=True)
            free = place[head, token]
            waiting[:, head, free] = residuals[:, head, token]
            owner[head, free] = prototype[head, token]
            count += waits.sum(1)
            valid = valid & ~waits
            ready = ((count == most) & ~self.fitted.view(-1)).nonzero().squeeze(1)
            self._fit(ready, waiting, owner)
        self._count(residuals, prototype, valid)
        return ready

    def _fit(self, heads: Tensor, waiting: Tensor, owner: Tensor) -> None:
        """Fit the codebooks of `heads` `[n]`, and count what waited for them."""
        codebooks = self.codebooks.flatten(1, 2)
        # One head at a time: a codebook does not depend on which heads are ready together.
        for head in heads.tolist():
            for kind, samples in enumerate(waiting[:, head]):
                codebooks[kind, head] = fit_codebook(
                    samples, self._config.subquantizers, self._config.codewords
                )
        self.fitted.view(-1)[heads] = True
        ready = torch.zeros_like(owner, dtype=torch.bool).index_fill(0, heads, True)
        self._count(waiting, owner, ready & (owner >= 0))
        # Counts are not kept, so that the state does not depend on how long other heads
        # take.
        waiting[:, heads] = 0.0
        owner[heads] = -1
        if self.fitted.all():
            self._reservoir = None

    def _count(self, residuals: Tensor, prototype: Tensor, valid: Tensor) -> None:
        """Count residuals `[2, B, n, D]` of prototypes `[B, n]` where `valid` and the head is
        fitted.
        """
        K = self._size[2]
        G = self._config.subquantizers
        C = self._config.codewords
        B, n = prototype.shape
        counted = (valid & self.fitted.view(-1, 1)).int()[..., None].expand(-1, -1, G).flatten()
        codes = _encode_residuals(self.codebooks.flatten(0, 2), residuals.flatten(0, 1))
        head = torch.arange(B, device=prototype.device)[:, None]
        part = torch.arange(G, device=prototype.device)
        start = (head * K + prototype.clamp(min=0))[..., None] * G + part
        for counts, code in zip(self.counts, codes.view(2, B, n, G), strict=True):
            counts.view(-1).index_add_(0, (start * C + code).view(-1), counted)

    def freed_(self, rows: Tensor) -> None:
        """Forget `rows`; residuals that wait for them serve the codebooks only."""
        for tensor in (*self.counts, self.updates):
            tensor.flatten(0, 2)[rows] = 0
        self._rename_owners(rows, torch.full_like(rows, -1))

    def merged_(self, into: Tensor, gone: Tensor) -> None:
        """Add the statistics of prototypes `gone` to those of prototypes `into`."""
        for tensor in (*self.counts, self.updates):
            flat = tensor.flatten(0, 2)
            flat.index_add_(0, into, flat[gone])
            flat[gone] = 0
        self._rename_owners(gone, into % self._size[2])

    def _rename_owners(self, rows: Tensor, prototypes: Tensor) -> None:
        """Give residuals that wait for prototypes `rows` `[n]` to `prototypes` `[n]` of the same
        head.
        """
        if self._reservoir is None:
            return
        K = self._size[2]
        _, owner, _ = self._reservoir
        names = torch.arange(K, device=owner.device).repeat(len(owner))
        names[rows] = prototypes
        owner.copy_(torch.where(owner >= 0, names.view(-1, K).gather(1, owner.clamp(min=0)), owner))

    def modes(self, rows: Tensor, modes: int) -> Tensor:
        """Decode the S likeliest residuals of prototypes `rows` `[n]`: of keys and of values, `[2,
        n, S, D]` float32.

        They are paired by rank; zeros where a prototype has no residuals, or its head no codebooks
        yet.
        """
        heads = rows // self._size[2]
        known = self.fitted.view(-1)[heads] & (self.updates.view(-1)[rows] > 0)
        part = torch.arange(self._config.subquantizers, device=rows.device)
        decoded = []
        for counts, codebooks in zip(self.counts, self.codebooks, strict=True):
            codes = find_likeliest_codes(counts.flatten(0, 2)[rows], modes)
            found = codebooks.flatten(0, 1)[heads[:, None, None], part, codes].flatten(2)
            decoded.append(found.mul_(known[:, None, None]))
        return torch.stack(decoded)

    def report(self) -> list[JsonObject]:
        """Return for each layer: residual updates held, how far the codebooks are, and the entropy
        of their usage.
        """
        R = self._config.warmup_residuals
        came = (
            torch.full_like(self.fitted, R, dtype=torch.int64)
            if self._reservoir is None
            else self._reservoir[2].view_as(self.fitted)
        )
        keys, values = self.counts.sum(3)
        return [
            {
                "residual_updates": int(self.updates[layer].sum()),
                "codebooks": "fitted" if bool(fitted.all()) else "warming up",
                "warmup_residuals": int(came[layer].min()),
                "warmup_target": R,
                "key_usage_entropy_bits": _entropy(keys[layer]),
                "value_usage_entropy_bits": _entropy(values[layer]),
            }
            for layer, fitted in enumerate(self.fitted)
        ]

    def live_tensors(self) -> TensorDict:
        """Return its part of the state. The `warmup.*` tensors are gone once all heads are
        fitted.
        """
        found = dict(zip(_COUNTS, self.counts, strict=True))
        found["residual.updates"] = self.updates
        found |= zip(_CODEBOOKS, self.codebooks, strict=True)
        found["codebook.fitted"] = self.fitted
        if self._reservoir is not None:
            waiting, *rest = self._reservoir
            heads = self.fitted.shape
            found |= {
                name: held.unflatten(0, heads)
                for name, held in zip(_WARMUP, (*waiting, *rest), strict=True)
            }
        return found

    def take(self, tensors: Tensors) -> None:
        """Take the statistics of a state; a reservoir that no head waits for is left out."""
        if tensors["codebook.fitted"].all():
            self._reservoir = None
        else:
            R = self._config.warmup_residuals
            K = self._size[2]
            missing = [name for name in _WARMUP if name not in tensors]
            if missing:
                raise StateCorrupt(
                    f"state: tensor {missing[0]} is missing while heads wait for their codebooks"
                )
            owner, count = (tensors[name] for name in _WARMUP[2:])
            if ((owner < -1) | (owner >= K)).any() or ((count < 0) | (count > R)).any():
                raise StateCorrupt(
                    f"state: warmup.owner and warmup.count lead beyond {K} prototypes or {R} places"
                )
        super().take(tensors)


def _entropy(used: Tensor) -> float:
    """Return the bits in a choice of codeword, mean over heads and subspaces of counts `[H, G, C]`;
    at most log2 C.
    """
    share = used.double() / used.sum(2, keepdim=True).clamp(min=1)
    return float(torch.special.entr(share).sum(2).mean()) / math.log(2)


def fit_codebook(samples: Tensor, subquantizers: int, codewords: int) -> Tensor:
    """Return the codebook `[G, C, D / G]` of samples `[n, D]`, `n >= C`, by Lloyd's k-means in each
    subspace.

    A codeword that no sample chooses moves to the sample farthest from its own codeword, the next
    one to the next.
    """
    n = samples.shape[0]
    G = subquantizers
    C = codewords
    parts = samples.view(n, G, -1).transpose(0, 1).contiguous()
    codebook = _spread_out(parts, C)
    squares = parts.square().sum(2)
    for _ in range(CODEBOOK_ITERATIONS):
        distance = codebook.square().sum(2)[:, None] - 2 * torch.bmm(
            parts, codebook.transpose(1, 2)
        )
        nearest, code = distance.min(2)
        member = torch.nn.functional.one_hot(code, C).to(parts.dtype)
        size = member.sum(1)
        means = torch.bmm(member.transpose(1, 2), parts) / size.clamp(min=1)[..., None]
        empty = size == 0
        # A sample alone in its cluster becomes a codeword by itself; a second one there would be
        # lost.
        alone = size.gather(1, code) == 1
        farthest = (nearest + squares).masked_fill(alone, -torch.inf).topk(C, dim=1).indices
        farthest = farthest.gather(1, (empty.cumsum(1) - 1).clamp(min=0))
        worst_served = parts.gather(1, farthest[..., None].expand_as(means))
        codebook = torch.where(empty[..., None], worst_served, means)
    return codebook


def _spread_out(parts: Tensor, codewords: int) -> Tensor:
    """Choose first codewords `[G, C, d]` among samples `[G, n, d]`: k-means++ (Arthur and
    Vassilvitskii, 2007).
    """
    n = parts.shape[1]
    chosen = [parts[:, 0]]
    distance = torch.full(parts.shape[:2], torch.inf, device=parts.device)
    for c in range(1, codewords):
        distance = torch.minimum(distance, (parts - chosen[-1][:, None]).square().sum(2))
        below = distance.double().cumsum(1)
        # Multiples of the golden ratio stand in for random numbers.
        pick = (below <= below[:, -1:] * (c * _GOLDEN % 1.0)).sum(1).clamp(max=n - 1)
        chosen.append(parts.gather(1, pick[:, None, None].expand(-1, 1, parts.shape[2])).squeeze(1))
    return torch.stack(chosen, 1)


def _encode_residuals(codebook: Tensor, vectors: Tensor) -> Tensor:
    """Return codes `[B, T, G]` int64 of vectors `[B, T, D]` under one codebook each, `[B, G, C, D /
    G]`.
    """
    B, G, C, d = codebook.shape
    parts = vectors.view(B, -1, G, d).transpose(1, 2).reshape(B * G, -1, d)
    words = codebook.reshape(B * G, C, d)
    distance = torch.baddbmm(words.square().sum(2)[:, None], parts, words.transpose(1, 2), alpha=-2)
    return distance.argmin(2).view(B, G, -1).transpose(1, 2)


def find_likeliest_codes(counts: Tensor, modes: int) -> Tensor:
    """Return the S likeliest tuples of codes of histograms `[n, G, C]`, best first: `[n, S, G]`
    int64.

    This is Algorithm 3 with a beam of S instead of B = 4 S, which is as good, as a score is a sum
    over subspaces. Ties go to the better prefix, then to the lower code. Where there are fewer than
    S tuples, they are repeated in order.
    """
    G, C = counts.shape[1:]
    total = counts.sum(2, keepdim=True).double() + C * CODEBOOK_SMOOTHING
    scores = (
        ((counts.double() + CODEBOOK_SMOOTHING) / total).log().mul_(_SCORE_UNIT).round_().long()
    )
    scores, codes = (
        part[:, :, :modes] for part in scores.sort(dim=2, descending=True, stable=True)
    )
    beam = scores[:, 0]
    chosen = codes[:, 0, :, None]
    for g in range(1, G):
        sums = (beam[:, :, None] + scores[:, g, None]).flatten(1)
        best = sums.sort(dim=1, descending=True, stable=True).indices[:, :modes]
        beam = sums.gather(1, best)
        prefix = best // codes.shape[2]
        code = best % codes.shape[2]
        last = codes[:, g].gather(1, code)[..., None]
        chosen = torch.cat((chosen.gather(1, prefix[..., None].expand(-1, -1, g)), last), 2)
    return chosen[:, torch.arange(modes, device=counts.device) % chosen.shape[1]]
