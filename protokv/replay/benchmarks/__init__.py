"""Published benchmarks, one file each, and all types of questions: theirs and those of the procedural world.

`base.Benchmark` is the interface; `BENCHMARKS` lists every data set.
"""

from __future__ import annotations

from typing import Final

from protokv.errors import ConfigError, use_one_of
from protokv.replay.benchmarks.base import Benchmark
from protokv.replay.benchmarks.mlvu import Mlvu
from protokv.replay.benchmarks.ovo_bench import OvoBench
from protokv.replay.benchmarks.ovo_s_bench import OvoSBench
from protokv.replay.benchmarks.rvs import RvsEgo, RvsMovie
from protokv.replay.benchmarks.streamingbench import StreamingBench
from protokv.replay.benchmarks.videomme import VideoMme
from protokv.replay.questions import OTHER, WORLD, QuestionType

BENCHMARKS: Final[dict[str, Benchmark]] = {
    benchmark.name: benchmark
    for benchmark in (RvsEgo(), RvsMovie(), OvoBench(), StreamingBench(), VideoMme(), Mlvu(), OvoSBench())
}
"""Every data set by its name."""


def find_benchmark(name: str) -> Benchmark:
    """Return a data set by its name.

    Raises:
        ConfigError: there is none of this name.
    """
    if name not in BENCHMARKS:
        raise ConfigError(f"there is no data set {name!r}", hint=use_one_of(name, BENCHMARKS))
    return BENCHMARKS[name]


def find_types(dataset: str = "") -> tuple[QuestionType, ...]:
    """Return the types of a data set; where none is named, those of the procedural world and then all others."""
    if dataset:
        return BENCHMARKS[dataset].types if dataset in BENCHMARKS else ()
    return (*WORLD, *(kind for benchmark in BENCHMARKS.values() for kind in benchmark.types))


def find_type(name: str, dataset: str = "") -> QuestionType:
    """Return a type by its name. An unknown one may change with time; one without a name is retrospective."""
    found = (kind for kind in find_types(dataset) if kind.name == name)
    return next(found, None) or QuestionType(name, retrospective=not name)


def order_groups(dataset: str = "") -> tuple[str, ...]:
    """Return the groups of a data set in the order of tables."""
    groups = dict.fromkeys(kind.group for kind in find_types(dataset))
    return (*(group for group in groups if group != OTHER), OTHER)
