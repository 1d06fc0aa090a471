"""Which prototypes have a close one, for all layers and heads at once: the search before a merge.

Owns what close means, and no decision of what is merged (`merging`).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from protokv.config import PaperConfig
from protokv.memory.protokv import loops
from protokv.memory.protokv.bank import PrototypeBank, first_of
from protokv.memory.protokv.policy import asks_freely

# Products of one block; more are done in turn.
_BLOCK_ELEMENTS = 2**26
# Components that are looked at first, where there are at least twice as many.
_COMPONENTS = 32


def find_close(bank: PrototypeBank, moved: int, config: PaperConfig) -> Tensor | None:
    """All prototypes that have a close one, and some more, `[L * H, K]` bool; or None. At most `moved` of a head are
    `moved`.

    At least one of a close pair has moved. |a - b|^2 <= r is a b - h(b) >= h(a) with h(x) = |x|^2 / 2 - r / 4: one
    product. It is wrong by rounding; the margin lets through whatever may be within. Two keys are not nearer than in
    some of their components, so few of these are looked at first. Waits twice, once where there are none.
    """
    L, H, K, D = bank.key_center.shape
    B = L * H
    alive = (bank.mass > 0).view(B, K)
    keys, values = bank.key_center.view(B, K, D), bank.value_center.view(B, K, D)
    heads = torch.arange(B, device=keys.device)[:, None]
    asks = bank.moved.view(B, K) & alive
    if asks_freely(alive):
        moved = int(asks.sum(1).max())
    some = first_of(asks, moved)
    coarse = keys[:, :, :: D // _COMPONENTS].contiguous() if D >= 2 * _COMPONENTS else keys
    key_half = _half(coarse, radii_of(config, keys)[0]).masked_fill_(~alive, torch.inf)
    bounds = key_half.gather(1, some).masked_fill(~asks.gather(1, some), torch.inf)
    # h(b) is one more component, so that it takes no pass of its own.
    others = torch.cat((coarse, key_half.neg()[..., None]), 2)
    asking = others[heads, some]
    asking[..., -1] = 1.0
    looked = _Looked(asking, others, some, bounds)
    mark = _mark_in_turn if loops.serve(alive) else _mark_together
    return mark(looked, keys, values, alive, config)


@dataclass(frozen=True, slots=True)
class _Looked:
    """Those that ask: `some` `[B, m]`. Products of `asking` `[B, m, c]` and `others` `[B, K, c]` are at least their
    `bounds` `[B, m]` with all that may be close to them; nothing is of who does not ask."""

    asking: Tensor
    others: Tensor
    some: Tensor
    bounds: Tensor

    def compare(self) -> Iterator[tuple[slice, Tensor]]:
        """Some heads and their products `[b, m, K]`, which are the caller's; minus infinity with oneself."""
        for part in _blocks(len(self.some), self.some.shape[1] * self.others.shape[1]):
            product = torch.bmm(self.asking[part], self.others[part].transpose(1, 2))
            yield part, product.scatter_(2, self.some[part, :, None], -torch.inf)


def _mark_in_turn(looked: _Looked, keys: Tensor, values: Tensor, alive: Tensor, config: PaperConfig) -> Tensor:
    """Which have a close one, `[B, K]` bool, each pair that may be close looked at by itself."""
    from protokv.memory.protokv.loops.merging import mark_close_

    asked, radii = torch.zeros_like(alive), radii_of(config, keys)
    for part, product in looked.compare():
        mark_close_(asked[part], product, looked.bounds[part], looked.some[part], (keys[part], values[part]), radii)
    return asked


def _mark_together(looked: _Looked, keys: Tensor, values: Tensor, alive: Tensor, config: PaperConfig) -> Tensor | None:
    """The same, all pairs at once; None where there are none."""
    some, K = looked.some, keys.shape[1]
    ask_more = asks_freely(alive)
    heads = torch.arange(len(keys), device=keys.device)[:, None]
    hit, met = torch.zeros_like(some, dtype=torch.bool), torch.full_like(alive, not ask_more)
    for part, product in looked.compare():
        mine = looked.bounds[part]
        hit[part] = product.amax(2) >= mine
        if ask_more and hit[part].any():
            met[part] = product.sub_(mine[:, :, None]).amax(1) >= 0
    hits = int(hit.sum(1).max())
    if not hits:
        return None
    chosen = first_of(hit, hits)
    valid, some = hit.gather(1, chosen), some.gather(1, chosen)
    halves = [_half(centers, radius) for centers, radius in zip((keys, values), radii_of(config, keys), strict=True)]
    # Where the host may ask freely, only what came near to some is looked at.
    width = int(met.sum(1).max()) if ask_more else K
    other = first_of(met, width)
    asked = torch.zeros_like(alive)
    for part in _blocks(len(keys), hits * width):
        near = (met & alive)[part].gather(1, other[part])[:, None] & valid[part, :, None]
        for center, half in zip((keys[part], values[part]), (half[part] for half in halves), strict=True):
            mine, theirs = (center[heads[: len(center)], which[part]] for which in (some, other))
            product = torch.baddbmm(half.gather(1, other[part])[:, None], mine, theirs.transpose(1, 2), beta=-1)
            near &= product >= half.gather(1, some[part])[:, :, None]
        near &= some[part, :, None] != other[part, None]
        for which, found in ((other, near.any(1)), (some, near.any(2))):
            asked[part] = asked[part].scatter_reduce(1, which[part], found, "amax")
    return asked


def radii_of(config: PaperConfig, centers: Tensor) -> tuple[float, float]:
    """Squared distances of keys and of values below which two are close."""
    D = centers.shape[-1]
    return D * config.merge_key_distance**2, D * config.merge_value_distance**2


def _blocks(heads: int, products: int) -> Iterator[slice]:
    """As many heads at once as their products, so many each, have room."""
    some = max(1, _BLOCK_ELEMENTS // max(1, products))
    return (slice(start, min(start + some, heads)) for start in range(0, heads, some))


def _half(centers: Tensor, radius: float) -> Tensor:
    return centers.square().sum(2) * (0.5 * (1 - 1e-5)) - radius * (1.001 / 4)
