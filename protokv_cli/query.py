"""`protokv query`: questions to one state, once or again and again, or to a folder of states."""

from __future__ import annotations

import shlex
import time
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, NoReturn

import typer

from protokv.errors import ConfigError
from protokv.timings import Timings
from protokv_cli.answers import AnswerFlags, Answers, decoding_text, note_model, row_of
from protokv_cli.commits import await_first_commit, commit_age_s, note_commit, rounds, stream_time_of
from protokv_cli.exits import Exit
from protokv_cli.options import MOST_USED, ModelFlags, OutputFlags, complete_states, option
from protokv_cli.output import Format, Output
from protokv_cli.parsing import parse_duration, parse_optional
from protokv_cli.process import interruptible, uncollected
from protokv_cli.progress import loading, show_timings
from protokv_cli.questions import Question, Refusals, read_questions, typed_questions
from protokv_cli.tables import grid, time_text

if TYPE_CHECKING:
    from protokv.core.session import Session
    from protokv.fleet.states import Reply
    from protokv.state.reader import Reader

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
    named: Annotated[
        str | None,
        option(
            "--state -s STATE",
            "The state; then all arguments are questions.",
            MOST_USED,
            autocompletion=complete_states,
        ),
    ] = None
    file: Annotated[
        Path | None, option("--questions FILE", "Questions, one a line or a JSON object a line.", MOST_USED)
    ] = None
    at: Annotated[
        str | None,
        option(
            "--at TIME",
            "Ask the newest kept commit not after this time: 12m or 7:30 of the stream, -10m before its end; of a "
            "live stream also 14:05 or 2026-11-21T14:05.",
            MOST_USED,
        ),
    ] = None
    watch: Annotated[
        str | None,
        option("--watch TIME", "Ask again at this interval, such as 30s; a JSON line each time.", MOST_USED),
    ] = None
    top: Annotated[
        int | None,
        option("--top COUNT", "Of many states, show the COUNT answers that the model is surest of.", MOST_USED, min=1),
    ] = None
    verify: Annotated[
        bool, option("--verify/--no-verify", "Check that every byte of the state is as it was saved.")
    ] = True


@dataclass(frozen=True, kw_only=True)
class Query:
    """Questions to a state, as they were given.

    Attributes:
        out: the streams of the command.
        state: path or address of a state, or of a folder of them.
        questions: in order; the first is read already.
        at_prompt: they are typed.
        alone: there is one, so it is not repeated before its answer.
        refusals: those that cannot be asked.
        clock: adds up the seconds of each stage.
        ask, answer, model: the options.
    """

    out: Output
    state: str
    questions: Iterator[Question]
    at_prompt: bool
    alone: bool
    refusals: Refusals
    clock: Timings
    ask: AskFlags
    answer: AnswerFlags
    model: ModelFlags


def query(
    arguments: Arguments = None, *, ask: AskFlags, answer: AnswerFlags, model: ModelFlags, output: OutputFlags
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
        with uncollected(), clock.stage("imports"):
            from protokv.fleet.plan import is_place

        many = is_place(state)
        _refuse_contradictions(ask, answer, many)
        if len(texts) > 1 and not any(" " in text for text in texts):
            together = shlex.quote(" ".join(texts))
            out.note(f"Hint: these are {len(texts)} questions of one word; for one question use quotes: {together}")
        at_prompt = not texts and ask.file is None and out.stdin is not None and out.stdin.isatty()
        refusals = Refusals(out)
        asked = Query(
            out=out,
            state=state,
            questions=_open_questions(out, texts, ask.file, at_prompt, refusals),
            at_prompt=at_prompt and ask.watch is None,
            alone=ask.watch is None and (at_prompt or (len(texts) == 1 and texts != ["-"] and ask.file is None)),
            refusals=refusals,
            clock=clock,
            ask=ask,
            answer=answer,
            model=model,
        )
        if ask.watch is not None and output.fmt is Format.AUTO:
            out.format = Format.JSON
        (_query_many if many else _query_one)(asked)
        if not asked.at_prompt:
            refusals.check()


def _split(arguments: list[str], named: str | None) -> tuple[str, list[str]]:
    """Return the state and the questions: the first argument is the state unless `--state` names it."""
    if named is not None:
        return named, arguments
    if not arguments:
        raise ConfigError("there is no state to ask", hint=_EXAMPLE)
    return arguments[0], arguments[1:]


def _refuse_contradictions(ask: AskFlags, answer: AnswerFlags, many: bool) -> None:
    """Refuse options that do not go together. ConfigError."""
    if ask.watch is not None and (ask.at is not None or ask.top is not None or many):
        raise ConfigError("--watch asks the last commit of one state", hint="leave out --at, --top and folders")
    if ask.watch is not None and answer.frames is not None:
        raise ConfigError("--watch looks at what is still coming", hint="leave out --frames")
    if answer.video is not None and answer.frames is None:
        raise ConfigError("--video is where --frames looks", hint="add --frames DIR")
    if ask.top is not None and not many:
        raise ConfigError("--top ranks the answers of many states", hint="name their folder: --state DIR/")
    for name, given in {"--evidence is": answer.with_evidence, "--timings are": answer.timings}.items():
        if given and many:
            raise ConfigError(f"{name} told of one state", hint="name the state itself")


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
        raise ConfigError("there is no question", hint=_EXAMPLE)
    return chain((first,), questions)


def _query_one(asked: Query) -> None:
    """Open a state once, at the commit that is asked for, and print the answers."""
    out, ask, model, clock = asked.out, asked.ask, asked.model, asked.clock
    if ask.watch is not None:
        with interruptible():
            await_first_commit(out, asked.state)
    with uncollected(), loading(out, model.model, model.revision):
        with clock.stage("imports"):
            from protokv.core.decoding import Decoding
            from protokv.state.reader import Reader

        with clock.stage("state"):
            reader = Reader.open(asked.state, verify=ask.verify)
        writer = None
        if asked.answer.frames is not None:
            from protokv_cli.frames import FrameWriter

            writer = FrameWriter(reader.header, asked.answer.frames, asked.answer.video, asked.state)
        at_s = None if ask.at is None else stream_time_of(ask.at, reader, time.time())
        Decoding(**asked.answer.sampling)  # raises before a model is loaded
        session = reader.at(at_s).session(model.model, timings=clock, **model.placement)
        decoding = asked.answer.decoding(session.backbone)
    note_model(out, session.backbone)
    answers = Answers(
        out=out,
        state=asked.state,
        decoding=decoding,
        how=asked.answer,
        clock=clock,
        refusals=asked.refusals,
        at_prompt=asked.at_prompt,
        alone=asked.alone,
        frames=writer,
    )
    if ask.watch is not None:
        _ask_again(asked, answers, reader, session)
    # The header is that of the last commit, so it has no age for an earlier one.
    age_s = None if ask.at else commit_age_s(reader, time.time())
    note_commit(out, session.clock.stream_time_s, at_s, age_s)
    if asked.at_prompt:
        out.note(f"{asked.state} at {time_text(session.clock.stream_time_s)}; type a question, or help, or exit")
    answers.ask_all(session, asked.questions, age_s)
    if asked.answer.timings and out.format is not Format.JSON:
        show_timings(out, clock.seconds)
        out.error(f"decoding: {decoding_text(decoding)}")


def _ask_again(asked: Query, answers: Answers, reader: Reader, session: Session) -> NoReturn:
    """Ask the same questions at every interval, until Ctrl-C."""
    kept = list(asked.questions)
    with interruptible():
        for n, _ in enumerate(rounds(parse_duration(asked.ask.watch or ""))):
            if n:
                reader = reader.open(asked.state, verify=asked.ask.verify)
                session = reader.session(session.backbone)
            answers.ask_all(session, kept, commit_age_s(reader, time.time()))
    raise AssertionError("rounds have no end")


def _query_many(asked: Query) -> None:
    """Ask every state of a folder; end with exit code 3 if one cannot be asked."""
    from protokv.core.decoding import Decoding
    from protokv.core.turns import read_ids
    from protokv.fleet.plan import find_states
    from protokv.fleet.states import ask_all, load_backbone_for, rank_replies

    out, ask, model, system = asked.out, asked.ask, asked.model, asked.answer.system
    at_s = parse_optional(parse_duration, ask.at)
    states = find_states(asked.state)
    Decoding(**asked.answer.sampling)  # raises before a model is loaded
    backbone = load_backbone_for(states, model.model, **model.placement)
    decoding = asked.answer.decoding(backbone)
    note_model(out, backbone)
    questions: list[str] = []
    for one in asked.questions:
        with asked.refusals.at(one.where):
            read_ids(backbone, one.text, (), system)
            questions.append(one.text)
    answered: list[Reply] = []
    failed = 0
    for reply in ask_all(states, backbone, questions, decoding, at_s=at_s, verify=ask.verify, system=system):
        if reply.failure is not None:
            failed += 1
            out.error(f"Error: {reply.state}: {reply.failure.message}")
        elif ask.top is None:
            _show_reply(out, _reply_row(reply), several=len(questions) > 1)
        else:
            answered.append(reply)
    ranked = [{**_reply_row(reply), "rank": rank} for rank, reply in rank_replies(answered, ask.top or 0)]
    if ask.top is not None and out.format is Format.TABLE:
        names = ("rank", "state", "answer", "mean_logprob", *(["question"] if len(questions) > 1 else []))
        cells = [[row[name] for name in names] for row in ranked]
        out.table(grid([name.replace("mean_logprob", "log prob") for name in names], cells, left=names))
    else:
        for row in ranked:
            _show_reply(out, row, several=len(questions) > 1)
    if failed:
        out.error(f"{failed} of {len(states)} states cannot be asked")
        raise typer.Exit(Exit.PARTIAL)


def _reply_row(reply: Reply) -> dict[str, Any]:
    assert reply.answer is not None
    return row_of(reply.answer, reply.state)


def _show_reply(out: Output, row: dict[str, Any], *, several: bool) -> None:
    """Show an answer, with its question if there are several; in JSON, all keys."""
    if out.format is Format.JSON:
        out.json(row)
    else:
        fields = [row["state"], f"{row['mean_logprob']:.3f}", row["answer"]]
        out.plain("\t".join([*fields, row["question"]] if several else fields))
