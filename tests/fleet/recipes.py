"""Recipes with the mock instead of a model, some with accidents. Worker processes import them by name."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from protokv.core.backbone import Backbone, BackboneIdentity, PreparedStep
from protokv.core.step import StepTokens
from protokv.errors import ModelError
from protokv.fleet import Recipe
from tests.mock_backbone import MockBackbone

R = TypeVar("R", bound=Recipe)


def remade(recipe: Recipe, kind: type[R], **changes: Any) -> R:
    """Return a recipe as another kind, with the same place and options unless changed."""
    return kind(**{"place": recipe.place, "options": recipe.options, **changes})


class Hooked(MockBackbone):
    """Calls a function before every step."""

    def __init__(self, before: Callable[[PreparedStep], None]) -> None:
        super().__init__()
        self._before = before

    def embed_steps(self, steps: Sequence[PreparedStep], times_s: Sequence[float]) -> list[StepTokens]:
        self._before(steps[0])
        return super().embed_steps(steps, times_s)


def is_red(step: PreparedStep, red: int) -> bool:
    """Return True if the frames of a step have this redness, up to the loss of the codec."""
    return abs(float(step.pixels[0, 0]) * 255 - red) < 6


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
    """Kills its process at a step of this redness; each time it takes a byte of the file `lives`, until it is empty."""

    at: int
    lives: Path

    def load(self, device: str) -> Backbone:
        super().load(device)

        def kill(step: PreparedStep) -> None:
            left = self.lives.stat().st_size
            if left and is_red(step, self.at):
                os.truncate(self.lives, left - 1)
                os.kill(os.getpid(), signal.SIGKILL)

        return Hooked(kill)


@dataclass(frozen=True, kw_only=True)
class MissingRecipe(MockRecipe):
    """Has no model to load."""

    def load(self, device: str) -> Backbone:
        raise ModelError("there is no model", hint="find one")


@dataclass(frozen=True, kw_only=True)
class WaitingRecipe(MockRecipe):
    """Waits for a byte from a pipe before every step, and then writes a dot to stdout."""

    gate: Path

    def load(self, device: str) -> Backbone:
        gate = self.gate.open("rb", buffering=0)

        def wait(_: PreparedStep) -> None:
            gate.read(1)
            os.write(1, b".")

        return Hooked(wait)
