"""`protokv query`: questions in, answers from a state alone out."""

from __future__ import annotations

import time
from collections.abc import Iterator
from itertools import chain
from pathlib import Path
from typing import Annotated

import typer

from protokv.errors import ConfigError
from protokv.timings import Timings
from protokv_cli import options
from protokv_cli.answers import Answers, row_of
from protokv_cli.beyond import warn_of_answers
from protokv_cli.loading import loading
from protokv_cli.moment import commit_age_s, stream_time_of, tell_commit
from protokv_cli.output import Format, Output
from protokv_cli.parsing import parse_duration
from protokv_cli.process import uncollected
from protokv_cli.prompt import typed_lines
from protokv_cli.query_fleet import query_fleet
from protokv_cli.questions import Question, read_questions
from protokv_cli.tables import time_text
from protokv_cli.timings import show_timings
from protokv_cli.watching import interruptible, rounds


def query(
    arguments: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="STATE QUESTION...",
            help="State that ingest wrote, and questions; - reads lines or JSONL from stdin. Without any: a prompt on "
            "a terminal, stdin otherwise.",
        ),
    ] = None,
    named: Annotated[
        str | None,
        typer.Option("--state", "-s", metavar="STATE", help="The state; then all arguments are questions."),
    ] = None,
    file: Annotated[
        Path | None,
        typer.Option("--questions", metavar="FILE", help="Questions, one a line or a JSON object a line."),
    ] = None,
    at: Annotated[
        str | None,
        typer.Option(
            "--at",
            metavar="TIME",
            help="Ask the newest kept commit not after 12m or 7:30 of the stream, -10m before its end; of a live one "
            "also 14:05 or 2026-11-21T14:05.",
        ),
    ] = None,
    watch: Annotated[
        str | None,
        typer.Option("--watch", metavar="TIME", help="Ask again and again, such as every 30s, a JSON line each."),
    ] = None,
    verify: Annotated[
        bool, typer.Option("--verify/--no-verify", help="Check that every byte of the state is the one that was saved.")
    ] = True,
    model: options.Model = None,
    top: Annotated[
        int | None,
        typer.Option("--top", metavar="K", min=1, help="Of many states, the K answers that the model is surest of."),
    ] = None,
    evidence: Annotated[
        bool, typer.Option("--evidence", help="Say which times of the stream each answer stood on.")
    ] = False,
    max_new_tokens: Annotated[int, typer.Option("--max-new-tokens", help="Tokens of an answer at the most.")] = 64,
    temperature: Annotated[float, typer.Option("--temperature", help="0 is greedy; above 0 draws.")] = 0.0,
    top_p: Annotated[float, typer.Option("--top-p", help="Draw from this share of the probability.")] = 1.0,
    device: options.Device = "auto",
    device_map: options.DeviceMap = None,
    seed: options.Seed = 0,
    timings: options.Timings = False,
    fmt: options.OutputFormat = Format.AUTO,
    as_json: options.Json = False,
    quiet: options.Quiet = False,
    debug: options.Debug = False,
) -> None:
    """Answer questions about a video from its state alone; asking changes nothing.

    While ingest writes the state, its last commit answers. What `ingest --keep` kept answers as of an earlier time.

    Without a question on a terminal there is a prompt, with history; Ctrl-D ends it.

    A line on stdin or of --questions is a question, or a JSON object with the key "question"; if it has "answer" too,
    the answers are compared and the score is told at the end.

    Of a folder all states are asked, and each answer has the mean log probability that the model gave its tokens. --top
    prints the surest ones first, so that a person finds the video among a thousand.

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
      protokv query --state states/ --top 5 "what shape appeared first?"
    """
    out = Output(fmt, as_json=as_json, quiet=quiet, debug=debug)
    with out.errors():
        state, questions = _split(arguments or [], named)
        at_prompt = not questions and file is None and out.stdin is not None and out.stdin.isatty()
        asked: Iterator[Question]
        if at_prompt and out.stdin is not None:
            asked = map(Question, typed_lines(out.stdin))
        else:
            asked = read_questions(questions or ([] if file else ["-"]), out.stdin, file)
        # What is wrong with them is told before a model is loaded; who types is asked when it is.
        first = None if at_prompt else next(asked, None)
        if first is None and not at_prompt:
            raise ConfigError("there is no question", hint='protokv query STATE "What shape appeared first?"')
        clock = Timings()
        clock.add("start", time.process_time())
        with uncollected(), clock.stage("imports"):
            from protokv.fleet.places import is_place

        if watch is not None and (at is not None or top is not None or is_place(state)):
            raise ConfigError("--watch asks the last commit of one state", hint="leave out --at, --top and folders")
        if is_place(state):
            if evidence:
                raise ConfigError("--evidence is told of one state", hint="name the state itself")
            at_s = None if at is None else parse_duration(at)
            from protokv.fleet.ask import load_backbone_for
            from protokv.fleet.places import find_states
            from protokv.generate import Decoding

            query_fleet(
                out,
                states := find_states(state),
                [question.text for question in chain(() if first is None else (first,), asked)],
                Decoding(max_new_tokens=max_new_tokens, temperature=temperature, top_p=top_p, seed=seed),
                load_backbone_for(states, model, device=device, device_map=device_map),
                row_of,
                top=top,
                at_s=at_s,
                verify=verify,
            )
            return
        if top is not None:
            raise ConfigError("--top ranks the answers of many states", hint="name their folder: --state DIR/")
        with uncollected(), loading(out, model):
            with clock.stage("imports"):
                from protokv.checkpoint import load
                from protokv.generate import Decoding

            at_s = None if at is None else stream_time_of(at, state, time.time())
            decoding = Decoding(max_new_tokens=max_new_tokens, temperature=temperature, top_p=top_p, seed=seed)
            session = load(
                state,
                model,
                device=device,
                device_map=device_map,
                at_s=at_s,
                verify=verify,
                timings=clock,
            )
            from protokv.snapshot import read_header
            from protokv.watched import beyond_model

        beyond = beyond_model(read_header(state))
        warn_of_answers(out, beyond)
        answers = Answers(out, state, decoding, clock if timings else None, beyond=bool(beyond), evidence=evidence)
        if watch is not None:
            kept = list(chain(() if first is None else (first,), asked))
            if fmt is Format.AUTO:
                out.format = Format.JSON
            with interruptible():
                for n, _ in enumerate(rounds(parse_duration(watch))):
                    if n:
                        session = load(state, session.backbone, verify=verify)
                    answers.of(session, kept, alone=False)
        else:
            tell_commit(out, session.clock.stream_time_s, at_s, None if at else commit_age_s(state, time.time()))
            if at_prompt:
                out.note(f"{state} at {time_text(session.clock.stream_time_s)}; Ctrl-D ends")
            alone = at_prompt or (len(questions) == 1 and questions != ["-"] and file is None)
            every = chain(() if first is None else (first,), asked)
            answers.of(session, every, alone=alone, at_prompt=at_prompt)
        if timings and out.format is not Format.JSON:
            show_timings(out, clock.seconds)


def _split(arguments: list[str], named: str | None) -> tuple[str, list[str]]:
    """The state and the questions: the first argument is the state unless `--state` names it."""
    if named is not None:
        return named, arguments
    if not arguments:
        raise ConfigError("there is no state to ask", hint='protokv query STATE "What shape appeared first?"')
    return arguments[0], arguments[1:]
