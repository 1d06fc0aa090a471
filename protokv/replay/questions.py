"""Questions with their reference times, read from JSON lines, and the comparison of two answers.

The reference time t0 is when the decisive evidence was last seen, if the data say so, and else the data set's query
time (the paper's proxy, section 4, "Delayed-Query Protocol"). A sweep over delays is fair to a question about the past
whose answer stays the same while the stream goes on: it is `retrospective` (same section). Two answers are equal but
for case, spaces and a full stop, or by their shared words.
"""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Final, Literal

import msgspec

from protokv.errors import ConfigError, SourceNotFound
from protokv.texts import admit_question

Reference = Literal["evidence", "query", "end"]


@dataclass(frozen=True, slots=True)
class Question:
    """One question about one stream.

    Attributes:
        id: unique within its stream.
        text, answer, type: as the data set has them; the type may be empty.
        reference_s: t0, seconds of stream time; infinite for the end of a stream that is not opened yet.
        reference: the meaning of t0: end of the evidence, query time of the data set, or end of the stream.
        dataset: its benchmark; empty for any other question.
        prompt: the wording of the benchmark with its options, whose letter is the answer; empty: the text.
        retrospective: the answer stays true while the stream goes on.
    """

    id: str
    text: str
    answer: str
    type: str
    reference_s: float
    reference: Reference
    dataset: str = ""
    prompt: str = ""
    retrospective: bool = True

    @property
    def causal(self) -> bool:
        """True for a benchmark's own query, which may see no frame after its time."""
        return self.dataset != "" and self.reference == "query"


class _Row(msgspec.Struct):
    """A line of a file of questions, as users write it."""

    question: str
    answer: str
    ask_s: Annotated[float, msgspec.Meta(ge=0)] | None = None
    evidence_s: Annotated[float, msgspec.Meta(ge=0)] | None = None
    type: str = ""
    id: str | int | None = None
    lasts: bool = True
    video: str | None = None


def load_questions(path: str | Path) -> list[tuple[str | None, Question]]:
    """Read the questions of a JSON-lines file, each with the name of its video (`video`), or None.

    A row has `question`, `answer`, optionally `type` and `id`, and its time in seconds: `evidence_s`, or else `ask_s`.
    `lasts` is false if the answer may change while the stream goes on.

    Raises:
        SourceNotFound: there is no such file.
        ConfigError: a row lacks something; the line is named.
    """
    file = Path(path)
    if not file.is_file():
        raise SourceNotFound(f"there is no file of questions at {path}", hint="name a JSONL file with --questions")
    lines = enumerate(file.read_bytes().splitlines(), start=1)
    return [_parse(line, f"{file.name} line {number}", number) for number, line in lines if line.strip()]


def _parse(line: bytes, where: str, number: int) -> tuple[str | None, Question]:
    try:
        row = msgspec.json.decode(line, type=_Row)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        hint = 'one object per line: {"question": "...", "answer": "...", "ask_s": 95}'
        raise ConfigError(f"{where}: {error}", hint=hint) from error
    admit_question(row.question, f"{where}: the question")
    time = row.ask_s if row.evidence_s is None else row.evidence_s
    if time is None or not row.answer.strip():
        raise ConfigError(f"{where}: expected an answer, and evidence_s or ask_s, from which delays are counted")
    reference: Reference = "query" if row.evidence_s is None else "evidence"
    name = str(number if row.id is None else row.id)
    return row.video, Question(
        name, row.question.strip(), row.answer.strip(), row.type, time, reference, retrospective=row.lasts
    )


F1_RIGHT: Final = 0.5
F1_RULE: Final = f"offline, token F1 of {F1_RIGHT:g} or more"
"""The rule for an open answer without a judge."""


def is_expected(answer: str, expected: str) -> bool:
    """Return True if two answers are equal but for case, spaces and a final full stop."""
    return normalize_answer(answer) == normalize_answer(expected)


def token_f1(answer: str, expected: str) -> float:
    """Return the harmonic mean of precision and recall of the words, without articles, as SQuAD counts them."""
    given, wanted = Counter(_words(answer)), Counter(_words(expected))
    if not given or not wanted:
        return float(given == wanted)
    return 2 * sum((given & wanted).values()) / (sum(given.values()) + sum(wanted.values()))


def normalize_answer(text: str) -> str:
    """Return a text without case, repeated spaces and a final full stop."""
    return " ".join(text.casefold().split()).rstrip(".")


def _words(text: str) -> list[str]:
    return [word for word in re.findall(r"\w+", text.casefold()) if word not in ("a", "an", "the")]
