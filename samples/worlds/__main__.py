"""Run a study of memories: `python -m samples.worlds STUDY -o rows.jsonl`, in the root of a
checkout.

The rows are those of `protokv replay`, and the same command continues an interrupted run.
`--report` shows the rows of files.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from protokv.backbones import load_backbone
from protokv.core.backbone import Backbone
from protokv.core.settings import parse_budget
from protokv.errors import ConfigError, ProtoKVError
from protokv.replay.benchmarks import find_benchmark
from protokv.replay.dataset import OpenDataset, complete_memory_variants, open_dataset
from protokv.replay.figure import save_report_figure
from protokv.replay.judges import Judge, judge_rows
from protokv.replay.memories import MemoryVariant, make_memory_variants, vary_memory_settings
from protokv.replay.plan import ReplayFailure, ReplayPlan, make_replay_plan, run_replay_plan
from protokv.replay.questions import DELAY_LADDER_S
from protokv.replay.report import summarise_answers
from protokv.replay.rows import AnswerRow, AnswerRowFile, read_answer_rows
from protokv.replay.runner import TrialSetup
from protokv.replay.tables import REPORT_NOTE, save_report_points, tabulate_report
from protokv.state.moments import parse_duration
from protokv_cli.parsing import parse_list, parse_variation
from samples.worlds.language import (
    MEASURES,
    read_language,
    resume_rows,
    run_language,
    summarise_language,
)
from samples.worlds.llama import load_llama
from samples.worlds.streams import find_group
from samples.worlds.studies import Study, list_studies, load_study


@dataclass(frozen=True)
class Part:
    """The streams of a study, or of one of its data sets, with the memories to compare on them."""

    opened: OpenDataset
    variants: list[MemoryVariant]
    delays_s: Sequence[float] | None
    wanted_s: Sequence[float]
    types: Sequence[str] | None


def read_options(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Read the command line; options that are left out come from the study."""
    parser = argparse.ArgumentParser(
        prog="python -m samples.worlds", description=__doc__.splitlines()[0]
    )
    add = parser.add_argument
    add(
        "study",
        nargs="*",
        help=f"{', '.join(list_studies())}, or a .toml file; with --report: files of rows",
    )
    add(
        "-o",
        "--output",
        type=Path,
        default=Path("results.jsonl"),
        help="rows; a run continues the file",
    )
    add("--report", action="store_true", help="show rows, ask nothing")
    add("--dry-run", action="store_true", help="show the cost of a run, ask nothing")
    add("--force", action="store_true", help="start over and replace the rows")
    add("--json", action="store_true", help="the report as one JSON document")
    add("--plot", type=Path, help="figure to draw, .png")
    add("--csv", type=Path, help="all numbers as a CSV file")
    add("--model", help="name or folder")
    add("--device", default="auto")
    add("--memory", type=parse_list, help="memories to compare, with commas")
    add(
        "--budget",
        type=lambda text: [parse_budget(one) for one in parse_list(text)],
        help="tokens kept, with commas",
    )
    add(
        "--set",
        action="append",
        default=[],
        type=parse_variation,
        metavar="[MEMORY.]NAME=VALUE,...",
    )
    add(
        "--delays",
        type=lambda text: [parse_duration(one) for one in parse_list(text)],
        help="such as 0,30s,2m",
    )
    add("--types", type=parse_list, help="types of questions, with commas, or all")
    worlds = parser.add_argument_group("worlds")
    worlds.add_argument("--worlds", metavar="[SEED:]COUNT", help="seeds of the streams")
    worlds.add_argument("--length", type=parse_duration)
    worlds.add_argument("--distractor-rate", type=float, help="distracting events a minute")
    worlds.add_argument(
        "--distractor-similarity", type=float, help="share with colour and place of the evidence"
    )
    worlds.add_argument("--cuts", help="SHORTEST:LONGEST scene in seconds, or none")
    worlds.add_argument("--moving", type=float, help="share of shapes that move")
    worlds.add_argument("--backdrop", choices=("plain", "natural"))
    worlds.add_argument("--evidence", type=parse_duration, help="time that the evidence takes")
    worlds.add_argument(
        "--before", help="distraction before the evidence, such as 2m; mix: four places in turn"
    )
    worlds.add_argument("--per-type", type=int, help="questions of each type and stream")
    sets = parser.add_argument_group("data sets")
    sets.add_argument("--dataset", help="one of the study's data sets")
    sets.add_argument("--data-root", type=Path, help="its folder, or that of several")
    sets.add_argument("--judge", help="a model at OPENAI_BASE_URL that reads open answers")
    return parser.parse_intermixed_args(arguments)


def change_worlds(options: argparse.Namespace) -> dict[str, Any]:
    """Return the fields of `Worlds` that the options change."""
    given = {
        "length_s": options.length and round(options.length),
        "distractor_rate": options.distractor_rate,
        "distractor_similarity": options.distractor_similarity,
        "moving": options.moving,
        "backdrop": options.backdrop,
        "evidence_s": options.evidence and round(options.evidence),
        "per_type": options.per_type,
    }
    found = {name: value for name, value in given.items() if value is not None}
    if options.worlds:
        seed, _, count = options.worlds.rpartition(":")
        found |= {"count": int(count)} | ({"first_seed": int(seed)} if seed else {})
    if options.cuts:
        found["cut_s"] = (
            None if options.cuts == "none" else tuple(map(int, options.cuts.split(":")))
        )
    if options.before:
        found["before"] = (
            "mix" if options.before == "mix" else round(parse_duration(options.before))
        )
    return found


def list_variants(
    study: Study, options: argparse.Namespace, budgets: Sequence[int]
) -> list[MemoryVariant]:
    """Return the memories of a study, or those that are named, at the budgets."""
    budgets = options.budget or budgets
    named = (
        study.variants(budgets)
        if options.memory is None
        else make_memory_variants(options.memory, budgets)
    )
    return vary_memory_settings(named, options.set)


def open_part(study: Study, options: argparse.Namespace, model: str) -> Part:
    """Open the streams of a study, or one of its data sets if it is named."""
    if options.dataset:
        part = study.dataset(options.dataset)
        benchmark = find_benchmark(options.dataset)
        if part is None or options.data_root is None:
            raise ConfigError(
                f"{options.dataset} is no data set of this study, or it has no --data-root"
            )
        opened = open_dataset(benchmark, options.data_root)
        delays_s = options.delays or part.delays_s
        return Part(
            opened,
            list_variants(study, options, part.budgets),
            delays_s,
            DELAY_LADDER_S,
            options.types,
        )
    if study.worlds is None:
        raise ConfigError(
            "this study compares on data sets", hint="name one with --dataset and --data-root"
        )
    types = options.types or study.types
    streams = msgspec.structs.replace(study.worlds, **change_worlds(options)).open(types)
    variants = list_variants(study, options, study.default_budgets(model))
    return Part(
        OpenDataset(streams, {}, Counter()), variants, options.delays, study.delays_s, types
    )


def plan_part(part: Part, backbone: Backbone, dataset: str | None) -> ReplayPlan:
    """Plan what is asked of what and when; a data set adds its baselines."""
    streams = part.opened.streams
    variants = complete_memory_variants(
        part.variants, streams, backbone, baselines=dataset is not None
    )
    setup = TrialSetup.of(backbone, find_benchmark(dataset) if dataset else None)
    return make_replay_plan(
        streams, variants, part.delays_s, setup, wanted_s=part.wanted_s, types=part.types
    )


def run_study(study: Study, options: argparse.Namespace) -> int:
    """Run a study on worlds or a data set, and show its rows."""
    model = options.model or study.model
    part = open_part(study, options, model)
    backbone = load_backbone(model, device=options.device)
    plan = plan_part(part, backbone, options.dataset)
    if options.dry_run:
        print(json.dumps(plan.cost()), file=sys.stderr)
        return 0
    results = AnswerRowFile(options.output, start_over=options.force)
    missing = dict(part.opened.missing)
    total = plan.cost(results.rows.keys())["answers"]
    seen = Counter[str]()
    for event in run_replay_plan(plan, results):
        if isinstance(event, ReplayFailure):
            missing[event.video] = event.error.message
        elif isinstance(event, AnswerRow):
            if event.video not in seen:
                print(f"{event.video}: {seen.total()} of {total} answers", file=sys.stderr)
            seen[event.video] += 1
    keys = [key for key in plan.trials if key in results.rows]
    if options.judge:
        without = sum(row is None for row in judge_rows(results, keys, Judge(options.judge)))
        print(f"{without} answers have no verdict", file=sys.stderr)
    for video, why in missing.items():
        print(f"left out: {video}: {why}", file=sys.stderr)
    show([results.rows[key] for key in keys], options, plan.dropped)
    return 3 if missing else 0


def show(
    rows: Sequence[AnswerRow], options: argparse.Namespace, dropped: Mapping[str, int]
) -> None:
    """Print the table of some rows, or their report as JSON, and write the files that were asked
    for.
    """
    if not rows:
        raise ConfigError(f"there is nothing to show: no question could be asked ({dict(dropped)})")
    report = summarise_answers(rows, find_group)
    report["facts"] |= {f"left out, {why}": str(n) for why, n in dropped.items()}
    if options.json:
        print(json.dumps(report))
    else:
        rows_shown = tabulate_report(report)
        print("\n".join(f"{name}: {text}" for name, text in report["facts"].items()), end="\n\n")
        print_grid([list(rows_shown[0]), *(list(row.values()) for row in rows_shown)])
        print(f"\n{REPORT_NOTE}")
    if options.csv:
        save_report_points(report, options.csv)
    if options.plot:
        save_report_figure(report, options.plot)


def print_grid(rows: Sequence[Sequence[str]]) -> None:
    """Print cells in columns."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        print(
            "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        )


def run_text(study: Study, options: argparse.Namespace) -> int:
    """Run a study of text, and show its rows."""
    assert study.language is not None
    changed = {
        name: value
        for name, value in change_worlds(options).items()
        if name in ("first_seed", "count")
    }
    language = msgspec.structs.replace(study.language, **changed)
    variants = list_variants(study, options, language.token_budgets)
    total = len(variants) * len(language.kinds()) * language.count
    if options.dry_run:
        print(json.dumps({"rows": total}), file=sys.stderr)
        return 0
    if options.force:
        options.output.unlink(missing_ok=True)
    rows = resume_rows(options.output)
    backbone = load_llama(options.model or study.model, device=options.device)
    with options.output.open("ab") as file:
        for row in run_language(language, backbone, variants, rows):
            file.write(msgspec.json.encode(row) + b"\n")
            file.flush()
            rows.append(row)
            print(f"{len(rows)} of {total} rows", file=sys.stderr)
    show_text(summarise_language(rows), options.json)
    return 0


def show_text(found: Sequence[dict[str, Any]], as_json: bool) -> None:
    """Print a table for each kind of stream and budget, or all as JSON."""
    if as_json:
        print(json.dumps(found))
        return
    columns = {column: names for column, names in MEASURES.items() if names[0] in found[0]}
    for kind in dict.fromkeys((one["redundancy"], one["changed"], one["budget"]) for one in found):
        own = [one for one in found if (one["redundancy"], one["changed"], one["budget"]) == kind]
        print(
            f"steps of a paragraph: {kind[0]}, tokens changed: {kind[1]:.0%}, tokens kept: "
            f"{kind[2]}"
        )
        print_grid(
            [
                ["memory", *columns, "state, bytes", "step ms"],
                *(_list_cells(one, columns.values()) for one in own),
            ]
        )
        print()


def _list_cells(one: dict[str, Any], columns: Iterable[Sequence[str]]) -> list[str]:
    means = [" ".join(f"{one[name]['mean']:.2f}" for name in names) for names in columns]
    return [one["memory"], *means, str(one["state_bytes"]), str(one["step_ms"])]


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a study or show rows; return the exit code."""
    options = read_options(arguments)
    try:
        if options.report:
            paths = options.study or [options.output]
            texts = read_language(paths)
            if texts:
                show_text(summarise_language(texts), options.json)
            else:
                show(read_answer_rows(paths), options, {})
            return 0
        if len(options.study) != 1:
            raise ConfigError("name one study", hint=", ".join(list_studies()))
        study = load_study(options.study[0])
        return run_study(study, options) if study.language is None else run_text(study, options)
    except ProtoKVError as error:
        print(
            f"Error: {error.message}",
            *([f"Hint: {error.hint}"] if error.hint else []),
            sep="\n",
            file=sys.stderr,
        )
        return 2


if __name__ == "__main__":
    raise SystemExit(main())
