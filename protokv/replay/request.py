"""A request for a replay: names and numbers of a caller, made into streams, memories and a plan.

Values that are left out come from the study or the data set.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import msgspec

from protokv.core.backbone import Backbone
from protokv.core.decoding import Decoding
from protokv.errors import ConfigError, use_one_of
from protokv.memories import DEFAULT, MemoryConfig
from protokv.replay.benchmarks import find_benchmark
from protokv.replay.benchmarks.base import Benchmark
from protokv.replay.dataset import Opened, open_dataset, with_baselines
from protokv.replay.judges import Judge, select_judge
from protokv.replay.memories import Variant, Variation, name_memories, vary_memories
from protokv.replay.plan import Plan, make_plan
from protokv.replay.runner import SHORT, Setup
from protokv.replay.schedule import LADDER
from protokv.replay.streams import open_files
from protokv.replay.studies import Dataset, Study, load_study
from protokv.words.find import OFF


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplayRequest:
    """A replay; see `protokv replay --help` for the meaning of each field.

    `worlds` has the fields of the study's `Worlds` to change; `prompt` is "official", "bare", or None for the model's.
    """

    study: Study = field(default_factory=lambda: load_study("quick"))
    sources: Sequence[str] | None = None
    questions: Path | None = None
    worlds: Mapping[str, Any] = field(default_factory=dict)
    dataset: str | None = None
    data_root: Path | None = None
    most_videos: int | None = None
    delays_s: Sequence[float] | None = None
    memories: Sequence[str] | None = None
    budgets: Sequence[int] | None = None
    variations: Sequence[Variation] = ()
    intersection: bool = True
    types: Sequence[str] | None = None
    prompt: str | None = None
    strict: bool = False
    subtitles: str = OFF

    @property
    def benchmark(self) -> Benchmark | None:
        """The data set.

        Raises:
            ConfigError: there is none of this name.
        """
        return None if self.dataset is None else find_benchmark(self.dataset)

    @property
    def part(self) -> Dataset | None:
        """The study's part about the data set."""
        return None if self.dataset is None else self.study.dataset(self.dataset)

    def check(self) -> None:
        """Refuse contradictions.

        Raises:
            ConfigError: naming one.
        """
        seeds_named = "first_seed" in self.worlds
        if self.sources and seeds_named:
            raise ConfigError("a replay has either SOURCE or --world", hint="leave one of them out")
        if self.benchmark is not None:
            if self.sources or seeds_named:
                raise ConfigError("a replay has either --dataset or sources of its own", hint="leave one of them out")
            if self.data_root is None:
                raise ConfigError(
                    f"where is {self.dataset}?", hint="name its folder with --data-root; samples/benchmarks/README.md"
                )
        elif self.data_root is not None:
            raise ConfigError("--data-root is the folder of a data set", hint="name the data set with --dataset")
        if self.sources and self.questions is None:
            raise ConfigError("there are no questions about the sources", hint="name a JSONL file with --questions")
        if self.prompt not in (None, "official", "bare"):
            raise ConfigError(f"there is no prompt {self.prompt!r}", hint=use_one_of(self.prompt, ("official", "bare")))

    def open(self, model: str) -> Opened:
        """Open the streams, and list the missing ones.

        Args:
            model: the name of the model; its budgets are checked before anything is opened.

        Raises:
            ConfigError: a value is wrong; it is named.
            SourceError: a video or file is missing or cannot be read.
        """
        self.variants(model)
        benchmark = self.benchmark
        if benchmark is not None and self.data_root is not None:
            own = self.data_root / benchmark.name
            return open_dataset(
                benchmark,
                own if own.is_dir() else self.data_root,
                from_evidence=any(self._delays() or ()),
                strict=self.strict,
                most_videos=self.most_videos,
                subtitles=self.subtitles,
            )
        if self.sources and self.questions:
            return Opened(open_files(self.sources, self.questions, self.subtitles), {}, Counter())
        if self.study.worlds is None:
            names = ", ".join(part.name for part in self.study.datasets)
            raise ConfigError(
                "this study compares on data sets, and none is named", hint=f"add --dataset: {names}; or --dry-run"
            )
        return Opened(msgspec.structs.replace(self.study.worlds, **self.worlds).open(self._types()), {}, Counter())

    def plan(self, opened: Opened, backbone: Backbone, fps: float | None = None) -> Plan:
        """Plan what is asked of what and when; a benchmark adds its baselines to the memories.

        Raises:
            ConfigError: two memories or streams have one name.
        """
        words = any(stream.has_words for stream in opened.streams)
        variants = [replace(one, config=one.config.with_words(words)) for one in self.variants(backbone.identity.name)]
        if self.benchmark is not None:
            variants = with_baselines(variants, backbone, words=words)
        return make_plan(
            opened.streams,
            variants,
            self._delays(),
            self.setup(backbone, fps),
            wanted_s=LADDER if self.sources or self.dataset else self.study.delays_s,
            intersection=self.intersection,
            types=self._types(),
        )

    def setup(self, backbone: Backbone, fps: float | None) -> Setup:
        """Return how questions are asked: a benchmark's own rate and length of answers, unless `fps` is given."""
        benchmark = self.benchmark
        if benchmark is None:
            return Setup.of(backbone, fps=fps, decoding=SHORT)
        bare = not backbone.converses if self.prompt is None else self.prompt == "bare"
        decoding = Decoding(max_new_tokens=benchmark.max_new_tokens)
        return Setup.of(backbone, fps=fps or benchmark.fps, decoding=decoding, bare=bare)

    def judge(self, name: str | None, placement: Mapping[str, Any]) -> Judge | None:
        """Return the judge of open answers; None if none is named.

        Raises:
            ConfigError: it cannot be asked, or there are no open answers.
        """
        if name is None:
            return None
        if self.benchmark is None or not self.benchmark.open_ended:
            raise ConfigError("a judge reads open answers", hint="name a data set that has them: rvs-ego, rvs-movie")
        return select_judge(name, **placement)

    def cost(self, plan: Plan, backbone: Backbone, done: Collection[str] = ()) -> dict[str, Any]:
        """Return the cost of a run, and the seconds that it would take by a short timing."""
        cost = plan.cost(done)
        return cost | {"estimate_s": plan.estimate(backbone, cost)}

    def _delays(self) -> Sequence[float] | None:
        if self.delays_s is None and self.dataset is not None:
            return (0.0,) if self.part is None else self.part.delays_s
        return self.delays_s

    def _types(self) -> Sequence[str] | None:
        if self.types is not None or self.sources or self.dataset is not None:
            return self.types
        return self.study.types

    def variants(self, model: str) -> list[Variant]:
        """Return the memories under test, at the budgets for this model.

        Raises:
            ConfigError: a memory or a setting is unknown, or does not fit a budget.
        """
        memories = self.memories
        if self.part is not None:
            budgets = self.budgets or self.part.budgets
        elif self.dataset is not None:
            budgets, memories = self.budgets or [MemoryConfig.of(DEFAULT).budget], memories or [DEFAULT]
        elif self.study.language is not None:
            budgets = self.budgets or self.study.language.token_budgets
        else:
            budgets = self.budgets or self.study.default_budgets(model)
        named = self.study.variants(budgets) if memories is None else name_memories(memories, budgets)
        return vary_memories(named, self.variations)
