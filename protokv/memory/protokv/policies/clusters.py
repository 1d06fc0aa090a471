"""`ClusterWriter`: puts one step's clusters of prototypes and tokens into the bank.

Owns what a cluster is when it is written: centres, mu and Sigma are moments of all its members, weighted with their
masses and added up in float64 one member after the other, so that they depend on nothing but the members; mass adds,
the last step is the newest, the anchor is the newest or the first member's or the mean. Knows nothing of how clusters
are found (`agglomerative`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from protokv.memory.protokv.bank import PrototypeBank
from protokv.memory.protokv.policy import Assigned, FarTokens, Follower


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
    """Writes one step into the bank, given what each point is part of now.

    Points `[B, K + T]` are the prototypes and then the tokens; the root of a cluster is its first point, and `anchor`
    is that of `PaperConfig`. A cluster lives in the slot of its root; one of tokens alone opens a free slot, lowest
    first.
    """

    def __init__(self, bank: PrototypeBank, tokens: FarTokens, root: Tensor, step: int, anchor: str) -> None:
        self._bank, self._tokens, self._root, self._step, self._anchor = bank, tokens, root, step, anchor
        M = root.shape[1]
        self._K = bank.mass.shape[2]
        self._is_root = root == torch.arange(M, device=root.device)
        # The slot of each point that is a root, else -1.
        self.slot = torch.where(self._is_root, torch.arange(M, device=root.device), -1)

    def write_(self, followers: Sequence[Follower]) -> None:
        """Merge, free and open slots, and count."""
        bank, K = self._bank, self._K
        L, H = bank.mass.shape[:2]
        members = self._members()
        means, anchors, last_step = self._summary(members)
        gone = (members.point < K) & (members.rank > 0)
        self._tell(followers, members)
        bank.free_(members.head[gone] * K + members.point[gone])
        self._open()
        roots = members.rank == 0
        rows = members.head[roots] * K + self.slot[members.head[roots], members.point[roots]]
        self._replace(rows, means, anchors, last_step)
        opened = self._is_root[:, K:].sum(1)
        bank.opened += opened.view(L, H)
        bank.absorbed += (self._is_root.shape[1] - K - opened).view(L, H)
        bank.merged += (~self._is_root[:, :K]).sum(1).view(L, H)

    def assigned(self) -> Assigned:
        """Of each token the slot that it shares, and its residual against the centre; after `write_`."""
        bank, tokens, K = self._bank, self._tokens, self._K
        slot = self.slot.gather(1, self._root)[:, K:]
        rows = torch.arange(len(slot), device=slot.device)[:, None] * K + slot
        keys, values = bank.centers(rows)
        shared = bank.mass.view(-1)[rows] > 1
        return Assigned(torch.where(shared, slot, -1), tokens.keys - keys, tokens.values - values)

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
        """Of each cluster the weighted means `[c, F]` float64 behind its mass, its anchor and its newest step."""
        bank, tokens, K = self._bank, self._tokens, self._K
        D, P = tokens.keys.shape[2], bank.position.shape[3]
        T = tokens.keys.shape[1]
        is_token = members.point >= K
        row = members.head * K + members.point.clamp(max=K - 1)
        token = (members.point - K).clamp(min=0)
        given = members.head * T + token

        def pick(held: Tensor, new: Tensor) -> Tensor:
            return torch.where(is_token.view(-1, *[1] * (held.ndim - 1)), new, held)

        n = pick(bank.mass.view(-1)[row], torch.ones_like(row)).double()[:, None]
        mu = pick(bank.mean.view(-1, 2)[row], tokens.seen.coordinates[token]).double()
        eye = torch.eye(2, device=row.device).view(1, 4)
        sigma = pick(bank.covariance.view(-1, 4)[row], eye).double()
        position = pick(bank.position.view(-1, P)[row], tokens.seen.positions[token])
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
        anchor = means[:, -P:] if self._anchor == "average" else position[self._extreme(members, position)]
        last_step = torch.full((members.clusters,), -1, device=row.device)
        last_step.scatter_reduce_(0, members.cluster, step, "amax")
        return means[:, : means.shape[1] - P], anchor, last_step

    def _extreme(self, members: _Members, position: Tensor) -> Tensor:
        """The member of each cluster that is newest, or first; of equal ones the first in order."""
        # The first component is time under M-RoPE and the index of the token under RoPE.
        time = position[:, 0] if self._anchor == "recent" else -position[:, 0]
        best = torch.full((members.clusters,), -torch.inf, dtype=time.dtype, device=time.device)
        best.scatter_reduce_(0, members.cluster, time, "amax")
        index = torch.arange(len(time), device=time.device)
        is_best = time == best[members.cluster]
        chosen = torch.full((members.clusters,), len(time), device=time.device)
        return chosen.scatter_reduce_(0, members.cluster[is_best], index[is_best], "amin")

    def _tell(self, followers: Sequence[Follower], members: _Members) -> None:
        """Followers take one member of every cluster at a time. Prototypes stand before tokens in a cluster."""
        K = self._K
        held = members.point < K
        first = (members.rank == 0).nonzero().squeeze(1)
        root = members.head * K + members.point[first][members.cluster] if len(first) else members.head
        if not followers or not len(first):
            return
        for rank in range(1, int(members.rank.max()) + 1):
            some = ((members.rank == rank) & held).nonzero().squeeze(1)
            if not len(some):
                return
            for follower in followers:
                follower.merged_(root[some], members.head[some] * K + members.point[some])

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
        bank.open_(rows, tokens.keys[head, token], tokens.values[head, token], tokens.seen.at(token), self._step)

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
