"""Recipes with the mock instead of a model, some with accidents. Worker processes import them by name."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from protokv.core.backbone import Backbone, BackboneIdentity, PreparedStep
from protokv.core.step import StepTokens
from protokv.errors import ModelError
from protokv.fleet import Recipe
from tests.mock_backbone import MockBackbone


class Hooked(MockBackbone):
    """Calls a function before every step."""

    def __init__(self, before: Callable[[PreparedStep], None]) -> None:
        super().__init__()
        self._before = before

    def embed_steps(self, steps: Sequence[PreparedStep], times_s: Sequence[float]) -> list[StepTokens]:
        self._before(steps[0])
        return super().embed_steps(steps, times_s)


@dataclass(frozen=True, kw_only=True)
class MockRecipe(Recipe):
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
    """Kills its process at a step of this redness, up to the loss of the codec, once: it removes the file `life`."""

    at: int
    life: Path

    def load(self, device: str) -> Backbone:
        super().load(device)

        def kill(step: PreparedStep) -> None:
            if abs(float(step.pixels[0, 0]) * 255 - self.at) < 6 and self.life.exists():
                self.life.unlink()
                os.kill(os.getpid(), signal.SIGKILL)

        return Hooked(kill)


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
