"""Recipes with the mock instead of a model, some with accidents. Worker processes import them by
name.
"""

import os
import signal
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from protokv.core.backbone import Backbone, BackboneIdentity, PreparedStep
from protokv.errors import ModelError
from protokv.fleet import JobRecipe
from tests.mock_backbone import MockBackbone


@dataclass(frozen=True, kw_only=True)
class MockRecipe(JobRecipe):
    """Loads the mock, and appends a line to `log` each time."""

    log: Path | None = None

    def load(self, device: str) -> Backbone:
        if self.log is not None:
            with self.log.open("a") as log:
                log.write(f"{os.getpid()} {device}\n")
        return MockBackbone()

    def identify(self, device: str) -> BackboneIdentity:
        return MockBackbone().identity


@dataclass(frozen=True, kw_only=True)
class KillingRecipe(MockRecipe):
    """Kills its process at a step of this redness, up to the loss of the codec, once: it removes
    the file `life`.
    """

    at: int
    life: Path

    def load(self, device: str) -> Backbone:
        backbone: Any = super().load(device)
        embed = backbone.embed_steps

        def kill(steps: Sequence[PreparedStep], times_s: Sequence[float]) -> Any:
            if abs(float(steps[0].pixels[0, 0]) * 255 - self.at) < 6 and self.life.exists():
                self.life.unlink()
                os.kill(os.getpid(), signal.SIGKILL)
            return embed(steps, times_s)

        backbone.embed_steps = kill
        return backbone


@dataclass(frozen=True, kw_only=True)
class MissingRecipe(MockRecipe):
    """Has no model to load."""

    def load(self, device: str) -> Backbone:
        raise ModelError("there is no model", hint="find one")


@dataclass(frozen=True, kw_only=True)
class OrphanedRecipe(MockRecipe):
    """Kills the process of the coordinator while it loads the model, and goes on for a minute."""

    def load(self, device: str) -> Any:
        os.kill(os.getppid(), signal.SIGKILL)
        time.sleep(60)
