"""`protokv query`: questions to one state, once or again and again, or to a folder of states."""

from __future__ import annotations

import shlex
import time
from collections.abc import Iterable, Iterator
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from protokv.errors import ConfigError
from protokv.timings import Timings
from protokv_cli import options
from protokv_cli.answers import (
    Answers,
    QueryOptions,
    check_system,
    decoding_text,
    note_model,
    row_of,
)
from protokv_cli.commits import await_first_commit, commit_age_s, note_commit, rounds, stream_time_of
from protokv_cli.exits import Exit
from protokv_cli.options import option
from protokv_cli.output import Format, Output
from protokv_cli.panels import Panel
from protokv_cli.parsing import parse_duration
from protokv_cli.process import interruptible, uncollected
from protokv_cli.progress import loading, show_timings
from protokv_cli.questions import Question, Refusals, read_questions, typed_questions
from protokv_cli.tables import grid, time_text

if TYPE_CHECKING:
    from protokv.fleet.states import Reply


def query(
    arguments: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="STATE QUESTION...",
            help="State that ingest wrote, and questions; - reads lines or JSONL from stdin. Without questions: a "
            "prompt on a terminal, stdin otherwise.",
            autocompletion=options.states,
        ),
    ] = None,
    named: Annotated[
        str | None,
        option(
            "--state -s STATE",
            "The state; then all arguments are questions.",
            Panel.MOST,
            autocompletion=options.states,
        ),
    ] = None,
    file: Annotated[
        Path | None, option("--questions FILE", "Questions, one a line or a JSON object a line.", Panel.MOST)
    ] = None,
    at: Annotated[
        str | None,
        option(
            "--at TIME",
            "Ask the newest kept commit not after this time: 12m or 7:30 of the stream, -10m before its end; of a "
            "live stream also 14:05 or 2026-11-21T14:05.",
            Panel.MOST,
        ),
    ] = None,
    watch: Annotated[
        str | None,
        option("--watch TIME", "Ask again at this interval, such as 30s; a JSON line each time.", Panel.MOST),
    ] = None,
    verify: Annotated[
        bool, option("--verify/--no-verify", "Check that every byte of the state is as it was saved.", Panel.ANSWERS)
    ] = True,
    model: options.Model = None,
    revision: options.Revision = None,
    top: Annotated[
        int | None,
        option("--top COUNT", "Of many states, show the COUNT answers that the model is surest of.", Panel.MOST, min=1),
    ] = None,
    evidence: Annotated[
        bool, option("--evidence", "Show the times of the stream that each answer stood on.", Panel.MOST)
    ] = False,
    frames: Annotated[
        Path | None, option("--frames DIR", "Write the frames at these times as PNG, named by time.", Panel.EVIDENCE)
    ] = None,
    video: Annotated[
        Path | None,
        option(
            "--video PATH", "The video, or its folder. Default: beside the state, or in this folder.", Panel.EVIDENCE
        ),
    ] = None,
    system: options.System = None,
    max_new_tokens: Annotated[
        int | None,
        option("--max-new-tokens COUNT", "The most tokens of an answer. Default: the model's, or 64.", Panel.MOST),
    ] = None,
    temperature: Annotated[
        float | None,
        option(
            "--temperature NUMBER", "0 is greedy; above 0 draws. Default: as the model was published.", Panel.ANSWERS
        ),
    ] = None,
    top_p: Annotated[
        float | None,
        option(
            "--top-p SHARE",
            "Draw from this share of the probability. Default: as the model was published.",
            Panel.ANSWERS,
        ),
    ] = None,
    device: options.Device = "auto",
    device_map: options.DeviceMap = None,
    seed: Annotated[int, option("--seed NUMBER", "Seed of the draws.", Panel.ANSWERS)] = 0,
    timings: options.Timings = False,
    fmt: options.OutputFormat = Format.AUTO,
    as_json: options.Json = False,
    quiet: options.Quiet = False,
    debug: options.Debug = False,
) -> None:
    """Answer questions about a video from its state alone; asking changes nothing.

    While ingest writes the state, its last commit answers. With --at, a kept commit answers as of an earlier time.

    Without a question on a terminal there is a prompt, with history; Ctrl-D ends it. What is typed there is one
    conversation, until new begins another. All other questions are asked each by itself.

    Tokens are chosen as the model was published to (generation_config.json): some models draw, with the same answer for
    the same seed. --temperature 0 is greedy.

    A line on stdin or of --questions is a question, or a JSON object with the key "question"; if it has "answer" too,
    the answers are compared and the score is shown at the end. A question has at most 65,536 characters and 4,096
    tokens. One that cannot be asked is named, the others are answered, and the exit code is 2.

    For a folder, all states are asked, and each answer has the mean log probability that the model gave its tokens.
    --top shows the surest answers first, so that a person finds the video among a thousand.

    \b
    Examples:
      protokv query video.safetensors "What colour was the star?" "How many shapes appeared?"
      protokv query video.safetensors
      protokv query video.safetensors --questions questions.jsonl
      protokv query video.safetensors - < questions.jsonl | jq -r .answer
      protokv query video.safetensors --at 12m "What is visible now?"
      protokv query camera.safetensors --at 14:05 "What is visible now?"
      protokv query camera.safetensors --watch 30s "What is visible now?"
      protokv query video.safetensors --evidence "where was the star?"
      protokv query video.safetensors --video videos/ --frames seen/ "where was the star?"
      protokv query --state states/ --top 5 "what shape appeared first?"
    """
    out = Output(fmt, as_json=as_json, quiet=quiet, debug=debug)
    with out.errors():
        state, texts = _split(arguments or [], named)
        if len(texts) > 1 and not any(" " in text for text in texts):
            together = shlex.quote(" ".join(texts))
            out.note(f"Hint: these are {len(texts)} questions of one word; for one question use quotes: {together}")
        at_prompt = not texts and file is None and out.stdin is not None and out.stdin.isatty()
        refusals = Refusals(out)
        questions = _open_questions(out, texts, file, at_prompt, refusals)
        clock = Timings()
        clock.add("start", time.process_time())
        with uncollected(), clock.stage("imports"):
            from protokv.fleet.plan import is_place

        many = is_place(state)
        if watch is not None and (at is not None or top is not None or many):
            raise ConfigError("--watch asks the last commit of one state", hint="leave out --at, --top and folders")
        sampling = {"max_new_tokens": max_new_tokens, "temperature": temperature, "top_p": top_p, "seed": seed}
        asking = QueryOptions(
            model=model,
            placement={"revision": revision, "device": device, "device_map": device_map},
            sampling={name: value for name, value in sampling.items() if value is not None},
            system=system,
            at=at,
            watch_s=None if watch is None else parse_duration(watch),
            verify=verify,
            top=top,
            evidence=evidence or frames is not None,
            frames=frames,
            video=video,
            timings=timings,
            at_prompt=at_prompt and watch is None,
            alone=watch is None and (at_prompt or (len(texts) == 1 and texts != ["-"] and file is None)),
        )
        if frames is not None and watch is not None:
            raise ConfigError("--watch looks at what is still coming", hint="leave out --frames")
        if video is not None and frames is None:
            raise ConfigError("--video is where --frames looks", hint="add --frames DIR")
        if many:
            _query_many(out, state, questions, asking, refusals)
            return
        if top is not None:
            raise ConfigError("--top ranks the answers of many states", hint="name their folder: --state DIR/")
        if watch is not None and fmt is Format.AUTO:
            out.format = Format.JSON
        _query_one(out, state, questions, asking, clock, refusals)
        if not asking.at_prompt:
            refusals.check()


def _split(arguments: list[str], named: str | None) -> tuple[str, list[str]]:
    """Return the state and the questions: the first argument is the state unless `--state` names it."""
    if named is not None:
        return named, arguments
    if not arguments:
        raise ConfigError("there is no state to ask", hint='protokv query STATE "What shape appeared first?"')
    return arguments[0], arguments[1:]


def _open_questions(
    out: Output, texts: list[str], file: Path | None, at_prompt: bool, refusals: Refusals
) -> Iterator[Question]:
    """Return the questions. The first is read now, so that no model is loaded if there is none."""
    if at_prompt and out.stdin is not None:
        return typed_questions(out.stdin, refusals)
    questions = read_questions(texts or ([] if file else ["-"]), out.stdin, file, refusals)
    first = next(questions, None)
    if first is None:
        refusals.check()
        raise ConfigError("there is no question", hint='protokv query STATE "What shape appeared first?"')
    return chain((first,), questions)


def _query_one(
    out: Output,
    state: str,
    questions: Iterator[Question],
    asking: QueryOptions,
    clock: Timings,
    refusals: Refusals,
) -> None:
    """Load a state once, at the commit that is asked for, and print the answers."""
    if asking.watch_s is not None:
        with interruptible():
            await_first_commit(out, state)
    with uncollected(), loading(out, asking.model, asking.placement["revision"]):
        with clock.stage("imports"):
            from protokv.core.decoding import Decoding
            from protokv.state.api import read_header
            from protokv.state.checkpoint import load

        with clock.stage("state"):
            header = read_header(state)
        writer = None
        if asking.frames is not None:
            from protokv_cli.frames import FrameWriter

            writer = FrameWriter(header, asking.frames, asking.video, state)
        at_s = None if asking.at is None else stream_time_of(asking.at, state, header, time.time())
        Decoding(**asking.sampling)  # raises before a model is loaded
        session = load(state, asking.model, at_s=at_s, verify=asking.verify, timings=clock, **asking.placement)
        decoding = replace(session.backbone.decoding, **asking.sampling)
        check_system(session.backbone, asking.system)
    note_model(out, session.backbone)
    answers = Answers(out, state, asking, decoding, clock, refusals, frames=writer)
    if asking.watch_s is not None:
        kept = list(questions)
        with interruptible():
            for n, _ in enumerate(rounds(asking.watch_s)):
                if n:
                    header, session = read_header(state), load(state, session.backbone, verify=asking.verify)
                answers.ask_all(session, kept, commit_age_s(header, time.time()))
    # The header is that of the last commit, so it has no age for an earlier one.
    age_s = None if asking.at else commit_age_s(header, time.time())
    note_commit(out, session.clock.stream_time_s, at_s, age_s)
    if asking.at_prompt:
        out.note(f"{state} at {time_text(session.clock.stream_time_s)}; type a question, or help, or exit")
    answers.ask_all(session, questions, age_s)
    if asking.timings and out.format is not Format.JSON:
        show_timings(out, clock.seconds)
        out.error(f"decoding: {decoding_text(decoding)}")


def _query_many(out: Output, place: str, given: Iterator[Question], asking: QueryOptions, refusals: Refusals) -> None:
    """Ask every state of a folder; end with exit code 3 if one cannot be asked."""
    from protokv.core.decoding import Decoding
    from protokv.core.turns import read_ids
    from protokv.fleet.plan import find_states
    from protokv.fleet.states import ask_all, load_backbone_for, surest

    for name, wanted in {"--evidence is": asking.evidence, "--timings are": asking.timings}.items():
        if wanted:
            raise ConfigError(f"{name} told of one state", hint="name the state itself")
    at_s = None if asking.at is None else parse_duration(asking.at)
    states = find_states(place)
    Decoding(**asking.sampling)  # raises before a model is loaded
    backbone = load_backbone_for(states, asking.model, **asking.placement)
    decoding = replace(backbone.decoding, **asking.sampling)
    check_system(backbone, asking.system)
    note_model(out, backbone)
    questions: list[str] = []
    for one in given:
        with refusals.at(one.where):
            read_ids(backbone, one.text, (), asking.system)
            questions.append(one.text)
    answered: list[Reply] = []
    failed = 0
    how: dict[str, Any] = {"at_s": at_s, "verify": asking.verify, "system": asking.system}
    for reply in ask_all(states, backbone, questions, decoding, **how):
        if reply.failure is not None:
            failed += 1
            out.error(f"Error: {reply.state}: {reply.failure.message}")
        elif asking.top is None:
            _show_reply(out, reply, with_question=len(questions) > 1)
        else:
            answered.append(reply)
    ranked = surest(answered, asking.top or 0)
    if asking.top is not None and out.format is Format.TABLE:
        _show_ranked(out, ranked, with_question=len(questions) > 1)
    else:
        for rank, reply in ranked:
            _show_reply(out, reply, rank, with_question=len(questions) > 1)
    if failed:
        out.error(f"{failed} of {len(states)} states cannot be asked")
        raise typer.Exit(Exit.PARTIAL)
    refusals.check()


def _show_ranked(out: Output, ranked: Iterable[tuple[int, Reply]], *, with_question: bool) -> None:
    """Show the surest answers as a table; the mean log probability of a token says how sure the model was."""
    rows = []
    for rank, reply in ranked:
        assert reply.answer is not None
        row = (rank, reply.state, reply.answer.text, f"{reply.answer.mean_logprob:.3f}")
        rows.append((*row, reply.answer.question) if with_question else row)
    columns = ("rank", "state", "answer", "log prob")
    out.table(grid((*columns, "question") if with_question else columns, rows, left=("state", "answer", "question")))


def _show_reply(out: Output, reply: Reply, rank: int | None = None, *, with_question: bool) -> None:
    assert reply.answer is not None
    row = row_of(reply.answer, reply.state) | ({} if rank is None else {"rank": rank})
    if out.format is Format.JSON:
        out.json(row)
    else:
        fields = [reply.state, f"{row['mean_logprob']:.3f}", row["answer"]]
        out.plain("\t".join([*fields, row["question"]] if with_question else fields))
