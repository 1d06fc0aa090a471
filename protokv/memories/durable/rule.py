"""`DurableRule`: as many points go as tokens came. One rule for every size of bank.

It is ours, not the paper's. There every token goes into an existing prototype, and a brief,
distinct token is averaged away. Here distinct tokens stay and redundant ones merge, with no
threshold and no rate. Age plays no part.

A step has points: the T tokens that leave the near window, and C prototypes that may have cheap
merges. T of the points go, each into the nearest heavier one that stays. The C that stay take the
slots of the C prototypes. A cluster is the mean of its members, each as heavy as its mass, and
stands where its newest member does. `samples/studies/delay/` measures what this keeps.

A point that goes into a heavier one costs w v / (w + v) |f - g|^2, as Ward's rule has it (1963).
f is [key; value], the key without rotation. w and v are the tokens that the two points count as:

- one each in a shallow model. There repeats enter the bank, and a mass says how long a thing was in
  view. If masses counted, a heavy prototype would be dear to go into: repeats would pile up beside
  it, and what came once would pay for them.
- their masses in a deep model (`repeats.DEEP_MODEL_LAYERS`), words included. There repeats stay
  out, and a mass says how many distinct tokens a point stands for.

`docs/guides/memories.md` compares these costs.

Each point has a goal: the heavier one that stays, into which it would go at the least cost. Where a
goal would go itself at a lower cost, the point waits. Who goes is found in two rounds. In the first
the T cheapest points go, except those that wait. In the second all others get new goals, and the
cheapest go, as many as are missing. The cost of one that waits again counts `WAITING_COST_FACTOR`
times, since it would end up farther away. At last each point that goes finds its goal among those
that stay. Costs are those of the points as they came: what came into a point in this step is not
charged. Slots without mass go before all others; what `NoveltyCounts` keeps goes last.

A deep model does not average strangers. If a point goes at a higher cost than the mean squared
distance of the step's tokens from their mean, it is dropped, and its goal stays as it is.
`samples/studies/language/` measures what this brings.

A bank of at most `WHOLE_BANK_PROTOTYPES` or 1.5 T prototypes is searched whole: C is its size. In a
larger one the C are those with the least known costs. Every token is compared with all prototypes,
and so are T / 8 prototypes a step, in turn. Comparisons read a sketch: [key; value] folded to at
most 64 numbers under fixed random signs (Achlioptas, 2003;
https://doi.org/10.1016/S0022-0000(03)00025-4). A bank that is not searched whole holds its sketches
in bfloat16 where the device multiplies it. This rounds less than the 8 bits of a centre do.

All shapes are fixed, nothing waits for the device, and no number of a tensor steers Python: once
the bank is full, every step is the same operations. `tests/oracles/durable.py` has the rule written
out for one head.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

from protokv.core.bank import BankRule, FarTokens, PrototypeBank
from protokv.core.near import ExactTokens, WindowMove
from protokv.core.step import MOST_STREAM_COUNT, StepKV
from protokv.core.tensors import MemoryShape, Specs, TensorDict, TensorGroups, Tensors
from protokv.device import arrays
from protokv.device.arrays import concat_rows, find_first_minimum, slice_rows, sum_weighted_rows
from protokv.device.kernels import multiplies_bfloat16
from protokv.memories.durable.bank import MOST_PROTOTYPE_NUMBER, DurableBank
from protokv.memories.durable.novelty import MergeExclusions, NoveltyCounts
from protokv.memories.durable.repeats import RepeatWeights, is_deep
from protokv.memories.durable.settings import DurableConfig

WAITING_COST_FACTOR = 10
"""How many times the cost of a point counts that waits in both rounds."""
WHOLE_BANK_PROTOTYPES = 192
"""Banks up to this size are searched whole. Larger ones have two thirds of this number as
candidates, or more."""
_IN_TURN = 8
"""A step of T tokens compares T / 8 prototypes with all others."""
_WIDTH = 64
"""The most numbers of a sketch."""
# Costs that are worked out at once: what stays in a CPU's cache, and a gigabyte elsewhere.
_AT_ONCE = {"cpu": 2**21}
_MOST_AT_ONCE = 2**28
# Prototypes that are decoded at once to take a state.
_READ_AT_ONCE = 2**18
_SEED = 1
# The exponent of cue 0, above that of any other.
_FIRST_CUE = 50

# Costs that are no distances, from the lowest to the highest:
# -|f|^2 of a point without mass, so that it goes before all others. bfloat16 holds it exactly.
_EMPTY = 2.0**126
# What is added to the cost of a point that `NoveltyCounts` keeps: more than any merge costs.
_KEPT = 8e36
# The cost of a merge that may not be: into itself, or into a lighter point.
_NEVER = 1e38
# Numbers to sort by are mass * _PLACES + place, or step * _PLACES + place, in an int64. A step has
# fewer points than _PLACES; _LIGHT is above every mass * _PLACES.
_PLACES = 1 << 20
_LIGHT = 1 << 61


class DurableRule(BankRule[DurableConfig]):
    """Absorbs steps into one bank of `[L, H, K]` prototypes. B = L * H; n = C + T points."""

    @classmethod
    def declare(cls, config: DurableConfig, shape: MemoryShape) -> Specs:
        """Declare the counts of novelty, the weights of the near window, the known costs and whose
        turn it is.
        """
        declare = shape.axes(prototype=config.prototypes).declare
        head = "layer kv_head"
        known = "half of the least cost of a merge, as far as known"
        tried = "slots from the front that were candidates"
        return (
            *NoveltyCounts.declare(shape),
            *(
                RepeatWeights.declare(config.near_tokens)
                if RepeatWeights.acts(config, shape)
                else ()
            ),
            declare("rule.cost", f"{head} prototype", torch.float32, known),
            declare("rule.tried", head, torch.int64, tried),
        )

    def __init__(self, bank: PrototypeBank, config: DurableConfig, shape: MemoryShape) -> None:
        assert isinstance(bank, DurableBank)
        self._bank = bank
        self._novelty = NoveltyCounts(config, shape)
        self._repeats = (
            RepeatWeights(config.near_tokens, shape) if RepeatWeights.acts(config, shape) else None
        )
        # Deep in a model a mean of strangers is a token that the model has never read.
        self._drops = self._repeats is not None
        # Elsewhere a mass says how long a thing was there.
        self._most_counted = MOST_PROTOTYPE_NUMBER if is_deep(shape) else 1
        L, H, K = bank.mass.shape
        B = L * H
        D = shape.head_size
        F = 2 * shape.head_size
        device = shape.device
        while F > _WIDTH and F % 2 == 0:
            F //= 2
        self._size = B, K, F
        self._signs = draw_sketch_signs(2 * D).to(device)
        # A bank that is searched whole needs no sketches between steps.
        held = K if K > WHOLE_BANK_PROTOTYPES else 0
        self._halves = torch.tensor([-0.5], device=device)
        self._one = torch.tensor(-1.0, device=device)
        self._empty = torch.tensor(-_EMPTY, device=device)
        self._zero = torch.tensor(0.0, device=device)
        self._most = torch.tensor(MOST_PROTOTYPE_NUMBER, device=device)
        # What the cost of a point counts that goes, and of one that waits.
        self._factors = torch.tensor([1.0, WAITING_COST_FACTOR], device=device)
        self._dtype = torch.bfloat16 if held and multiplies_bfloat16(device) else torch.float32
        nothing = torch.zeros(1, 1, 2 * D, device=device)
        self._sketches = self._sketch(nothing, nothing[..., 0] > 0).repeat(B, held, 1)
        # -1 / w of each prototype (`_share`), which is -1 or more. The slots that were never used
        # have numbers from -1 down, the lower the farther back. So the bank is filled from the
        # front, and a state leaves out the slots behind those in use.
        self._fresh = torch.linspace(-1, -2, held, device=device)
        self._shares = self._fresh.repeat(B, 1)
        self._cost = torch.zeros(B, K, device=device)
        self._head = torch.arange(B, device=device)[:, None] * K
        self._line = torch.arange(B * K + 4 * WHOLE_BANK_PROTOTYPES, device=device)
        # Only on a CPU is it known how many slots were used: to read a number of a device, the host
        # would wait. The state of an empty bank says 1, too.
        self.prototypes_used = 1 if held and arrays.is_readable_by_numpy(self._line) else None
        self._blank = torch.tensor([0, -1] + [0] * shape.position_components, device=device)

    def see_(self, before: ExactTokens, step: StepKV) -> None:
        """Count the tokens that come again."""
        self._novelty.see_(before, step)
        if self._repeats is not None:
            self._repeats.see_(before, step)

    def plan(self, step: int, move: WindowMove) -> Sequence[float]:
        """Return the numbers of `NoveltyCounts`."""
        return self._novelty.plan(step, move)

    def absorb_(
        self, tokens: FarTokens, step: int, numbers: Tensor, newest: Callable[[], FarTokens]
    ) -> tuple[Tensor, ...]:
        """Put evicted tokens into the bank at time `step`."""
        if self._repeats is not None:
            tokens = self._repeats.weigh_(tokens, self._bank)
        (B, K, _), T = self._size, tokens.keys.shape[1]
        least = K if K <= WHOLE_BANK_PROTOTYPES else WHOLE_BANK_PROTOTYPES * 2 // 3
        C = min(K, max(-(-T * 3 // 2), least))
        # A CPU works on a few heads at once, so that their numbers stay in its cache. A device
        # works on all: every part would cost it launches.
        with_all = (
            (T + -(-T // _IN_TURN)) * K if C < K and self._cost.device.type in _AT_ONCE else 0
        )
        parts = [*self._parts(B, max((C + T) ** 2, with_all))]
        usable = tokens.mass > 0
        limits = self._novelty.limits(numbers, T, self._bank.opened.view(B), parts)
        if C == K and self.prototypes_used is not None:
            self.prototypes_used = K
        if len(self._line) < C + T:
            self._line = torch.arange(C + T, device=self._line.device)
        centers = torch.cat((tokens.keys, tokens.values), 2)
        rows = torch.cat((tokens.mass[:, None], limits[0].step.expand(T, 1), tokens.positions), 1)
        # A token without mass has no step and no position.
        rows = torch.where(usable[:, None], rows, self._blank).expand(B, -1, -1)
        changed = [
            self._take_in_(heads, centers[heads], rows[heads], usable, own, C)
            for heads, own in zip(parts, limits, strict=True)
        ]
        self._bank.opened += usable.sum()
        return tuple(map(concat_rows, zip(*changed, strict=True)))

    def _take_in_(
        self,
        heads: slice,
        centers: Tensor,
        rows: Tensor,
        usable: Tensor,
        limits: MergeExclusions,
        C: int,
    ) -> tuple[Tensor, ...]:
        """Put tokens with these centres and rows into the bank of some heads; return what
        `absorb_` does.
        """
        bank, (_, K, _), h = self._bank, self._size, heads.stop - heads.start
        sketch = self._sketch(centers, usable)
        every = self._line[heads.start * K : heads.stop * K]
        chosen = every if C == K else self._candidates(heads, sketch, limits, C)
        own = bank.read(chosen).view(h, C, -1)
        of_own = bank.rows.index_select(0, chosen).view(h, C, -1)
        searched = self._sketches.numel() > 0
        if searched:
            known = self._sketches.flatten(0, 1).index_select(0, chosen).view(h, C, -1)
        else:
            known = self._sketch(own, of_own[..., 0] > 0)
        centers = torch.cat((own, centers), 1)
        points = centers.new_empty(h, C + sketch.shape[1], sketch.shape[2])
        sketch = torch.cat((known, sketch), 1, out=points)
        centers, rows, cost = self._merge(centers, sketch, torch.cat((of_own, rows), 1), limits, C)
        mass = rows[..., 0].flatten()
        bank.rows.index_copy_(0, chosen, rows.flatten(0, 1))
        centers, *shown = bank.write_(chosen, centers.flatten(0, 1), mass)
        if searched:
            self._sketches.flatten(0, 1).index_copy_(0, chosen, self._sketch(centers, mass > 0))
            self._shares.view(-1).index_copy_(0, chosen, self._share(mass))
        if C < K:
            self._cost.view(-1).index_copy_(0, chosen, cost.flatten())
        return chosen, *shown

    def _parts(self, rows: int, costs: int) -> Iterator[slice]:
        """Yield parts of some rows, of `costs` costs each; results do not depend on the size."""
        step = max(1, _AT_ONCE.get(self._cost.device.type, _MOST_AT_ONCE) // costs)
        for start in range(0, rows, step):
            yield slice(start, min(start + step, rows))

    def _sketch(self, centers: Tensor, usable: Tensor) -> Tensor:
        """Return sketches of centres `[..., 2 D]`, a row each.

            float32   [f_1 ... f_F | -1/2       | |f|^2]
            bfloat16  [f_1 ... f_F | -1/2, -1/2 | |f|^2 in two parts, of which the second is what
                       the first rounds off]

        A point that is not `usable` is empty: its |f|^2 is so low that it merges before all others.
        """
        f = (centers * self._signs).view(*centers.shape[:-1], -1, self._size[2]).sum(-2)
        f = f.to(self._dtype).float()
        norm = torch.where(usable, f.square().sum(-1), self._empty)[..., None]
        parts = 1 if self._dtype == torch.float32 else 2
        halves = self._halves.expand(*norm.shape[:-1], parts)
        z = f.new_empty((*f.shape[:-1], self._size[2] + 2 * parts), dtype=self._dtype)
        torch.cat((f, halves, norm.expand_as(halves)), -1, out=z)
        if parts > 1:
            torch.sub(norm, z[..., -2:-1], out=z[..., -1:])
        return z

    def _turn(self, sketches: Tensor) -> Tensor:
        """Return rows `[B, n, ...]` from sketches: [f | |f|^2 | -1/2]. The product of the row of a
        point and the sketch of another is f g - |f|^2 / 2 - |g|^2 / 2: -1 / 2 of their squared
        distance.
        """
        F = self._size[2]
        f = sketches[..., :F]
        rest = sketches[..., F:]
        halves, norms = rest.chunk(2, -1)
        return torch.cat((f, norms, halves), -1)

    def _share(self, mass: Tensor) -> Tensor:
        """Return -1 / w, where a point of this mass counts as w tokens; without mass as one."""
        return self._one / mass.clamp(1, self._most_counted)

    def _candidates(self, heads: slice, tokens: Tensor, limits: MergeExclusions, C: int) -> Tensor:
        """Return the rows of the C candidates of each of these heads, and compare some prototypes
        with all others.

        Candidates are the prototypes with the least known costs, to each other or to the tokens
        with these sketches. Prototypes that are kept come last."""
        _, K, F = self._size
        T = tokens.shape[1]
        sketches = self._sketches[heads]
        shares = self._shares[heads]
        known = self._cost[heads]
        turns = -(-T // _IN_TURN)
        some = torch.add(self._line[turns : 2 * turns], limits.step, alpha=turns).remainder_(K)
        turned = sketches.index_select(1, some)
        ours = self._turn(torch.cat((tokens, turned), 1))
        # Made positive, the |f|^2 of an empty token, or of an empty prototype in turn, is so high
        # that no prototype is near it.
        ours[..., F].abs_()
        share = shares.index_select(1, some)[..., None]
        # `least`: each prototype's least cost to the tokens and to the prototypes in turn.
        # `of_turns`: the least cost of those in turn to any prototype. Every token counts as one
        # here, so its nearest prototype is found before anything is divided.
        least = torch.empty_like(known)
        of_turns = []
        for part in self._parts(K, ours.shape[0] * ours.shape[1]):
            theirs = shares[:, part]
            near, costs = torch.bmm(ours, sketches[:, part].mT).tensor_split((T,), 1)
            costs = costs / (theirs[:, None] + share)
            torch.minimum(near.amax(1) / (theirs - 1), costs.amin(1), out=least[:, part])
            itself = some[:, None] == self._line[part]
            of_turns.append(costs.add_(itself, alpha=_NEVER).amin(2))
        known.index_copy_(
            1, some, of_turns[0] if len(of_turns) == 1 else torch.stack(of_turns).amin(0)
        )
        torch.minimum(known, least, out=least)
        bank = self._bank
        last, mass = (rows.flatten(0, 1)[heads] for rows in (bank.last_step, bank.mass))
        kept = find_kept(limits, last, mass)
        found = least.add_(kept, alpha=_KEPT).topk(C, largest=False).indices
        if self.prototypes_used is not None and self.prototypes_used < K:
            self.prototypes_used = max(self.prototypes_used, 1 + int(found.max()))
        return (found + self._head[heads]).view(-1)

    def _merge(
        self, centers: Tensor, sketch: Tensor, rows: Tensor, limits: MergeExclusions, C: int
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return the C points that stay, with what came into them: centres, rows, and the least
        known costs.

        Args:
            centers: `[B, n, 2 D]` float32, of prototypes and, after these, of tokens.
            sketch: `[B, n, ...]`, as `_sketch` returns them.
            rows: `[B, n, 2 + P]` int64: mass, step and position. Those that are returned fit into
                `DurableBank.rows`.
            limits: which points are kept.
            C: how many stay.
        """
        mass = rows[..., 0]
        last = rows[..., 1]
        n = rows.shape[1]
        into, stay, cost = self._choose(sketch, mass, find_kept(limits, last, mass), n - C)
        total = mass.scatter_reduce(1, into, mass, "sum", include_self=False)
        share = mass / total.clamp(min=1).gather(1, into)
        centers, means = sum_weighted_rows((centers, rows[..., 2:].float()), share, into, stay)
        # A cluster stands where its newest member does, the last one if several are newest.
        newest = torch.add(self._line[:n], last, alpha=_PLACES)
        newest = newest.scatter_reduce(1, into, newest, "amax").gather(1, stay) & (_PLACES - 1)
        rows = rows.gather(1, newest[:, :, None].expand(-1, -1, rows.shape[2]))
        torch.gather(total, 1, stay, out=rows[..., 0])
        # If the stream does not repeat itself, members have no place in common: it stands at their
        # mean.
        place = rows[..., 2:]
        torch.where(limits.share[:, :, None] > 0, means.round_().long(), place, out=place)
        narrow = torch.empty_like(rows, dtype=torch.int32)
        return centers, torch.minimum(rows, self._most, out=narrow), cost

    def _choose(
        self, sketch: Tensor, mass: Tensor, kept: Tensor, T: int
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Choose the T points that go, and where to.

        Returns:
            What each point goes into, `[B, n]`, itself if it stays or is dropped; which points
            stay, `[B, C]`; and their least costs to each other, `[B, C]`.
        """
        # The first round: the cheapest go, except those whose goal would go at a lower cost.
        costs = self._compute_costs(sketch, mass, kept)
        least, goal = find_first_minimum(costs)
        waits = least > least.gather(1, goal)
        cheapest = least.argsort(dim=1, stable=True)[:, :T]
        gone = self._zero.expand_as(least).scatter(1, cheapest, -torch.inf).masked_fill_(waits, 0)
        # The second round: new goals for all others. What has gone has an infinite cost as a goal,
        # and comes first in rank.
        least, goal = find_first_minimum(costs.sub_(gone[:, None]))
        waits = least > least.gather(1, goal)
        factors = self._factors
        rank = torch.addcmul(gone, least, torch.where(waits, factors[1], factors[0]))
        goes, stay = rank.argsort(dim=1, stable=True).tensor_split((T,), 1)
        # At last: the goal of each point among those that stay.
        gone.scatter_(1, goes, -torch.inf)
        least, goal = find_first_minimum(costs.sub_(gone[:, None]))
        if self._drops:
            # Half of the mean squared distance of the tokens from their mean, as costs are halves:
            # the sum of squares over 2 T, since `correction` is subtracted from T.
            usual = sketch[:, -T:, : self._size[2]].var(1, correction=-T).sum(1, keepdim=True)
            goal = torch.where(least <= usual, goal, self._line[: mass.shape[1]])
        into = goal.scatter(1, stay, stay)
        least -= gone
        return into, stay, least.scatter_reduce(1, goal, least, "amin").gather(1, stay)

    def _compute_costs(self, sketch: Tensor, mass: Tensor, kept: Tensor) -> Tensor:
        """Return half of what it costs that a point goes into another, `[B, n, n]`."""
        n = mass.shape[1]
        share = self._share(mass)
        costs = torch.bmm(self._turn(sketch), sketch.mT)
        above = kept[:, :, None] * _KEPT
        torch.addcdiv(above, costs, share[:, None] + share[..., None], out=costs)
        # A point may go into one that is heavier, of equal ones into the earlier. What is kept
        # counts as lighter than all others, so that only what is kept or empty goes into it.
        weight = torch.sub(self._line[:n], mass, alpha=_PLACES).add_(kept, alpha=_LIGHT)
        places = self._line[:n].float().expand_as(weight)
        place = torch.empty_like(costs[:, 0]).scatter_(1, weight.argsort(dim=1), places)
        # A CPU compares and fills four times as slowly as it adds.
        return costs.add_((place[:, None] + 1 - place[:, :, None]).clamp_(0, 1), alpha=_NEVER)

    def live_tensors(self) -> TensorDict:
        """Return the least known costs, whose turn it is, and what novelty and repeats hold."""
        return {
            "rule.cost": self._cost.view_as(self._bank.mass),
            "rule.tried": (self._shares >= -1).sum(1).view_as(self._bank.opened),
            **self._novelty.live_tensors(),
            **({} if self._repeats is None else self._repeats.live_tensors()),
        }

    def buffers(self) -> TensorGroups:
        """Return what a search reads."""
        return {"rule": (self._sketches, self._shares)}

    def take(self, tensors: Tensors) -> None:
        """Take a state; the bank has taken its own before."""
        self._novelty.take(tensors)
        if self._repeats is not None:
            self._repeats.take(tensors)
        self._cost.view_as(self._bank.mass).copy_(tensors["rule.cost"])
        if self._sketches.numel():
            mass = self._bank.rows[:, 0]
            sketches = self._sketches.flatten(0, 1)
            for some in slice_rows(len(mass), _READ_AT_ONCE):
                sketches[some] = self._sketch(
                    self._bank.read(self._line[: len(mass)][some]), mass[some] > 0
                )
            fresh = self._line[: len(self._fresh)] >= tensors["rule.tried"].view(-1, 1).to(
                self._line.device
            )
            torch.where(fresh, self._fresh, self._share(mass).view_as(fresh), out=self._shares)
            if self.prototypes_used is not None:
                self.prototypes_used = int(tensors["rule.tried"].max())


def draw_sketch_signs(numbers: int) -> Tensor:
    """Return fixed random signs, the same on every machine, `[numbers]` float32."""
    return (
        torch.randint(0, 2, (numbers,), generator=torch.Generator().manual_seed(_SEED))
        .mul_(2)
        .sub_(1)
        .float()
    )


def find_kept(limits: MergeExclusions, last_step: Tensor, mass: Tensor) -> Tensor:
    """Return True for points, with `last_step` and `mass` `[B, n]`, that must not merge while
    others can. Points of mass 0 may get any value.

    A head that sees little twice keeps points of its first and of its newest steps, or words of the
    highest turn. `NoveltyCounts` finds up to where.
    """
    turn = _rank_words(last_step, mass) if limits.spread else last_step
    return (last_step <= limits.first) | (turn > limits.newest)


def _rank_words(last_step: Tensor, mass: Tensor) -> Tensor:
    """Return int64 numbers, the higher the longer a prototype of words is kept, -1 for one that is
    no token.

    A cue is what was said in one step of words, and `last_step` is its number. Cues are kept by the
    highest power of two that divides their number, so that those that stay are spread evenly over
    the stream: at first all, then every second one, then every fourth.
    """
    power = (
        torch.frexp((last_step & -last_step).double())
        .exponent.long()
        .masked_fill_(last_step == 0, _FIRST_CUE)
    )
    return torch.where(mass == 1, power * MOST_STREAM_COUNT + last_step, -1)
