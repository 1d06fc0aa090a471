"""How long a plan would take, from a few steps and one answer of it: an estimate for `--dry-run`, and a low one.

Memories are nearly empty in these steps, and what a full one costs is not seen.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import islice
from typing import Any

from protokv.backbones.base import Backbone
from protokv.core.session import Session
from protokv.replay.plan import Plan
from protokv.replay.runner import synchronise


@dataclass(frozen=True, slots=True)
class Pace:
    """Seconds of one step through the vision tower, of one through a memory, and of one answer."""

    embed_s: float
    take_s: float
    answer_s: float

    def estimate_s(self, cost: Mapping[str, Any]) -> float:
        """Seconds for what `Plan.cost` counts."""
        return float(cost["embedded"] * self.embed_s + cost["steps"] * self.take_s + cost["answers"] * self.answer_s)


def measure_pace(plan: Plan, backbone: Backbone, *, steps: int = 4) -> Pace | None:
    """Time the first steps of the first stream under its first memory; None if there is nothing to do.

    Raises:
        SourceError: its video cannot be read.
    """
    found = next(((stream, one) for stream, asked in plan.asked for one in asked if not one.variant.blind), None)
    if found is None:
        return None
    (stream, one), setup = found, plan.setup
    session = Session.start(backbone, one.variant.config, fps=setup.fps)
    embed, take = [], []
    for step in islice(stream.steps(setup.fps, setup.frames_per_step), steps):
        began = time.perf_counter()
        tokens = session.embed(step.images, step.time_s)
        synchronise(backbone)
        seen = time.perf_counter()
        session.take([tokens], [step.time_s])
        synchronise(backbone)
        embed.append(seen - began)
        take.append(time.perf_counter() - seen)
    began = time.perf_counter()
    session.ask(one.trial.prompt or one.trial.question, setup.decoding)
    answer = time.perf_counter() - began
    # The first step of each pays for what is set up once.
    return Pace(min(embed, default=0.0), min(take, default=0.0), answer)
