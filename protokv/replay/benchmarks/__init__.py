"""The paper's benchmarks, one file each; `base.Benchmark` is the interface."""

from __future__ import annotations

from protokv.errors import ConfigError, suggest_name
from protokv.replay.benchmarks.base import OTHER_GROUP, Benchmark
from protokv.replay.benchmarks.mlvu import Mlvu
from protokv.replay.benchmarks.ovo_bench import OvoBench
from protokv.replay.benchmarks.rvs import RvsEgo, RvsMovie
from protokv.replay.benchmarks.streamingbench import StreamingBench
from protokv.replay.benchmarks.videomme import VideoMme

BENCHMARKS: dict[str, Benchmark] = {
    benchmark.name: benchmark
    for benchmark in (RvsEgo(), RvsMovie(), OvoBench(), StreamingBench(), VideoMme(), Mlvu())
}
"""Every data set by its name."""


def find_benchmark(name: str) -> Benchmark:
    """Return a data set by its name. ConfigError: there is none of this name."""
    if name not in BENCHMARKS:
        raise ConfigError(f"there is no data set {name!r}", hint=suggest_name(name, BENCHMARKS))
    return BENCHMARKS[name]


def find_question_group(question_type: str, dataset: str) -> str:
    """Return the group of a type in the tables of a data set; `OTHER_GROUP` outside of one."""
    return (
        BENCHMARKS[dataset].find_type(question_type).group if dataset in BENCHMARKS else OTHER_GROUP
    )
