"""Worlds for questions of order: four events at the start, in the middle or at the end among 24
others.

The four lie within a minute or, in every second world, within 16 seconds. The others share no
shape, colour or place with them. The four may be shown twice, at the start and in the middle. Makes
worlds and questions; knows no model.
"""

from __future__ import annotations

from typing import Final

import numpy as np

from samples.questions import Question
from samples.seeds import ORDER_CARD
from samples.worlds.phrases import ORDER_TYPES
from samples.worlds.questions import find_facts, phrase, pick_different
from samples.worlds.world import World, WorldConfig

PLACES: Final = ("start", "middle", "end")
TWICE: Final = "twice"
DISTRACTORS: Final = 24
CONTENT: Final = ("colour", "shape", "where", "at", "whether")
ASKED: Final = (
    *(kind for kind in ORDER_TYPES if kind not in ("before", "after")),
    *CONTENT,
    "first",
    "last",
    "now",
)
"""Types in the order of the table: order first, then the types that training must not lose."""
ASKED_TWICE: Final = ("which_first", "which_last", "before", "after", "colour", "where")
"""Types with the same answer for both showings."""

LENGTHS_S: Final = (180, 240, 300)
_EVIDENCE_S: Final = (60, 16)


def make_order_world(place: str, index: int) -> World:
    """Make world number `index` with the evidence at `place`; the evidence itself depends on the
    index alone.

    Six successive worlds have six different pairs of length and density.
    """
    length_s = LENGTHS_S[index // 2 % len(LENGTHS_S)]
    evidence_s = _EVIDENCE_S[index % 2]
    middle_s = length_s // 120 * 60
    before_s = {"start": 0, "middle": middle_s, "end": length_s - evidence_s, TWICE: 0}[place]
    return World(
        WorldConfig(
            ORDER_CARD[index],
            length_s,
            60 * DISTRACTORS / (length_s - evidence_s),
            evidence_events=4,
            evidence_s=evidence_s,
            before_s=before_s,
            again_s=middle_s if place == TWICE else None,
        )
    )


def ask_order(world: World, kinds: tuple[str, ...] = ASKED, per_type: int = 4) -> list[Question]:
    """Ask up to `per_type` different facts of each type at the end of `world`; deterministic.

    A second showing adds no questions.
    """
    ask_s = world.config.length_s
    repeats = world.repeats()
    events = [event for event in world.events_until(ask_s) if event not in repeats]
    asked = []
    for number, kind in enumerate(kinds):
        rng = np.random.default_rng([world.config.seed, 32, number, world.config.before_s])
        for fact in pick_different(rng, find_facts(kind, events, ask_s), per_type):
            asked.append(
                Question(phrase(rng, kind, fact), fact.answer, kind, fact.evidence_s, float(ask_s))
            )
    return asked
