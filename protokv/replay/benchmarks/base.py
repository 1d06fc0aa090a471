"""What a published benchmark is: videos with questions, the wording of a prompt, and rules that score an answer.

A data set is one file that implements `Benchmark` and one line in `BENCHMARKS`. It reads annotations and nothing else:
it opens no video, knows no model and no memory.
"""

from __future__ import annotations

import hashlib
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import ClassVar, Self

from protokv.replay.questions import Question, QuestionType


@dataclass(frozen=True, slots=True)
class Video:
    """One video of a data set and all questions about it.

    Attributes:
        name: as the annotations have it; tells it from all others.
        path: where the annotations say it is, in any of the usual layouts (`files.find_video`).
        questions: about it, in order of the annotations.
        rate_fps: frames per second if it is an array of key frames (`.npy`) and not a video file.
        clip_s: start and end of the part that the questions are about, where a file may hold that part alone.
    """

    name: str
    path: str
    questions: tuple[Question, ...]
    rate_fps: float = 1.0
    clip_s: tuple[float, float] | None = None


@dataclass(frozen=True, slots=True)
class Annotations:
    """What was read.

    Attributes:
        videos: in order of the annotations.
        notes: what was left out, or is not as published, and how often.
    """

    videos: tuple[Video, ...]
    notes: Mapping[str, int] = field(default_factory=dict)

    @classmethod
    def of(cls, questions: Mapping[str, Sequence[Question]], notes: Counter[str] | None = None) -> Self:
        """Of questions by the path of their video, which is its name; notes that count nothing are left out."""
        return cls(tuple(Video(path, path, tuple(asked)) for path, asked in questions.items()), +(notes or Counter()))


@dataclass(frozen=True, slots=True)
class Score:
    """Whether an answer is right.

    Attributes:
        official: by the rule of the benchmark's own code.
        strict: by a rule that no other text satisfies by chance; the same where the official rule is strict.
    """

    official: bool
    strict: bool


class Benchmark(ABC):
    """A data set and its protocol.

    Attributes:
        name: on the command line and in rows.
        types: of its questions, by its own names, in the order of tables.
        templates: the literal prompts; their digest stands beside every number.
        source: address of the annotations and of the scoring code.
        licence: of the annotations.
        fps: frames per second that its protocol fixes; None: it leaves that to the model.
        open_ended: answers are sentences, for a judge to read.
        max_new_tokens: room for an answer.
    """

    name: ClassVar[str]
    types: ClassVar[tuple[QuestionType, ...]]
    templates: ClassVar[tuple[str, ...]]
    source: ClassVar[str]
    licence: ClassVar[str]
    fps: ClassVar[float | None] = None
    open_ended: ClassVar[bool] = False
    max_new_tokens: ClassVar[int] = 16

    @property
    def prompt_hash(self) -> str:
        """Twelve hexadecimal digits of the SHA-256 of the templates."""
        return hashlib.sha256("\0".join(self.templates).encode()).hexdigest()[:12]

    @abstractmethod
    def load(self, root: Path, *, from_evidence: bool = False) -> Annotations:
        """Read the annotations below a folder.

        Args:
            root: of the data set.
            from_evidence: delays are to be counted from the evidence where the annotations know when it was.

        Raises:
            SourceNotFound: there are no annotations; the file that was looked for is named.
            ConfigError: they are not as published; the place is named.
        """

    @abstractmethod
    def score(self, prediction: str, expected: str, kind: str, options: Sequence[str]) -> Score:
        """Score an answer to the official prompt.

        Args:
            prediction: what the model wrote.
            expected: the answer as the question has it: a letter where there are options.
            kind: the type of the question.
            options: of the question.
        """

    def means(self, shares: Mapping[str, float]) -> dict[str, float]:
        """The numbers that papers print for it.

        Args:
            shares: type -> accuracy, of the types that were asked.

        Returns:
            Name -> value; what cannot be formed from these types is left out.
        """
        return {}


def mean_of(shares: Mapping[str, float], types: Sequence[str]) -> float | None:
    """The mean over types, each counted once; None unless all were asked."""
    return sum(shares[name] for name in types) / len(types) if types and all(t in shares for t in types) else None
