"""Published benchmarks, one file each; `base.Benchmark` is the interface, `registry` the list."""

from __future__ import annotations

from protokv.replay.benchmarks.base import Annotations, Benchmark, Score, Video
from protokv.replay.benchmarks.registry import BENCHMARKS, find_benchmark, find_type, find_types, order_groups

__all__ = [
    "BENCHMARKS",
    "Annotations",
    "Benchmark",
    "Score",
    "Video",
    "find_benchmark",
    "find_type",
    "find_types",
    "order_groups",
]
