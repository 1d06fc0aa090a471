"""A request for a replay: names and numbers of a caller, made into streams, memories and a plan."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

from protokv.core.backbone import Backbone
from protokv.core.decoding import Decoding
from protokv.errors import ConfigError
from protokv.memories import DEFAULT_MEMORY, MemoryConfig
from protokv.replay.benchmarks import find_benchmark
from protokv.replay.benchmarks.base import Benchmark
from protokv.replay.dataset import OpenedStreams, open_dataset, with_baselines
from protokv.replay.judges import Judge
from protokv.replay.memories import Variant, Variation, name_memories, vary_memories
from protokv.replay.plan import Plan, make_plan
from protokv.replay.runner import Setup
from protokv.replay.streams import open_files
from protokv.words.find import OFF

COMPARED: Final = ("full", "durable", "continuity", "paper", "sliding-window", "infinipot-v")
"""Memories that are compared on videos if none is named."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplayRequest:
    """A replay of videos with questions, or of a data set; `protokv replay --help` says what each field means."""

    sources: Sequence[str] | None = None
    questions: Path | None = None
    dataset: str | None = None
    data_root: Path | None = None
    most_videos: int | None = None
    delays_s: Sequence[float] | None = None
    memories: Sequence[str] | None = None
    budgets: Sequence[int] | None = None
    variations: Sequence[Variation] = ()
    intersection: bool = True
    types: Sequence[str] | None = None
    subtitles: str = OFF

    @property
    def benchmark(self) -> Benchmark | None:
        """The data set. ConfigError: there is none of this name."""
        return None if self.dataset is None else find_benchmark(self.dataset)

    def check(self) -> None:
        """Refuse contradictions. ConfigError: names one."""
        if self.benchmark is not None:
            if self.sources:
                raise ConfigError("a replay has either --dataset or SOURCE", hint="leave one of them out")
            if self.data_root is None:
                raise ConfigError(
                    f"where is {self.dataset}?", hint="name its folder with --data-root; samples/benchmarks/README.md"
                )
        elif self.data_root is not None:
            raise ConfigError("--data-root is the folder of a data set", hint="name the data set with --dataset")
        elif not self.sources:
            raise ConfigError("there is nothing to watch", hint="name videos and --questions, or a --dataset")
        elif self.questions is None:
            raise ConfigError("there are no questions about the sources", hint="name a file with --questions")
        if self.questions is not None and not self.sources:
            raise ConfigError("--questions are about sources of your own", hint="name the videos")

    def open(self) -> OpenedStreams:
        """Open the streams, and list the missing ones, once the memories are known to fit.

        Raises:
            ConfigError: a value is wrong; it is named.
            SourceError: a video or file is missing or cannot be read.
        """
        self.check()
        self.variants()
        benchmark = self.benchmark
        if benchmark is None:
            assert self.sources is not None
            assert self.questions is not None
            return OpenedStreams(open_files(self.sources, self.questions, self.subtitles), {}, Counter())
        assert self.data_root is not None
        own = self.data_root / benchmark.name
        root = own if own.is_dir() else self.data_root
        return open_dataset(benchmark, root, most_videos=self.most_videos, subtitles=self.subtitles)

    def variants(self) -> list[Variant]:
        """Return the memories under test at their budgets.

        Raises:
            ConfigError: a memory or a setting is unknown, or does not fit a budget.
        """
        budgets = self.budgets or [MemoryConfig.of(DEFAULT_MEMORY).budget]
        memories = self.memories or (COMPARED if self.dataset is None else [DEFAULT_MEMORY])
        return vary_memories(name_memories(memories, budgets), self.variations)

    def plan(self, opened: OpenedStreams, backbone: Backbone, fps: float | None = None) -> Plan:
        """Plan what is asked of what and when; a benchmark adds its baselines to the memories.

        Raises:
            ConfigError: two memories or streams have one name.
        """
        words = any(stream.has_words for stream in opened.streams)
        variants = [replace(one, config=one.config.with_words(words)) for one in self.variants()]
        delays_s = self.delays_s
        if self.benchmark is not None:
            variants = with_baselines(variants, backbone, words=words)
            delays_s = (0.0,) if delays_s is None else delays_s
        setup = make_setup(self.benchmark, backbone, fps=fps)
        return make_plan(opened.streams, variants, delays_s, setup, intersection=self.intersection, types=self.types)

    def judge(self, name: str | None) -> Judge | None:
        """Return the judge of open answers, if one is named. ConfigError: it cannot be asked, or no answer is open."""
        if name is None:
            return None
        if self.benchmark is None or not self.benchmark.open_ended:
            raise ConfigError("a judge reads open answers", hint="name a data set that has them: rvs-ego, rvs-movie")
        return Judge(name)


def make_setup(benchmark: Benchmark | None, backbone: Backbone, *, fps: float | None = None) -> Setup:
    """Return how questions are asked: at a benchmark's own rate and length of answers, unless `fps` is given."""
    if benchmark is None:
        return Setup.of(backbone, fps=fps)
    return Setup.of(backbone, fps=fps or benchmark.fps, decoding=Decoding(max_new_tokens=benchmark.max_new_tokens))
