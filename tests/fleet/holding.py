"""A model that says where it is at one step of a video, once, and waits there until it is ended."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from protokv.backbones.base import Backbone, PreparedStep
from protokv.core.step import StepTokens
from tests.fleet.models import MockModel, is_red
from tests.mock_backbone import MockBackbone


@dataclass(frozen=True, kw_only=True)
class HoldingModel(MockModel):
    """Args: `says`: a FIFO that takes the node and the process; `once`: a folder that the first one makes."""

    at: int
    says: Path
    once: Path

    def load(self, device: str) -> Backbone:
        model = self

        class Holding(MockBackbone):
            def embed_steps(self, steps: Sequence[PreparedStep], times_s: Sequence[float]) -> list[StepTokens]:
                if is_red(steps[0], model.at):
                    model.hold()
                return super().embed_steps(steps, times_s)

        return Holding()

    def hold(self) -> None:
        try:
            self.once.mkdir()
        except FileExistsError:
            return
        import ray

        self.says.write_text(f"{ray.get_runtime_context().get_node_id()} {os.getpid()}")
        # Nobody writes there any more.
        self.says.read_text()
