"""A step of the paper's rule by compiled loops beside the same step by tensor operations, in turn.

    python -m tests.benchmarks.loops

One layer of 4 KV heads of 128, bfloat16, 196 tokens a step, one thread of a CPU. Two memories that have seen the same
are given the same steps (see `conftest.Stream` for the scenes). Writes `results/loops-cpu.*`.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from statistics import median
from typing import Any
from unittest import mock

import torch

from protokv.config import MemoryConfig
from protokv.core import loops
from tests.benchmarks.conftest import FULL, Sizes, filled
from tests.benchmarks.paired import write_table

NOTE = (
    "L 1, H {heads}, D {size}, bfloat16, {tokens} tokens a step; CPU milliseconds of {rounds} steps. `loops`: compiled "
    "by numba; `tensors`: without it; in turn. A step is what is appended and the context that is shown after it."
)
# Steps of a scene before it is measured, so that what comes again has been there.
SETTLED = 40
# Steps of one before it is the other's turn.
IN_A_ROW = 5


@torch.inference_mode()
def measure(kind: str, budget: int, scene: str, sizes: Sizes, rounds: int, settled: int = SETTLED) -> dict[str, Any]:
    """A row: least and median milliseconds of a step of both, and the median of its context alone."""
    config = MemoryConfig.of(kind, budget=budget)
    of_each: dict[str, list[tuple[float, float]]] = {"loops": [], "tensors": []}
    helds = [filled(config, scene, replace(sizes, layers=1), torch.device("cpu"), torch.bfloat16) for _ in of_each]
    for number in range(0, settled + rounds, IN_A_ROW):
        for (name, times), held in zip(of_each.items(), helds, strict=True):
            for _ in range(IN_A_ROW):
                step = held.stream.step(scene)
                with mock.patch.object(loops, "LEAST", 0 if name == "loops" else sys.maxsize):
                    start = time.thread_time()
                    held.memory.append(step)
                    middle = time.thread_time()
                    held.memory.context()
                    end = time.thread_time()
                if number >= settled:
                    times.append((1000 * (end - start), 1000 * (end - middle)))
    row: dict[str, Any] = {"memory": kind, "budget": budget, "scene": scene}
    for name, times in of_each.items():
        whole, context = zip(*times, strict=True)
        figures = {"least": min(whole), "median": median(whole), "of that context": median(context)}
        row |= {f"{name}, {what}": round(figure, 1) for what, figure in figures.items()}
    return row


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure and write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--memory", nargs="+", default=["paper", "continuity"])
    parser.add_argument("--budget", nargs="+", type=int, default=[6_000, 24_000])
    parser.add_argument("--rounds", type=int, default=40)
    given = parser.parse_args(arguments)
    torch.set_num_threads(1)
    rows = [
        measure(kind, budget, scene, FULL, given.rounds)
        for kind in given.memory
        for budget in given.budget
        for scene in ("moving", "recurring", "still")
    ]
    for row in rows:
        print(*row.values(), sep="; ")
    note = {"heads": FULL.kv_heads, "size": FULL.head_size, "tokens": FULL.tokens, "rounds": given.rounds}
    write_table("loops", "cpu", rows, NOTE.format(**note))


if __name__ == "__main__":
    main()
