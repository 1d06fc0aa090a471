"""Questions with their reference times, read from JSON lines; when they are asked; and the
comparison of two answers.

The reference time t0 is when the decisive evidence was last seen, if the data say so, and else the
data set's query time (the paper's proxy, section 4, "Delayed-Query Protocol"). A sweep over delays
is fair to a question about the past whose answer stays the same while the stream goes on: it is
`retrospective` (same section).

A question can be asked at delay Delta if and only if t0 + Delta is not beyond the end of its stream
(appendix "Dataset Selection for Query-Delay Sweep"). By default it is asked only if every delay
fits, so that all points of a curve have the same questions.
"""

from __future__ import annotations

import re
from codecs import BOM_UTF8
from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median_high
from typing import Annotated, Literal

import msgspec

from protokv.errors import ConfigError, SourceNotFound
from protokv.texts import check_question_text

DelayStart = Literal["evidence", "query", "end"]

ASK_SLACK_S = 1e-6  # container durations are rounded: an ask this far after the end still counts
# the default delays
DELAY_LADDER_S = (0.0, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0, 600.0, 1800.0, 3600.0, 7200.0)
ALL_QUESTION_TYPES = "all"


@dataclass(frozen=True, slots=True)
class ReplayQuestion:
    """One question about one stream."""

    id: str  # unique within its stream
    text: str
    answer: str
    type: str  # as the data set has it; may be empty
    # t0, seconds of stream time; infinite for the end of a stream that is not opened yet
    reference_s: float
    # the meaning of t0: end of the evidence, query time of the data set, or end of the stream
    reference: DelayStart
    dataset: str = ""  # its benchmark; empty for any other question
    # the wording of the benchmark with its options, whose letter is the answer; empty: the text
    prompt: str = ""
    retrospective: bool = True  # the answer stays true while the stream goes on

    @property
    def causal(self) -> bool:
        """True for a benchmark's own query, which may see no frame after its time."""
        return self.dataset != "" and self.reference == "query"


class _Row(msgspec.Struct):
    """A line of a file of questions, as users write it."""

    question: str
    answer: Annotated[str, msgspec.Meta(pattern=r"\S")]
    ask_s: Annotated[float, msgspec.Meta(ge=0)] | None = None
    evidence_s: Annotated[float, msgspec.Meta(ge=0)] | None = None
    type: str = ""
    id: str | int | None = None
    lasts: bool = True
    video: str | None = None


def load_questions(path: str | Path) -> list[tuple[str | None, ReplayQuestion]]:
    """Read the questions of a JSON-lines file, each with the name of its video (`video`), or None.

    A row has `question`, `answer`, optionally `type` and `id`, and its time in seconds:
    `evidence_s`, or else `ask_s`. `lasts` is false if the answer may change while the stream goes
    on. SourceNotFound: there is no such file. ConfigError: a row lacks something; the line is
    named.
    """
    file = Path(path)
    if not file.is_file():
        raise SourceNotFound(
            f"there is no file of questions at {path}", hint="name a JSONL file with --questions"
        )
    # Windows may mark UTF-8 at its beginning.
    lines = enumerate(file.read_bytes().removeprefix(BOM_UTF8).splitlines(), start=1)
    return [
        _parse(line, f"{file.name} line {number}", number) for number, line in lines if line.strip()
    ]


def _parse(line: bytes, where: str, number: int) -> tuple[str | None, ReplayQuestion]:
    try:
        row = msgspec.json.decode(line, type=_Row)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise ConfigError(
            f"{where}: {error}",
            hint='one object per line: {"question": "...", "answer": "...", "ask_s": 95}',
        ) from error
    check_question_text(row.question, f"{where}: the question")
    time = row.ask_s if row.evidence_s is None else row.evidence_s
    if time is None:
        raise ConfigError(f"{where}: expected evidence_s or ask_s, from which delays are counted")
    reference: DelayStart = "query" if row.evidence_s is None else "evidence"
    name = str(number if row.id is None else row.id)
    return row.video, ReplayQuestion(
        name,
        row.question.strip(),
        row.answer.strip(),
        row.type,
        time,
        reference,
        retrospective=row.lasts,
    )


@dataclass(frozen=True, slots=True)
class DelayedQuestion:
    """A question at one delay, asked when the stream has reached `at_s`."""

    question: ReplayQuestion
    delay_s: float

    @property
    def at_s(self) -> float:
        """t0 + Delta, seconds of stream time."""
        return self.question.reference_s + self.delay_s


def plan_asks(
    questions: Iterable[ReplayQuestion],
    delays_s: Sequence[float],
    length_s: float,
    dropped: Counter[str],
    *,
    intersection: bool = True,
    types: Collection[str] | None = None,
) -> list[DelayedQuestion]:
    """Return the asks of a sweep over one stream of `length_s` seconds, in order of time; `dropped`
    counts the questions that are left out, by reason.

    With `intersection` only questions that fit every delay. `types` are names of types, or
    `ALL_QUESTION_TYPES`; None: retrospective questions of all types. A single delay of 0 is no
    sweep, and asks every question. ConfigError: there is no delay.
    """
    if not delays_s:
        raise ConfigError("there is no delay to ask at", hint="for example --delays 0,30s,2m")
    sweep = any(delay > 0 for delay in delays_s)
    asks: list[DelayedQuestion] = []
    for question in questions:
        named = f"type {question.type or 'unnamed'}"
        each = [DelayedQuestion(question, delay) for delay in delays_s]
        valid = [ask for ask in each if ask.at_s <= length_s + ASK_SLACK_S]
        if types is not None and question.type not in types and ALL_QUESTION_TYPES not in types:
            dropped[f"{named} not asked for"] += 1
        elif types is None and sweep and not question.retrospective:
            dropped[f"{named}, whose answers change with time"] += 1
        elif not valid or (intersection and len(valid) < len(each)):
            dropped["beyond the end of the stream" + " at some delay" * bool(valid)] += 1
        else:
            asks += valid
    return sorted(asks, key=lambda ask: (ask.at_s, ask.question.id))


def fit_delays(rooms_s: Sequence[float], wanted: Sequence[float] = DELAY_LADDER_S) -> list[float]:
    """Choose delays that fit at least half of the questions: at most four, 0 if it is wanted, and
    the longest.

    `rooms_s` are the seconds between the reference time of each question and the end of its stream.
    `DELAY_LADDER_S` stands in for `wanted` if only 0 of them fits.
    """
    room = median_high(rooms_s or [0.0]) + ASK_SLACK_S
    fitting = [0.0]
    for ladder in (wanted, DELAY_LADDER_S):
        fitting = [delay for delay in sorted(ladder) if delay <= room] or [0.0]
        if any(fitting):
            break
    return fitting if len(fitting) <= 4 else [fitting[0], *fitting[-3:]]


LEAST_RIGHT_F1 = 0.5
F1_SCORING_RULE = f"offline, token F1 of {LEAST_RIGHT_F1:g} or more"
"""The rule for an open answer without a judge."""


def is_expected_answer(answer: str, expected: str) -> bool:
    """Return True if two answers are equal but for case, spaces and a final full stop."""
    given, wanted = (" ".join(text.casefold().split()).rstrip(".") for text in (answer, expected))
    return given == wanted


def score_token_f1(answer: str, expected: str) -> float:
    """Return the harmonic mean of precision and recall of the words, without articles, as SQuAD
    counts them.
    """
    given = Counter(_words(answer))
    wanted = Counter(_words(expected))
    if not given or not wanted:
        return float(given == wanted)
    return 2 * sum((given & wanted).values()) / (sum(given.values()) + sum(wanted.values()))


def _words(text: str) -> list[str]:
    return [word for word in re.findall(r"\w+", text.casefold()) if word not in ("a", "an", "the")]
