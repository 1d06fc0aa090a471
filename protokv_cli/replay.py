"""`protokv replay`: accuracy against delay, under several memories."""

from __future__ import annotations

import re
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import groupby, takewhile
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from protokv.core.settings import parse_budget
from protokv.errors import ConfigError
from protokv.state.moments import parse_duration
from protokv.texts import JsonObject, Keywords
from protokv_cli.exits import ExitCode
from protokv_cli.options import (
    SUBTITLES_HELP,
    TOP_PANEL,
    Flags,
    OutputFlags,
    WatchModelFlags,
    check_options,
    option,
    read_option,
)
from protokv_cli.output import (
    Output,
    ProgressBar,
    Row,
    format_time,
    format_time_left,
    tabulate_fields,
    tabulate_rows,
)
from protokv_cli.parsing import find_calibrations, parse_list, parse_variation
from protokv_cli.process import handle_signals

if TYPE_CHECKING:
    from protokv.core.backbone import Backbone
    from protokv.replay.benchmarks.base import Benchmark
    from protokv.replay.dataset import OpenDataset
    from protokv.replay.judges import Judge
    from protokv.replay.plan import ReplayPlan
    from protokv.replay.rows import AnswerRow, AnswerRowFile
    from protokv.replay.streams import ReplayStream

_TEXT = "Video files; with --report, files of results."
_Sources = Annotated[list[str] | None, typer.Argument(metavar="SOURCE", help=_TEXT)]


class _StudyFlags(Flags, panel="What to ask"):
    """What is asked about which videos, when, and under which memories."""

    questions: Path | None = option(
        "--questions FILE", "Questions about the sources, as above.", TOP_PANEL
    )
    delays: str | None = option(
        "--delays TIMES",
        "Delays 0,30s,2m,10m. Default: those that fit.",
        TOP_PANEL,
        parse=lambda text: [parse_duration(one) for one in parse_list(text)],
    )
    memories: str | None = option(
        "--memory NAMES", "Memories to compare: durable,paper,infinipot-v.", TOP_PANEL
    )
    budgets: str | None = option(
        "--budget -b COUNTS", "Visual tokens kept; several with commas: 512,6k.", TOP_PANEL
    )
    settings: list[str] | None = option(
        "--set [MEMORY.]NAME=VALUE,...", "A setting of all memories, or of one."
    )
    intersection: bool = option(
        "--intersection/--no-intersection", "Ask only what fits every delay.", default=True
    )
    types: str | None = option(
        "--types NAMES", "Question types to ask, or all; default: those whose answers last."
    )
    subtitles: str = option("--subtitles FILE|LANG", SUBTITLES_HELP, default="off")
    at_once: int = option(
        "--at-once COUNT",
        "Questions, and memories, in one forward; 1 times each alone.",
        default=8,
        min=1,
    )

    def plan(
        self,
        backbone: Backbone,
        benchmark: Benchmark | None,
        streams: Sequence[ReplayStream],
        fps: float | None,
    ) -> ReplayPlan:
        """Return what is to be done. A data set adds its baselines, and has other defaults.
        ConfigError.
        """
        from protokv.memories import DEFAULT_MEMORY, MemoryConfig
        from protokv.replay.dataset import complete_memory_variants
        from protokv.replay.memories import (
            COMPARED_MEMORIES,
            make_memory_variants,
            vary_memory_settings,
        )
        from protokv.replay.plan import make_replay_plan
        from protokv.replay.runner import TrialSetup

        names = parse_list(self.memories)
        budgets = parse_list(self.budgets)
        delays = read_option(self, "delays")
        named = make_memory_variants(
            names or ([DEFAULT_MEMORY] if benchmark else COMPARED_MEMORIES),
            [parse_budget(one) for one in budgets] or [MemoryConfig.of(DEFAULT_MEMORY).budget],
        )
        variants = vary_memory_settings(
            named, [parse_variation(text) for text in self.settings or ()]
        )
        return make_replay_plan(
            streams,
            complete_memory_variants(variants, streams, backbone, baselines=benchmark is not None),
            delays or ([0.0] if benchmark else None),
            TrialSetup.of(backbone, benchmark, fps=fps, at_once=self.at_once),
            intersection=self.intersection,
            types=None if self.types is None else parse_list(self.types),
        )


class _BenchmarkFlags(Flags, panel="Published benchmarks"):
    """A published benchmark."""

    dataset: str | None = option(
        "--dataset NAME", "A published benchmark instead of sources.", TOP_PANEL
    )
    data_root: Path | None = option("--data-root DIR", "Folder of the data set, or of several.")
    videos: int | None = option("--videos COUNT", "Take only the first COUNT videos.", min=1)
    judge: str | None = option(
        "--judge MODEL", "Judge of open answers: a model at OPENAI_BASE_URL."
    )

    def open(
        self, sources: list[str] | None, study: _StudyFlags
    ) -> tuple[Benchmark | None, OpenDataset]:
        """Open what there is to watch, of a data set or of the user. ConfigError, SourceError."""
        from protokv.replay.benchmarks import find_benchmark
        from protokv.replay.dataset import OpenDataset, open_dataset
        from protokv.replay.streams import open_replay_videos

        if self.dataset is not None:
            found = find_benchmark(self.dataset)
            check_options(
                (sources, "a replay has either --dataset or SOURCE", "leave one of them out"),
                (study.questions, "--questions are about sources of your own", "name the videos"),
                (
                    self.judge and not found.open_ended,
                    "a judge reads open answers",
                    "such as those of rvs-ego",
                ),
            )
            if self.data_root is None:
                raise ConfigError(
                    f"where is {self.dataset}?", hint="name its folder with --data-root"
                )
            return found, open_dataset(
                found, self.data_root, most_videos=self.videos, subtitles=study.subtitles
            )
        of_dataset = self.data_root is not None or self.judge
        check_options(
            (of_dataset, "--data-root and --judge are about a data set", "name it with --dataset")
        )
        if not sources:
            raise ConfigError(
                "there is nothing to watch", hint="name videos and --questions, or a --dataset"
            )
        if study.questions is None:
            raise ConfigError(
                "there are no questions about the sources", hint="name a file with --questions"
            )
        return None, OpenDataset(
            open_replay_videos(sources, study.questions, study.subtitles), {}, Counter()
        )


class _ResultFlags(Flags, panel="Results"):
    """Where the results go."""

    target: Path | None = option(
        "--output -o FILE",
        "Results; a run goes on. Default: NAME.results.jsonl, by the questions.",
        TOP_PANEL,
    )
    dry_run: bool = option("--dry-run", "Show the cost of a run; ask nothing.", TOP_PANEL)
    report: bool = option("--report", "Show the results in SOURCE..., merged; ask nothing.")
    plot: Path | None = option(
        "--plot FILE", "Figure of accuracy over the delay: .png, .pdf, .svg."
    )
    table: Path | None = option("--csv FILE", "All numbers as a CSV file.")
    calibrate: str | None = option(
        "--calibrate NAME", "Write a calibration for query --at-most-wrong, and show its promises."
    )
    force: bool = option("--force", "Start over and replace the results.")

    def locate(self, study: _StudyFlags, benchmark: _BenchmarkFlags) -> Path:
        """Return the file of results: other questions have another one, here."""
        name = benchmark.dataset or (study.questions and study.questions.stem) or "replay"
        return self.target or Path(f"{name}.results.jsonl")

    def check(self, results: Path, inputs: Sequence[object]) -> None:
        """Refuse to write over an input, and a figure that cannot be drawn. ConfigError."""
        from protokv.replay.figure import check_figure_path
        from protokv.state.store import refuse_input_as_target

        for written in (None if self.report else results, self.plot, self.table):
            if written is not None:
                refuse_input_as_target(written, *inputs)
        if self.plot:
            check_figure_path(self.plot)
        if self.calibrate is not None and not re.fullmatch(r"[\w.-]{1,100}", self.calibrate):
            raise ConfigError(
                f"{self.calibrate!r} is no name of a calibration", hint="use letters and digits"
            )


def replay(
    sources: _Sources = None,
    *,
    study: _StudyFlags,
    benchmark: _BenchmarkFlags,
    results: _ResultFlags,
    model: WatchModelFlags,
    output: OutputFlags,
) -> None:
    """Watch streams once, ask every question at each delay under every memory, and compare.

    The same command continues an interrupted run; a file of results holds one study, and another
    study is refused.

    Questions are JSON, one object per line:

    ```json
    {"question": "Who came in?", "answer": "the postman", "ask_s": 95}
    ```

    - `ask_s`: when it can be asked, in seconds; `evidence_s`, if known: when its answer was last
      visible, from which delays count then
    - `type`, `id`, `video`: optional, its type, its name, and the name of its file if there are
      several sources
    - `lasts`: false if the answer may change while the stream goes on

    ```sh
    protokv replay video.mp4 --questions questions.jsonl --memory durable,paper --budget 512
    protokv replay --dataset ovo-bench --data-root data/ovo-bench --budget 4k -o ovo.jsonl
    protokv replay --report results.jsonl --csv numbers.csv --plot curves.pdf
    ```
    """
    out = output.open()
    with out.errors():
        from protokv.backbones import load_backbone
        from protokv.ingestion.options import DEFAULT_MODEL
        from protokv.replay.judges import Judge
        from protokv.replay.rows import AnswerRowFile, read_answer_rows

        file = results.locate(study, benchmark)
        results.check(file, [*(sources or ()), study.questions])
        if results.report:
            _show_report(out, read_answer_rows(sources or [file]), results, {}, {})
            return
        model.check()
        known, opened = benchmark.open(sources, study)
        for video, why in opened.missing.items():
            out.error(f"left out: {video}: {why}")
        referee = Judge(benchmark.judge) if benchmark.judge else None
        loading: Keywords = model.loading | {"dtype": model.dtype or "auto"}
        backbone = load_backbone(model.model or DEFAULT_MODEL, **loading)
        plan = study.plan(backbone, known, opened.streams, model.fps)
        out.note_model(model.model, backbone.notice)
        missing = opened.missing
        if results.dry_run:
            cost = plan.cost()
            if file.exists() and not results.force:
                rows = AnswerRowFile(file)
                rows.check(plan.trials.values())
                cost = plan.cost(rows.rows)
            row = {"type": "plan", **cost, "missing": missing, "notes": dict(opened.notes)}
            out.record(row, "hours of video, and answers over all memories")
        else:
            rows = AnswerRowFile(file, start_over=results.force)
            missing = _run(out, plan, opened, results, rows, referee)
            out.note(f"results: {file}")
        if missing:
            raise typer.Exit(ExitCode.PARTIAL)


def _run(
    out: Output,
    plan: ReplayPlan,
    opened: OpenDataset,
    results: _ResultFlags,
    rows: AnswerRowFile,
    referee: Judge | None,
) -> dict[str, str]:
    """Run the rest of a plan and show the results; return why each video that could not be read was
    left out.
    """
    from protokv.replay.judges import judge_rows
    from protokv.replay.plan import ReplayFailure, run_replay_plan
    from protokv.replay.runner import ReplayProgress

    unread = dict(opened.missing)
    answers = plan.cost(rows.rows)["answers"]
    given = 0
    began_s = time.monotonic()
    with handle_signals(out.note) as stop, ProgressBar(out, f"0 of {answers} answers") as bar:
        for event in run_replay_plan(plan, rows, should_stop=lambda: bool(stop)):
            if isinstance(event, ReplayFailure):
                if len(plan.answers) == 1:
                    raise event.error
                unread[event.video] = event.error.message
                out.error(f"left out: {event.video}: {event.error.message}")
            elif not isinstance(event, ReplayProgress):
                given += 1
            elif bar.due():
                at = f"{format_time(event.stream_time_s)} / {format_time(event.length_s)}"
                left = format_time_left(given, answers - given, time.monotonic() - began_s)
                parts = [f"{given} of {answers} answers", *left, f"{event.video} {at}"]
                bar.show(parts, given, answers)
        keys = [key for key in plan.trials if key in rows.rows]
        judged = judge_rows(rows, keys, referee) if referee and stop.exit is None else ()
        without = sum(row is None for row in takewhile(lambda _: not stop, judged))
    if referee and without:
        out.error(
            f"{without} answers have no verdict of {referee.label}; run the same command again to "
            "ask for them"
        )
    if stop.exit is None or keys:
        left_out: JsonObject = {f"left out, {why}": n for why, n in plan.dropped.items()}
        left_out |= {f"left out, video {name}": why for name, why in unread.items()} | dict(
            opened.notes
        )
        _show_report(out, [rows.rows[key] for key in keys], results, left_out, unread)
    if stop.exit is not None:
        out.note(f"stopped; what is done is in {rows.path}. Continue with the same command.")
        raise typer.Exit(stop.exit)
    return unread


def _show_report(
    out: Output,
    rows: Sequence[AnswerRow],
    results: _ResultFlags,
    left_out: Row,
    missing: Mapping[str, str],
) -> None:
    """Show a table on a terminal, one JSON document in a pipe, and write the files that were asked
    for.
    """
    from protokv.replay.report import summarise_answers
    from protokv.replay.tables import REPORT_NOTE, save_report_points, tabulate_report

    reasons = "; ".join(f"{why.removeprefix('left out, ')}: {n}" for why, n in left_out.items())
    if not rows:
        raise ConfigError(
            f"there is nothing to show: no question could be asked ({reasons or 'none was there'})",
            hint="try shorter --delays, a longer stream, --no-intersection, or --types all",
        )
    report = summarise_answers(rows)
    if results.calibrate is not None:
        report["promises"] = _calibrate(out, rows, results.calibrate)
    report["missing"] = dict(missing)
    if out.as_json:
        report["facts"] |= {name: str(value) for name, value in left_out.items()}
        out.json(report)
    else:
        cells = [
            {**row, "memory": f"{row['memory']} {row['budget']}"} for row in tabulate_report(report)
        ]
        names = [name for name in cells[0] if name != "budget"]
        tables = []
        # Means of a set have no costs, and are one table.
        for part, rows_of_part in groupby(cells, lambda row: row["step ms"] and row["questions"]):
            columns = names[1:] if part else names
            title = f"questions: {part}" if part else ""
            tables.append(tabulate_rows(columns, rows_of_part, title))
        facts = tabulate_fields(report["facts"] | {"left out": reasons})
        out.table(facts, "", *tables, REPORT_NOTE)
        for further in (report["recalled"], report.get("promises")):
            if further:
                out.table("", tabulate_rows(list(further[0]), further))
    if results.table:
        save_report_points(report, results.table)
        out.note(f"numbers: {results.table}")
    if results.plot:
        from protokv.replay.figure import save_report_figure

        save_report_figure(report, results.plot)
        out.note(f"figure: {results.plot}")


def _calibrate(out: Output, rows: Sequence[AnswerRow], name: str) -> Sequence[Row]:
    """Write the calibrations of all memories to one file; return what each can promise."""
    from protokv.replay.calibrate import calibrate_answers, save_calibrations, tabulate_promises

    made = calibrate_answers(rows)
    path = find_calibrations() / f"{name}.json"
    save_calibrations(path, made)
    out.note(f"calibration: {path}")
    return list(tabulate_promises(made))
