"""Ask standing questions between the steps of a run, from the one session that watches.

A question is due where stream time passes a multiple of its interval: a run that was stopped asks
at the same times as one that was not, and its state has the same answers. Asking changes nothing in
the session.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, replace

from protokv.ingestion.events import QuestionAnswered
from protokv.ingestion.live import LiveSource
from protokv.ingestion.options import StandingQuestion
from protokv.state.sources import (
    MOST_ANSWER_CHARACTERS,
    MOST_STANDING_ANSWERS,
    StandingAnswer,
    StreamSegment,
    make_notice,
)
from protokv.stream.promise import find_promise_rule
from protokv.stream.session import Session
from protokv.stream.together import AskedQuestion, ask_together
from protokv.timings import time_stage
from protokv.video import Source


class StandingAsker:
    """Asks what is due, and has the last answers for the state: `kept`, oldest first."""

    def __init__(
        self,
        session: Session,
        ask: Sequence[StandingQuestion],
        kept: Sequence[StandingAnswer],
        source: Source,
        segment: StreamSegment,
    ) -> None:
        """Refuse, before anything is watched, what the model cannot be asked. ConfigError."""
        self._session = session
        self._source = source
        self._segment = segment
        self._live = source if isinstance(source, LiveSource) else None
        self.kept = list(kept)
        self._asked = [
            (one, replace(session.backbone.decoding, choices=one.choices)) for one in ask
        ]
        for one in ask:
            session.backbone.question_ids(one.text)
            session.backbone.choice_ids(one.choices)
            find_promise_rule(session, one.calibrations, one.at_most_wrong)

    def ask_due(self, before_s: float) -> list[QuestionAnswered]:
        """Ask what became due after stream time `before_s`; return the answers that are news."""
        session = self._session
        live = self._live
        now_s = session.clock.stream_time_s
        due = [
            (one, decoding)
            for one, decoding in self._asked
            if int(now_s / one.every_s + 1e-6) != int(before_s / one.every_s + 1e-6)
        ]
        if not due:
            return []
        dropped = live.frames_dropped if live else 0
        with time_stage(session.timings, "questions"):
            asked = []
            for one, decoding in due:
                promise = find_promise_rule(session, one.calibrations, one.at_most_wrong)
                how = {"evidence": one.evidence, "promise": promise}
                asked.append(AskedQuestion(session, one.text, decoding, how))
            answers = list(ask_together(asked))
        found = list[QuestionAnswered]()
        model = session.backbone.identity.name
        for (one, _), answer in zip(due, answers, strict=True):
            shares = {
                choice: round(share, 4) for choice, share in (answer.probabilities or {}).items()
            }
            news = QuestionAnswered(
                question=one.text[:MOST_ANSWER_CHARACTERS],
                answer=answer.text[:MOST_ANSWER_CHARACTERS],
                stream_time_s=now_s,
                mean_logprob=round(answer.mean_logprob, 6),
                probability=shares.get(answer.text),
                probabilities=shares or None,
                evidence=list(answer.evidence.spans) if answer.evidence else None,
                promise=answer.promise,
                took_s=round(answer.total_ms / 1e3, 4),
                late_s=round(max(0.0, live.log.stream_time(live.now()) - now_s), 3)
                if live
                else None,
                frames_dropped=live.frames_dropped - dropped if live else 0,
                notice="" if self._source.info.drawn else make_notice(model),
                videos=self._segment.list_videos(asdict(self._source.info)),
            )
            last = next(
                (row.answer for row in reversed(self.kept) if row.question == news.question), None
            )
            if not one.on_change or last is None or last.casefold() != news.answer.casefold():
                found.append(news)
                self.kept.append(
                    StandingAnswer(*(getattr(news, field) for field in StandingAnswer.__slots__))
                )
            if len(self.kept) > MOST_STANDING_ANSWERS:
                # The oldest whose question has a newer answer: `on_change` compares with the last.
                newest = {row.question: row for row in self.kept}
                self.kept.remove(
                    next(
                        (row for row in self.kept if newest[row.question] is not row), self.kept[0]
                    )
                )
        return found
