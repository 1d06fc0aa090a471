"""The held-out worlds of the model card: few events, many events, or evidence before a crowd."""

from __future__ import annotations

from typing import Final

import numpy as np

from samples.seeds import CARD, DEMONSTRATION, DEVELOPMENT, STUDY
from samples.worlds.world import World, WorldConfig

LENGTHS: Final = (8, 32, 64, 128, 256)
"""Lengths of the streams of the card, in steps of one second."""

LOADS: Final = ("few", "many", "crowd")


def make_held_out_world(load: str, length: int, index: int) -> World:
    """Make world number `index` of a table cell.

    "few" has 1 to 4 events. "many" has 6 to 24 if they fit, and questions about any of them.
    "crowd" has 4 events of evidence in the first quarter, at most a minute, and then 12 distracting
    events a minute.
    """
    seed = CARD.start + 10_000 * length + index
    if load == "crowd":
        first_s = min(60, max(16, length // 4))
        return World(WorldConfig(seed, length, 12.0, evidence_events=4, evidence_s=first_s))
    rng = np.random.default_rng([seed, 30])
    least, most = (1, 4) if load == "few" else (6, max(6, min(24, length // 3)))
    while True:
        target = int(rng.integers(least, most + 1))
        drawn = int(rng.integers(2**40))
        if any(drawn in taken for taken in (DEMONSTRATION, DEVELOPMENT, STUDY)):
            continue
        world = World(WorldConfig(drawn, length, min(40.0, 60 * target / length)))
        # Rates are rounded at random, and short streams hold fewer events, so draw until the number
        # fits.
        if min(least, 5) <= len(world.events_until(length)) <= most:
            return world
