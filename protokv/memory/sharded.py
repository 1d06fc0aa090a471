"""`LayerShards`: the memory of a model whose layers stand on several devices, as one memory for each run of layers.

Every memory treats layers apart, so a part that is given the keys and values of some layers does to them what the whole
would do; only the choice of a device differs. Owns the dealing out of steps and the joining of states and contexts: the
state has the names, shapes and bytes of the memory of all layers, and one may load what the other saved. Knows no kind
of memory: which of its tensors have layers, and where, a memory says itself (`Memory.layer_axis`, `finished`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from protokv.config import MemoryConfig
from protokv.context import Anchoring, Context, Segment
from protokv.errors import ConfigError, StateCorrupt
from protokv.layers import LayerRun, runs_of
from protokv.memory.base import Memory, MemoryShape, StepKV
from protokv.rotary import Rotary


class LayerShards(Memory):
    """Memories of one kind, one for each run of layers."""

    def __init__(self, cls: type[Memory], config: MemoryConfig, shape: MemoryShape, rotary: Rotary) -> None:
        """Empty memories.

        Args:
            cls: their kind.
            config: of each.
            shape: of the whole model, with `layer_devices`.
            rotary: gives angles on the device of the positions.

        Raises:
            ConfigError: the config does not fit the model, or this kind needs all layers on one device.
        """
        if cls.across_layers:
            raise ConfigError(
                f"the memory {config.name} cannot be spread over devices: a layer of it looks at what another one did",
                hint="load the model on one device, or choose another memory",
            )
        self._cls, self._config, self._shape, self._rotary = cls, config, shape, rotary
        self._runs = runs_of(shape.layer_devices or [shape.device] * shape.layers)
        self._parts = self._empty_parts()

    def start(self, keys: Tensor, values: Tensor) -> None:
        """Take the prompt prefix; each part takes its layers."""
        for run, part in zip(self._runs, self._parts, strict=True):
            part.start(keys[run.layers].to(run.device), values[run.layers].to(run.device))

    def select(self, features: Tensor, grid: tuple[int, int]) -> Tensor | None:
        """What the first part chooses. All are told, so that all have seen the same stream."""
        chosen = [part.select(features.to(run.device), grid) for run, part in zip(self._runs, self._parts, strict=True)]
        return None if chosen[0] is None else chosen[0].to(features.device)

    def append(self, step: StepKV) -> None:
        """Take one step; each part takes its layers."""
        for run, part in zip(self._runs, self._parts, strict=True):
            part.append(
                StepKV(
                    keys=step.keys[run.layers].to(run.device),
                    values=step.values[run.layers].to(run.device),
                    positions=step.positions.to(run.device),
                    coordinates=step.coordinates.to(run.device),
                    step=step.step,
                )
            )

    def context(self) -> Context:
        """The contexts of all parts."""
        return ShardedContext.of(self._runs, [part.context() for part in self._parts])

    def recall(self) -> Context:
        """What a question attends to in all parts."""
        return ShardedContext.of(self._runs, [part.recall() for part in self._parts])

    def tensors(self) -> dict[str, Tensor]:
        """The state of the memory of all layers, on the CPU."""
        states = [part.tensors() for part in self._parts]
        finished = [part.finished() for part in self._parts]
        joined = {}
        for name in dict.fromkeys(name for state in states for name in state):
            axis = self._cls.layer_axis.get(name, 0)
            if axis is None:
                joined[name] = states[0][name].cpu()
            else:
                pieces = [state.get(name, done.get(name)) for state, done in zip(states, finished, strict=True)]
                joined[name] = torch.cat([piece.cpu() for piece in pieces if piece is not None], axis)
        return joined

    def load(self, tensors: Mapping[str, Tensor]) -> None:
        """Take a state of the memory of all layers, from wherever it was saved."""
        for name in self._cls.finished_with(tensors):
            raise StateCorrupt(f"state: tensor {name} is unknown to this memory")
        for name, tensor in tensors.items():
            axis = self._cls.layer_axis.get(name, 0)
            layers = self._shape.layers
            if axis is not None and (tensor.ndim <= axis or tensor.shape[axis] != layers):
                raise StateCorrupt(
                    f"state: tensor {name} must have {layers} layers in axis {axis}, got {list(tensor.shape)}"
                )
        # Into new parts, so that nothing has changed when the last of them refuses.
        parts = self._empty_parts()
        for run, part in zip(self._runs, parts, strict=True):
            mine = {name: self._layers_of(name, tensor, run) for name, tensor in tensors.items()}
            finished = self._cls.finished_with(mine)
            part.load({name: tensor for name, tensor in mine.items() if name not in finished})
        self._parts = parts

    def nbytes(self) -> dict[str, int]:
        """Bytes by part of the state, over all devices; what all layers share is held once a device."""
        totals: dict[str, int] = {}
        for part in self._parts:
            for name, size in part.nbytes().items():
                totals[name] = totals.get(name, 0) + size
        return totals

    def report(self) -> dict[str, Any]:
        """As of the memory of all layers."""
        reports = [part.report() for part in self._parts]
        # Numbers that differ from part to part are least values, such as an oldest step.
        least = {
            name: value if all(r[name] == value for r in reports) else min(r[name] for r in reports)
            for name, value in reports[0].items()
            if name != "layers"
        }
        return least | {"layers": [layer for report in reports for layer in report["layers"]]}

    def _empty_parts(self) -> list[Memory]:
        return [self._cls(self._config, _part(self._shape, run), self._rotary) for run in self._runs]

    def _layers_of(self, name: str, tensor: Tensor, run: LayerRun) -> Tensor:
        axis = self._cls.layer_axis.get(name, 0)
        return tensor if axis is None else tensor.narrow(axis, run.start, len(run)).contiguous()


@dataclass(frozen=True, slots=True)
class ShardedContext(Context):
    """Contexts of consecutive layers, asked one after the other.

    Attributes:
        runs: which layers each is of.
        parts: the contexts.
        shift, next_position: the same for all parts; see `Context`.
    """

    runs: Sequence[LayerRun]
    parts: Sequence[Context]
    shift: int
    next_position: int | None

    @classmethod
    def of(cls, runs: Sequence[LayerRun], parts: Sequence[Context]) -> ShardedContext:
        """Of parts that agree in how far they were moved; text stands behind all of them."""
        ends = [part.next_position for part in parts if part.next_position is not None]
        return cls(runs, parts, parts[0].shift, max(ends, default=None))

    def at(self, layer: int, query: Tensor) -> tuple[Segment, ...]:
        """What the layer's part shows it."""
        run, part = next(pair for pair in zip(self.runs, self.parts, strict=True) if layer < pair[0].stop)
        return part.at(layer - run.start, query)

    def without_far(self) -> ShardedContext:
        """All parts without what is far."""
        return ShardedContext.of(self.runs, [part.without_far() for part in self.parts])

    def visible_tokens(self) -> int:
        """Of the part that sees most."""
        return max(part.visible_tokens() for part in self.parts)

    def far_span(self) -> int:
        """Of the part that has most."""
        return max(part.far_span() for part in self.parts)

    def compacted(self, anchoring: Anchoring, span: int) -> ShardedContext:
        """All parts with one span set aside, and moved by one shift.

        Where no token is near, each part finds another time at which the near window would begin, and so another shift.
        The latest is that of the memory of all layers, and the parts that found an earlier one are told.
        """
        parts = [part.compacted(anchoring, span) for part in self.parts]
        shift = max(part.shift for part in parts)
        told = replace(anchoring, near=anchoring.origin + span + shift)
        parts = [
            moved if moved.shift == shift else part.compacted(told, span)
            for part, moved in zip(self.parts, parts, strict=True)
        ]
        return ShardedContext.of(self.runs, parts)


def _part(shape: MemoryShape, run: LayerRun) -> MemoryShape:
    return replace(
        shape,
        layers=len(run),
        device=run.device,
        layer_devices=None,
        part_of=shape.layers,
        first_layer=run.start,
    )
