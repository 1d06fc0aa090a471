"""`protokv replay`: accuracy against delay, under several memories."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar

import typer

from protokv.core.settings import parse_budget
from protokv.memories import CONFIGS
from protokv_cli.answers import note_model
from protokv_cli.exits import Exit
from protokv_cli.options import MOST_USED, OutputFlags, WatchFlags, option, subtitles_option
from protokv_cli.output import Output
from protokv_cli.parsing import parse_duration, parse_list, parse_optional, parse_variation
from protokv_cli.process import handle_signals

if TYPE_CHECKING:
    from protokv.core.backbone import Backbone
    from protokv.replay.dataset import OpenedStreams
    from protokv.replay.judges import Judge
    from protokv.replay.plan import Plan
    from protokv.replay.request import ReplayRequest

DATASETS = ("rvs-ego", "rvs-movie", "ovo-bench", "streamingbench", "videomme", "mlvu")

Sources = Annotated[
    list[str] | None, typer.Argument(metavar="SOURCE", help="Video files; with --report, files of results.")
]


@dataclass(frozen=True, kw_only=True)
class StudyFlags:
    """What is asked about which videos, when, and under which memories."""

    PANEL: ClassVar[str] = "What to ask"
    questions: Path | None = option("--questions FILE", "Questions about the sources, as above.", MOST_USED)
    delays: str | None = option(
        "--delays TIMES", "Delays after the reference time: 0,30s,2m,10m; default: those that fit.", MOST_USED
    )
    memories: str | None = option(
        "--memory NAMES", "Memories to compare: durable,paper,infinipot-v.", MOST_USED, known=CONFIGS
    )
    budgets: str | None = option("--budget -b COUNTS", "Visual tokens kept; several with commas: 512,6k.", MOST_USED)
    settings: list[str] | None = option(
        "--set [MEMORY.]NAME=VALUE,...", "Change a setting of all memories, or of one; several values are compared."
    )
    intersection: bool = option(
        "--intersection/--no-intersection", "Ask only questions that fit every delay.", default=True
    )
    types: str | None = option("--types NAMES", "Question types to ask, or all; default: those whose answers last.")
    subtitles: str = subtitles_option("off")


@dataclass(frozen=True, kw_only=True)
class BenchmarkFlags:
    """A published benchmark."""

    PANEL: ClassVar[str] = "Published benchmarks"
    dataset: str | None = option(
        "--dataset NAME", "A published benchmark instead of sources.", MOST_USED, known=DATASETS
    )
    data_root: Path | None = option("--data-root DIR", "Folder of the data set, or of several.")
    videos: int | None = option("--videos COUNT", "Take only the first COUNT videos.", min=1)
    judge: str | None = option("--judge MODEL", "Judge of open answers: a model at OPENAI_BASE_URL.")


@dataclass(frozen=True, kw_only=True)
class ResultFlags:
    """Where the results go."""

    PANEL: ClassVar[str] = "Results"
    results: Path = option(
        "--output -o FILE", "Results; a run continues the file.", MOST_USED, default=Path("results.jsonl")
    )
    dry_run: bool = option("--dry-run", "Show the cost of a run; ask nothing.", MOST_USED, default=False)
    report: bool = option("--report", "Show the results in SOURCE..., merged; ask nothing.", default=False)
    plot: Path | None = option("--plot FILE", "Figure to draw, .png.")
    table: Path | None = option("--csv FILE", "All numbers as a CSV file.")
    force: bool = option("--force", "Start over and replace the results.", default=False)

    def check(self, *inputs: object) -> None:
        """Refuse to write over an input, and a figure that cannot be drawn. ConfigError."""
        from protokv.replay.figure import check_figure
        from protokv.state.writer import check_not_read

        for written in (None if self.report else self.results, self.plot, self.table):
            if written is not None:
                check_not_read(written, *inputs)
        if self.plot:
            check_figure(self.plot)


def replay(
    sources: Sources = None,
    *,
    study: StudyFlags,
    benchmark: BenchmarkFlags,
    results: ResultFlags,
    model: WatchFlags,
    output: OutputFlags,
) -> None:
    """Watch streams once, ask every question at each delay under every memory, and compare.

    The same command continues an interrupted run; a file of results holds one study, and another study is refused.

    Questions are JSON, one object per line:

    ```json
    {"question": "Who came in?", "answer": "the postman", "ask_s": 95}
    ```

    - `ask_s`: when it can be asked, in seconds; `evidence_s`, if known: when its answer was last visible
    - `type`, `id`: optional, the type and the name of the question
    - `lasts`: false if the answer may change while the stream goes on
    - `video`: the file's name, if there are several sources

    Delays count from evidence_s, or else from ask_s.

    ```sh
    protokv replay video.mp4 --questions questions.jsonl --delays 0,1m,5m --memory durable,sliding-window --budget 512
    protokv replay --dataset ovo-bench --data-root data/ovo-bench --memory durable --budget 4k -o ovo.jsonl
    protokv replay --report results.jsonl --plot curves.png
    ```
    """
    out = output.open()
    with out.errors():
        from protokv.replay.rows import read_rows
        from protokv_cli.replay_report import show_report

        results.check(*(sources or ()), study.questions)
        if results.report:
            show_report(out, read_rows(sources or [results.results]), plot=results.plot, table=results.table)
            return
        model.check()
        request = _build(sources, study, benchmark)
        _replay(out, request, benchmark, results, model)


def _build(sources: list[str] | None, study: StudyFlags, benchmark: BenchmarkFlags) -> ReplayRequest:
    """Return the request of the library. ConfigError."""
    from protokv.replay.request import ReplayRequest

    delays, budgets = parse_optional(parse_list, study.delays), parse_optional(parse_list, study.budgets)
    return ReplayRequest(
        sources=sources,
        questions=study.questions,
        dataset=benchmark.dataset,
        data_root=benchmark.data_root,
        most_videos=benchmark.videos,
        delays_s=None if delays is None else list(map(parse_duration, delays)),
        memories=parse_optional(parse_list, study.memories),
        budgets=None if budgets is None else list(map(parse_budget, budgets)),
        variations=[parse_variation(text) for text in study.settings or ()],
        intersection=study.intersection,
        types=parse_optional(parse_list, study.types),
        subtitles=study.subtitles,
    )


def _replay(
    out: Output, request: ReplayRequest, benchmark: BenchmarkFlags, results: ResultFlags, model: WatchFlags
) -> None:
    """Run a request, or show its cost; end with the exit code of a run that was stopped or left something out."""
    from protokv.backbones import load_backbone
    from protokv.ingestion.options import DEFAULT_MODEL
    from protokv.replay.rows import RowFile
    from protokv_cli.replay_report import show_cost

    loading: dict[str, Any] = model.loading | {"dtype": model.dtype or "auto"}
    opened = request.open()
    for video, why in opened.missing.items():
        out.error(f"left out: {video}: {why}")
    referee = request.judge(benchmark.judge)
    backbone = load_backbone(model.model or DEFAULT_MODEL, **loading)
    plan = request.plan(opened, backbone, model.fps)
    note_model(out, backbone)
    if results.dry_run:
        done: Collection[str] = ()
        if results.results.exists() and not results.force:
            rows = RowFile(results.results)
            rows.check(plan.trials.values())
            done = rows.rows.keys()
        show_cost(out, plan.cost(done), opened)
        return
    if _run(out, plan, backbone, opened, results, referee):
        raise typer.Exit(Exit.PARTIAL)


def _run(
    out: Output, plan: Plan, backbone: Backbone, opened: OpenedStreams, results: ResultFlags, referee: Judge | None
) -> dict[str, str]:
    """Run the rest of a plan and show the results; return why each video that could not be read was left out."""
    from protokv.replay.plan import UnreadableVideo, run_plan
    from protokv.replay.rows import RowFile
    from protokv_cli.replay_report import judge_answers, show_progress, show_report

    rows, unread = RowFile(results.results, start_over=results.force), dict(opened.missing)
    with handle_signals(out.note) as stop, show_progress(out, plan.cost(rows.rows.keys())["answers"], unread) as follow:
        for event in run_plan(plan, backbone, rows, should_stop=lambda: bool(stop)):
            if isinstance(event, UnreadableVideo) and len(plan.streams) == 1:
                raise event.error
            follow(event)
        keys = [key for key in plan.trials if key in rows.rows]
        if referee and stop.exit is None:
            judge_answers(out, rows, keys, referee, should_stop=lambda: bool(stop))
    asked = [rows.rows[key] for key in keys]
    if stop.exit is None or asked:
        show_report(
            out, asked, dropped=plan.dropped, plot=results.plot, table=results.table, missing=unread, notes=opened.notes
        )
    if stop.exit is not None:
        out.note(f"stopped; what is done is in {results.results}. Continue with the same command.")
        raise typer.Exit(stop.exit)
    return unread
