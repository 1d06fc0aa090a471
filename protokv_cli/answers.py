"""Answers: asking a session one question after another, the rows and lines of an answer, and its warnings."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from protokv.errors import ConfigError
from protokv.texts import cut
from protokv_cli.output import Format, Output
from protokv_cli.progress import timings_key
from protokv_cli.questions import Question, Refusals, surviving_errors
from protokv_cli.tables import time_text

if TYPE_CHECKING:
    from protokv.core.backbone import Backbone
    from protokv.core.decoding import Decoding
    from protokv.core.parts import Evidence
    from protokv.core.session import Answer, Session
    from protokv.timings import Timings
    from protokv_cli.frames import FrameWriter


@dataclass(frozen=True, slots=True, kw_only=True)
class QueryOptions:
    """The options of a query: `placement` has keywords of `load_backbone`, `sampling` has fields of `Decoding`.

    `at` is the text of the user. With `at_prompt`, questions are typed. A question that is `alone` is not
    repeated before its answer.
    """

    model: str | None
    placement: dict[str, Any]
    sampling: dict[str, Any]
    system: str | None
    at: str | None
    watch_s: float | None
    verify: bool
    top: int | None
    evidence: bool
    frames: Path | None
    video: Path | None
    timings: bool
    at_prompt: bool
    alone: bool


class Answers:
    """Asks and shows each answer: as it is generated in table and plain form, as one row in JSON."""

    def __init__(
        self,
        out: Output,
        state: str,
        asking: QueryOptions,
        decoding: Decoding,
        clock: Timings,
        refusals: Refusals,
        *,
        frames: FrameWriter | None = None,
    ) -> None:
        """Ask nothing yet."""
        self._frames = frames
        self._out, self._state, self._asking, self._decoding, self._clock = out, state, asking, decoding, clock
        self._refusals, self._warned_of_words = refusals, False
        self._turns, self._warned_of_turns = list[tuple[str, str]](), False

    def ask_all(self, session: Session, questions: Iterable[Question], age_s: float | None) -> None:
        """Ask every question, and note how many answers were as expected.

        `age_s` is that of the last commit of a live stream. A refused question does not end the loop.
        """
        asked = right = 0
        for question in questions:
            with surviving_errors(self._out, self._asking.at_prompt), self._refusals.at(question.where):
                row = self._ask(session, question, age_s)
                if "correct" in row:
                    asked, right = asked + 1, right + row["correct"]
                if self._out.format is Format.JSON:
                    self._out.json(row)
                elif self._out.format is Format.TABLE and row.get("correct") is False:
                    self._out.table(f"  expected: {cut(question.expected or '')}", style="yellow")
        if asked:
            self._out.note(f"{right} of {asked} answers as expected ({right / asked:.1%})")

    def _ask(self, session: Session, question: Question, age_s: float | None) -> dict[str, Any]:
        self._warn_of_words(session, question.text)
        if question.fresh:
            self._turns.clear()
        answer = self._stream(session, question.text)
        self._warn_of_turns(session, answer)
        self._turns.append((question.text, answer.text))
        row = row_of(answer, self._state)
        if answer.evidence is not None:
            moments = [asdict(moment) | {"share": round(moment.share, 4)} for moment in answer.evidence.moments]
            # `faint` is null if a low share says nothing about the model.
            row |= {"evidence": moments, "faint": answer.evidence.faint}
            if self._out.format is not Format.JSON:
                self._out.plain(f"  {evidence_text(answer.evidence)}")
                for said in heard(answer.evidence):
                    self._out.plain(f"    {said}")
            if self._frames is not None:
                row["frames"] = self._frames.write(answer, session)
                self._out.note(f"{len(row['frames'])} frames are in {self._asking.frames}")
        if age_s is not None:
            row["commit_age_s"] = round(age_s, 3)
        if self._asking.timings:
            self._clock.add("first token", answer.ttft_ms / 1e3)
            self._clock.add("tokens", (answer.total_ms - answer.ttft_ms) / 1e3)
            row |= {"timings": timings_key(self._clock.seconds), "decoding": asdict(self._decoding)}
        if question.expected is not None:
            from protokv.replay.questions import is_expected

            row |= {"expected": question.expected, "correct": is_expected(answer.text, question.expected)}
        return row

    def _stream(self, session: Session, question: str) -> Answer:
        if self._out.format is Format.TABLE and not self._asking.alone:
            self._out.table(cut(question), style="cyan", end=" ")
        told: dict[str, Any] = {"evidence": self._asking.evidence, "turns": self._turns, "system": self._asking.system}
        pieces = session.stream(question, self._decoding, **told)
        while True:
            try:
                piece = next(pieces)
            except StopIteration as end:
                if self._out.format is not Format.JSON:
                    self._out.plain("")
                answer: Answer = end.value
                if answer.finish_reason == "repetition" and self._out.format is not Format.JSON:
                    self._out.warn("Note: the answer is cut, because it repeats itself")
                return answer
            if self._out.format is not Format.JSON:
                self._out.plain(piece, end="")

    def _warn_of_turns(self, session: Session, answer: Answer) -> None:
        """Say, once, that the model has not read all of the conversation."""
        if self._warned_of_turns or answer.turns == len(self._turns):
            return
        self._warned_of_turns = True
        if session.backbone.converses:
            self._out.warn("Note: the oldest turns have no room left in the conversation; new begins another")
        else:
            self._out.warn(
                f"Note: {session.backbone.identity.name} keeps no conversation: it reads each question alone"
            )

    def _warn_of_words(self, session: Session, question: str) -> None:
        """Name, once, the words of a question that the model cannot represent."""
        words = [] if self._warned_of_words else session.backbone.unknown_words(question)
        if not words:
            return
        self._warned_of_words = True
        name = session.backbone.identity.name
        self._out.warn(
            f"Note: {name} does not know the word{'s' * (len(words) > 1)} {cut(', '.join(words), 200)}. "
            "For other videos name a real model when ingesting: --model NAME (see: protokv models)"
        )


def check_system(backbone: Backbone, system: str | None) -> None:
    """Refuse a system prompt for a model that takes none. ConfigError."""
    if system is not None and not backbone.converses:
        raise ConfigError(f"{backbone.identity.name} takes no system prompt", hint="leave out --system")


def decoding_text(decoding: Decoding) -> str:
    """Return how tokens are chosen, in a line such as `greedy, repetition penalty 1.05, at most 64 tokens`."""
    how = [f"drawn at temperature {decoding.temperature:g}", f"top p {decoding.top_p:g}", f"seed {decoding.seed}"]
    if decoding.top_k:
        how.insert(1, f"top k {decoding.top_k}")
    if decoding.temperature == 0:
        how = ["greedy"]
    if decoding.repetition_penalty != 1:
        how.append(f"repetition penalty {decoding.repetition_penalty:g}")
    if decoding.no_repeat_ngram_size:
        how.append(f"no {decoding.no_repeat_ngram_size} tokens twice")
    return ", ".join([*how, f"at most {decoding.max_new_tokens} tokens"])


def row_of(answer: Answer, state: str) -> dict[str, Any]:
    """Return the JSON row of an answer of a state."""
    return {
        "question": answer.question,
        "answer": answer.text,
        "stream_time_s": answer.stream_time_s,
        "ttft_ms": round(answer.ttft_ms, 3),
        "total_ms": round(answer.total_ms, 3),
        "context_tokens": answer.context_tokens,
        "mean_logprob": round(answer.mean_logprob, 6),
        "state": state,
        "finish_reason": answer.finish_reason,
    }


def evidence_text(evidence: Evidence) -> str:
    """Return a line such as `stood on 0:07 to 0:09 (61 %), 1:02 to 1:03 (4 %)`; it says if the share is low."""
    moments = ", ".join(
        f"{time_text(moment.start_s)} to {time_text(moment.end_s)} ({moment.share:.0%})".replace("%", " %")
        for moment in evidence.moments
    )
    if not moments:
        text = "no moment stands out"
    elif evidence.faint:
        text = f"no moment stands out; most {moments}"
    else:
        text = f"stood on {moments}"
    return f"{text}: this may no longer be in memory" if evidence.faint else text


def heard(evidence: Evidence) -> list[str]:
    """Return what was said at the moments, in order of time, in lines such as `0:07 good morning`."""
    said = sorted({one.start_s: one for moment in evidence.moments for one in moment.words}.items())
    return [f"{time_text(start_s)} {cut(one.text)}" for start_s, one in said]


def note_model(out: Output, backbone: Backbone) -> None:
    """Say in a line what the model cannot read, if there is something."""
    if backbone.notice:
        out.note(f"Note: {backbone.notice}")
