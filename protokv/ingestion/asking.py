"""Ask standing questions between the steps of a run, from the one session that watches.

A question is due where stream time passes a multiple of its interval: a run that was stopped asks at the same times as
one that was not, and its state has the same answers. Asking changes nothing in the session.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from protokv.core.session import Session
from protokv.ingestion.events import Answered
from protokv.ingestion.live import LiveSource
from protokv.ingestion.options import StandingQuestion
from protokv.state.sources import MOST_CHARACTERS, MOST_KEPT, KeptAnswer
from protokv.timings import stage


class Asker:
    """Asks what is due, and keeps the last answers for the state.

    Attributes:
        kept: the last `MOST_KEPT` answers, oldest first, and at least the last one of each question.
    """

    def __init__(
        self,
        session: Session,
        questions: Sequence[StandingQuestion],
        kept: Sequence[KeptAnswer],
        live: LiveSource | None,
    ) -> None:
        """Refuse, before anything is watched, what the model cannot be asked. ConfigError, QuestionError."""
        for one in questions:
            session.backbone.question_ids(one.text)
            session.backbone.choice_ids(one.choices)
        self._session, self._questions, self.kept, self._live = session, questions, list(kept), live
        # The stream time since which a question is due.
        self._due_s: dict[StandingQuestion, float] = {}

    def ask_due(self, before_s: float) -> list[Answered]:
        """Ask what became due after stream time `before_s`; return the answers that are news.

        While steps of a live source pile up, a question waits for the model to catch up, for one interval at most.
        """
        now_s, found = self._session.clock.stream_time_s, []
        for one in self._questions:
            if int(now_s / one.every_s + 1e-6) > int(before_s / one.every_s + 1e-6):
                self._due_s.setdefault(one, now_s)
            since_s = self._due_s.get(one)
            is_pressed = self._live is not None and self._live.is_pressed
            if since_s is None or (is_pressed and now_s - since_s < one.every_s):
                continue
            del self._due_s[one]
            with stage(self._session.timings, "questions"):
                answered = self._ask(one)
            last = next((row.answer for row in reversed(self.kept) if row.question == one.text), None)
            if not one.on_change or last is None or _plain(last) != _plain(answered.answer[:MOST_CHARACTERS]):
                self._keep(answered)
                found.append(answered)
        return found

    def _ask(self, one: StandingQuestion) -> Answered:
        session, live = self._session, self._live
        dropped = live.frames_dropped if live else 0
        answer = session.ask(one.text, replace(session.backbone.decoding, choices=one.choices), evidence=one.evidence)
        shares, evidence = answer.probabilities, answer.evidence
        return Answered(
            question=one.text,
            answer=answer.text,
            stream_time_s=answer.stream_time_s,
            mean_logprob=round(answer.mean_logprob, 6),
            probabilities=shares and {choice: round(share, 4) for choice, share in shares.items()},
            evidence=evidence and list(evidence.spans),
            faint=evidence and evidence.faint,
            took_s=round(answer.total_ms / 1e3, 4),
            late_s=round(live.find_delay(answer.stream_time_s), 3) if live else None,
            frames_dropped=live.frames_dropped - dropped if live else 0,
        )

    def _keep(self, answered: Answered) -> None:
        text, shares = answered.answer, answered.probabilities
        at_s, sure = answered.stream_time_s, answered.mean_logprob
        row = KeptAnswer(answered.question, text[:MOST_CHARACTERS], at_s, sure, shares and shares[text])
        self.kept.append(row)
        if len(self.kept) > MOST_KEPT:
            # The oldest one whose question has a newer answer: `on_change` compares with the last.
            newest = {one.question: one for one in self.kept}
            self.kept.remove(next((one for one in self.kept if newest[one.question] is not one), self.kept[0]))


def _plain(answer: str) -> str:
    """Return an answer without what makes no difference between two."""
    return answer.casefold().strip().rstrip(".!")
