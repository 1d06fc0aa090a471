"""Types of questions: how tables group them, and whether a delayed query is fair to them.

A data set declares its own types, by the names that it gives them (`Benchmark.types`); those of the procedural world
stand here. A sweep over delays is fair to a question about the past whose answer does not change while the stream goes
on (`retrospective`): the paper, section 4, "Delayed-Query Protocol". Knows no question and no row.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

OTHER: Final = "other"
"""The group of what nobody has grouped; tables show it last."""


@dataclass(frozen=True, slots=True)
class QuestionType:
    """A type of questions.

    Attributes:
        name: as the data set has it; empty where it says none.
        group: what tables show together, such as "order" (of events) or "backward".
        retrospective: whether the answer stays true while the stream goes on.
    """

    name: str
    group: str = OTHER
    retrospective: bool = True


WORLD: Final = (
    # `protokv.mini.questions`; "last" and "count" change while things keep coming, and parts of the stream move.
    *(QuestionType(name, "content") for name in ("colour", "shape", "where", "at", "whether")),
    *(QuestionType(name, "order") for name in ("first", "which_first", "which_last", "before", "after")),
    *(QuestionType(name, "order") for name in ("middle_first", "middle_last", "middle_before", "middle_after")),
    # Asked of what happened in the first minutes of a stream.
    QuestionType("times", "counting"),
    *(QuestionType(name, "slow change") for name in ("where_first", "where_last")),
    *(QuestionType(name, retrospective=False) for name in ("last", "count", "now", "anything_now", "third", "tenth")),
)
"""Types of the procedural world."""


def find_types(dataset: str = "") -> tuple[QuestionType, ...]:
    """The types of a data set; where none is named those of the procedural world, and behind them all others."""
    from protokv.replay.benchmarks import BENCHMARKS

    if dataset:
        return BENCHMARKS[dataset].types if dataset in BENCHMARKS else ()
    return (*WORLD, *(kind for benchmark in BENCHMARKS.values() for kind in benchmark.types))


def find_type(name: str, dataset: str = "") -> QuestionType:
    """The type of a name. An unknown one may change with time; a question without a type is taken as it is."""
    found = (kind for kind in find_types(dataset) if kind.name == name)
    return next(found, None) or QuestionType(name, retrospective=not name)


def order_groups(dataset: str = "") -> tuple[str, ...]:
    """The groups of a data set in the order of tables."""
    groups = dict.fromkeys(kind.group for kind in find_types(dataset))
    return (*(group for group in groups if group != OTHER), OTHER)
