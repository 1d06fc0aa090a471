"""The interface of a published benchmark: videos with questions, the prompt, and the rule that scores an answer.

A data set reads annotations only: it opens no video and knows no model and no memory.
"""

from __future__ import annotations

import hashlib
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import ClassVar, Final, Self

from protokv.replay.questions import Question

OTHER_GROUP: Final = "other"
"""The group of types without a group."""


@dataclass(frozen=True, slots=True)
class QuestionType:
    """A type of questions.

    Attributes:
        name: as the data set has it; empty: none.
        group: counted together, such as "order" (of events) or "backward".
        retrospective: the answer stays true while the stream goes on.
    """

    name: str
    group: str = OTHER_GROUP
    retrospective: bool = True


@dataclass(frozen=True, slots=True)
class Video:
    """One video of a data set and all questions about it.

    Attributes:
        name: its unique name in the annotations.
        path: its path in the annotations; `files.find_video` finds the file.
        questions: in order of the annotations.
        clip_s: start and end of the part that the questions are about, if a file may hold only that part.
    """

    name: str
    path: str
    questions: tuple[Question, ...]
    clip_s: tuple[float, float] | None = None


@dataclass(frozen=True, slots=True)
class Annotations:
    """The annotations of a data set.

    Attributes:
        videos: in order of the annotations.
        notes: what was left out or differs from the publication -> how often.
    """

    videos: tuple[Video, ...]
    notes: Mapping[str, int] = field(default_factory=dict)

    @classmethod
    def group(cls, questions: Mapping[str, Sequence[Question]], notes: Counter[str] | None = None) -> Self:
        """Make them from questions by the path of their video, which is its name; drop notes that count nothing."""
        return cls(tuple(Video(path, path, tuple(asked)) for path, asked in questions.items()), +(notes or Counter()))


class Benchmark(ABC):
    """A data set and its protocol.

    Attributes:
        name: its name on the command line and in rows.
        types: the types of its questions, in the order of tables.
        templates: the literal prompts; reports show their digest.
        source: address of the annotations and of the scoring code.
        fps: frames per second of its protocol; None: the model's own.
        open_ended: answers are sentences, for a judge to read.
        max_new_tokens: the longest answer.
        judge: the rule of `score`, if it is not the benchmark's own.
    """

    name: ClassVar[str]
    types: ClassVar[tuple[QuestionType, ...]]
    templates: ClassVar[tuple[str, ...]]
    source: ClassVar[str]
    fps: ClassVar[float | None] = None
    open_ended: ClassVar[bool] = False
    max_new_tokens: ClassVar[int] = 16
    judge: ClassVar[str] = ""

    @property
    def prompt_hash(self) -> str:
        """Twelve hexadecimal digits of the SHA-256 of the templates."""
        return hashlib.sha256("\0".join(self.templates).encode()).hexdigest()[:12]

    def find_type(self, name: str) -> QuestionType:
        """Return a type by its name; the answers of an unknown one may change with time."""
        return next((kind for kind in self.types if kind.name == name), QuestionType(name, retrospective=False))

    @abstractmethod
    def load(self, root: Path) -> Annotations:
        """Read the annotations below a folder.

        Raises:
            SourceNotFound: there are no annotations; names the expected file.
            ConfigError: they are not as published; names the place.
        """

    @abstractmethod
    def is_right(self, prediction: str, expected: str, kind: str) -> bool:
        """Score an answer to the official prompt by the official rule; `kind` is the type, a letter may be expected."""

    def means(self, shares: Mapping[str, float]) -> dict[str, float]:
        """Return the numbers that papers print, by name, from the accuracies of the types that were asked.

        A number is left out if one of its types was not asked.
        """
        return {}


def average_types(shares: Mapping[str, float], types: Sequence[str]) -> float | None:
    """Return the mean over types, each counted once; None unless all were asked."""
    return sum(shares[name] for name in types) / len(types) if types and all(t in shares for t in types) else None
