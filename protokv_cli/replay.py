"""`protokv replay`: accuracy against delay, under every memory that is named."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from protokv.config import CONFIGS
from protokv.errors import ConfigError
from protokv_cli import options
from protokv_cli.completion import lists, values
from protokv_cli.output import Format, Output
from protokv_cli.parsing import parse_budget, parse_duration, parse_list, parse_scene, parse_seeds, parse_variation
from protokv_cli.signals import stopping

STUDIES = ("quick", "delay", "budgets", "ablation", "anchors", "allocation", "splits", "coefficients")


def replay(
    sources: Annotated[
        list[str] | None,
        typer.Argument(metavar="SOURCE...", help="Video files; with --report, files of results."),
    ] = None,
    questions: Annotated[
        Path | None, typer.Option("--questions", metavar="JSONL", help="Questions about the sources, as above.")
    ] = None,
    world: Annotated[
        str | None,
        typer.Option("--world", metavar="SEED[:COUNT]", help="Procedural streams instead of files."),
    ] = None,
    length: Annotated[str | None, typer.Option("--length", help="Of a procedural stream.")] = None,
    pressure: Annotated[
        float | None, typer.Option("--pressure", help="Distracting events per minute after the evidence, 0 to 40.")
    ] = None,
    cuts: Annotated[
        str | None, typer.Option("--cuts", help="Shortest:longest scene of a procedural stream in seconds, or none.")
    ] = None,
    moving: Annotated[float | None, typer.Option("--moving", help="Share of shapes that move, 0 to 1.")] = None,
    evidence: Annotated[str, typer.Option("--evidence", help="Time that the evidence comes in, up to 1m.")] = "16s",
    per_type: Annotated[
        int | None, typer.Option("--per-type", help="Questions per type and procedural stream.")
    ] = None,
    delays: Annotated[
        str | None,
        typer.Option("--delays", help="After the reference time: 0,30s,2m,10m; what fits, if left out."),
    ] = None,
    memories: Annotated[
        str | None,
        typer.Option(
            "--memory",
            metavar="NAMES",
            help="Memories to compare: durable,paper,infinipot-v.",
            autocompletion=lists(CONFIGS),
        ),
    ] = None,
    study: Annotated[
        str,
        typer.Option(
            "--study",
            help="Memories, streams and delays to compare where no others are named: quick, delay, or a table of the "
            "paper: ablation, anchors, allocation, splits, coefficients, budgets.",
            autocompletion=values(STUDIES),
        ),
    ] = "quick",
    budgets: Annotated[
        str | None, typer.Option("--budget", "-b", help="Visual tokens kept; several with commas: 512,6k.")
    ] = None,
    settings: Annotated[
        list[str] | None,
        typer.Option(
            "--set",
            metavar="[MEMORY.]NAME=VALUE,...",
            help="Change a setting of the memories, or of one of them; several values are compared.",
        ),
    ] = None,
    intersection: Annotated[
        bool,
        typer.Option("--intersection/--no-intersection", help="Only questions that can be asked at every delay."),
    ] = True,
    types: Annotated[
        str | None,
        typer.Option(
            "--types",
            help="Question types to ask, or all; the retrospective and unnamed if left out.",
        ),
    ] = None,
    output: Annotated[
        Path, typer.Option("--output", "-o", metavar="JSONL", help="Results; a run goes on with what is there.")
    ] = Path("results.jsonl"),
    report: Annotated[
        bool, typer.Option("--report", help="Show the results in SOURCE..., merged, and ask nothing.")
    ] = False,
    plot: Annotated[Path | None, typer.Option("--plot", help="Figure to draw, .png or .svg.")] = None,
    html: Annotated[Path | None, typer.Option("--html", help="Page to write, figure and tables in one file.")] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Say what would be done, and do nothing.")] = False,
    force: Annotated[bool, typer.Option("--force", help="Start over and replace the results.")] = False,
    model: options.Model = None,
    fps: Annotated[float | None, typer.Option("--fps", help="Frames per second to sample.")] = None,
    device: options.Device = "auto",
    dtype: options.Dtype = None,
    device_map: options.DeviceMap = None,
    quantization: options.Quantization = None,
    fmt: options.OutputFormat = Format.AUTO,
    as_json: options.Json = False,
    quiet: options.Quiet = False,
    debug: options.Debug = False,
) -> None:
    """Watch streams once, ask every question at each delay under every memory, and compare.

    Without SOURCE and --world, procedural streams are made. The same command goes on where an earlier run stopped; a
    file of results holds one study, and another study is refused.

    \b
    Questions are JSON, one object per line:
      {"question": "Who came in?", "answer": "the postman", "ask_s": 95}
    ask_s         when it can be asked, in seconds; evidence_s, if known, when the answer was last to be seen
    type, id      optional: a name of the kind of question, and of the question
    video         the file's name, where there are several sources
    Delays count from evidence_s, and from ask_s where there is none.

    \b
    Examples:
      protokv replay --study quick
      protokv replay video.mp4 --questions questions.jsonl --delays 0,1m,5m --memory durable,sliding-window --budget 512
      protokv replay --world 7:20 --length 10m --pressure 12 --study ablation --budget 144 --html ablation.html
      protokv replay --report results.jsonl --plot curves.png
    """
    out = Output(fmt, as_json=as_json, quiet=quiet, debug=debug)
    with out.errors():
        from dataclasses import replace

        from protokv.backbones import EMBEDDED, load_backbone
        from protokv.replay.figure import check_figure
        from protokv.replay.plan import make_plan, run
        from protokv.replay.rows import RowFile, check_trials, read_rows
        from protokv.replay.runner import Setup
        from protokv.replay.schedule import LADDER
        from protokv.replay.streams import make_worlds, open_files
        from protokv.replay.studies import default_budgets, find_study, name_memories, vary_memories
        from protokv_cli.replay_tables import following, show, show_cost

        if plot:
            check_figure(plot)
        if html:
            check_figure()
        if report:
            show(out, read_rows(sources or [output]), plot=plot, html=html)
            return
        if sources and world:
            raise ConfigError("a replay has either SOURCE or --world", hint="leave one of them out")
        if sources and questions is None:
            raise ConfigError("there are no questions about the sources", hint="name a JSONL file with --questions")
        named = find_study(study)
        name = model or EMBEDDED
        tokens = [parse_budget(text) for text in parse_list(budgets)] if budgets else default_budgets(named, name)
        variants = named.variants(tokens) if memories is None else name_memories(parse_list(memories), tokens)
        variants = vary_memories(variants, [parse_variation(text) for text in settings or ()])
        after = named.pressure
        if pressure is not None:
            after = replace(after, events_per_minute=pressure)
        if cuts is not None:
            after = replace(after, cut_s=parse_scene(cuts))
        if moving is not None:
            after = replace(after, moving=moving)
        streams = (
            open_files(sources, questions)
            if sources and questions
            else make_worlds(
                named.seeds if world is None else parse_seeds(world),
                named.length_s if length is None else round(parse_duration(length)),
                after,
                evidence_s=round(parse_duration(evidence)),
                per_type=named.per_type if per_type is None else per_type,
            )
        )
        plan = make_plan(
            streams,
            variants,
            None if delays is None else [parse_duration(text) for text in parse_list(delays)],
            wanted_s=LADDER if sources else named.delays_s,
            intersection=intersection,
            types=None if types is None else parse_list(types),
        )
        backbone = load_backbone(
            name, device=device, dtype=dtype or "auto", device_map=device_map, quantization=quantization
        )
        setup = Setup.of(backbone, fps=fps)
        trials = plan.trials(setup)
        if dry_run:
            done = read_rows([output]) if output.exists() and not force else []
            check_trials(done, trials, output)
            show_cost(out, plan.cost(setup, {row.key for row in done}))
            return
        results = RowFile(output, start_over=force)
        cost = plan.cost(setup, results.rows.keys())
        with stopping(out.warn) as stop, following(out, cost["answers"]) as follow:
            for event in run(plan, backbone, setup, results, should_stop=lambda: bool(stop)):
                follow(event)
        asked = [results.rows[trial.key] for trial in trials if trial.key in results.rows]
        if stop.exit is None or asked:
            show(out, asked, dropped=plan.dropped, plot=plot, html=html)
        if stop.exit is not None:
            out.warn(f"stopped; what is done is in {output}. Continue with the same command.")
            raise typer.Exit(stop.exit)
