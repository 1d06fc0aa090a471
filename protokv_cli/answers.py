"""Answers: asking a session one question after another, the rows and lines of an answer, and its warnings."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from protokv.errors import ConfigError, ProtoKVError
from protokv.texts import cut
from protokv_cli.options import MOST_USED, ModelFlags, note_embedded, option
from protokv_cli.output import Format, Output, format_time
from protokv_cli.progress import round_timings
from protokv_cli.questions import AskedQuestion, Refusals

if TYPE_CHECKING:
    from protokv.core.backbone import Backbone
    from protokv.core.decoding import Decoding
    from protokv.core.parts import Evidence
    from protokv.core.session import Answer, Session
    from protokv.state.reader import Reader
    from protokv.timings import Timings
    from protokv_cli.frames import FrameWriter


@dataclass(frozen=True, kw_only=True)
class AnswerFlags:
    """How an answer is written."""

    PANEL: ClassVar[str] = "Answers"
    max_new_tokens: int | None = option("--max-new-tokens COUNT", "Default: the model's, or 64.", MOST_USED)
    evidence: bool = option("--evidence", "Show the times that each answer stood on.", MOST_USED, default=False)
    frames: Path | None = option("--frames DIR", "Write the frames at these times as PNG, named by time.")
    video: Path | None = option("--video PATH", "Their video or its folder. Default: beside the state, or here.")
    system: str | None = option("--system TEXT", "A system prompt, in front of each question.")
    temperature: float | None = option("--temperature NUMBER", "0 is greedy; above 0 draws. Default: as published.")
    top_p: float | None = option("--top-p SHARE", "Draw from this share of the probability. Default: as published.")
    seed: int = option("--seed NUMBER", "Seed of the draws.", default=0)

    @property
    def with_evidence(self) -> bool:
        """Whether evidence is wanted."""
        return self.evidence or self.frames is not None

    def decoding(self, backbone: Backbone | None = None) -> Decoding:
        """Return how a model draws; without one, only refuse numbers that cannot be. ConfigError."""
        from protokv.core.decoding import Decoding

        if backbone and self.system is not None and not backbone.converses:
            raise ConfigError(f"{backbone.identity.name} takes no system prompt", hint="leave out --system")
        names = ("max_new_tokens", "temperature", "top_p", "seed")
        given = {name: value for name in names if (value := getattr(self, name)) is not None}
        return replace(backbone.decoding if backbone else Decoding(), **given)


@dataclass
class Answers:
    """Asks and shows each answer: as it is generated in table and plain form, as one row in JSON.

    Attributes:
        state: the name of the state, for rows.
        how: how an answer is written.
        refusals: the questions that cannot be asked.
        clock: adds up the seconds of each stage.
        timed: they are told.
        at_prompt: questions are typed, and are one conversation.
        alone: a question is not repeated before its answer.
    """

    out: Output
    state: str
    how: AnswerFlags
    refusals: Refusals
    clock: Timings
    timed: bool
    at_prompt: bool
    alone: bool

    def __post_init__(self) -> None:
        """Begin without a conversation."""
        self._turns, self._noted = list[tuple[str, str]](), set[str]()
        self._frames: FrameWriter | None = None

    def start(self, reader: Reader, model: ModelFlags) -> Session:
        """Load the model; refuse before what cannot be answered. ConfigError, SourceError, StateError, ModelError."""
        self.how.decoding()
        if self.how.frames is not None:
            from protokv_cli.frames import FrameWriter

            self._frames = FrameWriter(reader, self.how.frames, self.how.video)
        note_embedded(self.out, reader.model)
        return reader.session(model.model, timings=self.clock, **model.placement)

    def ask_all(
        self, session: Session, decoding: Decoding, questions: Iterable[AskedQuestion], age_s: float | None
    ) -> None:
        """Ask every question, and note how many answers were as expected.

        `age_s` is that of the last commit of a live stream. A refused question does not end the loop; at a prompt,
        neither does Ctrl-C during an answer.
        """
        asked = right = 0
        for question in questions:
            try:
                with self.refusals.at(question.where):
                    row = self._ask(session, decoding, question, age_s)
                    if "correct" in row:
                        asked, right = asked + 1, right + row["correct"]
                    if self.out.format is Format.JSON:
                        self.out.json(row)
                    elif self.out.format is Format.TABLE and row.get("correct") is False:
                        self.out.table(f"  expected: {cut(question.expected or '')}", style="yellow")
            except (KeyboardInterrupt, ProtoKVError) as error:
                if not self.at_prompt:
                    raise
                self.out.error(f"Error: {error.message}" if isinstance(error, ProtoKVError) else "")
        if asked:
            self.out.note(f"{right} of {asked} answers as expected ({right / asked:.1%})")

    def _ask(
        self, session: Session, decoding: Decoding, question: AskedQuestion, age_s: float | None
    ) -> dict[str, Any]:
        name = session.backbone.identity.name
        if words := session.backbone.unknown_words(question.text):
            self._note_once(f"Note: {name} does not know {cut(', '.join(words), 200)}")
        answer = self._stream(session, decoding, question.text)
        if answer.turns < len(self._turns):
            left_out = "the oldest turns have no room left in the conversation"
            alone = f"{name} keeps no conversation: it reads each question alone"
            self._note_once(f"Note: {left_out if session.backbone.converses else alone}")
        if self.at_prompt:
            self._turns.append((question.text, answer.text))
        row = make_answer_row(answer, self.state)
        if answer.evidence is not None:
            spans = [asdict(span) | {"share": round(span.share, 4)} for span in answer.evidence.spans]
            # `faint` is null if a low share says nothing about the model.
            row |= {"evidence": spans, "faint": answer.evidence.faint}
            if self.out.format is not Format.JSON:
                self.out.plain("\n".join(f"  {line}" for line in describe_evidence(answer.evidence)))
            if self._frames is not None:
                row["frames"] = self._frames.write(answer, session)
                self.out.note(f"{len(row['frames'])} frames are in {self.how.frames}")
        if age_s is not None:
            row["commit_age_s"] = round(age_s, 3)
        if self.timed:
            self.clock.add("first token", answer.ttft_ms / 1e3)
            self.clock.add("tokens", (answer.total_ms - answer.ttft_ms) / 1e3)
            row |= {"timings": round_timings(self.clock.seconds), "decoding": asdict(decoding)}
        if question.expected is not None:
            from protokv.replay.questions import is_expected

            row |= {"expected": question.expected, "correct": is_expected(answer.text, question.expected)}
        return row

    def _stream(self, session: Session, decoding: Decoding, question: str) -> Answer:
        if self.out.format is Format.TABLE and not self.alone:
            self.out.table(cut(question), style="cyan", end=" ")
        pieces = session.stream(
            question, decoding, evidence=self.how.with_evidence, turns=self._turns, system=self.how.system
        )
        shows = self.out.format is not Format.JSON
        while True:
            try:
                piece = next(pieces)
            except StopIteration as end:
                answer: Answer = end.value
                if shows:
                    self.out.plain("")
                    if answer.finish_reason == "repetition":
                        self.out.note("Note: the answer is cut, because it repeats itself")
                return answer
            if shows:
                self.out.plain(piece, end="")

    def _note_once(self, text: str) -> None:
        if text not in self._noted:
            self._noted.add(text)
            self.out.note(text)


def make_answer_row(answer: Answer, state: str) -> dict[str, Any]:
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


def describe_evidence(evidence: Evidence) -> list[str]:
    """Return a line such as `stood on 0:07 to 0:09 (61 %), 1:02 to 1:03 (4 %)`, and what was said then, in lines."""
    spans = ", ".join(
        f"{format_time(one.start_s)} to {format_time(one.end_s)} ({100 * one.share:.0f} %)" for one in evidence.spans
    )
    if evidence.faint or not spans:
        most = f"; most {spans}: this may no longer be in memory" if spans else ""
        stood = f"no span stands out{most}"
    else:
        stood = f"stood on {spans}"
    said = sorted({one.start_s: one for span in evidence.spans for one in span.words}.items())
    return [stood, *(f"  {format_time(start_s)} {cut(one.text)}" for start_s, one in said)]
