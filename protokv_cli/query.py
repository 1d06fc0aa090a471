"""`protokv query`: questions in, answers from a state alone out."""

from __future__ import annotations

import json
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import chain
from typing import IO, TYPE_CHECKING, Annotated, Any

import typer

from protokv.errors import ConfigError
from protokv.timings import Timings
from protokv_cli import options
from protokv_cli.beyond import REAL_MODEL, warn_of_answers
from protokv_cli.loading import loading
from protokv_cli.moment import commit_age_s, stream_time_of, tell_commit
from protokv_cli.output import Format, Output
from protokv_cli.parsing import parse_duration
from protokv_cli.process import uncollected
from protokv_cli.query_fleet import query_fleet
from protokv_cli.timings import rounded, show_timings
from protokv_cli.watching import interruptible, rounds

if TYPE_CHECKING:
    from protokv.session import Answer, Session


@dataclass(frozen=True, slots=True)
class _Question:
    text: str
    expected: str | None = None


def query(
    arguments: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="STATE QUESTION...",
            help="State that ingest wrote, and questions; - reads lines or JSONL from stdin, and so does no question.",
        ),
    ] = None,
    named: Annotated[
        str | None,
        typer.Option("--state", "-s", metavar="STATE", help="The state; then all arguments are questions."),
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

    A line on stdin is a question, or a JSON object with the key "question"; if it has "answer" too, the answers are
    compared and the score is told at the end.

    Of a folder all states are asked, and each answer has the mean log probability that the model gave its tokens. --top
    prints the surest ones first, so that a person finds the video among a thousand.

    \b
    Examples:
      protokv query video.safetensors "What colour was the star?" "How many shapes appeared?"
      protokv query video.safetensors - < questions.jsonl | jq -r .answer
      protokv query video.safetensors --at 12m "What is visible now?"
      protokv query camera.safetensors --at 14:05 "What is visible now?"
      protokv query camera.safetensors --watch 30s "What is visible now?"
      protokv query --state states/ --top 5 "what shape appeared first?"
    """
    out = Output(fmt, as_json=as_json, quiet=quiet, debug=debug)
    with out.errors():
        state, questions = _split(arguments or [], named)
        asked = _read(questions or ([] if out.stdin is None or out.stdin.isatty() else ["-"]), out.stdin)
        first = next(asked, None)
        if first is None:
            raise ConfigError("there is no question", hint='protokv query STATE "What shape appeared first?"')
        clock = Timings()
        clock.add("start", time.process_time())
        with uncollected(), clock.stage("imports"):
            from protokv.fleet.places import is_place

        if watch is not None and (at is not None or top is not None or is_place(state)):
            raise ConfigError("--watch asks the last commit of one state", hint="leave out --at, --top and folders")
        if is_place(state):
            at_s = None if at is None else parse_duration(at)
            from protokv.fleet.ask import load_backbone_for
            from protokv.fleet.places import find_states
            from protokv.generate import Decoding

            query_fleet(
                out,
                states := find_states(state),
                [first.text, *(question.text for question in asked)],
                Decoding(max_new_tokens=max_new_tokens, temperature=temperature, top_p=top_p, seed=seed),
                load_backbone_for(states, model, device=device, device_map=device_map),
                _row,
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
        asking = _Asking(out, state, decoding, _UnknownWords(out, session), clock if timings else None, beyond)
        if watch is not None:
            kept = [first, *asked]
            if fmt is Format.AUTO:
                out.format = Format.JSON
            with interruptible():
                for n, _ in enumerate(rounds(parse_duration(watch))):
                    if n:
                        session = load(state, session.backbone, verify=verify)
                    asking(session, kept, alone=False)
        else:
            tell_commit(out, session.clock.stream_time_s, at_s, None if at else commit_age_s(state, time.time()))
            asking(session, chain((first,), asked), alone=len(questions) == 1 and questions != ["-"])
        if timings and out.format is not Format.JSON:
            show_timings(out, clock.seconds)


@dataclass(frozen=True, slots=True)
class _Asking:
    """Asks a session, and writes what it answers."""

    out: Output
    state: str
    decoding: Any
    unknown: _UnknownWords
    clock: Timings | None
    beyond: list[str]

    def __call__(self, session: Session, questions: Iterable[_Question], *, alone: bool) -> None:
        """Every question, and how many were answered as expected."""
        from protokv.replay.texts import is_expected

        out, age_s = self.out, commit_age_s(self.state, time.time())
        n, right = 0, 0
        for question in questions:
            self.unknown(question.text)
            answer = _answer(out, session, question.text, self.decoding, alone=alone)
            row = _row(answer, self.state) | ({"beyond_model": True} if self.beyond else {})
            if age_s is not None:
                row["commit_age_s"] = round(age_s, 3)
            if self.clock is not None:
                self.clock.add("first token", answer.ttft_ms / 1e3)
                self.clock.add("tokens", (answer.total_ms - answer.ttft_ms) / 1e3)
                row["timings"] = rounded(self.clock.seconds)
            if question.expected is not None:
                correct = is_expected(answer.text, question.expected)
                row |= {"expected": question.expected, "correct": correct}
                n, right = n + 1, right + correct
            if out.format is Format.JSON:
                out.json(row)
            elif question.expected is not None and out.format is Format.TABLE and not row["correct"]:
                out.table(f"  expected: {question.expected}", style="yellow")
        if n:
            out.note(f"{right} of {n} answers as expected ({right / n:.1%})")


def _split(arguments: list[str], named: str | None) -> tuple[str, list[str]]:
    """The state and the questions: the first argument is the state unless `--state` names it."""
    if named is not None:
        return named, arguments
    if not arguments:
        raise ConfigError("there is no state to ask", hint='protokv query STATE "What shape appeared first?"')
    return arguments[0], arguments[1:]


def _answer(out: Output, session: Session, question: str, decoding: Any, *, alone: bool) -> Answer:
    """Ask; on a terminal and in plain form the text is written as it comes, on a terminal behind its question."""
    if out.format is Format.TABLE and not alone:
        out.table(question, style="cyan", end=" ")
    pieces = session.stream(question, decoding)
    while True:
        try:
            piece = next(pieces)
        except StopIteration as end:
            if out.format is not Format.JSON:
                out.plain("")
            answer: Answer = end.value
            return answer
        if out.format is not Format.JSON:
            out.plain(piece, end="")


def _row(answer: Answer, state: str) -> dict[str, Any]:
    return {
        "question": answer.question,
        "answer": answer.text,
        "stream_time_s": answer.stream_time_s,
        "ttft_ms": round(answer.ttft_ms, 3),
        "total_ms": round(answer.total_ms, 3),
        "context_tokens": answer.context_tokens,
        "mean_logprob": round(answer.mean_logprob, 6),
        "state": state,
    }


def _read(arguments: list[str], stdin: IO[str] | None) -> Iterator[_Question]:
    for argument in arguments:
        if argument != "-":
            yield _Question(argument)
            continue
        for number, line in enumerate(stdin or (), start=1):
            if line.strip():
                yield _parse(line.strip(), number)


def _parse(line: str, number: int) -> _Question:
    if not line.startswith("{"):
        return _Question(line)
    try:
        row = json.loads(line)
        question, expected = row["question"], row.get("answer")
    except (ValueError, KeyError, RecursionError) as error:
        raise ConfigError(
            f"line {number} of stdin is not a JSON object with the key question: {error}",
            hint='write {"question": "..."} or the bare question, one a line',
        ) from error
    if not isinstance(question, str) or not isinstance(expected, str | None):
        raise ConfigError(f"line {number} of stdin: question and answer must be text", hint="put them in quotes")
    return _Question(question, expected)


class _UnknownWords:
    """Says once which words of a question the model cannot represent, and what to do about it."""

    def __init__(self, out: Output, session: Session) -> None:
        self._out, self._session, self._said = out, session, False

    def __call__(self, question: str) -> None:
        from protokv.backbones import EMBEDDED

        words = [] if self._said else self._session.backbone.unknown_words(question)
        if not words:
            return
        self._said = True
        name = self._session.backbone.identity.name
        who = "the embedded model knows only its procedural world of coloured shapes and" if name == EMBEDDED else name
        self._out.warn(
            f"Note: {who} does not know the word{'s' * (len(words) > 1)} {', '.join(words)}. "
            f"For other videos name a real model when ingesting: --model {REAL_MODEL}"
        )
