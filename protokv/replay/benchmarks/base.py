"""The interface of a published benchmark: videos with questions, the prompt, and the rule that
scores an answer.

A data set reads annotations only: it opens no video and knows no model and no memory.
"""

from __future__ import annotations

import hashlib
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import ClassVar

from protokv.replay.questions import ReplayQuestion

OTHER_GROUP = "other"
"""The group of types without a group."""


@dataclass(frozen=True, slots=True)
class QuestionType:
    """A type of questions."""

    name: str  # as the data set has it; empty: none
    group: str = OTHER_GROUP  # counted together, such as "order" (of events) or "backward"
    retrospective: bool = True  # the answer stays true while the stream goes on


@dataclass(frozen=True, slots=True)
class BenchmarkVideo:
    """One video of a data set."""

    name: str  # unique in the annotations
    path: str  # path in the annotations; `files.find_dataset_video` finds the file
    # the part that questions are about, if a file may hold only that part
    clip_s: tuple[float, float] | None = None


AskedQuestions = Iterator[tuple[BenchmarkVideo, ReplayQuestion]]


class Benchmark(ABC):
    """A data set and its protocol."""

    name: ClassVar[str]  # on the command line and in rows
    types: ClassVar[tuple[QuestionType, ...]]  # types in the order of tables
    templates: ClassVar[tuple[str, ...]]  # the literal prompts; reports show their digest
    source: ClassVar[str]  # address of the annotations and of the scoring code
    fps: ClassVar[float | None] = None  # frames per second of its protocol; None: the model's own
    open_ended: ClassVar[bool] = False  # answers are sentences, for a judge to read
    max_new_tokens: ClassVar[int] = 16
    judge: ClassVar[str] = ""  # the rule of `is_right`, if it is not the benchmark's own
    # numbers that papers print -> types, or numbers before, whose mean each is
    averages: ClassVar[Mapping[str, Sequence[str]]] = {}

    @property
    def prompt_hash(self) -> str:
        """Twelve hexadecimal digits of the SHA-256 of the templates."""
        return hashlib.sha256("\0".join(self.templates).encode()).hexdigest()[:12]

    def find_type(self, name: str) -> QuestionType:
        """Return a type by its name; the answers of an unknown one may change with time."""
        return next(
            (kind for kind in self.types if kind.name == name),
            QuestionType(name, retrospective=False),
        )

    @abstractmethod
    def read(self, root: Path, notes: Counter[str]) -> AskedQuestions:
        """Yield each question of the annotations below a folder with its video, in their order.

        `notes` counts what is left out or differs from the publication. SourceNotFound: there are
        no annotations; names the expected file. ConfigError: they are not as published; names the
        place.
        """

    @abstractmethod
    def is_right(self, prediction: str, expected: str, kind: str) -> bool:
        """Score an answer to the official prompt by the official rule; `kind` is the type, a letter
        may be expected.
        """

    def means(self, shares: Mapping[str, float]) -> dict[str, float]:
        """Return the numbers that papers print, by name, from the accuracies of the types that were
        asked.

        A number is left out if one of its types was not asked.
        """
        known = dict(shares)
        for name, parts in self.averages.items():
            if all(part in known for part in parts):
                known[name] = fmean(known[part] for part in parts)
        return {name: known[name] for name in self.averages if name in known}
