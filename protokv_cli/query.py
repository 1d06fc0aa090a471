"""`protokv query`: questions to one state, once or again and again, or to a folder of states."""

from __future__ import annotations

import shlex
import time
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar

import typer

from protokv.errors import ConfigError
from protokv.timings import Timings
from protokv_cli.answers import AnswerFlags, Answers, describe_decoding, make_answer_row, note_model
from protokv_cli.commits import await_first_commit, commit_age_s, find_stream_time, note_commit, rounds
from protokv_cli.exits import Exit
from protokv_cli.options import MOST_USED, ModelFlags, TimedOutputFlags, complete_states, option
from protokv_cli.output import Format, Output
from protokv_cli.parsing import parse_duration, parse_optional
from protokv_cli.process import allow_interrupt, pause_collection
from protokv_cli.progress import loading, show_timings
from protokv_cli.questions import AskedQuestion, Refusals, read_questions, read_typed_questions
from protokv_cli.tables import format_time, grid

if TYPE_CHECKING:
    from protokv.fleet.states import Reply

_EXAMPLE = 'protokv query STATE "What shape appeared first?"'

Arguments = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="STATE QUESTION",
        help="State that ingest wrote, and questions; - reads lines or JSONL from stdin. Without questions: a prompt "
        "on a terminal, stdin otherwise.",
        autocompletion=complete_states,
    ),
]


@dataclass(frozen=True, kw_only=True)
class AskFlags:
    """What is asked of which state."""

    PANEL: ClassVar[str] = "What to ask"
    named: str | None = option(
        "--state -s STATE", "The state; then all arguments are questions.", MOST_USED, autocompletion=complete_states
    )
    file: Path | None = option("--questions FILE", "Questions, one a line or a JSON object a line.", MOST_USED)
    at: str | None = option(
        "--at TIME",
        "Ask the newest kept commit not after this time: 12m or 7:30 of the stream, -10m before its end; of a live "
        "stream also 14:05 or 2026-11-21T14:05.",
        MOST_USED,
    )
    watch: str | None = option(
        "--watch TIME", "Ask again at this interval, such as 30s; a JSON line each time.", MOST_USED
    )
    top: int | None = option(
        "--top COUNT", "Of many states, show the COUNT answers that the model is surest of.", MOST_USED, min=1
    )
    verify: bool = option(
        "--verify/--no-verify", "Check that every byte of the state is as it was saved.", default=True
    )


def query(
    arguments: Arguments = None, *, ask: AskFlags, answer: AnswerFlags, model: ModelFlags, output: TimedOutputFlags
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

    ```sh
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
    ```
    """
    out, clock = output.open(), Timings()
    with out.errors():
        clock.add("start", time.process_time())
        state, texts = _split(arguments or [], ask.named)
        with pause_collection(), clock.stage("imports"):
            from protokv.fleet.plan import is_place

        many = is_place(state)
        _refuse_contradictions(ask, answer, output, many)
        if len(texts) > 1 and not any(" " in text for text in texts):
            together = shlex.quote(" ".join(texts))
            out.note(f"Hint: these are {len(texts)} questions of one word; for one question use quotes: {together}")
        at_prompt = not texts and ask.file is None and out.stdin is not None and out.stdin.isatty()
        refusals = Refusals(out)
        questions = _open_questions(out, texts, ask.file, at_prompt, refusals)
        alone = ask.watch is None and (at_prompt or (len(texts) == 1 and texts != ["-"] and ask.file is None))
        at_prompt = at_prompt and ask.watch is None
        if ask.watch is not None and output.fmt is Format.AUTO:
            out.format = Format.JSON
        if many:
            _query_many(out, state, questions, ask, answer, model, refusals)
        else:
            answers = Answers(out, state, answer, refusals, clock, output.timings, at_prompt, alone)
            _query_one(answers, questions, ask, model)
        if not at_prompt:
            refusals.check()


def _split(arguments: list[str], named: str | None) -> tuple[str, list[str]]:
    """Return the state and the questions: the first argument is the state unless `--state` names it."""
    if named is not None:
        return named, arguments
    if not arguments:
        raise ConfigError("there is no state to ask", hint=_EXAMPLE)
    return arguments[0], arguments[1:]


def _refuse_contradictions(ask: AskFlags, answer: AnswerFlags, output: TimedOutputFlags, many: bool) -> None:
    """Refuse options that do not go together. ConfigError."""
    if ask.watch is not None and (ask.at is not None or ask.top is not None or many):
        raise ConfigError("--watch asks the last commit of one state", hint="leave out --at, --top and folders")
    if ask.watch is not None and answer.frames is not None:
        raise ConfigError("--watch looks at what is still coming", hint="leave out --frames")
    if answer.video is not None and answer.frames is None:
        raise ConfigError("--video is where --frames looks", hint="add --frames DIR")
    if ask.top is not None and not many:
        raise ConfigError("--top ranks the answers of many states", hint="name their folder: --state DIR/")
    for name, given in {"--evidence is": answer.with_evidence, "--timings are": output.timings}.items():
        if given and many:
            raise ConfigError(f"{name} told of one state", hint="name the state itself")


def _open_questions(
    out: Output, texts: list[str], file: Path | None, at_prompt: bool, refusals: Refusals
) -> Iterator[AskedQuestion]:
    """Return the questions. The first is read now, so that no model is loaded if there is none."""
    if at_prompt and out.stdin is not None:
        return read_typed_questions(out.stdin, refusals)
    questions = read_questions(texts or ([] if file else ["-"]), out.stdin, file, refusals)
    first = next(questions, None)
    if first is None:
        refusals.check()
        raise ConfigError("there is no question", hint=_EXAMPLE)
    return chain((first,), questions)


def _query_one(answers: Answers, questions: Iterator[AskedQuestion], ask: AskFlags, model: ModelFlags) -> None:
    """Open a state once, at the commit that is asked for, and print the answers."""
    out, clock = answers.out, answers.clock
    if ask.watch is not None:
        with allow_interrupt():
            await_first_commit(out, answers.state)
    with pause_collection(), loading(out, model.model, model.revision):
        with clock.stage("imports"):
            from protokv.state.reader import Reader

        with clock.stage("state"):
            reader = Reader.open(answers.state, verify=ask.verify)
        answers.prepare(reader)
        at_s = None if ask.at is None else find_stream_time(ask.at, reader, time.time())
        session = reader.at(at_s).session(model.model, timings=clock, **model.placement)
        decoding = answers.how.decoding(session.backbone)
    note_model(out, session.backbone)
    if ask.watch is not None:
        kept = list(questions)
        with allow_interrupt():
            for n, _ in enumerate(rounds(parse_duration(ask.watch))):
                if n:
                    reader = Reader.open(answers.state, verify=ask.verify)
                    session = reader.session(session.backbone)
                answers.ask_all(session, decoding, kept, commit_age_s(reader, time.time()))
    # The header is that of the last commit, so it has no age for an earlier one.
    age_s = None if ask.at else commit_age_s(reader, time.time())
    note_commit(out, session.clock.stream_time_s, at_s, age_s)
    if answers.at_prompt:
        out.note(f"{answers.state} at {format_time(session.clock.stream_time_s)}; type a question, or help, or exit")
    answers.ask_all(session, decoding, questions, age_s)
    if answers.timed and out.format is not Format.JSON:
        show_timings(out, clock.seconds)
        out.error(f"decoding: {describe_decoding(decoding)}")


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
    answer.check()
    backbone = load_backbone_for(states, model.model, **model.placement)
    decoding = answer.decoding(backbone)
    note_model(out, backbone)
    questions: list[str] = []
    for one in given:
        with refusals.at(one.where):
            read_ids(backbone, one.text, (), answer.system)
            questions.append(one.text)
    failed = 0
    several = len(questions) > 1
    found = ask_all(states, backbone, questions, decoding, at_s=at_s, verify=ask.verify, system=answer.system)
    answered: list[Reply] = []
    for reply in found:
        if reply.failure is not None:
            failed += 1
            out.error(f"Error: {reply.state}: {reply.failure.message}")
        elif ask.top is None:
            _show_reply(out, _make_reply_row(reply), several)
        else:
            answered.append(reply)
    rows = [{**_make_reply_row(reply), "rank": rank} for rank, reply in rank_replies(answered, ask.top or 0)]
    if ask.top is not None and out.format is Format.TABLE:
        names = ["rank", "state", "answer", "mean_logprob", *(["question"] if several else [])]
        cells = [[row[name] for name in names] for row in rows]
        out.table(grid([name.replace("mean_logprob", "log prob") for name in names], cells, left=names))
    else:
        for row in rows:
            _show_reply(out, row, several)
    if failed:
        out.error(f"{failed} of {len(states)} states cannot be asked")
        raise typer.Exit(Exit.PARTIAL)


def _make_reply_row(reply: Reply) -> dict[str, Any]:
    assert reply.answer is not None
    return make_answer_row(reply.answer, reply.state)


def _show_reply(out: Output, row: dict[str, Any], several: bool) -> None:
    """Show an answer, with its question if there are several; in JSON, all keys."""
    if out.format is Format.JSON:
        out.json(row)
    else:
        fields = [row["state"], f"{row['mean_logprob']:.3f}", row["answer"]]
        out.plain("\t".join([*fields, row["question"]] if several else fields))
