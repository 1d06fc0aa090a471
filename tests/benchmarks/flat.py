"""Compare a step late in a stream with an early one: time and bytes of `durable`, at the level of tensors.

    python -m tests.benchmarks.flat

One memory stands at step 1,000 and one at step 10,000, then 100,000 and 1,000,000. At each of these places they take
the same steps in turn, so that other work of the machine slows both. The sizes are small: a million steps take half
an hour. Writes `results/flat-cpu.*`.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from itertools import cycle
from typing import Any

import torch
from safetensors.torch import save

from protokv.core.build import build_memory
from protokv.core.memory import Memory
from protokv.core.step import StepKV
from protokv.core.tensors import MemoryShape
from protokv.memories import DurableConfig
from tests.benchmarks.results import paired, resident_mib, write_table
from tests.core.streams import PlainRotary, shape_of

NOTE = (
    "L 1, H 1, D 8, {tokens} tokens a step, {prototypes} prototypes; CPU milliseconds of one step on a busy machine. "
    "At each place the two memories took the same {rounds} steps in turn. `time_ratio` is the median of the ratios, "
    "`bytes_ratio` the ratio of the states, `file_bytes` a saved state, `resident_mib` what the process held."
)
# Steps that are made once and repeated: a stream of any length from few tensors.
_MADE = 64


class Stream:
    """A memory and the steps that it takes, with the indices and positions of an endless stream."""

    def __init__(self, config: DurableConfig, shape: MemoryShape, tokens: int) -> None:
        self._generator = torch.Generator().manual_seed(0)
        self.memory: Memory = build_memory(config, shape, PlainRotary(shape.head_size))
        sink = self._noise(shape, shape.sink_tokens)
        self.memory.start(sink, sink)
        self._parts: Iterator[Any] = cycle(
            [(self._noise(shape, tokens), self._noise(shape, tokens)) for _ in range(_MADE)]
        )
        self._coordinates = torch.rand(tokens, 2, generator=self._generator)
        self._line = shape.sink_tokens + torch.arange(tokens)[:, None]
        self.steps = 0

    def _noise(self, shape: MemoryShape, tokens: int) -> torch.Tensor:
        return torch.randn(shape.layers, shape.kv_heads, tokens, shape.head_size, generator=self._generator)

    def step(self, *, show: bool = True) -> None:
        """Take one step and show the memory."""
        keys, values = next(self._parts)
        positions = self._line + self.steps * len(self._line)
        self.memory.append(StepKV(keys, values, positions, self._coordinates, self.steps))
        if show:
            self.memory.context()
        self.steps += 1

    def advance(self, steps: int) -> None:
        while self.steps < steps:
            self.step(show=self.steps >= steps - _MADE)

    def nbytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.memory.tensors().values())


@torch.inference_mode()
def measure(*, early: int, late: Sequence[int], rounds: int, tokens: int, prototypes: int) -> Iterator[dict[str, Any]]:
    """Yield a row for each late step: medians and bytes at both places, and their ratios."""
    # A third as many near tokens as prototypes.
    config, shape = DurableConfig(budget=prototypes * 4 // 3), shape_of(layers=1)
    at_early, at_late = Stream(config, shape, tokens), Stream(config, shape, tokens)
    at_early.advance(early)
    for steps in late:
        at_late.advance(steps)
        times = paired(at_late.step, at_early.step, rounds)
        sizes = [stream.nbytes() for stream in (at_early, at_late)]
        yield {
            "early_step": early,
            "late_step": steps,
            "early_ms": times["other_ms"],
            "late_ms": times["ms"],
            "time_ratio": times["ratio"],
            "early_bytes": sizes[0],
            "late_bytes": sizes[1],
            "bytes_ratio": sizes[1] / sizes[0],
            "file_bytes": len(save(at_late.memory.tensors())),
            "resident_mib": resident_mib(),
            "rounds": rounds,
        }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--early", type=int, default=1000)
    parser.add_argument("--late", type=int, nargs="+", default=[10_000, 100_000, 1_000_000])
    parser.add_argument("--rounds", type=int, default=300, help="steps that are timed at each place")
    parser.add_argument("--tokens", type=int, default=4, help="of a step")
    parser.add_argument("--prototypes", type=int, default=96)
    given = vars(parser.parse_args())
    torch.set_num_threads(1)
    rows = []
    for row in measure(**given):
        print(row)
        rows.append(row)
        write_table("flat", "cpu", rows, NOTE.format(**given))


if __name__ == "__main__":
    main()
