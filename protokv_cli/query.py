"""`protokv query`: questions to one state, once or again and again, or to a folder of states."""

from __future__ import annotations

import shlex
import sys
import time
from collections.abc import Iterable, Iterator
from itertools import chain
from pathlib import Path, PurePath
from typing import TYPE_CHECKING, Annotated, Any

import typer

from protokv.errors import ConfigError, ModelError, ProtoKVError, StateError
from protokv.texts import JsonObject
from protokv.timings import Timings
from protokv_cli.asking import (
    Answerer,
    AnswerFlags,
    QuestionErrors,
    UserQuestion,
    read_questions,
    read_typed_questions,
)
from protokv_cli.exits import ExitCode, find_exit_code
from protokv_cli.options import (
    TOP_PANEL,
    Flags,
    ModelFlags,
    OutputFormat,
    TimedOutputFlags,
    check_options,
    option,
)
from protokv_cli.output import ProgressBar, format_time, round_timings, show_timings, tabulate_rows
from protokv_cli.parsing import open_commit_at, parse_list, show_commit_note

if TYPE_CHECKING:
    from protokv.core.backbone import Backbone
    from protokv.state.reader import StateReader
    from protokv.stream.session import Session

_EXAMPLE = 'protokv query STATE "What shape appeared first?"'

_TEXT = (
    "State that ingest wrote, and questions; - reads lines or JSONL from stdin. Without: a prompt, "
    "or stdin."
)
_Arguments = Annotated[list[str] | None, typer.Argument(metavar="STATE QUESTION", help=_TEXT)]


class _AskFlags(Flags, panel="What to ask"):
    """What is asked of which state."""

    named: str | None = option(
        "--state -s STATE", "The state; then all arguments are questions.", TOP_PANEL
    )
    file: Path | None = option(
        "--questions FILE", "Questions, one a line or a JSON object a line.", TOP_PANEL
    )
    at: str | None = option(
        "--at TIME", "As of 12m, 7:30, -10m; if live, 14:05 or 2026-11-21T14:05.", TOP_PANEL
    )
    engine: str | None = option(
        "--engine URL",
        "A vLLM with protokv.vllm answers, at this address, and no weights are loaded here.",
        TOP_PANEL,
    )
    top: int | None = option(
        "--top COUNT",
        "Of many states, the COUNT likeliest to give the first of --choices.",
        TOP_PANEL,
        min=1,
    )
    verify: bool = option(
        "--verify/--no-verify", "Check that every byte is as it was saved.", default=True
    )


def query(
    arguments: _Arguments = None,
    *,
    ask: _AskFlags,
    answer: AnswerFlags,
    model: ModelFlags,
    output: TimedOutputFlags,
) -> None:
    """Answer questions about a video from its state alone; asking changes nothing.

    While ingest writes the state, its last commit answers. With --at, a kept commit answers as of
    an earlier time.

    In a pipe, one question gives the text of its answer, and several, or --json, a JSON object
    each. On a terminal without a question there is a prompt; Ctrl-D ends it. What is typed there is
    one conversation.

    A line on stdin or of --questions is a question, or a JSON object with the key "question"; if it
    has "answer" too, the answers are compared and the score is shown at the end. A question has at
    most 65,536 characters and 4,096 tokens. One that cannot be asked is named, the others are
    answered, and the exit code is 2.

    All states of a folder are asked. --top with --choices shows those first whose answer is most
    likely the first choice, so that a person finds the video among a thousand. Without --choices it
    shows the surest answers, by the mean log probability of their tokens, whatever they say.

    ```sh
    protokv query video.safetensors "What colour was the star?" "How many shapes appeared?"
    protokv query video.safetensors - --json < questions.jsonl | jq -r .answer
    protokv query camera.safetensors --at 14:05 "What is visible now?"
    protokv query --state states/ --top 5 --choices yes,no "Did a star appear?"
    ```
    """
    out = output.open()
    clock = Timings()
    with out.errors():
        clock.add("start", time.process_time())
        state, *texts = [*([ask.named] if ask.named else []), *(arguments or [])] or [""]
        if not state:
            raise ConfigError("there is no state to ask", hint=_EXAMPLE)
        with clock.stage("imports"):
            from protokv.state.folder import names_many_states

        many = names_many_states(state)
        check_options(
            (
                ask.top and not many,
                "--top ranks the answers of many states",
                "name their folder: --state DIR/",
            ),
            (answer.frames and many, "--frames are of one state", "name the state itself"),
        )
        if len(texts) > 1 and " " not in "".join(texts):
            out.note(
                f"Hint: these are {len(texts)} questions; for one, use quotes: "
                f"{shlex.quote(' '.join(texts))}"
            )
        typed = not texts and ask.file is None and sys.stdin.isatty()
        one = len(texts) == 1 and texts != ["-"] and ask.file is None
        if output.fmt is OutputFormat.AUTO and not output.as_json and one and not many:
            out.as_json = False
        answers = Answerer(
            out,
            answer,
            QuestionErrors(out),
            clock,
            timed=output.timings,
            at_prompt=typed and not many,
        )
        questions = _read_questions(answers.refusals, texts, ask.file, typed)
        if many:
            _ask_many(answers, state, [*chain.from_iterable(questions)], ask, model)
        else:
            answers.shows = not out.as_json
            answers.alone = typed or one
            _ask_one(answers, state, questions, ask, model)
        if not typed:
            answers.refusals.check()


def _read_questions(
    errors: QuestionErrors, texts: list[str], file: Path | None, typed: bool
) -> Iterator[list[UserQuestion]]:
    """Return the questions. The first are read now, so that no model is loaded if there is none."""
    if typed:
        return read_typed_questions(errors)
    questions = read_questions(texts or ([] if file else ["-"]), file, errors)
    first = next((some for some in questions if some), None)
    if first is None:
        errors.check()
        raise ConfigError("there is no question", hint=_EXAMPLE)
    return chain((first,), questions)


def _ask_one(
    answers: Answerer,
    state: str,
    questions: Iterator[list[UserQuestion]],
    ask: _AskFlags,
    model: ModelFlags,
) -> None:
    """Open a state once, at the commit that is asked for, and print the answers."""
    out = answers.out
    videos = list[Any]()
    right = list[bool]()
    if "backbone" in model.choice:
        model.check()
    with ProgressBar(out, "loading model", model.model or "", logs=False):
        reader, session = _open(answers, state, Path(state).parent, ask, model)
        if answers.how.frames is not None:
            from protokv.state.frames import find_state_videos

            named = answers.how.video
            places = [named] if named else [Path(), Path(state).parent]
            videos += find_state_videos(reader.header, places)
    # The last commit of a live stream has an age.
    clocks = reader.wall_clocks if reader.at_s is None else []
    age_s = max(0.0, time.time() - clocks[-1].committed_at) if clocks else None
    show_commit_note(out, reader, session.clock.stream_time_s, age_s)
    if answers.at_prompt:
        at = format_time(session.clock.stream_time_s)
        out.note(f"{state} at {at}; type questions, one conversation; exit or Ctrl-D ends")
    for row in answers.ask_all(state, reader.header, session, questions, videos):
        row |= {} if age_s is None else {"commit_age_s": round(age_s, 3)}
        right += [row["correct"]] if "correct" in row else []
        if not answers.shows:
            out.json(row)
    if right:
        out.note(
            f"{sum(right)} of {len(right)} answers as expected ({sum(right) / len(right):.1%})"
        )
    if answers.timed and answers.shows:
        show_timings(out, round_timings(answers.clock))


def _open(
    answers: Answerer,
    state: str,
    place: str | Path,
    ask: _AskFlags,
    model: ModelFlags,
    loaded: Backbone | None = None,
) -> tuple[StateReader, Session]:
    """Open a state of a place, at the commit that is asked for; `loaded` serves if it made the
    state, too.
    """
    clock = answers.clock
    how = model.choice
    with clock.stage("imports"):
        # Its library takes long.
        from protokv.stream.engine import Engine, EngineSession
        from protokv.stream.opening import load_fitting_backbone, open_session

    with clock.stage("state"):
        reader = open_commit_at(answers.out, state, ask.at, ask.verify)
    answers.how.decoding()
    if ask.engine is not None:
        how |= {"device": "meta", "device_map": None}
    with clock.stage("model"):
        backbone = load_fitting_backbone(loaded, reader.header, **how)
    if ask.engine is None:
        return reader, open_session(reader, backbone, timings=clock)
    name = PurePath(state).relative_to(place).with_suffix("").as_posix()
    return reader, EngineSession.open(reader, Engine(ask.engine), name, backbone, timings=clock)


def _ask_many(
    answers: Answerer, place: str, questions: list[UserQuestion], ask: _AskFlags, model: ModelFlags
) -> None:
    """Ask every state of a folder; end with exit code 3 if one cannot be asked."""
    from protokv.state.folder import find_states, group_by_model

    out = answers.out
    states = find_states(place)
    failed = list[ProtoKVError]()

    def make_rows() -> Iterator[JsonObject]:
        loaded = None
        for state in group_by_model(states):
            try:
                reader, session = _open(answers, state, place, ask, model, loaded)
            except (StateError, ModelError) as error:
                failed.append(error)
                named = "" if state in error.message else f"{state}: "
                out.error(f"Error: {named}{error.message}")
            else:
                loaded = session.backbone
                yield from answers.ask_all(state, reader.header, session, [questions])

    rows: Iterable[JsonObject] = make_rows()
    best_by = "mean_logprob"
    if ask.top is not None:
        if choices := parse_list(answers.how.choices):
            rows = (row | {"probability": row["probabilities"][choices[0]]} for row in rows)
            best_by = "probability"
        # Sorting is stable: of equal ones, the first state's comes first.
        found = sorted(rows, key=lambda row: -row[best_by])
        asked = [
            [row for row in found if row["question"] == one.text][: ask.top] for one in questions
        ]
        rows = [row | {"rank": rank} for best in asked for rank, row in enumerate(best, start=1)]
    names = [*(["rank"] if ask.top else []), "state", best_by, "answer"]
    names += ["question"] if len(questions) > 1 else []
    out.show(rows, lambda rows: [tabulate_rows(names, rows)])
    if failed:
        out.error(f"{len(failed)} of {len(states)} states cannot be asked")
        none_asked = len(failed) == len(states)
        raise typer.Exit(find_exit_code(failed[0]) if none_asked else ExitCode.PARTIAL)
