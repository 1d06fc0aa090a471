"""What somebody wants to replay, from names and numbers to streams, memories, a plan and its cost.

The command line and other callers fill in a `Request`; what is left out is filled in from the study, the preset or the
data set. Knows no terminal.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from protokv.backbones.base import Backbone
from protokv.config import DEFAULT, MemoryConfig
from protokv.core.decoding import Decoding
from protokv.errors import ConfigError
from protokv.mini import EMBEDDED, is_embedded
from protokv.mini.phrases import ORDER_TYPES, TIME_TYPES
from protokv.mini.world import Backdrop
from protokv.replay.benchmarks import Benchmark, find_benchmark
from protokv.replay.dataset import Opened, open_dataset, with_baselines
from protokv.replay.judges import Judge, select_judge
from protokv.replay.pace import measure_pace
from protokv.replay.plan import Plan, make_plan
from protokv.replay.presets import PRESETS, Cell
from protokv.replay.runner import SHORT, Setup, Variant
from protokv.replay.schedule import LADDER
from protokv.replay.streams import Before, Stream, make_worlds, open_files
from protokv.replay.studies import Study, Variation, default_budgets, find_study, name_memories, vary_memories

PROMPTS = ("official", "bare")


@dataclass(frozen=True, slots=True)
class Worlds:
    """Procedural streams; None takes what the study says."""

    seeds: Sequence[int] | None = None
    length_s: int | None = None
    events_per_minute: float | None = None
    cuts: tuple[int, int] | Literal["study"] | None = "study"
    moving: float | None = None
    evidence_s: int = 16
    per_type: int | None = None
    before: Before | None = None
    distractor_similarity: float | None = None
    backdrop: Backdrop | None = None

    def open(self, study: Study, types: Sequence[str] | None = None) -> list[Stream]:
        """Make them, with questions of the types that are asked by default and of those that are named.

        Raises:
            ConfigError: a value is out of its range.
        """
        after = study.distractors
        if self.events_per_minute is not None:
            after = replace(after, events_per_minute=self.events_per_minute)
        if self.cuts != "study":
            after = replace(after, cut_s=self.cuts)
        if self.moving is not None:
            after = replace(after, moving=self.moving)
        if self.distractor_similarity is not None:
            after = replace(after, distractor_similarity=self.distractor_similarity)
        if self.backdrop is not None:
            after = replace(after, backdrop=self.backdrop)
        return make_worlds(
            study.seeds if self.seeds is None else self.seeds,
            study.length_s if self.length_s is None else self.length_s,
            after,
            evidence_s=self.evidence_s,
            per_type=study.per_type if self.per_type is None else self.per_type,
            before=study.before if self.before is None else self.before,
            also=[kind for kind in (*ORDER_TYPES, *TIME_TYPES) if kind in (types or ())],
            evidence=study.evidence,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """What is wanted; see `protokv replay --help` for the meaning of each."""

    study: str = "quick"
    sources: Sequence[str] | None = None
    questions: Path | None = None
    worlds: Worlds = field(default_factory=Worlds)
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

    @property
    def benchmark(self) -> Benchmark | None:
        """The data set.

        Raises:
            ConfigError: there is none of this name.
        """
        return None if self.dataset is None else find_benchmark(self.dataset)

    @property
    def cell(self) -> Cell | None:
        """The part of the paper's table that is wanted."""
        return PRESETS[self.study].cell(self.dataset) if self.study in PRESETS and self.dataset else None

    @property
    def default_model(self) -> str:
        """Which model watches where none is named: that of the study."""
        return EMBEDDED if self.study in PRESETS else find_study(self.study).model

    def check(self) -> None:
        """Refuse what contradicts itself.

        Raises:
            ConfigError: naming it.
        """
        if self.sources and self.worlds.seeds is not None:
            raise ConfigError("a replay has either SOURCE or --world", hint="leave one of them out")
        if self.benchmark is not None:
            if self.sources or self.worlds.seeds is not None:
                raise ConfigError("a replay has either --dataset or sources of its own", hint="leave one of them out")
            if self.data_root is None:
                raise ConfigError(
                    f"where is {self.dataset}?", hint="name its folder with --data-root; samples/benchmarks/README.md"
                )
        elif self.data_root is not None:
            raise ConfigError("--data-root is the folder of a data set", hint="name the data set with --dataset")
        if self.sources and self.questions is None:
            raise ConfigError("there are no questions about the sources", hint="name a JSONL file with --questions")
        if self.prompt not in (None, *PROMPTS):
            raise ConfigError(f"there is no prompt {self.prompt!r}", hint=f"use one of {', '.join(PROMPTS)}")
        if self.study not in PRESETS:
            find_study(self.study)

    def open(self, model: str) -> Opened:
        """The streams, with what is missing among them.

        Args:
            model: the name of the model, whose own study budgets are checked before anything is opened.

        Raises:
            ConfigError: something is not as it should be, naming it.
            SourceError: a video or file is missing or cannot be read.
        """
        self._variants(model)
        benchmark = self.benchmark
        if benchmark is not None and self.data_root is not None:
            own = self.data_root / benchmark.name
            return open_dataset(
                benchmark,
                own if own.is_dir() else self.data_root,
                from_evidence=any(self._delays() or ()),
                strict=self.strict,
                most_videos=self.most_videos,
            )
        if self.sources and self.questions:
            return Opened(open_files(self.sources, self.questions), {}, Counter())
        return Opened(self.worlds.open(find_study(self.study), self._types()), {}, Counter())

    def plan(self, opened: Opened, backbone: Backbone, fps: float | None = None) -> Plan:
        """What is asked of what and when; beside a benchmark's memories stand its baselines.

        Raises:
            ConfigError: two memories or streams have one name.
        """
        variants = self._variants(backbone.identity.name)
        if self.benchmark is not None:
            variants = with_baselines(variants, backbone)
        return make_plan(
            opened.streams,
            variants,
            self._delays(),
            self.setup(backbone, fps),
            wanted_s=LADDER if self.sources or self.dataset else find_study(self.study).delays_s,
            intersection=self.intersection,
            types=self._types(),
        )

    def setup(self, backbone: Backbone, fps: float | None) -> Setup:
        """How it is asked: a benchmark's own rate and room for answers, where no other rate is named."""
        benchmark = self.benchmark
        if benchmark is None:
            return Setup.of(backbone, fps=fps, decoding=SHORT)
        bare = is_embedded(backbone.identity.name) if self.prompt is None else self.prompt == "bare"
        decoding = Decoding(max_new_tokens=benchmark.max_new_tokens)
        return Setup.of(backbone, fps=fps or benchmark.fps, decoding=decoding, bare=bare)

    def judge(self, name: str | None, output: Path, placement: Mapping[str, Any]) -> Judge | None:
        """Who reads open answers; None where nobody was named.

        Raises:
            ConfigError: it cannot be asked, or there is nothing for it to read.
        """
        if name is None:
            return None
        if self.benchmark is None or not self.benchmark.open_ended:
            raise ConfigError("a judge reads open answers", hint="name a data set that has them: rvs-ego, rvs-movie")
        return select_judge(name, output.with_name(f"{output.name}.judge.sqlite"), **placement)

    def cost(self, plan: Plan, backbone: Backbone, done: Collection[str] = ()) -> dict[str, Any]:
        """What a run would do, and seconds that it would take by a short timing."""
        cost = plan.cost(done)
        pace = measure_pace(plan, backbone) if cost["answers"] else None
        return cost | {"estimate_s": None if pace is None else round(pace.estimate_s(cost), 1)}

    def _delays(self) -> Sequence[float] | None:
        if self.delays_s is None and self.dataset is not None:
            return (0.0,) if self.cell is None else self.cell.delays_s
        return self.delays_s

    def _types(self) -> Sequence[str] | None:
        if self.types is not None or self.sources or self.dataset is not None:
            return self.types
        return find_study(self.study).types

    def _variants(self, model: str) -> list[Variant]:
        cell = self.cell
        if cell is not None:
            named = cell.variants(self.budgets)
            if self.memories is not None:
                named = name_memories(self.memories, self.budgets or cell.budgets)
        elif self.dataset is not None:
            budgets = self.budgets or [MemoryConfig.of(DEFAULT).budget]
            named = name_memories(self.memories or [DEFAULT], budgets)
        else:
            study = find_study(self.study)
            budgets = self.budgets or default_budgets(study, model)
            named = study.variants(budgets) if self.memories is None else name_memories(self.memories, budgets)
        return vary_memories(named, self.variations)
