"""What a step of `paper` has to do, part by part: the barest torch operations for it, beside what it takes here.

    python -m tests.benchmarks.floor

One layer of 4 KV heads of 128, bfloat16, |M| = 24k, the scene "moving", one thread of a CPU. What the rule requires of
a part is done once at its real shape by the fewest operations that we know of: products, passes over a tensor, gathers,
sorts and writes, into memory that is there already, with nothing that decides where they go. What takes several rounds
(tokens that find their prototype moved) is counted once. Both are measured in turn, step by step. Writes
`results/floor-cpu.*`.
"""

from __future__ import annotations

import argparse
import time
from collections import defaultdict
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from statistics import median
from typing import Any
from unittest import mock

import torch

from protokv.config import MemoryConfig
from protokv.memory.near import NearWindow
from protokv.memory.protokv import memory as protokv
from protokv.memory.protokv.policies import assignment, paper
from protokv.memory.protokv.policies.candidates import Candidates
from protokv.memory.protokv.policies.updates import Updates
from protokv.memory.protokv.residuals import Residuals
from protokv.memory.rows import write_rows_
from protokv.memory.sorting import least_from, sorted_from
from tests.benchmarks.conftest import FULL, Sizes, filled
from tests.benchmarks.paired import write_table

NOTE = (
    "|M| = {budget}, L 1, H {heads}, D {size}, bfloat16, {tokens} tokens a step, {prototypes} prototypes a head, of "
    'which a step touches {touched} in all; scene "moving"; CPU milliseconds of {rounds} steps on a busy machine. '
    "`least`: the barest operations alone; `ours`: the part as it is; in turn."
)
WHOLE, REST = "the whole step", "between the parts"
# What our step does for each part. `Residuals.modes` is called inside `_show`.
STAGES: dict[str, list[tuple[Any, str]]] = {
    "tokens come and go": [
        (protokv.ProtoKV, "_admit"),
        (NearWindow, "append"),
        (protokv.ProtoKV, "_far_tokens"),
        (paper.PaperRule, "_ask"),
    ],
    "costs of all prototypes": [(assignment, "_costs")],
    "the cheapest": [(Candidates, "__init__")],
    "who finds another one moved": [(Candidates, "deepen_"), (Updates, "__init__"), (assignment, "_choose")],
    "prototypes moved": [(Updates, "write_")],
    "residuals counted": [(Residuals, "record_")],
    "ageing": [(paper, "decay_")],
    "close prototypes": [(paper, "merge_")],
    "likeliest modes": [(Residuals, "modes")],
    "pseudo-tokens written": [(protokv.ProtoKV, "_show")],
    "biases": [(protokv.ProtoKV, "_show_biases")],
}


def barest(sizes: Sizes, config: Any, touched: int) -> dict[str, tuple[str, Callable[[], object]]]:
    """For each part what is done, in words, and a call that does it."""
    B, n, D, K, S = sizes.kv_heads, sizes.tokens, sizes.head_size, config.prototypes, config.pseudo_tokens
    G, C, N, few = config.subquantizers, config.codewords, K * S, max(1, touched // sizes.kv_heads)
    some, part = max(1, min(32, D // 2)), D // G
    noise, empty = torch.randn, torch.empty
    keys, values, centers, weights = noise(B, n, D), noise(B, n, D), noise(B, K, D), noise(B, n, n)
    short, units, length = noise(B, n, D).bfloat16(), empty(B, K, D), noise(B, K, 1)
    costs, narrow, features, form = noise(B, n, K), empty(n, K).double(), noise(n, 6).double(), noise(B, 6, K).double()
    rows = torch.randperm(B * K)[: few * B].sort().values
    codebook, lengths, codes = noise(B * G, C, part), noise(B * G, C, 1), torch.randint(B * K * G * C, (B * n * G,))
    counts, ones = torch.zeros(B * K, G * C, dtype=torch.int32), torch.ones(B * n * G, dtype=torch.int32)
    mass, near = torch.ones(B, K, dtype=torch.int64), empty(B, few, K)
    # The i-th best of a beam and the j-th best code with i * j <= S.
    pairs = sum(S // i for i in range(1, S + 1))
    words, which = noise(B * G * C, part), torch.randint(B * G * C, (few * B * S * G,))
    shown, slots = noise(few * B * S, D), torch.zeros(B * N, D, dtype=torch.bfloat16)
    places = (rows[:, None] * S + torch.arange(S)).view(-1)
    bias, owner = empty(B, N), torch.arange(K).repeat_interleave(S).expand(B, -1)

    def come_and_go() -> None:
        for _ in range(2):
            short.abs().amax()
            slots[: B * n].copy_(slots[B * n : 2 * B * n])
            slots[: B * n].view_as(short).copy_(short)
            short.float()

    def cost() -> None:
        torch.mul(centers, length, out=units)
        for head in range(B):
            torch.mm(features, form[head], out=narrow)
            costs[head].copy_(narrow)
        costs.baddbmm_(keys, units.transpose(1, 2), alpha=-1)

    def meet() -> None:
        torch.bmm(weights, keys)
        found = torch.bmm(keys, keys.transpose(1, 2))
        found += torch.bmm(features.expand(B, -1, -1), form[:, :, :n]).float()
        least_from(found)

    def move() -> None:
        for given in (keys, values):
            held = centers.view(B * K, D)
            write_rows_(held, rows, held.index_select(0, rows))
            given - given

    def count() -> None:
        for given in (keys, values):
            parts = given.view(B, n, G, part).transpose(1, 2).reshape(B * G, n, part)
            torch.baddbmm(lengths, codebook, parts.transpose(1, 2)).amin(1)
            counts.view(-1).index_add_(0, codes, ones)

    def close() -> None:
        torch.bmm(centers[:, :few, :some], centers[:, :, :some].transpose(1, 2), out=near)
        near.amax(2)

    def modes() -> None:
        for _ in range(2):
            ordered = sorted_from(counts.index_select(0, rows).view(-1, G, C))[:, :, :S].double().log_()
            for _ in range(1, G):
                sorted_from(empty(pairs, len(rows), dtype=torch.int64).copy_(ordered[0, 0, 0]), 0)

    def write() -> None:
        for turned in (True, False):
            made = words.index_select(0, which).view_as(shown).add_(shown)
            if turned:
                made = made.mul_(shown).addcmul_(shown, shown)
            write_rows_(slots, places, made.bfloat16())

    return {
        "tokens come and go": (
            f"[{B}, {n}, {D}], keys and values: one maximum, one copy out, one in, one cast",
            come_and_go,
        ),
        "costs of all prototypes": (
            f"one scaling of [{B}, {K}, {D}]; [{B}, {n}, 6] x [6, {K}] in float64, cast; one product [{B}, {n}, {D}] x "
            f"[{D}, {K}], added",
            cost,
        ),
        "the cheapest": (f"one argmin over [{B}, {n}, {K}]", lambda: least_from(costs)),
        "who finds another one moved": (
            f"one round: [{B}, {n}, {n}] x [{n}, {D}], [{B}, {n}, {D}] x [{D}, {n}], the float64 one of 6; one argmin",
            meet,
        ),
        "prototypes moved": (
            f"gather and write {few * B} rows of {D}, keys and values; one pass over the tokens",
            move,
        ),
        "residuals counted": (f"[{B * G}, {C}, {part}] x [{part}, {n}], one minimum, {B * n * G} counts, twice", count),
        "ageing": ("one pass over the masses", lambda: torch.where(mass > 1, mass, mass)),
        "close prototypes": (f"[{B}, {few}, {some}] x [{some}, {K}], one maximum", close),
        "likeliest modes": (
            f"gather {few * B} histograms, sort each part, one log; {G - 1} sorts of {pairs} sums for each, twice",
            modes,
        ),
        "pseudo-tokens written": (
            f"{few * B * S} of keys and as many of values: gather codewords, add the centre, turn keys, cast, write",
            write,
        ),
        "biases": (
            f"one log of [{B}, {K}], one gather of [{B}, {N}]",
            lambda: bias.copy_(mass.float().log().gather(1, owner)),
        ),
    }


def _stopped(call: Callable[..., Any], part: str, times: dict[str, float], inside: list[str]) -> Callable[..., Any]:
    """The call; what it takes is added to its part and taken from the part that it is called in."""

    def timed(*args: Any, **kwargs: Any) -> Any:
        inside.append(part)
        start = time.thread_time()
        result = call(*args, **kwargs)
        spent = 1000 * (time.thread_time() - start)
        inside.pop()
        times[part] += spent
        if inside:
            times[inside[-1]] -= spent
        return result

    return timed


@torch.inference_mode()
def measure(sizes: Sizes, budget: int, rounds: int) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """A row for each part and one for the step, and what stands in the note."""
    config = MemoryConfig.of("paper", budget=budget)
    held = filled(config, "moving", replace(sizes, layers=1), torch.device("cpu"), torch.bfloat16)
    held.append()
    assert isinstance(held.memory, protokv.ProtoKV)
    touched = int(held.memory._bank.stale.sum())
    held.memory.context()
    calls = barest(sizes, config, touched)
    spent: dict[str, float] = defaultdict(float)
    ours, least = defaultdict[str, list[float]](list), defaultdict[str, list[float]](list)
    with ExitStack() as stack:
        inside: list[str] = []
        for part, owner, name in ((part, *where) for part, places in STAGES.items() for where in places):
            timed = _stopped(getattr(owner, name), part, spent, inside)
            stack.enter_context(mock.patch.object(owner, name, timed))
        for _ in range(rounds):
            step = held.stream.step(held.scene)
            spent.clear()
            start = time.thread_time()
            held.memory.append(step)
            held.memory.context()
            whole = 1000 * (time.thread_time() - start)
            for part in STAGES:
                ours[part].append(spent[part])
            ours[REST].append(whole - sum(spent.values()))
            ours[WHOLE].append(whole)
            for part, (_, call) in calls.items():
                call()
                start = time.thread_time()
                call()
                least[part].append(1000 * (time.thread_time() - start))
            least[WHOLE].append(sum(least[part][-1] for part in STAGES))
    rows = [_row(part, calls[part][0], least[part], ours[part]) for part in STAGES]
    rows += [_row(REST, "nothing", [0.0], ours[REST]), _row(WHOLE, "their sum", least[WHOLE], ours[WHOLE])]
    note = {"budget": budget, "heads": sizes.kv_heads, "size": sizes.head_size, "tokens": sizes.tokens}
    return rows, note | {"prototypes": config.prototypes, "touched": touched, "rounds": rounds}


def _row(part: str, least: str, of_least: list[float], of_ours: list[float]) -> dict[str, Any]:
    figures = {"least": of_least, "ours": of_ours}
    found = {
        f"{name}, {what}": of(times)
        for name, times in figures.items()
        for what, of in (("min", min), ("median", median))
    }
    return {"part": part, "at least": least} | {name: round(number, 2) for name, number in found.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--budget", type=int, default=24_000)
    parser.add_argument("--rounds", type=int, default=60)
    given = parser.parse_args()
    torch.set_num_threads(1)
    rows, note = measure(FULL, given.budget, given.rounds)
    for row in rows:
        print(*row.values(), sep="; ")
    write_table("floor", "cpu", rows, NOTE.format(**note))


if __name__ == "__main__":
    main()
