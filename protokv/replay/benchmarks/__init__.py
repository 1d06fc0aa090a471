"""Published benchmarks, one file a data set and one line each here. `Benchmark` says what one is."""

from __future__ import annotations

from typing import Final

from protokv.errors import ConfigError
from protokv.replay.benchmarks.base import Annotations, Benchmark, Score, Video
from protokv.replay.benchmarks.mlvu import Mlvu
from protokv.replay.benchmarks.ovo_bench import OvoBench
from protokv.replay.benchmarks.ovo_s_bench import OvoSBench
from protokv.replay.benchmarks.rvs import RvsEgo, RvsMovie
from protokv.replay.benchmarks.streamingbench import StreamingBench
from protokv.replay.benchmarks.videomme import VideoMme

__all__ = ["BENCHMARKS", "Annotations", "Benchmark", "Score", "Video", "find_benchmark"]

BENCHMARKS: Final[dict[str, Benchmark]] = {
    benchmark.name: benchmark
    for benchmark in (RvsEgo(), RvsMovie(), OvoBench(), StreamingBench(), VideoMme(), Mlvu(), OvoSBench())
}
"""Every data set by its name."""


def find_benchmark(name: str) -> Benchmark:
    """A data set by its name.

    Raises:
        ConfigError: there is none of this name.
    """
    if name not in BENCHMARKS:
        raise ConfigError(f"there is no data set {name!r}", hint=f"use one of {', '.join(BENCHMARKS)}")
    return BENCHMARKS[name]
