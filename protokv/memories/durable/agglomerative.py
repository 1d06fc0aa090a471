"""`Agglomerative`: evicted tokens become prototypes, and the cheapest pairs merge while there are too many.

Ours, not the paper's. Algorithm 1 puts every token into an existing prototype, so a brief, distinct token is averaged
away. Here distinct tokens stay and redundant ones merge, with no threshold and no rate. The T tokens of a step are
added to the K prototypes; then the pair of least cost w v / (w + v) * ||f_i - f_j||^2 merges until K are left
(`tests/oracles/ward.py` has it written out). f = [key; value], the key without rotation. w is n ** merge_mass_power for
a point of mass n, and adds up where points merge: Ward's linkage (1963). A token has mass 1, or 4 if the next step
repeats it, and repeats do not enter (`durable.repeats`). Age plays no part, and nothing is deleted.
`samples/studies/delay/` measures what it keeps.

The result is exact, although most of the bank is not compared. By reducibility (`ward`) a point takes part in no merge
cheaper than its own least cost. A lower bound of that cost is kept for each prototype between steps; only the tokens
and the prototypes with low bounds are merged. If the last merge costs less than the bounds of all others, merging all
points would give the same; else more prototypes are taken in. The bounds are no state, and change no result.

`ClusterWriter` writes the clusters of a step into the bank: moments of all members, weighted with their masses, added
up in float64 one member after the other, so that they depend on the members alone.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from protokv.core.bank import FarTokens, PrototypeBank
from protokv.core.tensors import MemoryShape
from protokv.memories.durable.novelty import REPEATS, NoveltyRule
from protokv.memories.durable.settings import DurableConfig
from protokv.memories.durable.ward import Merged, costs_between, merge_cheapest

# Costs of one block of the search for near prototypes; more are done in turn. Small, so that a CPU keeps it in cache.
_BLOCK_ELEMENTS = 2**20
# Costs among the points that are merged, of as many heads as are merged at once.
_MATRIX_ELEMENTS = 2**25
# Prototypes that are measured at once when all are.
_ROWS = 512
# What float32 products and centres may be wrong by, as a share of the squared norms and of a cost.
_PRODUCT_ERROR = 2.0**-18
_COST_ERROR = 2.0**-13


@dataclass(frozen=True, slots=True)
class _Found:
    """What was merged.

    Attributes:
        points: `[B, n]` int64, ascending, the points that were looked at: some prototypes and, counted on, all tokens.
        merged: what became of them.
        limit: `[B]`, no other prototype has a lower cost than this.
    """

    points: Tensor
    merged: Merged
    limit: Tensor


class Agglomerative(NoveltyRule):
    """The exact rule over one bank of `[L, H, K]` prototypes; remembers which of them are far from all others."""

    def __init__(self, bank: PrototypeBank, config: DurableConfig, shape: MemoryShape) -> None:
        super().__init__(bank, config, shape)
        L, H, K = bank.mass.shape
        # A lower bound of what merging each prototype with its nearest would cost; once it was measured.
        self._bound = torch.zeros(L * H, K, device=bank.mass.device)
        self._measured = False
        # How many points the last step had to look at. Speed only.
        self._width = 0

    def take(self, tensors: Mapping[str, Tensor]) -> None:
        """Take the state, and forget the bounds of the bank that was replaced."""
        super().take(tensors)
        self._bound.zero_()
        self._measured, self._width = False, 0

    def buffers(self) -> Mapping[str, Sequence[Tensor]]:
        """Return the bounds."""
        return {"bank": (self._bound,)}

    def absorb_(self, tokens: FarTokens, step: int) -> None:
        """Put evicted tokens into the bank at time `step`."""
        bank = self._bank
        tokens = self._novelty.weigh_(tokens, bank).counted_only()
        K = bank.mass.shape[2]
        B, T, _ = tokens.keys.shape
        if not T:
            return
        merges = ((bank.mass > 0).view(B, K).sum(1) + T - K).clamp(min=0)
        root = torch.arange(K + T, device=merges.device).repeat(B, 1)
        found = self._merge(tokens, merges, step) if merges.any() else None
        if found is not None:
            root.scatter_(1, found.points, found.points.gather(1, found.merged.root))
        writer = ClusterWriter(bank, tokens, root, step, self._novelty.share() > 0)
        writer.write_()
        if found is not None:
            self._remember(found, writer.slot)

    def _merge(self, tokens: FarTokens, merges: Tensor, step: int) -> _Found:
        """Merge the tokens and the prototypes with low bounds."""
        B, T, _ = tokens.keys.shape
        K = self._bound.shape[1]
        if not self._measured:
            self._measure_all()
        weight = self._weight_of(tokens.mass).expand(B, T)
        near_tokens = _least_costs(self._bank, self._weight(), tokens.keys, tokens.values, weight)[1]
        bound = torch.minimum(self._bound, near_tokens)
        repeat = REPEATS * usual_cost(tokens)[:, None]
        # Besides the two of each merge, two that may merge are left.
        kept = self._kept(step, T, K - 2)
        bound.masked_fill_(kept[:, :K] & (bound >= repeat), torch.inf)
        every_token = torch.arange(K, K + T, device=merges.device).expand(B, T)
        # Those that are kept may not merge; of the others there must be more than merges.
        held = max(self._width, int((merges + (kept[:, :K] & bound.isfinite()).sum(1)).max()) + 1)
        while True:
            held = min(held, K)
            low, nearest = bound.topk(min(held + 1, K), largest=False)
            limit = low[:, held] if held < K else torch.full_like(low[:, 0], torch.inf)
            points = torch.cat((nearest[:, :held].sort(1).values, every_token), 1)
            merged = self._merge_points(*self._points(tokens, points), merges, kept.gather(1, points), repeat)
            # No prototype is left to take in.
            if held == K or (merged.height < limit * (1 - _COST_ERROR)).all():
                break
            held += held // 2 + 1
        # A little more than this step needed, and not much less than the last one took: a second try costs more.
        needed = int((bound <= merged.height[:, None]).sum(1).max())
        self._width = max(needed * 9 // 8 + 1, self._width * 15 // 16)
        return _Found(points, merged, limit)

    def _kept(self, step: int, T: int, most: int) -> Tensor:
        """Return which points merge with repeats alone, `[B, K + T]` bool: those with the last turns, tokens before
        prototypes and of equal ones those further on, and the prototypes of the first steps; up to `most` in all."""
        novelty, last_step = self._novelty, self._bank.last_step.flatten(0, 1)
        turn = novelty.turn(last_step, self._bank.mass.flatten(0, 1))
        rank = turn.argsort(dim=1, stable=True).argsort(dim=1)
        B, K = rank.shape
        ranks = torch.cat((rank, torch.arange(K, K + T, device=rank.device).expand(B, T)), 1)
        ranks[:, :K].masked_fill_(turn < 0, -1)
        kept = ranks >= (K + T - novelty.kept(step, T, most))[:, None]
        kept[:, :K] |= novelty.first(novelty.share(), step, T, most, last_step)
        return kept

    @staticmethod
    def _merge_points(points: Tensor, mass: Tensor, merges: Tensor, kept: Tensor, repeat: Tensor) -> Merged:
        """Merge among `points` `[B, n, 2 D]`, in batches of heads that fit in memory. What is `kept` `[B, n]` merges
        only where that costs less than `repeat` `[B, 1]`: neither it nor its cluster merges with any other."""
        heads = max(1, _MATRIX_ELEMENTS // points.shape[1] ** 2)
        parts = []
        split = (torch.split(tensor, heads) for tensor in (points, mass, merges, kept, repeat))
        for some, some_mass, some_merges, some_kept, some_repeat in zip(*split, strict=True):
            costs = costs_between(some, some_mass)
            barred = (some_kept[:, :, None] | some_kept[:, None]) & (costs >= some_repeat[:, None])
            parts.append(merge_cheapest(costs.masked_fill_(barred, torch.inf), some_mass, some_merges))
        return Merged(*(torch.cat([getattr(part, name) for part in parts]) for name in ("root", "height", "nearest")))

    def _points(self, tokens: FarTokens, points: Tensor) -> tuple[Tensor, Tensor]:
        """Return features [key; value] and weights of some points of each head: `[B, n, 2 D]` and `[B, n]`."""
        bank = self._bank
        B, T, D = tokens.keys.shape
        K = bank.mass.shape[2]
        is_token = points >= K
        head = torch.arange(B, device=points.device)[:, None]
        row = head * K + points.clamp(max=K - 1)
        token = head * T + (points - K).clamp(min=0)
        gathered = []
        for held, given in zip(bank.centers(row), (tokens.keys, tokens.values), strict=True):
            gathered.append(torch.where(is_token[:, :, None], given.reshape(-1, D)[token], held))
        given_weight = self._weight_of(tokens.mass)[(points - K).clamp(min=0)]
        return torch.cat(gathered, 2), torch.where(is_token, given_weight, self._weight().view(-1)[row])

    def _weight(self) -> Tensor:
        """Return the weight of each prototype in the cost of a merge, `[B, K]`; 0 where a slot is free."""
        return self._weight_of(self._bank.mass.flatten(0, 1))

    def _weight_of(self, mass: Tensor) -> Tensor:
        """Return the weight of points of `mass` in the cost of a merge, float32."""
        return mass.float().pow(self._config.merge_mass_power).masked_fill_(mass == 0, 0.0)

    def _measure_all(self) -> None:
        """Measure every prototype: K^2 costs for each head, once a stream and after a state was loaded."""
        K = self._bound.shape[1]
        every = torch.arange(K, device=self._bound.device).expand_as(self._bound)
        for rows in torch.split(every, _ROWS, 1):
            self._bound[:, rows[0]] = self._measure(rows)[0]
        self._bound.masked_fill_(self._bank.mass.view_as(self._bound) == 0, torch.inf)
        self._measured = True

    def _measure(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        """Return the least costs of prototypes `rows` `[B, n]`, and of all prototypes to these: `[B, n]`, `[B, K]`."""
        bank = self._bank
        B, K = self._bound.shape
        flat = torch.arange(B, device=rows.device)[:, None] * K + rows
        keys, values = bank.centers(flat)
        weight = self._weight()
        return _least_costs(bank, weight, keys, values, weight.view(-1)[flat], own=rows)

    def _remember(self, found: _Found, slot: Tensor) -> None:
        """Measure the prototypes that changed against all; `slot` `[B, K + T]` is where a point is now, or -1.

        The bounds of all others then hold, against each other and against the changed ones.
        """
        merged = found.merged
        K = self._bound.shape[1]
        size = torch.zeros_like(merged.root).scatter_add_(1, merged.root, torch.ones_like(merged.root))
        changed = (size > 1) | ((size == 1) & (found.points >= K))
        where = slot.gather(1, found.points)
        # Prototypes whose neighbour has moved away have needlessly low bounds, and would be looked at in every step.
        bound, limit = self._bound.gather(1, where.clamp(min=0)), found.limit[:, None]
        vague = (size > 0) & (bound <= limit) & (merged.nearest > limit)
        some = changed | vague
        order = some.to(torch.uint8).argsort(dim=1, descending=True, stable=True)[:, : int(some.sum(1).max())]
        rows = where.gather(1, order)
        # Shorter heads are filled up, which does no harm; merged points have no slot.
        rows = torch.where(rows < 0, rows.amax(1, keepdim=True), rows)
        own, others = self._measure(rows)
        torch.minimum(self._bound, others, out=self._bound)
        self._bound.scatter_(1, rows, own)


def usual_cost(tokens: FarTokens) -> Tensor:
    """Return what merging two tokens of a step usually costs, `[B]`: the median squared distance from their mean."""
    points = torch.cat((tokens.keys, tokens.values), 2)
    return (points - points.mean(1, keepdim=True)).square().sum(2).median(1).values


def _least_costs(
    bank: PrototypeBank, weight: Tensor, keys: Tensor, values: Tensor, own_weight: Tensor, own: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Lower bounds of the least cost of points `[B, n, D]` and prototypes: of each point `[B, n]`, of each prototype
    `[B, K]`; `own` `[B, n]` are the prototypes that the points themselves are."""
    K = bank.mass.shape[2]
    B, n, _ = keys.shape
    of_points = torch.empty(B, n, device=keys.device)
    of_prototypes = torch.full((B, K), torch.inf, device=keys.device)
    # Keys of a head may have much in common; what is left when it is taken away is not drowned in rounding.
    common = keys.mean(1, keepdim=True)
    free = (bank.mass == 0).view(B, K)
    share = weight.reciprocal().masked_fill_(free, 1.0)
    heads = max(1, _BLOCK_ELEMENTS // (n * K))
    points = max(1, _BLOCK_ELEMENTS // K)
    for start in range(0, B, heads):
        h = slice(start, start + heads)
        centers, contents = bank.head_centers(h)
        centers = centers - common[h]
        norms = centers.square().sum(2).add_(contents.square().sum(2)).masked_fill_(free[h], torch.inf)
        for first in range(0, n, points):
            p = slice(first, first + points)
            k, v = keys[h, p] - common[h], values[h, p]
            own_norms = k.square().sum(2).add_(v.square().sum(2))
            costs = (own_norms[:, :, None] + norms[:, None]).mul_(1 - _PRODUCT_ERROR)
            costs.baddbmm_(k, centers.transpose(1, 2), alpha=-2)
            costs.baddbmm_(v, contents.transpose(1, 2), alpha=-2)
            costs /= own_weight[h, p].reciprocal()[:, :, None] + share[h, None]
            if own is not None:
                costs.scatter_(2, own[h, p][:, :, None], torch.inf)
            of_points[h, p] = costs.amin(2)
            of_prototypes[h] = torch.minimum(of_prototypes[h], costs.amin(1))
    return of_points.clamp_(min=0.0), of_prototypes.clamp_(min=0.0)


@dataclass(slots=True)
class _Members:
    """Points of clusters of more than one, sorted by cluster and then by point; flat over the heads.

    Attributes:
        head, point: `[m]` int64; points count the prototypes and then the tokens.
        cluster: `[m]` int64, from 0.
        rank: `[m]` int64, which member of its cluster it is; number 0 is the root.
    """

    head: Tensor
    point: Tensor
    cluster: Tensor
    rank: Tensor
    clusters: int


class ClusterWriter:
    """Writes one step into the bank, given the cluster of each point.

    Points `[B, K + T]` are the prototypes and then the tokens; the root of a cluster is its first point. A
    cluster lives in the slot of its root; one of tokens alone opens a free slot, lowest first. It stands where its
    newest member does, or in heads that are True in `at_mean` `[B]` at the mean position of all.
    """

    def __init__(self, bank: PrototypeBank, tokens: FarTokens, root: Tensor, step: int, at_mean: Tensor) -> None:
        self._bank, self._tokens, self._root, self._step = bank, tokens, root, step
        self._at_mean = at_mean
        M = root.shape[1]
        self._K = bank.mass.shape[2]
        self._is_root = root == torch.arange(M, device=root.device)
        # The slot of each point that is a root, else -1.
        self.slot = torch.where(self._is_root, torch.arange(M, device=root.device), -1)

    def write_(self) -> None:
        """Merge, free and open slots, and count."""
        bank, K = self._bank, self._K
        L, H = bank.mass.shape[:2]
        members = self._members()
        means, anchors, last_step = self._summary(members)
        gone = (members.point < K) & (members.rank > 0)
        bank.free_(members.head[gone] * K + members.point[gone])
        self._open()
        roots = members.rank == 0
        rows = members.head[roots] * K + self.slot[members.head[roots], members.point[roots]]
        self._replace(rows, means, anchors, last_step)
        opened = self._is_root[:, K:].sum(1)
        bank.opened += opened.view(L, H)
        bank.absorbed += (self._is_root.shape[1] - K - opened).view(L, H)
        bank.merged += (~self._is_root[:, :K]).sum(1).view(L, H)

    def _members(self) -> _Members:
        B, M = self._root.shape
        flat = torch.arange(B, device=self._root.device)[:, None] * M + self._root
        size = torch.zeros(B * M, dtype=torch.int64, device=flat.device)
        size.index_add_(0, flat.view(-1), torch.ones_like(flat.view(-1)))
        member = (size[flat] > 1).view(-1).nonzero().squeeze(1)
        order = flat.view(-1)[member].argsort(stable=True)
        member = member[order]
        head, point = member // M, member % M
        is_first = self._is_root.view(-1)[member]
        cluster = is_first.cumsum(0) - 1
        first = is_first.nonzero().squeeze(1)
        rank = torch.arange(len(member), device=member.device) - first[cluster]
        return _Members(head, point, cluster, rank, len(first))

    def _summary(self, members: _Members) -> tuple[Tensor, Tensor, Tensor]:
        """Return of each cluster its mass and weighted means `[c, F]` float64, its anchor and its newest step."""
        bank, tokens, K = self._bank, self._tokens, self._K
        D, P = tokens.keys.shape[2], bank.position.shape[3]
        T = tokens.keys.shape[1]
        is_token = members.point >= K
        row = members.head * K + members.point.clamp(max=K - 1)
        token = (members.point - K).clamp(min=0)
        given = members.head * T + token

        def pick(held: Tensor, new: Tensor) -> Tensor:
            return torch.where(is_token.view(-1, *[1] * (held.ndim - 1)), new, held)

        n = pick(bank.mass.view(-1)[row], tokens.mass[token]).double()[:, None]
        mu = pick(bank.mean.view(-1, 2)[row], tokens.token_positions.coordinates[token]).double()
        eye = torch.eye(2, device=row.device).view(1, 4)
        sigma = pick(bank.covariance.view(-1, 4)[row], eye).double()
        position = pick(bank.position.view(-1, P)[row], tokens.token_positions.positions[token])
        step = pick(bank.last_step.view(-1)[row], torch.full_like(row, self._step))
        keys, values = bank.centers(row)
        parts = [
            torch.ones_like(n),
            pick(keys, tokens.keys.reshape(-1, D)[given]),
            pick(values, tokens.values.reshape(-1, D)[given]),
            mu,
            sigma + (mu[:, :, None] * mu[:, None, :]).flatten(1),
            position,
        ]
        weighted = torch.cat(parts, 1).double().mul_(n)
        total = torch.zeros(members.clusters, weighted.shape[1], dtype=torch.float64, device=row.device)
        # One member of every cluster at a time: the order of adding is theirs, whatever else there is.
        by_rank = members.rank.argsort(stable=True)
        for some in by_rank.split_with_sizes(torch.bincount(members.rank).tolist()):
            total[members.cluster[some]] += weighted[some]
        means = total / total[:, :1]
        means[:, 0] = total[:, 0]
        at_mean = self._at_mean[members.head[members.rank == 0], None]
        anchor = torch.where(at_mean, means[:, -P:], position[self._newest(members, position)])
        last_step = torch.full((members.clusters,), -1, device=row.device)
        last_step.scatter_reduce_(0, members.cluster, step, "amax")
        return means[:, : means.shape[1] - P], anchor, last_step

    @staticmethod
    def _newest(members: _Members, position: Tensor) -> Tensor:
        """Return the newest member of each cluster; of equal ones the first in order."""
        # The first component is time under M-RoPE and the index of the token under RoPE.
        time = position[:, 0]
        best = torch.full((members.clusters,), -torch.inf, dtype=time.dtype, device=time.device)
        best.scatter_reduce_(0, members.cluster, time, "amax")
        index = torch.arange(len(time), device=time.device)
        is_best = time == best[members.cluster]
        chosen = torch.full((members.clusters,), len(time), device=time.device)
        return chosen.scatter_reduce_(0, members.cluster[is_best], index[is_best], "amin")

    def _open(self) -> None:
        """Open free slots, lowest first, with the tokens that are the roots of their clusters."""
        bank, tokens, K = self._bank, self._tokens, self._K
        B = self._root.shape[0]
        free = (bank.mass == 0).view(B, K)
        order = free.to(torch.uint8).argsort(dim=1, descending=True, stable=True)
        head, token = self._is_root[:, K:].nonzero(as_tuple=True)
        place = (self._is_root[:, K:].cumsum(1) - 1)[head, token]
        slot = order[head, place]
        self.slot[head, K + token] = slot
        rows = head * K + slot
        bank.open_(rows, tokens, head, token, self._step)

    def _replace(self, rows: Tensor, means: Tensor, anchors: Tensor, last_step: Tensor) -> None:
        bank = self._bank
        D, P = self._tokens.keys.shape[2], bank.position.shape[3]
        mass, keys, values, mu, second = means.split_with_sizes([1, D, D, 2, 4], 1)
        bank.mass.view(-1)[rows] = mass[:, 0].round().long()
        bank.put_centers_(rows, keys.float(), values.float())
        bank.mean.view(-1, 2)[rows] = mu.float()
        bank.covariance.view(-1, 4)[rows] = (second - (mu[:, :, None] * mu[:, None, :]).flatten(1)).float()
        bank.position.view(-1, P)[rows] = anchors
        bank.last_step.view(-1)[rows] = last_step
        bank.touch_(rows)
