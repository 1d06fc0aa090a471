"""Run stages: updates, records of accuracy and losses, gates, and a file at the end of each stage.

The trainer of a stage makes its batches and losses. Random draws depend only on the seed and the
number of the stage, so a run that resumes between two stages ends with the same weights.
"""

from __future__ import annotations

import copy
import math
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, ClassVar, Generic, Protocol, TypeVar

import numpy as np
import torch
from safetensors.torch import load_file
from torch import Tensor
from torch.nn import Parameter
from transformers import Qwen2_5_VLForConditionalGeneration

from samples.training.optimizer import MasterAdamW
from samples.training.stages import Say, save_atomically

WINDOW = 100
"""Steps between two records; a gate looks at the accuracy of one record."""


class Course(Protocol):
    """The fields of a stage that the loop reads; see `curriculum.Stage`."""

    @property
    def name(self) -> str: ...  # noqa: D102
    @property
    def steps(self) -> int: ...  # noqa: D102
    @property
    def rate(self) -> float: ...  # noqa: D102
    @property
    def rate_end(self) -> float | None: ...  # noqa: D102
    @property
    def warm_up(self) -> int: ...  # noqa: D102
    @property
    def gate(self) -> Mapping[str, float]: ...  # noqa: D102
    @property
    def gate_times(self) -> int: ...  # noqa: D102


AnyStage = TypeVar("AnyStage", bound=Course)


@dataclass(frozen=True, slots=True)
class Outcome:
    """The result of one batch: its loss, (key, right) of each answer, and further losses by
    name.
    """

    loss: Tensor
    verdicts: Iterable[tuple[str, bool]] = ()
    losses: Mapping[str, float] = field(default_factory=dict)


def stage_file(folder: Path, stage: Course) -> Path:
    """Return the file with the result of a stage."""
    return folder / f"stage-{stage.name}.safetensors"


def rate_at(stage: Course, step: int) -> float:
    """Return the learning rate: a short linear warm-up, then constant, or a cosine down to
    `rate_end`.
    """
    rate = stage.rate
    if stage.rate_end is not None:
        rate = stage.rate_end + (rate - stage.rate_end) * 0.5 * (
            1 + math.cos(math.pi * step / stage.steps)
        )
    return rate * min(1.0, (step + 1) / stage.warm_up)


class Loop(ABC, Generic[AnyStage]):
    """A model and its optimiser that go through stages."""

    stream: ClassVar[int]
    """The second word of the seed of a stage's generator."""
    window: ClassVar[int] = WINDOW

    def __init__(
        self,
        model: Qwen2_5_VLForConditionalGeneration,
        seed: int,
        say: Say,
        dtype: torch.dtype = torch.bfloat16,
        further: Iterable[tuple[str, Parameter]] = (),
    ) -> None:
        """Take a float32 model, whose vision tower is frozen, and `further` named parameters to
        train.
        """
        self.model = model
        self.seed = seed
        self.say = say
        model.model.visual.requires_grad_(False)
        trained = [(n, p) for n, p in model.named_parameters() if p.requires_grad]
        self.optimizer = MasterAdamW([*trained, *further], dtype)
        # The output layer is tied to the embedding, whose dtype has just changed.
        model.tie_weights()

    @abstractmethod
    def learn(self, rng: np.random.Generator, stage: AnyStage, progress: float) -> Outcome:
        """Compute the loss of the next batch at the fraction `progress` of a stage."""

    def begin(self, stage: AnyStage) -> None:
        """Prepare a stage."""

    def measure(self, stage: AnyStage) -> Mapping[str, Any]:
        """Return what to record at the end of a stage."""
        return {}

    def run(self, folder: Path, curriculum: Sequence[AnyStage]) -> None:
        """Run the stages in order; a stage whose file is in `folder` is done."""
        done = [i for i, stage in enumerate(curriculum) if stage_file(folder, stage).exists()]
        first = 0
        if done:
            first = done[-1] + 1
            self.optimizer.load(load_file(stage_file(folder, curriculum[done[-1]])))
            self.say({"resumed_after": curriculum[done[-1]].name})
        for index in range(first, len(curriculum)):
            self.run_stage(curriculum[index], index)
            save_atomically(self.optimizer.tensors(), stage_file(folder, curriculum[index]))

    def run_stage(self, stage: AnyStage, index: int) -> float:
        """Train one stage and return the mean loss of its last window."""
        rng = np.random.default_rng([self.seed, self.stream, index])
        self.begin(stage)
        self.say({"stage": stage.name, "begin": asdict(stage)})  # type: ignore[call-overload]
        counts: dict[str, list[int]] = {}
        sums: dict[str, list[float]] = {}
        loss_sum = 0.0
        met = 0
        n = 0
        mean = math.inf
        for step in range(stage.steps):
            outcome = self.learn(rng, stage, step / stage.steps)
            outcome.loss.backward()  # type: ignore[no-untyped-call]
            self.optimizer.step(rate_at(stage, step))
            loss_sum = loss_sum + outcome.loss.item()
            n = n + 1
            for key, ok in outcome.verdicts:
                pair = counts.setdefault(key, [0, 0])
                pair[0] += 1
                pair[1] += ok
            for key, loss in outcome.losses.items():
                sums.setdefault(key, []).append(loss)
            if n == self.window or step + 1 == stage.steps:
                mean = loss_sum / n
                accuracy = {k: round(v[1] / v[0], 3) for k, v in sorted(counts.items())}
                losses = {k: round(float(np.mean(v)), 4) for k, v in sums.items()}
                self.say(
                    {"stage": stage.name, "step": step + 1, "loss": round(mean, 4), **accuracy}
                    | ({"losses": losses} if losses else {})
                )
                met = (
                    met + 1 if all(accuracy.get(k, 0.0) >= v for k, v in stage.gate.items()) else 0
                )
                counts = {}
                sums = {}
                loss_sum = 0.0
                n = 0
                if stage.gate and met >= stage.gate_times:
                    break
        self.say({"stage": stage.name, "end": True, "steps": step + 1, **self.measure(stage)})
        return mean

    def float_model(self) -> Qwen2_5_VLForConditionalGeneration:
        """Return a float32 copy of the model with the master weights."""
        model = copy.deepcopy(self.model).float()
        parameters = dict(model.named_parameters())
        with torch.no_grad():
            for name, master in self.optimizer.masters.items():
                if name in parameters:
                    parameters[name].copy_(master)
        model.tie_weights()
        return model.eval()
