"""`protokv query` of one state: it is loaded once, at the commit that is asked for, and asked once or on and on."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from protokv.timings import Timings
from protokv_cli.answers import Answers
from protokv_cli.beyond import warn_of_answers
from protokv_cli.loading import loading
from protokv_cli.moment import commit_age_s, stream_time_of, tell_commit
from protokv_cli.output import Format, Output
from protokv_cli.process import uncollected
from protokv_cli.questions import Question
from protokv_cli.tables import time_text
from protokv_cli.timings import show_timings
from protokv_cli.watching import await_first_commit, interruptible, rounds


@dataclass(frozen=True, slots=True)
class Asking:
    """How a state is asked.

    Attributes:
        sampling: the fields of `protokv.core.decoding.Decoding`.
        at: of which time, as the user wrote it; None: the last commit.
        watch_s: seconds after which all is asked again; None: once.
        verify: check that every byte of the state is the one that was saved.
        evidence: say what each answer stood on.
        at_prompt: questions are typed as they are asked.
        alone: there is one, which is not repeated before its answer.
    """

    sampling: Mapping[str, Any]
    at: str | None
    watch_s: float | None
    verify: bool
    evidence: bool
    at_prompt: bool
    alone: bool


def query_state(
    out: Output,
    state: str,
    questions: Iterator[Question],
    asking: Asking,
    clock: Timings,
    *,
    model: str | None,
    revision: str | None,
    device: str,
    device_map: str | None,
    timings: bool,
) -> None:
    """Load the state, say what of it is asked, and print the answers.

    Args:
        out: where to.
        state: where it is.
        questions: as they come.
        asking: how.
        clock: adds up where the time goes.
        model: its name or folder; None: what the state names.
        revision: of a hub model; None: what the state names.
        device: where to load it; this and the next as for `load_backbone`.
        device_map: spread it over several devices instead.
        timings: say where the time went.
    """
    if asking.watch_s is not None:
        with interruptible():
            await_first_commit(out, state)
    with uncollected(), loading(out, model, revision):
        with clock.stage("imports"):
            from protokv.core.decoding import Decoding
            from protokv.storage.api import read_header
            from protokv.storage.checkpoint import load
            from protokv.storage.watched import beyond_model

        with clock.stage("state"):
            header = read_header(state)
        at_s = None if asking.at is None else stream_time_of(asking.at, state, header, time.time())
        decoding = Decoding(**asking.sampling)
        session = load(
            state,
            model,
            revision=revision,
            device=device,
            device_map=device_map,
            at_s=at_s,
            verify=asking.verify,
            timings=clock,
        )
    beyond = beyond_model(header)
    warn_of_answers(out, beyond)
    answers = Answers(out, state, decoding, clock if timings else None, beyond=bool(beyond), evidence=asking.evidence)
    if asking.watch_s is not None:
        kept = list(questions)
        with interruptible():
            for n, _ in enumerate(rounds(asking.watch_s)):
                if n:
                    header, session = read_header(state), load(state, session.backbone, verify=asking.verify)
                answers.of(session, kept, commit_age_s(header, time.time()))
    else:
        # The header is that of the last commit; the age of an earlier one is what was asked for.
        age_s = None if asking.at else commit_age_s(header, time.time())
        tell_commit(out, session.clock.stream_time_s, at_s, age_s)
        if asking.at_prompt:
            out.note(f"{state} at {time_text(session.clock.stream_time_s)}; Ctrl-D ends")
        answers.of(session, questions, age_s, alone=asking.alone, at_prompt=asking.at_prompt)
    if timings and out.format is not Format.JSON:
        show_timings(out, clock.seconds)
