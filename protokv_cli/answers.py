"""Questions put to a session one after the other, and what is shown of each answer."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from protokv_cli.beyond import REAL_MODEL
from protokv_cli.evidence import evidence_keys, evidence_text
from protokv_cli.output import Format, Output
from protokv_cli.prompt import told_at_prompt
from protokv_cli.questions import Question
from protokv_cli.timings import rounded

if TYPE_CHECKING:
    from protokv.core.decoding import Decoding
    from protokv.core.session import Answer, Session
    from protokv.timings import Timings


class Answers:
    """Asks, on a terminal and in plain form writes an answer as it comes, and counts."""

    def __init__(
        self,
        out: Output,
        state: str,
        decoding: Decoding,
        clock: Timings | None,
        *,
        beyond: bool = False,
        evidence: bool = False,
    ) -> None:
        """Nothing is asked yet.

        Args:
            out: where to.
            state: its path, for the rows.
            decoding: how answers are generated.
            clock: takes the time of answers, and stands in their rows; None: neither.
            beyond: the answers mean nothing, which their rows say.
            evidence: each says what it stood on.
        """
        self._evidence = evidence
        self._out, self._state, self._decoding, self._clock, self._beyond = out, state, decoding, clock, beyond
        self._unknown_told = False

    def of(
        self,
        session: Session,
        questions: Iterable[Question],
        age_s: float | None,
        *,
        alone: bool = False,
        at_prompt: bool = False,
    ) -> None:
        """Every question, and how many were answered as expected.

        Args:
            session: what is asked.
            questions: as they come.
            age_s: how long ago the last commit of a live stream was made; None of a file, and of an earlier commit.
            alone: a question is not repeated before its answer.
            at_prompt: one that cannot be asked ends nothing.
        """
        asked = right = 0
        for question in questions:
            with told_at_prompt(self._out, at_prompt):
                row = self._ask(session, question, age_s, alone=alone)
                if "correct" in row:
                    asked, right = asked + 1, right + row["correct"]
                if self._out.format is Format.JSON:
                    self._out.json(row)
                elif self._out.format is Format.TABLE and row.get("correct") is False:
                    self._out.table(f"  expected: {question.expected}", style="yellow")
        if asked:
            self._out.note(f"{right} of {asked} answers as expected ({right / asked:.1%})")

    def _ask(self, session: Session, question: Question, age_s: float | None, *, alone: bool) -> dict[str, Any]:
        self._tell_unknown(session, question.text)
        answer = self._answer(session, question.text, alone=alone)
        row = row_of(answer, self._state)
        if answer.evidence is not None:
            row |= evidence_keys(answer.evidence)
            if self._out.format is not Format.JSON:
                self._out.plain(f"  {evidence_text(answer.evidence)}")
        if self._beyond:
            row["beyond_model"] = True
        if age_s is not None:
            row["commit_age_s"] = round(age_s, 3)
        if self._clock is not None:
            self._clock.add("first token", answer.ttft_ms / 1e3)
            self._clock.add("tokens", (answer.total_ms - answer.ttft_ms) / 1e3)
            row["timings"] = rounded(self._clock.seconds)
        if question.expected is not None:
            from protokv.replay.texts import is_expected

            row |= {"expected": question.expected, "correct": is_expected(answer.text, question.expected)}
        return row

    def _answer(self, session: Session, question: str, *, alone: bool) -> Answer:
        if self._out.format is Format.TABLE and not alone:
            self._out.table(question, style="cyan", end=" ")
        pieces = session.stream(question, self._decoding, evidence=self._evidence)
        while True:
            try:
                piece = next(pieces)
            except StopIteration as end:
                if self._out.format is not Format.JSON:
                    self._out.plain("")
                answer: Answer = end.value
                return answer
            if self._out.format is not Format.JSON:
                self._out.plain(piece, end="")

    def _tell_unknown(self, session: Session, question: str) -> None:
        """Say once which words of a question the model cannot represent, and what to do about it."""
        from protokv.mini import is_embedded

        words = [] if self._unknown_told else session.backbone.unknown_words(question)
        if not words:
            return
        self._unknown_told = True
        name = session.backbone.identity.name
        who = f"{name} knows only its procedural world of coloured shapes and" if is_embedded(name) else name
        self._out.warn(
            f"Note: {who} does not know the word{'s' * (len(words) > 1)} {', '.join(words)}. "
            f"For other videos name a real model when ingesting: --model {REAL_MODEL}"
        )


def row_of(answer: Answer, state: str) -> dict[str, Any]:
    """An answer and the state that gave it, as JSON."""
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
