"""Ageing and recycling of prototypes (Algorithm 2), once a step, for all layers and heads at once.

Between the two close ones are merged (`merging`). Knows nothing of residual
histograms; a `BankListener` is told what died and what was merged.

Merging of prototypes with close centres (Algorithm 2, the loop over pairs), for all layers and heads at once.

The paper merges "each pair" that is close and leaves the order open. Here a step makes a few passes (`PASSES`) over the
prototypes that have a close one when it begins. In a pass each is compared with those before it in `turns`, all centres
as the pass before has left them: who has no close one before it stays, and the others go into the first of those that
stay and are close, if any. Centres are then those of all mass that came together. What is close after the last pass
waits for the next step. Pairs by themselves, and groups around one centre, come out as the loop over pairs has them.

A loop with the centre as it is after each single merge has no bound but the number of prototypes on what hangs on what:
along a line of centres, each close to the next, every decision waits for the one before. Slots are therefore in no
order of place or time in `turns`, and most of what is close is settled in one or two passes.

A pass has fixed shapes and asks the device for nothing: who merges with whom are matrices over the few prototypes in
question. They are in float64, so that which heads are planned together changes no decision. Knows nothing of residual
histograms; a `BankListener` is told what was merged.

Which prototypes have a close one, for all layers and heads at once: the search before a merge.

Owns what close means, and no decision of what is merged (`merging`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache, lru_cache
from hashlib import sha256

import torch
from torch import Tensor

from protokv.config import PaperConfig
from protokv.core.arrays import add_rows_
from protokv.core.bank import BankListener, FarTokens, PrototypeBank, asks_freely, first_of


@dataclass(frozen=True, slots=True)
class Recycler:
    """Where recycled slots take their tokens from.

    Attributes:
        newest: gives the tokens of the newest step that are in the near window; called only when a slot is
            free.
        seed: of what is drawn among them.
        of_model: how many layers the whole model has, and which of them the bank has: a part of a memory draws what
            the whole would. None: the bank has all.
        streams: streams whose heads the bank has; all draw the same.
    """

    newest: Callable[[], FarTokens]
    seed: int
    of_model: tuple[int, slice] | None = None
    streams: int = 1

    def draw(self, step: int, layers: int, heads: int, tokens: int) -> Tensor:
        """Uniform numbers in [0, 1) of each layer, head and token, `[L, H, T]` float32 on the CPU.

        A function of the seed and the step alone, so that nothing of it is state and every device draws the same.
        """
        whole, mine = self.of_model or (layers, slice(None))
        generator = torch.Generator().manual_seed(step_seed(self.seed, step))
        drawn = torch.rand(whole, heads // self.streams, tokens, generator=generator)[mine]
        return drawn.repeat(1, self.streams, 1)


def step_seed(seed: int, step: int) -> int:
    """A seed for what is drawn at one step of a stream: 63 bits of the sha256 of both numbers."""
    return int.from_bytes(sha256(f"{seed} {step}".encode()).digest()[:8], "little") >> 1


def decay_(
    bank: PrototypeBank, listeners: Sequence[BankListener], step: int, config: PaperConfig, *, dying: bool = True
) -> None:
    """n <- floor((1 - gamma) n) for idle prototypes, in whole numbers; mass 0 frees the slot.

    A prototype is idle when it has absorbed nothing for more than T_idle steps. It decays in each such step, or, with
    `decay="interval"`, in the first step behind each T_idle that pass. Asks the device for nothing; who knows that none
    dies may say so.
    """
    age = step - bank.last_step
    idle = (bank.mass > 0) & (age > config.idle_steps)
    if config.decay == "interval":
        idle &= (age - 1) % max(1, config.idle_steps) == 0
    less = decayed(bank.mass, config)
    bank.mass.copy_(torch.where(idle, less, bank.mass))
    if not dying:
        return
    died = idle & (less == 0)
    bank.expired += died.sum(2)
    bank.free_where_(died)
    for listener in listeners:
        listener.freed_(died.view(-1))


def decayed(mass: Tensor, config: PaperConfig) -> Tensor:
    """floor((1 - gamma) n)."""
    kept = config.kept_mass
    return (mass * kept.numerator).div(kept.denominator, rounding_mode="floor")


def recycle_(bank: PrototypeBank, recycler: Recycler, step: int) -> int:
    """Open slots that died or were merged away with distinct tokens of the newest near step, drawn at random.

    Slots that no token has opened yet are left to the evicted tokens. If more slots are free than the step
    has tokens in the window, the highest ones stay free. Returns how many of a head were opened at most.
    """
    L, H, K = bank.mass.shape
    tokens = recycler.newest()
    n = min(tokens.keys.shape[1], K)
    if n == 0:
        return 0
    freed = ((bank.mass == 0) & (bank.last_step >= 0)).view(L * H, K)
    draw = recycler.draw(step, L, H, tokens.keys.shape[1]).flatten(0, 1).argsort(dim=1, stable=True)
    token = draw[:, :n].to(freed.device, non_blocking=True)
    slot = first_of(freed, n)
    opened = freed.gather(1, slot)
    head = torch.arange(L * H, device=slot.device)[:, None]
    bank.open_(
        head * K + slot, tokens.keys[head, token], tokens.values[head, token], tokens.seen.at(token), step, opened
    )
    bank.recycled += opened.sum(1).view(L, H)
    return n


# Passes of one step: more settle hardly more (`tests/core/test_maintenance.py`).
PASSES = 4


@cache
def turns(slots: int) -> tuple[int, ...]:
    """The order in which the slots of a head come when pairs are merged: without any pattern, and always the same."""
    return tuple(sorted(range(slots), key=lambda slot: sha256(b"%d" % slot).digest()))


def merge_(
    bank: PrototypeBank, listeners: Sequence[BankListener], config: PaperConfig, moved: int | None = None
) -> int:
    """Merge prototypes whose root-mean-square distances are below eps_K for keys and eps_V for values.

    Args:
        bank: with `moved` set where a centre has changed since this was last called.
        listeners: are told.
        config: of the thresholds.
        moved: how many these are in one head at most; None: all may be.

    Returns:
        How many of one head at most are `moved` now.
    """
    K = bank.mass.shape[2]
    moved = K if moved is None else min(moved, K)
    is_on = moved and config.merge_key_distance and config.merge_value_distance
    asked = find_close(bank, moved, config) if is_on else None
    bank.moved.zero_()
    most = 0 if asked is None else int(asked.sum(1).max())
    if asked is None or not most:
        return 0
    rank = _ranks(K, asked.device)
    heads = torch.arange(len(asked), device=asked.device)[:, None]
    rows = heads * K + torch.where(asked, rank, rank + K).argsort(dim=1)[:, :most]
    owner, again = _plan(bank, rows, config)
    gone = _write(bank, rows, owner, config)
    for listener in listeners:
        listener.merged_(rows.gather(1, owner).view(-1), rows.view(-1))
    # A centre that changed may be close to any other; what was close and could not be settled is looked at again.
    bank.moved.view(-1)[rows] = again & ~gone
    return rows.shape[1]


@lru_cache(maxsize=32)
def _ranks(slots: int, device: torch.device) -> Tensor:
    """Where each slot stands in `turns`, `[K]`."""
    return torch.tensor(turns(slots), device=device).argsort()


def _plan(bank: PrototypeBank, rows: Tensor, config: PaperConfig) -> tuple[Tensor, Tensor]:
    """For each of `rows` `[B, V]`, which are in order, the place of the one that it is part of then, itself where it
    stays, `[B, V]`; and which had a close one when the step began, `[B, V]` bool."""
    B, V = rows.shape
    D = bank.key_center.shape[3]
    keys, values = bank.centers(rows)
    mass, radii = bank.mass.view(-1)[rows].double(), radii_of(config, keys)
    centers = torch.cat((keys, values), 2)
    place = torch.arange(V, device=rows.device)
    heads = torch.arange(0, B * V, V, device=rows.device)[:, None]
    sums, left, owner = centers.double() * mass[..., None], mass > 0, place.repeat(B, 1)
    again = left
    for turn in range(PASSES):
        # Where the host may ask freely, only what is left is looked at again.
        width = int(left.sum(1).max()) if asks_freely(rows) else V
        some = first_of(left, width)
        here, n = some + heads, mass.gather(1, some)
        means = sums.view(B * V, 2 * D)[here] / n.clamp(min=1)[..., None]
        is_left = left.gather(1, some)
        close = is_left[:, :, None] & is_left[:, None]
        for part, radius in zip(torch.split(means, D, 2), radii, strict=True):
            norms = part.square().sum(2)
            squares = torch.baddbmm(norms[:, :, None] + norms[:, None], part, part.transpose(1, 2), alpha=-2)
            close &= squares < radius
        close = close.triu_(1)
        if turn == 0:
            is_left = close.any(1) | close.any(2)
            again = left = torch.zeros_like(left).scatter_(1, some, is_left)
        stays = is_left & ~close.any(1)
        first = torch.where(close & stays[:, :, None], place[:width, None], width).amin(1)
        goes = torch.zeros_like(left).scatter_(1, some, first < width)
        # Where nothing goes in this pass, nothing will in another.
        if asks_freely(rows) and not goes.any():
            break
        joined = torch.where(first < width, some.gather(1, first.clamp(max=width - 1)), some)
        into = place.repeat(B, 1).scatter_(1, some, joined)
        added = (sums * goes[..., None]).view(B * V, 2 * D)
        add_rows_(sums.view(B * V, 2 * D), (heads + into).view(-1), added)
        mass.scatter_add_(1, into, mass * goes)
        left = left & ~goes
        owner = into.gather(1, owner)
    return owner, again


def _write(bank: PrototypeBank, rows: Tensor, owner: Tensor, config: PaperConfig) -> Tensor:
    """Merge `rows` `[B, V]` into the ones at their `owner` `[B, V]`; return which are gone, `[B, V]` bool.

    The masses before the merge weight everything: Sigma is that of all mass together. The anchor is that of the newest
    ("recent"), the oldest ("first"; of equals the first in order) or the mean.
    """
    B, V = rows.shape
    held = {name: getattr(bank, name).flatten(0, 2)[rows].flatten(2) for name in _MEANS}
    mass = bank.mass.view(-1)[rows]
    gone = owner != torch.arange(V, device=rows.device)
    grown = torch.zeros_like(gone).scatter_(1, owner, gone)
    changed = gone | grown
    flat = (torch.arange(0, B * V, V, device=rows.device)[:, None] + owner).view(-1)

    def added_up(parts: list[Tensor]) -> Tensor:
        """Means over all mass that came together, at the place of its owner, `[B, V, F]` float64."""
        weighted = (torch.cat(parts, 2).double() * mass[..., None]).flatten(0, 1)
        sums = torch.zeros_like(weighted)
        add_rows_(sums, flat, weighted)
        return sums.view(B, V, -1) / total.clamp(min=1)[..., None]

    total = torch.zeros_like(mass).scatter_add_(1, owner, mass)
    sizes = [part.shape[2] for part in held.values()]
    means = dict(zip(held, torch.split(added_up(list(held.values())), sizes, 2), strict=True))
    offset = held["mean"] - means["mean"].view(B * V, 2)[flat].view(B, V, 2)
    covariance = bank.covariance.view(-1, 4)[rows]
    spread = covariance.double() + (offset[..., :, None] * offset[..., None, :]).flatten(2)
    means["covariance"] = added_up([spread])
    if config.anchor != "average":
        means["position"] = _anchors(held["position"], owner, newest=config.anchor == "recent")
    for name, mean in means.items():
        tensor = getattr(bank, name).flatten(3)
        old = held.get(name, covariance)
        new = torch.where(changed[..., None], mean, old).masked_fill_(gone[..., None], 0.0)
        tensor.view(-1, tensor.shape[3])[rows] = new.to(tensor.dtype)
    bank.mass.view(-1)[rows] = torch.where(gone, 0, total)
    last_step = bank.last_step.view(-1)[rows]
    newest = last_step.scatter_reduce(1, owner, last_step, "amax")
    bank.last_step.view(-1)[rows] = torch.where(gone, last_step, newest)
    bank.merged += gone.sum(1).view_as(bank.merged)
    bank.stale.view(-1)[rows] |= changed
    bank.note_(rows.view(-1))
    return gone


def _anchors(position: Tensor, owner: Tensor, *, newest: bool) -> Tensor:
    """Of all that came together the newest or the oldest position `[B, V, P]`, at the place of the owner."""
    # The first component is time under M-RoPE and the index of the token under RoPE.
    time = position[..., 0] if newest else -position[..., 0]
    best = time.scatter_reduce(1, owner, time, "amax")
    place = torch.arange(owner.shape[1], device=owner.device)
    is_best = time == best.gather(1, owner)
    first = torch.full_like(owner, owner.shape[1] - 1)
    first.scatter_reduce_(1, owner, torch.where(is_best, place, owner.shape[1] - 1), "amin")
    return position.gather(1, first[..., None].expand_as(position))


_MEANS = ("key_center", "value_center", "mean", "position")


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
    return _mark_together(looked, keys, values, alive, config)


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
