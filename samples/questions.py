"""Questions about a world of the embedded model, the answers that each type can have, and the
accuracy of guessing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from samples.worlds.phrases import GROUPS, TYPES
from samples.worlds.pictures import COLOUR_NAMES, NUMBERS, PARTS, PLACES, SHAPES, TENTHS
from samples.worlds.questions import find_facts, phrase, pick_different
from samples.worlds.speech import NAMES
from samples.worlds.world import World

# Their answer is one of the two shapes in the question.
_OF_TWO: Final = ("which_first", "which_last", "middle_first", "middle_last")
_YES_NO: Final = ("yes", "no")
ANSWERS: Final[dict[str, tuple[str, ...]]] = {
    **dict.fromkeys(("shape", "at", "first", "last", *_OF_TWO), SHAPES),
    **dict.fromkeys(
        ("whether", "anything_now", "before", "after", "middle_before", "middle_after"), _YES_NO
    ),
    **dict.fromkeys(("where", "where_first", "where_last"), PLACES),
    **dict.fromkeys(("count", "times"), NUMBERS[1:]),
    "colour": COLOUR_NAMES,
    "now": (*SHAPES, "nothing"),
    "third": PARTS,
    "tenth": TENTHS,
    "owner": NAMES,
    "owned": SHAPES,
    "colour_of": COLOUR_NAMES,
    "where_of": PLACES,
}
"""Type -> every answer it can have."""

CHANCE: Final[dict[str, float]] = {
    kind: 0.5 if kind in _OF_TWO else 1 / len(answers) for kind, answers in ANSWERS.items()
}
"""Type -> accuracy of a uniform guess."""


@dataclass(frozen=True, slots=True)
class Question:
    """A question in English; times in seconds from the start of the stream; `lasts`: its answer
    stays true.
    """

    question: str
    answer: str
    type: str
    evidence_s: float
    ask_s: float
    lasts: bool = True


def make_questions(
    world: World, ask_s: float, *, per_type: int = 1, types: Sequence[str] = TYPES, seed: int = 0
) -> list[Question]:
    """Make up to `per_type` different questions of each type about `world` at `ask_s`;
    deterministic.
    """
    events = world.events_until(ask_s)
    said = world.said(0, ask_s)
    rng = np.random.default_rng([world.config.seed, 4, seed, round(2 * ask_s)])
    made: dict[tuple[str, str], Question] = {}
    for kind in types:
        for fact in pick_different(rng, find_facts(kind, events, ask_s, said), per_type):
            text = phrase(rng, kind, fact)
            made[text, kind] = Question(
                text, fact.answer, kind, fact.evidence_s, float(ask_s), kind in GROUPS
            )
    return list(made.values())
