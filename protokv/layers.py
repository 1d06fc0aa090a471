"""Which layers of a model stand on which device, as runs of consecutive ones.

A model that is larger than one device is spread over several by layers. What belongs to a layer (keys, values, its part
of a memory) stays where the layer is, so attention never moves it. Knows nothing of models and memories.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby

import torch


@dataclass(frozen=True, slots=True)
class LayerRun:
    """Layers `start` to `stop`, without the last, on one device."""

    start: int
    stop: int
    device: torch.device

    def __len__(self) -> int:
        return self.stop - self.start

    @property
    def layers(self) -> slice:
        """As an index into tensors whose first axis is the layers of the model."""
        return slice(self.start, self.stop)


def runs_of(devices: Sequence[torch.device]) -> list[LayerRun]:
    """The runs of a model whose layers stand on these devices, one a layer; longest possible, in order."""
    runs = []
    for device, layers in groupby(range(len(devices)), key=devices.__getitem__):
        first, *others = layers
        runs.append(LayerRun(first, first + 1 + len(others), device))
    return runs
