"""`Candidates`: the prototypes that each token would choose first, as long as no other token moves them.

Most tokens take the cheapest of all. Who finds that one moved needs the next cheapest, some need many: where the host
may ask freely these tokens alone are given more; elsewhere all have some from the beginning and are given more at once.
Knows nothing of what moves prototypes (`updates`).
"""

from __future__ import annotations

import torch
from torch import Tensor

from protokv.memory.protokv.policy import asks_freely
from protokv.memory.sorting import least_from

# Of a token that needs more than one; all, where these do not do.
_CANDIDATES = 8


class Candidates:
    """Candidates of tokens with costs `[B, n, K]`, cheapest first.

    Attributes:
        cost, prototype: `[B, n, c]`, the known ones; infinity and any prototype behind the last one of a token.
        bound: `[B, n]`, what all others cost at least; infinity where all are known.
    """

    def __init__(self, costs: Tensor) -> None:
        self._costs, self._shape = costs.flatten(0, 1), costs.shape
        if asks_freely(costs):
            least, place = least_from(self._costs)
            self._take(least[:, None], place[:, None])
            self._depth = torch.ones_like(place)
        else:
            self._take(*self._least(slice(None), min(_CANDIDATES, costs.shape[2])))
        self.bound = self.cost[:, :, -1].clone()

    def _least(self, rows: slice | Tensor, few: int) -> tuple[Tensor, Tensor]:
        found = self._costs[rows].topk(few, dim=1, largest=False)
        return found.values, found.indices

    def _take(self, cost: Tensor, prototype: Tensor) -> None:
        B, n, _ = self._shape
        self.cost, self.prototype = cost.view(B, n, -1), prototype.view(B, n, -1)

    def deepen_(self, tokens: Tensor) -> None:
        """Find more for `tokens` `[B, n]` bool, or for all."""
        K = self._shape[2]
        if not asks_freely(tokens):
            self._take(*self._least(slice(None), K))
            self.bound = torch.full_like(self.bound, torch.inf)
            return
        rows = tokens.view(-1).nonzero().squeeze(1)
        if not len(rows):
            return
        few = min(_CANDIDATES, K) if (self._depth[rows] < _CANDIDATES).all() else K
        more = max(0, few - self.cost.shape[2])
        cost = torch.nn.functional.pad(self.cost, (0, more), value=torch.inf).flatten(0, 1)
        prototype = torch.nn.functional.pad(self.prototype, (0, more)).flatten(0, 1)
        cost[rows, :few], prototype[rows, :few] = self._least(rows, few)
        self._take(cost, prototype)
        self._depth[rows] = few
        self.bound.view(-1)[rows] = torch.inf if few == K else cost[rows, few - 1]
