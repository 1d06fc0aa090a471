"""A model that waits for a byte from a pipe before every step, and says a dot on stdout behind it."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from protokv.backbones.base import Backbone, PreparedStep
from protokv.core.step import StepTokens
from tests.fleet.models import MockModel
from tests.mock_backbone import MockBackbone


@dataclass(frozen=True, kw_only=True)
class WaitingModel(MockModel):
    gate: Path

    def load(self, device: str) -> Backbone:
        gate = self.gate.open("rb", buffering=0)

        class Waiting(MockBackbone):
            def embed_steps(self, steps: Sequence[PreparedStep], times_s: Sequence[float]) -> list[StepTokens]:
                gate.read(1)
                os.write(1, b".")
                return super().embed_steps(steps, times_s)

        return Waiting()
