"""Models of workers, found by name in processes that import them: the mock, and what goes wrong with one."""

from __future__ import annotations

import os
import signal
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from protokv.backbones.base import Backbone, PreparedStep
from protokv.core.records import BackboneIdentity
from protokv.core.step import StepTokens
from protokv.errors import ModelError
from protokv.fleet import Model
from tests.mock_backbone import MockBackbone


def is_red(step: PreparedStep, red: int) -> bool:
    """Whether the frames of a step are of this redness, as far as a codec keeps it."""
    return abs(float(step.pixels[0, 0]) * 255 - red) < 6


@dataclass(frozen=True, kw_only=True)
class MockModel(Model):
    """Loads at once, and writes a line into `log` when it does."""

    log: Path | None = None

    def load(self, device: str) -> Backbone:
        if self.log is not None:
            with self.log.open("a") as log:
                log.write(f"{os.getpid()} {device}\n")
        return MockBackbone()

    def identify(self, device: str) -> BackboneIdentity:
        return MockBackbone().identity


@dataclass(frozen=True, kw_only=True)
class KillingModel(MockModel):
    """Kills its process at the step that is of this redness, as long as `lives` can be made shorter."""

    at: int
    lives: Path

    def load(self, device: str) -> Backbone:
        super().load(device)
        model = self

        class Killing(MockBackbone):
            def embed_steps(self, steps: Sequence[PreparedStep], times_s: Sequence[float]) -> list[StepTokens]:
                left = model.lives.stat().st_size
                if left and is_red(steps[0], model.at):
                    os.truncate(model.lives, left - 1)
                    os.kill(os.getpid(), signal.SIGKILL)
                return super().embed_steps(steps, times_s)

        return Killing()


@dataclass(frozen=True, kw_only=True)
class MissingModel(MockModel):
    """Is nowhere."""

    def load(self, device: str) -> Backbone:
        raise ModelError("there is no model", hint="find one")


@dataclass(frozen=True, kw_only=True)
class HeavyModel(MockModel):
    """Takes more memory than there is."""

    def load(self, device: str) -> Backbone:
        os.kill(os.getpid(), signal.SIGKILL)
        raise AssertionError
