"""Worlds with evidence that lasts for minutes: shapes that appear several times, and one that
crosses the picture.

Three shapes appear one to four times, all over the stream or, in every second world, within one
minute. Another one crosses the picture in one to two minutes. There are 24 events of other shapes.
Makes worlds and questions; knows no model.
"""

from __future__ import annotations

from typing import Final

import numpy as np

from samples.questions import Question
from samples.seeds import TIME_CARD
from samples.training.order_worlds import DISTRACTORS, LENGTHS_S
from samples.worlds.events import BLOCK_S
from samples.worlds.phrases import TIME_TYPES
from samples.worlds.questions import find_facts, phrase
from samples.worlds.world import World, WorldConfig

COUNTED: Final = 3
_CROSSING_S: Final = (60, 90, 120)


def make_time_world(place: str, index: int) -> World:
    """Make world number `index`; the crossing, and appearances within one minute, lie at `place` of
    the stream.
    """
    length_s = LENGTHS_S[index // 2 % len(LENGTHS_S)]
    takes_s = _CROSSING_S[index // 6 % len(_CROSSING_S)]
    minutes = length_s // BLOCK_S
    minute, begins_s = {
        "start": (0, 0),
        "middle": (minutes // 2, (length_s - takes_s) // 2),
        "end": (minutes - 1, length_s - takes_s),
    }[place]
    return World(
        WorldConfig(
            TIME_CARD[index],
            length_s,
            DISTRACTORS * BLOCK_S / length_s,
            counted=COUNTED,
            counted_in=(0, minutes) if index % 2 == 0 else (minute, 1),
            crossing_s=(begins_s, begins_s + takes_s),
        )
    )


def ask_time(world: World, kinds: tuple[str, ...] = TIME_TYPES) -> list[Question]:
    """Ask at the end of `world` how often each counted shape appeared, and where the crossing one
    was.
    """
    ask_s = world.config.length_s
    events = world.events_until(ask_s)
    asked = []
    for number, kind in enumerate(kinds):
        rng = np.random.default_rng([world.config.seed, 33, number])
        shapes = {event.shape for event in (world.counted if kind == "times" else world.crossing)}
        asked += [
            Question(phrase(rng, kind, fact), fact.answer, kind, fact.evidence_s, float(ask_s))
            for fact in find_facts(kind, events, ask_s)
            if events[fact.evidence[0]].shape in shapes
        ]
    return asked
