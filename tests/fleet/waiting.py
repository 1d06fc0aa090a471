"""A model that waits for a byte from a pipe before every step, and says a dot on stdout behind it."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from protokv.backbones.base import Backbone, StepTokens
from tests.fleet.models import MockModel
from tests.mock_backbone import MockBackbone


@dataclass(frozen=True, kw_only=True)
class WaitingModel(MockModel):
    gate: Path

    def load(self, device: str) -> Backbone:
        gate = self.gate.open("rb", buffering=0)

        class Waiting(MockBackbone):
            def embed_step(self, images: Any, time_s: float = 0.0) -> StepTokens:
                gate.read(1)
                os.write(1, b".")
                return super().embed_step(images, time_s)

        return Waiting()
