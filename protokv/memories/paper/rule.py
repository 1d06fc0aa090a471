"""`PaperPrototypeRule`: continuity-aware assignment (Algorithm 1) and maintenance (Algorithm 2) of
a prototype bank.

Source: ProtoKV (ICML 2026), arXiv 2606.26762, section 3 and appendix B. All layers and heads go
through Algorithm 1 together, one token after the other. The costs of a step are one matrix; after
each token only the column of the prototype that it moved is computed again, which is exact.
Residual statistics, if there are any, are told which prototype took which token, what died and what
was merged.

The paper merges "each pair" of close prototypes and leaves the order open. Settled: a step makes
`MERGE_PASSES` passes over prototypes with a close one, by `make_paper_merge_order`. In a pass, a
prototype without a close one before it stays, and the others go into the first one that stays and
is close to them.

A setting is what the paper's tables vary; dynamic allocation and joint histograms are not here.
When the idle rule acts is our reading: the text speaks of T_idle = 120 "steps", and Algorithm 2
runs "after every absorption". Here a step is a frame or a temporal patch. `samples/studies/delay/`
has both readings (`decay`), and T_idle in the paper's seconds.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import cache
from hashlib import sha256
from typing import Annotated, ClassVar, Literal

import torch
from torch import Tensor
from torch.nn.functional import normalize

from protokv.core.bank import BankRule, FarTokens, PrototypeBank
from protokv.core.prototypes import PrototypeConfig
from protokv.core.settings import ShareSetting, WeightSetting
from protokv.core.tensors import MemoryShape
from protokv.device.arrays import add_rows_, find_first_minimum
from protokv.errors import ConfigError
from protokv.memories.paper.residuals import ResidualStats

# Added to the diagonal of Sigma, which shrinks towards 0 while all tokens come from one place.
_SIGMA_FLOOR = 1e-4
# Passes of merging in one step; more passes settle hardly more pairs.
MERGE_PASSES = 4
# Costs `B * T * K` that are held at once. Longer steps are split; results do not depend on it.
_BLOCK_ELEMENTS = 2**25


_Anchor = Literal["recent", "first", "average"]
_MassBias = Literal["log_n", "log_n_over_s", "off"]
_Decay = Literal["floor", "interval", "off"]


@dataclass(frozen=True, slots=True, kw_only=True)
class PaperConfig(PrototypeConfig):
    """The paper's Algorithms 1 to 4; the defaults are its table to the letter.

    Attributes:
        pseudo_tokens: S, pseudo-tokens that show one prototype.
        anchor: the rotary position of a prototype: that of its newest token, of its first, or the
            mean of all.
        residual: True to keep residual statistics; without them all S pseudo-tokens are the centre.
        subquantizers: G; must divide the head size.
        codewords: C, codewords of each subquantizer.
        warmup_residuals: the first residuals of the stream, to which the codebooks of a head are
            fitted. The paper leaves T_warm open; 512 is the sample size in its first author's
            scripts.
        mass_bias: the bias added to the logit of a pseudo-token: log n, log(n / S), or 0.
        spatial_weight: lambda_sp, weight of the squared Mahalanobis distance; 0 turns the term off.
        idle_weight: lambda_idle, added to the cost of an idle prototype.
        idle_steps: T_idle; a prototype is idle when it has absorbed nothing for more than this many
            steps.
        key_rate: alpha, EMA rate of the key centre.
        value_rate: beta, EMA rate of the value centre.
        spatial_rate: eta, EMA rate of mu and Sigma.
        decay: when n <- floor((1 - gamma) n) happens to an idle prototype. "floor": in each step;
            "interval": once each T_idle steps that it stays idle (in the first step after them, if
            tokens leave the near window in that step); "off": never.
        decay_rate: gamma.
        merge: whether prototypes with close centres are merged.
        merge_key_distance, merge_value_distance: eps_K and eps_V, root-mean-square distances per
            component.
        recycle: whether freed slots are opened again with tokens of the newest step.
    """

    name: ClassVar[str] = "paper"

    pseudo_tokens: Annotated[int, 1, 1024] = 8
    anchor: _Anchor = "recent"
    residual: bool = True
    subquantizers: Annotated[int, 1, 1024] = 8
    codewords: Annotated[int, 2, 256] = 16
    warmup_residuals: Annotated[int, 2, 1_000_000] = 512
    mass_bias: _MassBias = "log_n"
    spatial_weight: WeightSetting = 0.1
    idle_weight: WeightSetting = 0.01
    idle_steps: Annotated[int, 0, 2**31] = 120
    key_rate: ShareSetting = 0.05
    value_rate: ShareSetting = 0.05
    spatial_rate: ShareSetting = 0.05
    decay: _Decay = "floor"
    decay_rate: ShareSetting = 0.05
    merge: bool = True
    merge_key_distance: WeightSetting = 0.20
    merge_value_distance: WeightSetting = 0.25
    recycle: bool = True

    def check(self) -> None:
        """Refuse a reservoir of fewer residuals than codewords."""
        super(PaperConfig, self).check()
        if self.warmup_residuals < self.codewords:
            raise ConfigError(
                f"warmup_residuals: expected {self.codewords} or more, got {self.warmup_residuals}"
            )

    @property
    def slots_per_prototype(self) -> int:
        """S, pseudo-tokens that show one prototype."""
        return self.pseudo_tokens

    @property
    def kept_mass(self) -> Fraction:
        """1 - gamma, exactly as the decimal was written, so that floor((1 - 0.05) * 20) is 19."""
        return 1 - Fraction(repr(self.decay_rate)).limit_denominator(1_000_000)


@dataclass(frozen=True, slots=True, kw_only=True)
class ContinuityConfig(PaperConfig):
    """The paper's assignment, with what loses evidence taken out: S = 1, no idle decay.

    Faster to update than `durable`, and as good only for what came while slots were free: of
    content shown after two minutes of distraction it answers .26 at 1/45 of the tokens, where
    `durable` answers .97 (`samples/studies/delay/`). Recycling goes too: it copies a token of the
    near window, which is counted again when it leaves the window.
    """

    name: ClassVar[str] = "continuity"

    pseudo_tokens: Annotated[int, 1, 1024] = 1
    residual: bool = False
    decay: _Decay = "off"
    recycle: bool = False


class PaperPrototypeRule(BankRule[PaperConfig]):
    """The paper's rule over one bank. It has no state but the bank."""

    # the statistics that are kept of what centres average away; None: none
    residuals: ResidualStats | None = None

    def __init__(self, bank: PrototypeBank, config: PaperConfig, shape: MemoryShape) -> None:
        self._bank = bank
        self._config = config
        self._shape = shape
        # Prototypes `[L * H, K]` that moved since the last search for close ones. Not state: all
        # True is safe.
        self._moved = torch.ones_like(bank.mass, dtype=torch.bool).flatten(0, 1)

    def take(self, tensors: Mapping[str, Tensor]) -> None:
        """Assume that every prototype of the loaded bank moved."""
        self._moved.fill_(True)

    def buffers(self) -> Mapping[str, Sequence[Tensor]]:
        """Return which prototypes moved."""
        return {"bank": (self._moved,)}

    def absorb_(self, tokens: FarTokens, step: int, told: Tensor) -> None:
        """Run Algorithm 1 for the evicted tokens of one step."""
        tokens = tokens.counted_only()
        if tokens.keys.shape[1] == 0:
            return
        rows, *residuals = _assign_(self._bank, tokens, step, self._config)
        self._moved.view(-1)[rows] = True
        if self.residuals is not None:
            K = self._moved.shape[1]
            fitted = self.residuals.record_(*residuals)
            self._bank.touch_(
                (fitted[:, None] * K + torch.arange(K, device=fitted.device)).view(-1)
            )

    def maintain_(self, newest: Callable[[], FarTokens], step: int) -> None:
        """Run Algorithm 2: age, merge, recycle."""
        bank = self._bank
        config = self._config
        if config.decay != "off":
            decay_masses_(bank, self.residuals, step, config)
        if config.merge:
            _merge_close_(bank, self._moved, self.residuals, config)
        if config.recycle:
            self._moved.view(-1)[_recycle_(bank, newest, config.seed, step, self._shape)] = True


# Algorithm 1


def _assign_(
    bank: PrototypeBank, tokens: FarTokens, step: int, config: PaperConfig
) -> list[Tensor]:
    """Put each token into the prototype of least cost (equation 1), in order; free slots come
    before all others.

    Returned are the rows of the bank `[T * B]` that changed, and what `ResidualStats.record_`
    takes.
    """
    L, H, K = bank.mass.shape
    B, T, D = tokens.keys.shape
    device = bank.mass.device
    head = torch.arange(B, device=device)
    directions = normalize(tokens.keys, dim=-1)
    coordinates = tokens.coordinates
    # c, p and mu move the same way, each at its rate: they stand side by side, with Sigma after, [B
    # * K, 2 D + 6].
    points = torch.cat((tokens.keys, tokens.values, coordinates.expand(B, T, 2)), 2)
    held = torch.cat(
        (bank.key_center, bank.value_center, bank.mean, bank.covariance.flatten(3)), 3
    ).flatten(0, 2)
    rates = torch.tensor(
        [config.key_rate] * D + [config.value_rate] * D + [config.spatial_rate] * 3, device=device
    )
    # A free slot becomes the token itself, with Sigma = I.
    opening = torch.tensor([1.0] * (2 * D + 2) + [0.0], device=device)
    identity = torch.eye(2, device=device)
    held[:, -4:] += identity.flatten() * (bank.mass.view(-1, 1) == 0)
    exact_coordinates = coordinates.double()
    floor = _SIGMA_FLOOR * identity.double()
    chosen = []
    opened = []
    after = []
    block = max(1, _BLOCK_ELEMENTS // (B * K))
    for start in range(0, T, block):
        stop = min(start + block, T)
        cost = _costs(bank, held, directions[:, start:stop], coordinates[start:stop], step, config)
        for t in range(start, stop):
            least, slot = find_first_minimum(cost[:, t - start])
            rows = head * K + slot
            is_free = least == -torch.inf
            rate = torch.where(is_free[:, None], opening, rates)
            new = held[rows]
            new[:, :-4].lerp_(points[:, t], rate[:, :-1])
            offset = coordinates[t] - new[:, -6:-4]
            new[:, -4:].lerp_((offset[:, :, None] * offset[:, None]).flatten(1), rate[:, -1:])
            held[rows] = new
            chosen.append(rows)
            opened.append(is_free)
            after.append(new)
            # Only these prototypes changed, and they are neither free nor idle now.
            column = (
                -normalize(new[:, None, :D], dim=-1) @ directions[:, t + 1 : stop].mT
            ).squeeze(1)
            if config.spatial_weight:
                mean, spread = new[:, -6:].double().split_with_sizes((2, 4), 1)
                root = torch.linalg.cholesky_ex(spread.view(B, 2, 2) + floor).L
                offset = exact_coordinates[t + 1 : stop].T - mean[:, :, None]
                whitened = torch.linalg.solve_triangular(root, offset, upper=False)
                column += config.spatial_weight * whitened.square_().sum(1)
            cost[head, t + 1 - start :, slot] = column
        rows = torch.stack(chosen[start:], 1)
        is_new = torch.stack(opened[start:], 1)
        _count_tokens_(bank, rows, is_new, tokens.positions[start:stop].double(), step, config)
    rows = torch.stack(chosen, 1)
    is_new = torch.stack(opened, 1)
    residual = points - torch.stack(after, 1)[..., :-4]
    changed = rows.view(-1)
    keys, values, means, spreads = held[changed].split_with_sizes((D, D, 2, 4), 1)
    bank.put_centers_(changed, keys, values)
    bank.mean.flatten(0, 2)[changed] = means
    bank.covariance.flatten(0, 2).flatten(1)[changed] = spreads
    bank.opened += is_new.sum(1).view(L, H)
    bank.absorbed += (~is_new).sum(1).view(L, H)
    bank.touch_(changed)
    residuals = (residual[..., part : part + D].contiguous() for part in (0, D))
    return [changed, *residuals, (rows % K).masked_fill_(is_new, -1)]


def _count_tokens_(
    bank: PrototypeBank,
    rows: Tensor,
    is_new: Tensor,
    positions: Tensor,
    step: int,
    config: PaperConfig,
) -> None:
    """Count tokens `[B, T]` at `positions` `[T, P]` in prototypes `rows`, and move the anchors of
    these.
    """
    B, T = rows.shape
    flat = rows.view(-1)
    anchors = bank.position.flatten(0, 2)
    mass = bank.mass.view(-1)
    mass.index_add_(0, flat, torch.ones_like(flat))
    bank.last_step.view(-1)[flat] = step
    if config.anchor == "average":
        add_rows_(anchors, flat, (positions.repeat(B, 1) - anchors[flat]) / mass[flat, None])
        return
    # The last token of each prototype, or the token that opened it.
    counts = torch.ones_like(is_new) if config.anchor == "recent" else is_new
    token = torch.arange(T, device=rows.device).expand(B, T)[counts]
    newest = torch.full_like(mass, -1).scatter_reduce_(0, rows[counts], token, "amax")
    moved = newest >= 0
    anchors[moved] = positions[newest[moved]]


def _costs(
    bank: PrototypeBank,
    held: Tensor,
    directions: Tensor,
    coordinates: Tensor,
    step: int,
    config: PaperConfig,
) -> Tensor:
    """Return equation 1 for all tokens and prototypes, `[B, T, K]` float32; a free slot costs minus
    infinity.

    `held` is `[B * K, 2 D + 6]`, `directions` are normalized keys `[B, T, D]`. The squared
    Mahalanobis distance is a quadratic form in x^2, xy, y^2, x, y and 1: a narrow product, in
    float64 because this form cancels where Sigma is close to `_SIGMA_FLOOR`.
    """
    B, T, D = directions.shape
    K = bank.mass.shape[2]
    idle = step - bank.last_step > config.idle_steps
    constant = (
        (float(config.idle_weight) * idle).masked_fill_(bank.mass == 0, -torch.inf).view(B, K)
    )
    keys = held.view(B, K, -1)[:, :, :D]
    cost = torch.empty(B, T, K, device=held.device)
    for head in range(B):
        torch.addmm(
            constant[head],
            directions[head],
            normalize(keys[head], dim=-1).T,
            alpha=-1,
            out=cost[head],
        )
    if config.spatial_weight:
        x, y = coordinates.double().unbind(1)
        features = torch.stack((x * x, x * y, y * y, x, y, torch.ones_like(x)), 1)
        x, y, xx, xy, _, yy = held[:, -6:].double().view(B, K, 6).unbind(2)
        xx = xx + _SIGMA_FLOOR
        yy = yy + _SIGMA_FLOOR
        weight = config.spatial_weight / (xx * yy - xy * xy)
        a = weight * yy
        b = -weight * xy
        c = weight * xx
        d = a * x + b * y
        e = b * x + c * y
        form = torch.stack((a, 2 * b, c, -2 * d, -2 * e, d * x + e * y), 1)
        for head in range(B):
            cost[head] += features @ form[head]
    return cost


# Algorithm 2


def decay_masses_(
    bank: PrototypeBank, residuals: ResidualStats | None, step: int, config: PaperConfig
) -> None:
    """n <- floor((1 - gamma) n) for idle prototypes, in whole numbers; mass 0 frees the slot."""
    age = step - bank.last_step
    idle = (bank.mass > 0) & (age > config.idle_steps)
    if config.decay == "interval":
        idle &= (age - 1) % max(1, config.idle_steps) == 0
    kept = config.kept_mass
    less = (bank.mass * kept.numerator).div(kept.denominator, rounding_mode="floor")
    bank.mass.copy_(torch.where(idle, less, bank.mass))
    died = idle & (less == 0)
    bank.expired += died.sum(2)
    rows = died.view(-1).nonzero().squeeze(1)
    bank.free_(rows)
    if residuals is not None:
        residuals.freed_(rows)


@cache
def make_paper_merge_order(slots: int) -> tuple[int, ...]:
    """Return the order in which the slots of a head are looked at for merging: without any pattern,
    always the same.

    By place, along a line of centres each close to the next, every decision would wait for the one
    before.
    """
    return tuple(sorted(range(slots), key=lambda slot: sha256(b"%d" % slot).digest()))


def _merge_close_(
    bank: PrototypeBank, moved: Tensor, residuals: ResidualStats | None, config: PaperConfig
) -> None:
    """Merge prototypes whose root-mean-square distances are below eps_K for keys and below eps_V
    for values.

    `moved` `[L * H, K]` bool are the prototypes that moved since the last search; on return those
    to search next time.
    """
    K = bank.mass.shape[2]
    rank = torch.tensor(make_paper_merge_order(K), device=moved.device).argsort()
    for head in range(len(moved)):
        slots = _find_close(bank, head, moved[head], config)
        moved[head] = False
        if not len(slots):
            continue
        slots = slots[rank[slots].argsort()]
        rows = head * K + slots
        owner, had_close = _plan_merges(bank, rows, config)
        stays = owner == torch.arange(len(owner), device=owner.device)
        # Pairs that the passes did not settle are searched again in the next step.
        moved[head, slots] = had_close & stays
        _write_merged(bank, rows, owner, config)
        if residuals is not None:
            residuals.merged_(rows[owner][~stays], rows[~stays])
        bank.free_(rows[~stays])
        bank.merged.view(-1)[head] += (~stays).sum()


def _find_close(bank: PrototypeBank, head: int, moved: Tensor, config: PaperConfig) -> Tensor:
    """Return the slots `[v]` of a head that may be close to another one; one of each pair has
    `moved` `[K]`.

    The squared distances are float32 products, so a margin lets through all that are close;
    `_plan_merges` decides.
    """
    alive = bank.mass.flatten(0, 1)[head] > 0
    asking = (moved & alive).nonzero().squeeze(1)
    near = alive.expand(len(asking), -1) & (
        asking[:, None] != torch.arange(len(alive), device=alive.device)
    )
    keys = bank.key_center.flatten(0, 1)[head]
    values = bank.value_center.flatten(0, 1)[head]
    for centers, most in ((keys, config.merge_key_distance), (values, config.merge_value_distance)):
        norms = centers.square().sum(1) * (1 - 1e-5)
        squares = torch.addmm(norms, centers[asking], centers.T, alpha=-2).add_(norms[asking, None])
        near &= squares < 1.001 * most**2 * keys.shape[1]
        some = near.any(1)
        asking = asking[some]
        near = near[some]
    found = near.any(0)
    found[asking] = True
    return found.nonzero().squeeze(1)


def _plan_merges(bank: PrototypeBank, rows: Tensor, config: PaperConfig) -> tuple[Tensor, Tensor]:
    """Plan all passes over prototypes `rows` `[v]` of one head, in merge order. In float64: large
    groups stay exact.

    Returned are of each the index in `rows` of what it is part of in the end, and whether it had a
    close one at first.
    """
    keys, values = bank.centers(rows)
    D = keys.shape[1]
    mass = bank.mass.view(-1)[rows].double()
    sums = torch.cat((keys, values), 1) * mass[:, None]
    owner = left = torch.arange(len(rows), device=rows.device)
    had_close = torch.zeros_like(left, dtype=torch.bool)
    for turn in range(MERGE_PASSES):
        means = sums[left] / mass[left, None]
        close = _within(means[:, :D], config.merge_key_distance) & _within(
            means[:, D:], config.merge_value_distance
        )
        # Each with those before it.
        close = close.triu(1)
        if turn == 0:
            had_close = close.any(0) | close.any(1)
            left = left[had_close]
            close = close[had_close][:, had_close]
        stays = ~close.any(0)
        takers = close & stays[:, None]
        goes = takers.any(0)
        if not goes.any():
            break
        # The first of several takers.
        into = left[takers[:, goes].byte().argmax(0)]
        gone = left[goes]
        add_rows_(sums, into, sums[gone])
        add_rows_(mass, into, mass[gone])
        heir = torch.arange(len(rows), device=rows.device)
        heir[gone] = into
        owner = heir[owner]
        left = left[~goes]
    return owner, had_close


def _within(points: Tensor, most: float) -> Tensor:
    """Return which pairs of points `[v, D]` have a root-mean-square distance below `most`, `[v, v]`
    bool.
    """
    distance: Tensor = torch.cdist(points, points, compute_mode="donot_use_mm_for_euclid_dist")
    return distance.lt(most * points.shape[1] ** 0.5)


def _write_merged(bank: PrototypeBank, rows: Tensor, owner: Tensor, config: PaperConfig) -> None:
    """Make each owner what it is together with its members; `rows` and `owner` `[v]` are those of
    `_plan_merges`.

    The masses before the merge weight everything; Sigma is moment-matched. Of equal anchors the
    first in order stays.
    """
    grown = torch.bincount(owner)[owner] > 1
    targets, group = torch.unique(rows[owner][grown], return_inverse=True)
    rows = rows[grown]
    mass = bank.mass.view(-1)[rows]
    total = torch.zeros_like(targets).index_add_(0, group, mass)

    def average(held: Tensor) -> Tensor:
        sums = torch.zeros(len(targets), held.shape[1], dtype=torch.float64, device=held.device)
        add_rows_(sums, group, held.double() * mass[:, None])
        return sums / total[:, None]

    coordinates = bank.mean.flatten(0, 2)[rows]
    position = bank.position.flatten(0, 2)[rows]
    mean = average(coordinates)
    offset = coordinates - mean[group]
    spread = bank.covariance.flatten(0, 2)[rows] + offset[:, :, None] * offset[:, None]
    if config.anchor == "average":
        anchor = average(position)
    else:
        # The first component is time under M-RoPE and the index of the token under RoPE.
        newest_first = position[:, 0].argsort(descending=config.anchor == "recent", stable=True)
        place = torch.arange(len(rows), device=rows.device)
        best = torch.full_like(targets, len(rows)).scatter_reduce_(
            0, group[newest_first], place, "amin"
        )
        anchor = position[newest_first[best]]
    merged = {
        "key_center": average(bank.key_center.flatten(0, 2)[rows]),
        "value_center": average(bank.value_center.flatten(0, 2)[rows]),
        "mean": mean,
        "covariance": average(spread.flatten(1)).view(-1, 2, 2),
        "position": anchor,
    }
    for name, new in merged.items():
        held = getattr(bank, name).flatten(0, 2)
        held[targets] = new.to(held.dtype)
    last_step = bank.last_step.view(-1)
    last_step[targets] = torch.full_like(targets, -1).scatter_reduce_(
        0, group, last_step[rows], "amax"
    )
    bank.mass.view(-1)[targets] = total
    bank.touch_(targets)


def _recycle_(
    bank: PrototypeBank, newest: Callable[[], FarTokens], seed: int, step: int, shape: MemoryShape
) -> Tensor:
    """Open slots that died or were merged away with distinct tokens of the newest near step; return
    the rows `[n]`.

    Slots that no token has opened yet are left to evicted tokens. If there are too few tokens, the
    highest stay free.
    """
    K = bank.mass.shape[2]
    freed = ((bank.mass == 0) & (bank.last_step >= 0)).flatten(0, 1)
    heads = freed.any(1).nonzero().squeeze(1).tolist()
    opened = [freed.new_empty(0, dtype=torch.int64)]
    if not heads:
        return opened[0]
    tokens = newest()
    order = (
        _draw(seed, step, shape, tokens.keys.shape[1]).argsort(dim=1, stable=True).to(freed.device)
    )
    for head in heads:
        slots = freed[head].nonzero().squeeze(1)[: order.shape[1]]
        token = order[head, : len(slots)]
        rows = head * K + slots
        bank.open_(rows, tokens, head, token, step)
        bank.recycled.view(-1)[head] += len(slots)
        opened.append(rows)
    return torch.cat(opened)


def _draw(seed: int, step: int, shape: MemoryShape, tokens: int) -> Tensor:
    """Draw numbers in [0, 1) for each head and token, `[L * H, T]` float32 on the CPU, by seed and
    step alone.
    """
    # Some layers of a model draw what the whole model draws for them.
    generator = torch.Generator().manual_seed(make_paper_seed(seed, step))
    return torch.rand(shape.model_layers, shape.kv_heads, tokens, generator=generator)[
        shape.own_layers
    ].flatten(0, 1)


def make_paper_seed(seed: int, step: int) -> int:
    """Return a seed for one step of a stream: 63 bits of the sha256 of both numbers."""
    return int.from_bytes(sha256(f"{seed} {step}".encode()).digest()[:8], "little") >> 1
