"""The schedule of questions: the valid-query rule of the paper (appendix "Dataset Selection for Query-Delay Sweep").

A question with reference time t0 can be asked at delay Delta if and only if t0 + Delta is not beyond the end of its
stream. By default a question is asked only if every delay fits, so that all points of a curve have the same questions.
A sweep leaves out questions whose answers change with time.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass

from protokv.errors import ConfigError
from protokv.replay.questions import Question

# Container durations are rounded: an ask this far after the end still counts.
ASK_SLACK_S = 1e-6

DELAY_LADDER_S = (0.0, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0, 600.0, 1800.0, 3600.0, 7200.0)
"""Default delays in seconds."""

MOST_DELAYS = 4

ALL_TYPES = "all"
"""A name that stands for all types."""


@dataclass(frozen=True, slots=True)
class Ask:
    """A question at one delay, asked when the stream has reached `at_s`."""

    question: Question
    delay_s: float

    @property
    def at_s(self) -> float:
        """t0 + Delta, seconds of stream time."""
        return self.question.reference_s + self.delay_s


@dataclass(frozen=True, slots=True)
class QuestionSchedule:
    """The asks of one stream in order of time, and reason -> number of questions left out."""

    asks: tuple[Ask, ...]
    dropped: Counter[str]

    @property
    def questions(self) -> int:
        """Different questions that are asked."""
        return len({ask.question.id for ask in self.asks})


def schedule(
    questions: Iterable[Question],
    delays_s: Sequence[float],
    length_s: float,
    *,
    intersection: bool = True,
    types: Collection[str] | None = None,
) -> QuestionSchedule:
    """Plan a sweep over one stream of `length_s` seconds.

    Args:
        questions: of this stream.
        delays_s: the sweep.
        length_s: of the stream.
        intersection: ask only questions that fit every delay.
        types: names of types to ask, or `ALL_TYPES`; None: retrospective questions of all types. A single delay of 0 is
            no sweep, and asks every question.

    Raises:
        ConfigError: there is no delay.
    """
    if not delays_s:
        raise ConfigError("there is no delay to ask at", hint="for example --delays 0,30s,2m")
    sweep = any(delay > 0 for delay in delays_s)
    asks: list[Ask] = []
    dropped: Counter[str] = Counter()
    for question in questions:
        if types is not None and question.type not in types and ALL_TYPES not in types:
            dropped[f"type {question.type or 'unnamed'} not asked for"] += 1
        elif types is None and sweep and not question.retrospective:
            dropped[f"type {question.type or 'unnamed'}, whose answers change with time"] += 1
        else:
            valid = [delay for delay in delays_s if question.reference_s + delay <= length_s + ASK_SLACK_S]
            if not valid or (intersection and len(valid) < len(delays_s)):
                dropped["beyond the end of the stream" + " at some delay" * bool(valid)] += 1
            else:
                asks += [Ask(question, delay) for delay in valid]
    asks.sort(key=lambda ask: (ask.at_s, ask.question.id))
    return QuestionSchedule(tuple(asks), dropped)


def fit_delays(rooms_s: Sequence[float], wanted: Sequence[float] = DELAY_LADDER_S) -> list[float]:
    """Choose delays that fit at least half of the questions: at most four, 0 if it is wanted, and the longest.

    Args:
        rooms_s: of every question, the seconds between its reference time and the end of its stream.
        wanted: delays to choose from; `DELAY_LADDER_S` stands in if only 0 of them fits.
    """
    ordered = sorted(rooms_s)
    room = ordered[len(ordered) // 2] if ordered else 0.0
    fitting = [delay for delay in sorted(wanted) if delay <= room + ASK_SLACK_S]
    if not any(fitting):
        fitting = [delay for delay in DELAY_LADDER_S if delay <= room + ASK_SLACK_S] or [0.0]
    return fitting if len(fitting) <= MOST_DELAYS else [fitting[0], *fitting[1 - MOST_DELAYS :]]
