"""Answers: asking a session one question after another, the rows and lines of an answer, and its warnings."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from protokv.errors import ConfigError, ProtoKVError
from protokv.texts import cut
from protokv_cli.options import MOST_USED, Flags, option
from protokv_cli.output import Output, format_time
from protokv_cli.progress import round_timings
from protokv_cli.questions import AskedQuestion, Refusals

if TYPE_CHECKING:
    from protokv.core.backbone import Backbone
    from protokv.core.decoding import Decoding
    from protokv.core.parts import Evidence
    from protokv.core.session import Answer, Session
    from protokv.timings import Timings
    from protokv_cli.frames import Videos


class AnswerFlags(Flags, panel="Answers"):
    """How an answer is written."""

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
    """Asks a session one question after another, and makes a row of each answer.

    Attributes:
        how: how an answer is written.
        refusals: the questions that cannot be asked.
        clock: adds up the seconds of each stage; rows have them if they are `timed`.
        shows: write each answer as it is generated, and what belongs to it in lines below.
        alone: then do not repeat the question before it.
        at_prompt: questions are typed, and are one conversation.
    """

    out: Output
    how: AnswerFlags
    refusals: Refusals
    clock: Timings
    timed: bool = False
    shows: bool = False
    alone: bool = False
    at_prompt: bool = False

    def __post_init__(self) -> None:
        """Begin without a conversation."""
        self._turns, self._noted = list[tuple[str, str]](), set[str]()

    def ask_all(
        self, state: str, session: Session, questions: Iterable[AskedQuestion], videos: Videos = ()
    ) -> Iterator[dict[str, Any]]:
        """Yield the row of each answer of a state; `videos` are those that `--frames` are from.

        A refused question does not end the loop; at a prompt, neither does Ctrl-C during an answer.
        """
        decoding = self.how.decoding(session.backbone)
        for question in questions:
            try:
                with self.refusals.at(question.where):
                    answer = self._stream(session, decoding, question.text)
                    row = make_answer_row(answer, state) | self._judge(answer, question)
                    if self.how.frames is not None:
                        from protokv_cli.frames import write_frames

                        row["frames"] = write_frames(videos, answer, session, self.how.frames)
                        self.out.note(f"{len(row['frames'])} frames are in {self.how.frames}")
                    if self.timed:
                        self.clock.add("first token", answer.ttft_ms / 1e3)
                        self.clock.add("tokens", (answer.total_ms - answer.ttft_ms) / 1e3)
                        row |= {"timings": round_timings(self.clock.seconds), "decoding": asdict(decoding)}
                    yield row
            except (KeyboardInterrupt, ProtoKVError) as error:
                if not self.at_prompt:
                    raise
                self.out.error(f"Error: {error.message}" if isinstance(error, ProtoKVError) else "")

    def _judge(self, answer: Answer, question: AskedQuestion) -> dict[str, Any]:
        """Return what an answer stood on and whether it is the expected one, and show both."""
        row: dict[str, Any] = {}
        if answer.evidence is not None:
            spans = [asdict(span) | {"share": round(span.share, 4)} for span in answer.evidence.spans]
            # `faint` is null if a low share says nothing about the model.
            row |= {"evidence": spans, "faint": answer.evidence.faint}
            if self.shows:
                self.out.text(describe_evidence(answer.evidence))
        if question.expected is not None:
            from protokv.replay.questions import is_expected

            row |= {"expected": question.expected, "correct": is_expected(answer.text, question.expected)}
            if self.shows and not row["correct"]:
                self.out.table(f"  expected: {cut(question.expected)}", style="yellow")
        return row

    def _stream(self, session: Session, decoding: Decoding, question: str) -> Answer:
        """Return the answer; say what the model does not read of the question and of the conversation."""
        name = session.backbone.identity.name
        if words := session.backbone.unknown_words(question):
            self._note_once(f"Note: {name} does not know {cut(', '.join(words), 200)}")
        if self.shows and not self.alone:
            self.out.table(cut(question), style="cyan", end=" ")
        pieces = session.stream(
            question, decoding, evidence=self.how.with_evidence, turns=self._turns, system=self.how.system
        )
        try:
            while True:
                piece = next(pieces)
                if self.shows:
                    self.out.text(piece, end="")
        except StopIteration as end:
            answer: Answer = end.value
        if self.shows:
            self.out.text("")
            if answer.finish_reason == "repetition":
                self.out.note("Note: the answer is cut, because it repeats itself")
        if answer.turns < len(self._turns):
            left_out = "the oldest turns have no room left in the conversation"
            alone = f"{name} keeps no conversation: it reads each question alone"
            self._note_once(f"Note: {left_out if session.backbone.converses else alone}")
        if self.at_prompt:
            self._turns.append((question, answer.text))
        return answer

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


def describe_evidence(evidence: Evidence) -> str:
    """Return a line such as `stood on 0:07 to 0:09 (61 %), 1:02 to 1:03 (4 %)`, and what was said then, in lines."""
    spans = ", ".join(
        f"{format_time(one.start_s)} to {format_time(one.end_s)} ({100 * one.share:.0f} %)" for one in evidence.spans
    )
    stood = f"stood on {spans}"
    if evidence.faint or not spans:
        stood = "no span stands out" + (f"; most {spans}: this may no longer be in memory" if spans else "")
    said = sorted({one.start_s: one for span in evidence.spans for one in span.words}.items())
    lines = [stood, *(f"  {format_time(start_s)} {cut(one.text)}" for start_s, one in said)]
    return "\n".join(f"  {line}" for line in lines)
