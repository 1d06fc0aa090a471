"""`protokv replay`: accuracy against delay, under several memories."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from protokv.core.settings import check_fps
from protokv.memories import CONFIGS
from protokv_cli import options
from protokv_cli.answers import note_model
from protokv_cli.exits import Exit
from protokv_cli.options import option
from protokv_cli.output import Format, Output
from protokv_cli.panels import Panel
from protokv_cli.parsing import parse_budget, parse_duration, parse_list, parse_scene, parse_seeds, parse_variation
from protokv_cli.process import stopping

STUDIES = ("quick", "delay", "language", "words")
DATASETS = ("rvs-ego", "rvs-movie", "ovo-bench", "streamingbench", "videomme", "mlvu", "ovo-s-bench")


def replay(
    sources: Annotated[
        list[str] | None,
        typer.Argument(metavar="SOURCE", help="Video files; with --report, files of results."),
    ] = None,
    questions: Annotated[
        Path | None, option("--questions FILE", "Questions about the sources, as above.", Panel.MOST)
    ] = None,
    world: Annotated[
        str | None, option("--world SEED[:COUNT]", "Procedural streams instead of files.", Panel.WORLDS)
    ] = None,
    length: Annotated[str | None, option("--length TIME", "Length of a procedural stream.", Panel.WORLDS)] = None,
    distractor_rate: Annotated[
        float | None, option("--distractor-rate NUMBER", "Distracting events per minute, 0 to 40.", Panel.WORLDS)
    ] = None,
    cuts: Annotated[
        str | None,
        option("--cuts TIMES", "Shortest:longest scene of a procedural stream in seconds, or none.", Panel.WORLDS),
    ] = None,
    moving: Annotated[
        float | None, option("--moving SHARE", "Share of shapes that move, 0 to 1.", Panel.WORLDS)
    ] = None,
    distractor_similarity: Annotated[
        float | None,
        option(
            "--distractor-similarity SHARE",
            "Share of distracting events with colour and place of the evidence, 0 to 1.",
            Panel.WORLDS,
        ),
    ] = None,
    backdrop: Annotated[
        str | None,
        option(
            "--backdrop NAME",
            "Background of a procedural stream: plain, or natural (noise with the spectrum of photographs).",
            Panel.WORLDS,
            known=("plain", "natural"),
        ),
    ] = None,
    evidence: Annotated[
        str | None, option("--evidence TIME", "Time that the evidence takes, up to 1m.", Panel.WORLDS)
    ] = None,
    before: Annotated[
        str | None,
        option(
            "--before TIME|mix",
            "Distraction before the evidence of a procedural stream, such as 2m; mix (the default): "
            "four places in turn, one a stream.",
            Panel.WORLDS,
        ),
    ] = None,
    per_type: Annotated[
        int | None, option("--per-type COUNT", "Questions per type and procedural stream.", Panel.WORLDS)
    ] = None,
    delays: Annotated[
        str | None,
        option("--delays TIMES", "Delays after the reference time: 0,30s,2m,10m; default: those that fit.", Panel.MOST),
    ] = None,
    memories: Annotated[
        str | None,
        option(
            "--memory NAMES",
            "Memories to compare: durable,paper,infinipot-v.",
            Panel.MOST,
            known=CONFIGS,
        ),
    ] = None,
    study: Annotated[
        str,
        option(
            "--study NAME|FILE",
            "Memories, streams and delays to compare, unless others are named: quick, delay, or a .toml file "
            "(examples: samples/studies/).",
            Panel.MOST,
            known=STUDIES,
        ),
    ] = "quick",
    dataset: Annotated[
        str | None, option("--dataset NAME", "A published benchmark instead of sources.", Panel.MOST, known=DATASETS)
    ] = None,
    data_root: Annotated[
        Path | None, option("--data-root DIR", "Folder of the data set, or of several.", Panel.BENCHMARKS)
    ] = None,
    videos: Annotated[
        int | None, option("--videos COUNT", "Take only the first COUNT videos.", Panel.BENCHMARKS, min=1)
    ] = None,
    prompt: Annotated[
        str | None,
        option(
            "--prompt NAME",
            "official, or bare: the question alone, for models that cannot answer by letters.",
            Panel.BENCHMARKS,
            known=("official", "bare"),
        ),
    ] = None,
    judge: Annotated[
        str | None,
        option("--judge NAME", "Judge of open answers: openai:MODEL or local:MODEL.", Panel.BENCHMARKS),
    ] = None,
    subtitles: options.Subtitles = "off",
    strict: Annotated[
        bool, option("--strict", "Stop at a video that is missing or cannot be read.", Panel.BENCHMARKS)
    ] = False,
    budgets: Annotated[
        str | None, option("--budget -b COUNTS", "Visual tokens kept; several with commas: 512,6k.", Panel.MOST)
    ] = None,
    settings: Annotated[
        list[str] | None,
        option(
            "--set [MEMORY.]NAME=VALUE,...",
            "Change a setting of all memories, or of one; several values are compared.",
            Panel.MEMORY,
        ),
    ] = None,
    intersection: Annotated[
        bool, option("--intersection/--no-intersection", "Ask only questions that fit every delay.", Panel.ASK)
    ] = True,
    types: Annotated[
        str | None,
        option("--types NAMES", "Question types to ask, or all; default: those whose answers last.", Panel.ASK),
    ] = None,
    output: Annotated[Path, option("--output -o FILE", "Results; a run continues the file.", Panel.MOST)] = Path(
        "results.jsonl"
    ),
    report: Annotated[
        bool, option("--report", "Show the results in SOURCE..., merged; ask nothing.", Panel.OUTPUT)
    ] = False,
    plot: Annotated[Path | None, option("--plot FILE", "Figure to draw, .png or .svg.", Panel.OUTPUT)] = None,
    html: Annotated[Path | None, option("--html FILE", "Page to write: figure and tables.", Panel.OUTPUT)] = None,
    dry_run: Annotated[bool, option("--dry-run", "Show the cost of a run; ask nothing.", Panel.MOST)] = False,
    force: Annotated[bool, option("--force", "Start over and replace the results.", Panel.OUTPUT)] = False,
    model: options.Model = None,
    revision: options.Revision = None,
    frame_tokens: options.FrameTokens = None,
    max_pixels: options.MaxPixels = None,
    fps: Annotated[float | None, option("--fps NUMBER", "Frames per second to sample.", Panel.WATCH)] = None,
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

    Without SOURCE, procedural streams are made. The same command continues an interrupted run; a file of results holds
    one study, and another study is refused.

    \b
    Questions are JSON, one object per line:
      {"question": "Who came in?", "answer": "the postman", "ask_s": 95}
    ask_s         when it can be asked, in seconds; evidence_s, if known, when its answer was last visible
    type, id      optional: the type and the name of the question
    video         the file's name, if there are several sources
    Delays count from evidence_s, or else from ask_s.

    \b
    Examples:
      protokv replay --study quick
      protokv replay video.mp4 --questions questions.jsonl --delays 0,1m,5m --memory durable,sliding-window --budget 512
      protokv replay --world 7:20 --length 10m --distractor-rate 12 --budget 144 --html page.html
      protokv replay --dataset ovo-bench --data-root data/ovo-bench --memory durable --budget 4k -o ovo.jsonl
      protokv replay --study samples/studies/ablation.toml -o ablation.jsonl
      protokv replay --report results.jsonl --plot curves.png
    """
    out = Output(fmt, as_json=as_json, quiet=quiet, debug=debug)
    with out.errors():
        from protokv.backbones import load_backbone, require_model

        if fps is not None:
            check_fps(fps)
        if model is not None and not report:
            require_model(model, revision)
        from protokv.replay.figure import check_figure
        from protokv.replay.language import read_language
        from protokv.replay.plan import run
        from protokv.replay.request import ReplayRequest
        from protokv.replay.rows import RowFile, check_trials, read_rows
        from protokv.replay.studies import load_study
        from protokv.state.api import check_not_read
        from protokv_cli.replay_language import replay_language, show_language
        from protokv_cli.replay_report import following, judging, show, show_cost, show_datasets

        for written in (None if report else output, plot, html):
            if written is not None:
                check_not_read(written, *(sources or ()), questions)
        if plot:
            check_figure(plot)
        if html:
            check_figure()
        if report:
            found = read_language(sources or [output])
            if found:
                show_language(out, found)
            else:
                show(out, read_rows(sources or [output]), plot=plot, html=html)
            return
        given: dict[str, Any] = {
            "length_s": None if length is None else round(parse_duration(length)),
            "distractor_rate": distractor_rate,
            "distractor_similarity": distractor_similarity,
            "moving": moving,
            "backdrop": backdrop,
            "evidence_s": None if evidence is None else round(parse_duration(evidence)),
            "before": "mix" if before == "mix" else None if before is None else round(parse_duration(before)),
            "per_type": per_type,
        }
        worlds = {name: value for name, value in given.items() if value is not None}
        if world is not None:
            seeds = parse_seeds(world)
            worlds |= {"first_seed": seeds.start, "count": len(seeds)}
        if cuts is not None:
            worlds["cut_s"] = parse_scene(cuts)
        request = ReplayRequest(
            study=load_study(study),
            sources=sources,
            questions=questions,
            worlds=worlds,
            dataset=dataset,
            data_root=data_root,
            most_videos=videos,
            delays_s=None if delays is None else [parse_duration(text) for text in parse_list(delays)],
            memories=None if memories is None else parse_list(memories),
            budgets=None if budgets is None else [parse_budget(text) for text in parse_list(budgets)],
            variations=[parse_variation(text) for text in settings or ()],
            intersection=intersection,
            types=None if types is None else parse_list(types),
            prompt=prompt,
            strict=strict,
            subtitles=subtitles,
        )
        name = model or request.study.model
        placement: dict[str, Any] = {"device": device, "device_map": device_map, "quantization": quantization}
        loading = placement | {"revision": revision, "dtype": dtype or "auto"}
        loading |= {"frame_tokens": frame_tokens, "max_pixels": max_pixels}
        if request.study.language is not None:
            replay_language(out, request, name, loading, output, dry_run=dry_run, force=force)
            return
        if dry_run and request.study.datasets and dataset is None and data_root is not None:
            backbone = load_backbone(name, **loading)
            show_datasets(out, study, request, backbone, fps)
            return
        request.check()
        opened = request.open(name)
        for video, why in opened.missing.items():
            out.error(f"left out: {video}: {why}")
        lost = {stream.name: stream.words_lost for stream in opened.streams if stream.words_lost}
        for video, why in lost.items():
            out.error(f"Error: {video}: not all words are read: {why}")
        referee = request.judge(judge, placement)
        backbone = load_backbone(name, **loading)
        plan = request.plan(opened, backbone, fps)
        note_model(out, backbone)
        if dry_run:
            done = read_rows([output]) if output.exists() and not force else []
            check_trials(done, plan.trials.values(), output)
            show_cost(out, request.cost(plan, backbone, {row.key for row in done}), opened)
            return
        results = RowFile(output, start_over=force)
        cost = plan.cost(results.rows.keys())
        unread = dict(opened.missing)
        with stopping(out.warn) as stop, following(out, cost["answers"], unread) as follow:
            for event in run(
                plan,
                backbone,
                results,
                should_stop=lambda: bool(stop),
                strict=strict or dataset is None,
            ):
                follow(event)
            keys = [key for key in plan.trials if key in results.rows]
            if referee and stop.exit is None:
                judging(out, results, keys, referee, should_stop=lambda: bool(stop))
        asked = [results.rows[key] for key in keys]
        if stop.exit is None or asked:
            show(out, asked, dropped=plan.dropped, plot=plot, html=html, missing=unread, notes=opened.notes)
        if stop.exit is not None:
            out.warn(f"stopped; what is done is in {output}. Continue with the same command.")
            raise typer.Exit(stop.exit)
        if unread or lost:
            raise typer.Exit(Exit.PARTIAL)
