"""`protokv query`: questions to one state, once or again and again, or to a folder of states."""

from __future__ import annotations

import shlex
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from itertools import chain
from pathlib import Path
from typing import Annotated, Any, ClassVar

import typer

from protokv.errors import ConfigError
from protokv.timings import Timings
from protokv_cli.answers import AnswerFlags, Answers, make_answer_row
from protokv_cli.commits import commit_age_s, find_stream_time, note_commit
from protokv_cli.exits import Exit
from protokv_cli.options import MOST_USED, ModelFlags, TimedOutputFlags, note_embedded, option
from protokv_cli.output import Format, Output, format_time
from protokv_cli.parsing import parse_duration, parse_optional
from protokv_cli.progress import Bar, show_timings
from protokv_cli.questions import AskedQuestion, Refusals, read_questions, read_typed_questions

_EXAMPLE = 'protokv query STATE "What shape appeared first?"'

Arguments = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="STATE QUESTION",
        help="State that ingest wrote, and questions; - reads lines or JSONL from stdin. Without questions: a prompt "
        "on a terminal, stdin otherwise.",
    ),
]


@dataclass(frozen=True, kw_only=True)
class AskFlags:
    """What is asked of which state."""

    PANEL: ClassVar[str] = "What to ask"
    named: str | None = option("--state -s STATE", "The state; then all arguments are questions.", MOST_USED)
    file: Path | None = option("--questions FILE", "Questions, one a line or a JSON object a line.", MOST_USED)
    at: str | None = option(
        "--at TIME",
        "Ask the last kept commit until then: 12m, 7:30, -10m before the end; if live also 14:05, 2026-11-21T14:05.",
        MOST_USED,
    )
    top: int | None = option("--top COUNT", "Of many states, the COUNT surest answers.", MOST_USED, min=1)
    verify: bool = option("--verify/--no-verify", "Check that every byte is as it was saved.", default=True)


def query(
    arguments: Arguments = None, *, ask: AskFlags, answer: AnswerFlags, model: ModelFlags, output: TimedOutputFlags
) -> None:
    """Answer questions about a video from its state alone; asking changes nothing.

    While ingest writes the state, its last commit answers. With --at, a kept commit answers as of an earlier time.

    In a pipe, one question gives the text of its answer, and several a JSON object each; --json says so for one, too.

    Without a question on a terminal there is a prompt, with history; Ctrl-D ends it. What is typed there is one
    conversation. All other questions are asked each by itself.

    Tokens are chosen as the model was published to (generation_config.json): some models draw, with the same answer for
    the same seed. --temperature 0 is greedy.

    A line on stdin or of --questions is a question, or a JSON object with the key "question"; if it has "answer" too,
    the answers are compared and the score is shown at the end. A question has at most 65,536 characters and 4,096
    tokens. One that cannot be asked is named, the others are answered, and the exit code is 2.

    For a folder, all states are asked, and each answer has the mean log probability that the model gave its tokens.
    --top shows the surest answers first, so that a person finds the video among a thousand.

    ```sh
    protokv query video.safetensors "What colour was the star?" "How many shapes appeared?"
    protokv query video.safetensors
    protokv query video.safetensors - --json < questions.jsonl | jq -r .answer
    protokv query camera.safetensors --at 14:05 "What is visible now?"
    protokv query video.safetensors --video videos/ --frames seen/ "where was the star?"
    protokv query --state states/ --top 5 "what shape appeared first?"
    ```
    """
    out, clock = output.open(), Timings()
    with out.errors():
        clock.add("start", time.process_time())
        state, *texts = [*([ask.named] if ask.named else []), *(arguments or [])] or [""]
        if not state:
            raise ConfigError("there is no state to ask", hint=_EXAMPLE)
        with clock.stage("imports"):
            from protokv.fleet.plan import is_place

        many = is_place(state)
        _refuse_contradictions(ask, answer, output, many)
        if len(texts) > 1 and not any(" " in text for text in texts):
            together = shlex.quote(" ".join(texts))
            out.note(f"Hint: these are {len(texts)} questions of one word; for one question use quotes: {together}")
        refusals = Refusals(out)
        typed = not texts and ask.file is None and sys.stdin.isatty()
        questions = read_typed_questions(refusals) if typed else _read_first(texts, ask.file, refusals)
        one = len(texts) == 1 and texts != ["-"] and ask.file is None
        if output.is_auto and one and not many and out.format is Format.JSON:
            out.format = Format.PLAIN
        if many:
            _query_many(out, state, questions, ask, answer, model, refusals)
        else:
            answers = Answers(out, state, answer, refusals, clock, output.timings, at_prompt=typed, alone=typed or one)
            _query_one(answers, questions, ask, model)
        if not typed:
            refusals.check()


def _refuse_contradictions(ask: AskFlags, answer: AnswerFlags, output: TimedOutputFlags, many: bool) -> None:
    """Refuse options that do not go together. ConfigError."""
    rules = {
        ("--video is where --frames looks", "add --frames DIR"): answer.video is not None and answer.frames is None,
        ("--top ranks the answers of many states", "name their folder: --state DIR/"): ask.top is not None and not many,
        ("--evidence is told of one state", "name the state itself"): answer.with_evidence and many,
        ("--timings are told of one state", "name the state itself"): output.timings and many,
    }
    for (why, hint), broken in rules.items():
        if broken:
            raise ConfigError(why, hint=hint)


def _read_first(texts: list[str], file: Path | None, refusals: Refusals) -> Iterator[AskedQuestion]:
    """Return the questions. The first is read now, so that no model is loaded if there is none."""
    questions = read_questions(texts or ([] if file else ["-"]), file, refusals)
    first = next(questions, None)
    if first is None:
        refusals.check()
        raise ConfigError("there is no question", hint=_EXAMPLE)
    return chain((first,), questions)


def _query_one(answers: Answers, questions: Iterator[AskedQuestion], ask: AskFlags, model: ModelFlags) -> None:
    """Open a state once, at the commit that is asked for, and print the answers."""
    out, clock = answers.out, answers.clock
    model.check()
    with Bar(out, "loading model", model.model or "", logs=False):
        with clock.stage("imports"):
            from protokv.state.reader import Reader

        with clock.stage("state"):
            reader = Reader.open(answers.state, verify=ask.verify)
        at_s = None if ask.at is None else find_stream_time(ask.at, reader, time.time())
        session = answers.start(reader.at(at_s), model)
    decoding = answers.how.decoding(session.backbone)
    # The header is that of the last commit, so it has no age for an earlier one.
    age_s = None if ask.at else commit_age_s(reader, time.time())
    note_commit(out, session.clock.stream_time_s, at_s, age_s)
    if answers.at_prompt:
        at = format_time(session.clock.stream_time_s)
        out.note(f"{answers.state} at {at}; type questions, one conversation; exit or Ctrl-D ends")
    answers.ask_all(session, decoding, questions, age_s)
    if answers.timed and out.format is not Format.JSON:
        show_timings(out, clock.seconds)
        out.error("decoding: " + ", ".join(f"{name} {value}" for name, value in asdict(decoding).items()))


def _query_many(
    out: Output,
    place: str,
    given: Iterator[AskedQuestion],
    ask: AskFlags,
    answer: AnswerFlags,
    model: ModelFlags,
    refusals: Refusals,
) -> None:
    """Ask every state of a folder; end with exit code 3 if one cannot be asked."""
    from protokv.core.turns import read_ids
    from protokv.fleet.plan import find_states
    from protokv.fleet.states import ask_all, load_backbone_for, rank_replies

    at_s = parse_optional(parse_duration, ask.at)
    states = find_states(place)
    answer.decoding()
    backbone = load_backbone_for(states, model.model, **model.placement)
    note_embedded(out, backbone.identity.name)
    questions: list[str] = []
    for one in given:
        with refusals.at(one.where):
            read_ids(backbone, one.text, (), answer.system)
            questions.append(one.text)
    failed = 0

    def make_rows() -> Iterator[dict[str, Any]]:
        nonlocal failed
        replies = ask_all(
            states, backbone, questions, answer.decoding(backbone), at_s=at_s, verify=ask.verify, system=answer.system
        )
        answered = []
        for reply in replies:
            if reply.answer is None:
                failed += 1
                out.error(f"Error: {reply.state}: {reply.failure.message if reply.failure else ''}")
            elif ask.top is None:
                yield make_answer_row(reply.answer, reply.state)
            else:
                answered.append(reply)
        for rank, reply in rank_replies(answered, ask.top or 0):
            if reply.answer is not None:
                yield {**make_answer_row(reply.answer, reply.state), "rank": rank}

    names = ["state", "mean_logprob", "answer", *(["question"] if len(questions) > 1 else [])]
    out.show(make_rows(), names if ask.top is None else ["rank", *names])
    if failed:
        out.error(f"{failed} of {len(states)} states cannot be asked")
        raise typer.Exit(Exit.PARTIAL)
