"""Results as JSON lines: one row per question, delay and memory, appended as soon as it is known.

A killed run leaves at most one torn last line, which the next run drops. A file holds one study:
rows that contradict each other about a stream, a question, a memory or the model are refused.
"""

from __future__ import annotations

import gzip
import json
import zlib
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from protokv.core.settings import format_setting_value
from protokv.errors import ConfigError, SourceNotFound
from protokv.replay.questions import DelayStart
from protokv.texts import JsonObject

_PROTOCOL = 1
"""Grows when the same settings give other questions, times or frames."""
_R = TypeVar("_R")
_NONE = ("unable to answer", "unknown", "i do not know")
"""How an answer begins that says that there is none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplayTrial:
    """One question at one delay under one memory, with everything that decides the answer."""

    video: str
    question_id: str
    question: str
    type: str
    expected: str
    reference: DelayStart  # the meaning of t0
    reference_s: float  # t0, seconds of stream time
    delay_s: float  # seconds after t0
    memory: str  # the label of the memory
    budget: int  # visual tokens that a question may read
    config: JsonObject  # the settings of the memory
    stream: JsonObject  # the world's settings or the file's fingerprint, and the sampling
    model: JsonObject  # its identity, as states have it
    decoding: JsonObject
    protocol: int = _PROTOCOL
    dataset: str = ""  # the benchmark of the question; empty for any other
    prompt: str = ""  # the wording of the benchmark
    prompt_hash: str = ""  # digest of the benchmark's templates
    frames: JsonObject = field(default_factory=dict)  # the backbone's settings for frames

    @property
    def asked(self) -> str:
        """The text that the model was asked."""
        return self.prompt or self.question

    @property
    def study(self) -> JsonObject:
        """Fact -> value. Trials of one study agree on every fact that they share."""
        # A model has many names; its digest identifies it.
        left_out = "name" if self.model["weights_digest"] else None
        of_benchmark = {
            "the data set": self.dataset,
            "the prompt": self.prompt_hash,
            "the frames": self.frames,
        }
        return (of_benchmark if self.dataset else {}) | {
            "the protocol": self.protocol,
            "the model": {name: value for name, value in self.model.items() if name != left_out},
            "the decoding": self.decoding,
            f"the stream {self.video}": self.stream,
            f"question {self.question_id} about {self.video}": {
                "text": self.question,
                "expected answer": self.expected,
                "reference time": self.reference_s,
            },
            f"the memory {self.memory} at {self.budget} tokens": self.config,
        }

    @property
    def key(self) -> str:
        """Everything that decides the answer, as one canonical text: equal keys are the same
        trial.
        """
        where = [self.video, self.question_id, self.memory, self.budget, self.delay_s]
        return json.dumps([where, self.study], sort_keys=True, ensure_ascii=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class AnswerRow(ReplayTrial):
    """A trial and its result."""

    asked_s: float  # stream time of the question: the end of the first step that reaches t0 + delay
    prediction: str
    correct: bool  # right by the official rule or the judge
    ttft_ms: float  # from the question's arrival to the first token
    total_ms: float  # from the question's arrival to the last token
    context_tokens: int  # tokens of the stream that attention could see; the prompt is not counted
    state_bytes: int  # bytes of the memory
    # mean time of a step until then, without the shared vision tower; of a shared forward its part
    step_ms: float
    tokens_seen: int  # visual tokens of the stream until then
    device: str
    points: float | None = None  # points of the judge, from 0 to 5
    judge: str = ""  # the judge of `correct`; empty: the rule of the data set
    mean_logprob: float | None = None  # how sure the answer was; None in rows of before
    at_once: int = 1  # questions that were answered together, this one included

    @property
    def is_unanswerable(self) -> bool:
        """Whether the right answer, or the option behind its letter, is that there is none."""
        option = self.asked.partition(f"{self.expected}. ")[2]
        return any(one.casefold().startswith(_NONE) for one in (self.expected, option))

    @property
    def has_choices(self) -> bool:
        """Whether the question named options, such as `A. red B. blue`."""
        return " B. " in self.asked.replace("\n", " ")


def read_answer_rows(paths: Iterable[str | Path]) -> list[AnswerRow]:
    """Read the rows of some files, packed with gzip if they end in .gz; of equal rows keep the last
    one.

    SourceNotFound: a file does not exist. ConfigError: as `parse_answer_rows`, or the rows are of
    different studies.
    """
    rows: dict[str, AnswerRow] = {}
    facts: JsonObject = {}
    for path in map(Path, paths):
        if not path.is_file():
            raise SourceNotFound(
                f"there are no results at {path}", hint="protokv replay ... -o results.jsonl"
            )
        for number, row in parse_answer_rows(path, AnswerRow):
            _check_study(
                facts, row, f"{path} line {number} is", "show the results of each study by itself"
            )
            rows[row.key] = row
    return list(rows.values())


def parse_answer_rows(path: Path, kind: type[_R]) -> Iterator[tuple[int, _R]]:
    """Yield each row of a file with the number of its line; a torn last line is left out, and so
    are unknown keys.

    ConfigError: a line that is not the last one is no row, or a packed file is damaged.
    """
    lines = read_results_text(path).split("\n")
    for number, line in enumerate(lines, start=1):
        try:
            if line.strip():
                yield number, msgspec.json.decode(line, type=kind)
        except msgspec.DecodeError as error:
            if number < len(lines):
                raise ConfigError(
                    f"{path} line {number} is not a row of results: {error}"
                ) from error


def _check_study(facts: JsonObject, trial: ReplayTrial, where: str, hint: str) -> None:
    """Add the facts of a trial to those of a study. ConfigError: it contradicts one; names it with
    both values.
    """
    for name, value in trial.study.items():
        if name in facts and facts[name] != value:
            was, now = _differ(facts[name], value)
            raise ConfigError(
                f"{where} of another study: {name} had {was} and now has {now}", hint=hint
            )
        facts[name] = value


def _differ(old: Any, new: Any) -> tuple[str, str]:
    """Describe how two values differ; of two objects, the first key that differs."""
    if isinstance(old, dict) and isinstance(new, dict):
        key = next(key for key in [*new, *old] if old.get(key) != new.get(key))
        was, now = _differ(old.get(key), new.get(key))
        return f"{key} {was}", f"{key} {now}"
    return format_setting_value(old), format_setting_value(new)


# The beginning of a row; only a torn row may be cut off.
_ROW_START = b'{"video": '


def read_results_text(path: Path) -> str:
    """Return a file of results as text, unpacked if it ends in .gz. ConfigError: it cannot be
    read.
    """
    try:
        return (
            gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
        ).decode()
    except (OSError, EOFError, zlib.error, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} cannot be read as results: {error}") from error


def cut_torn_answer_row(path: Path, start: bytes) -> None:
    """Cut off a torn last line. ConfigError: it does not begin like a row, with `start`."""
    whole, newline, torn = path.read_bytes().rpartition(b"\n")
    if torn and torn[: len(start)] != start[: len(torn)]:
        raise ConfigError(
            f"{path} does not end in a row of results", hint="name another file with -o"
        )
    if torn:
        path.write_bytes(whole + newline)


class AnswerRowFile:
    """A file that rows are appended to, and its `rows` by key."""

    def __init__(self, path: str | Path, *, start_over: bool = False) -> None:
        """Read the rows that are done; cut off a torn last line. ConfigError: the file holds
        something else.
        """
        self.path = Path(path)
        if start_over or not self.path.exists():
            self.path.write_text("", encoding="utf-8")
        self.rows = {row.key: row for row in read_answer_rows([self.path])}
        cut_torn_answer_row(self.path, _ROW_START)

    def append(self, row: AnswerRow) -> None:
        """Append one row."""
        with self.path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(asdict(row), ensure_ascii=False) + "\n")
        self.rows[row.key] = row

    def check(self, trials: Iterable[ReplayTrial]) -> None:
        """Refuse trials of another study. ConfigError: a row and a trial contradict each other."""
        facts: JsonObject = {}
        for row in self.rows.values():
            facts.update(row.study)
        for trial in trials:
            _check_study(
                facts,
                trial,
                f"{self.path} holds results",
                "name another file with -o, or use --force",
            )
