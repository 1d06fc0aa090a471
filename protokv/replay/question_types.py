"""Types of questions: how tables group them, and whether a delayed query is fair to them.

One registry for every data set; a new one adds its types here, by the names that it gives them. A sweep over delays is
fair to a question about the past whose answer does not change while the stream goes on (`retrospective`): the paper,
section 4, "Delayed-Query Protocol". Knows no question and no row.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final


@dataclass(frozen=True, slots=True)
class QuestionType:
    """A type of questions.

    Attributes:
        name: as the data set has it; empty where it says none.
        group: what tables show together: "content" (what was there), "order" (of events) or "other".
        retrospective: whether the answer stays true while the stream goes on.
    """

    name: str
    group: str = "other"
    retrospective: bool = True


_ALL: Final = (
    # The procedural world (`protokv.mini.questions`); "last" and "count" change while things keep coming.
    *(QuestionType(name, "content") for name in ("colour", "shape", "where", "at", "whether")),
    *(QuestionType(name, "order") for name in ("first", "which_first", "which_last")),
    *(QuestionType(name, retrospective=False) for name in ("last", "count", "now", "anything_now")),
    # RVS-Ego and RVS-Movie: the two kinds of yes / no, and the order of events.
    QuestionType("Whether Something Happened(Y/N)"),
    *(QuestionType(name, "order") for name in ("Order Judging(Y/N)", "What event order")),
    # OVO-Bench, backward tracing: episodic memory, action sequence, hallucination.
    *(QuestionType(name) for name in ("EPM", "HLD")),
    QuestionType("ASI", "order"),
)

TYPES: Final = {kind.name: kind for kind in _ALL}

GROUPS: Final = tuple(dict.fromkeys(kind.group for kind in _ALL if kind.group != "other"))
"""The groups in the order of tables; "other" comes after them."""


def find_type(name: str) -> QuestionType:
    """The type of a name. An unknown one may change with time; a question without a type is taken as it is."""
    return TYPES.get(name) or QuestionType(name, retrospective=not name)
