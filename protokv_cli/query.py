"""`protokv query`: which questions are put to which state, or to which folder of states."""

from __future__ import annotations

import time
from collections.abc import Iterator
from itertools import chain
from typing import Any

from protokv.errors import ConfigError
from protokv.timings import Timings
from protokv_cli import options, query_options
from protokv_cli.output import Format, Output
from protokv_cli.parsing import parse_duration
from protokv_cli.process import uncollected
from protokv_cli.prompt import typed_lines
from protokv_cli.query_fleet import query_fleet
from protokv_cli.query_state import Asking, query_state
from protokv_cli.questions import Question, read_questions


def query(
    arguments: query_options.Arguments = None,
    named: query_options.Named = None,
    file: query_options.File = None,
    at: query_options.At = None,
    watch: query_options.Watch = None,
    verify: query_options.Verify = True,
    model: options.Model = None,
    revision: options.Revision = None,
    top: query_options.Top = None,
    evidence: query_options.Evidence = False,
    max_new_tokens: query_options.MaxNewTokens = 64,
    temperature: query_options.Temperature = 0.0,
    top_p: query_options.TopP = 1.0,
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
        asked = chain(() if first is None else (first,), asked)
        clock = Timings()
        clock.add("start", time.process_time())
        with uncollected(), clock.stage("imports"):
            from protokv.fleet.plan import is_place

        if watch is not None and (at is not None or top is not None or is_place(state)):
            raise ConfigError("--watch asks the last commit of one state", hint="leave out --at, --top and folders")
        sampling = {"max_new_tokens": max_new_tokens, "temperature": temperature, "top_p": top_p, "seed": seed}
        loaded: dict[str, Any] = {"model": model, "revision": revision, "device": device, "device_map": device_map}
        if is_place(state):
            for option, given in {"--evidence is": evidence, "--timings are": timings}.items():
                if given:
                    raise ConfigError(f"{option} told of one state", hint="name the state itself")
            at_s = None if at is None else parse_duration(at)
            texts = [question.text for question in asked]
            query_fleet(out, state, texts, sampling, **loaded, top=top, at_s=at_s, verify=verify)
            return
        if top is not None:
            raise ConfigError("--top ranks the answers of many states", hint="name their folder: --state DIR/")
        if watch is not None and fmt is Format.AUTO:
            out.format = Format.JSON
        query_state(
            out,
            state,
            asked,
            Asking(
                sampling,
                at=at,
                watch_s=None if watch is None else parse_duration(watch),
                verify=verify,
                evidence=evidence,
                at_prompt=at_prompt,
                alone=at_prompt or (len(questions) == 1 and questions != ["-"] and file is None),
            ),
            clock,
            **loaded,
            timings=timings,
        )


def _split(arguments: list[str], named: str | None) -> tuple[str, list[str]]:
    """The state and the questions: the first argument is the state unless `--state` names it."""
    if named is not None:
        return named, arguments
    if not arguments:
        raise ConfigError("there is no state to ask", hint='protokv query STATE "What shape appeared first?"')
    return arguments[0], arguments[1:]
