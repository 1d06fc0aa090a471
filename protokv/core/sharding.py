"""`LayerShards`: the memory of a model whose layers stand on several devices, one part for each run of layers.

Every memory treats layers apart, so a part does the same to its layers as the whole memory. Steps are split
by layers, and states and contexts are joined: a state has the names, shapes and bytes of the memory of all layers, and
one may load what the other saved. Knows no kind of memory; `TensorSpec` says which tensors have layers.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from typing import Any

import torch
from torch import Tensor

from protokv.core.compact import Anchoring, compact_context, far_span, find_next_position, find_shift
from protokv.core.context import Context, Segment
from protokv.core.memory import LocalMemory, Memory
from protokv.core.packing import unpack
from protokv.core.rotary import Rotary
from protokv.core.sanitize import find_usable
from protokv.core.settings import MemoryConfig
from protokv.core.step import StepKV
from protokv.core.tensors import LAYER, MemoryShape, TensorSpec, add_up
from protokv.errors import ConfigError

CPU = torch.device("cpu")


class LayerShards(Memory):
    """Memories of one kind, one for each run of layers."""

    def __init__(self, cls: type[LocalMemory], config: MemoryConfig, shape: MemoryShape, rotary: Rotary) -> None:
        """Make an empty memory of the kind `cls` for each run of layers of the whole `shape`.

        Raises:
            ConfigError: the config does not fit the model, or this kind needs all layers on one device.
        """
        if cls.undivided:
            raise ConfigError(
                f"the memory {config.name} cannot be spread over devices: {cls.undivided}",
                hint="load the model on one device, or use another memory",
            )
        self.bounded, self.joins_steps = cls.bounded, cls.joins_steps
        self._cls, self._config, self._shape, self._rotary = cls, config, shape, rotary
        self._runs = find_runs(shape.layer_devices or [shape.device] * shape.layers)
        self._parts = self._empty_parts()

    def start(self, keys: Tensor, values: Tensor) -> None:
        """Take the prompt prefix; each part takes its layers."""
        for run, part in zip(self._runs, self._parts, strict=True):
            part.start(keys[run.layers].to(run.device), values[run.layers].to(run.device))

    def select(self, features: Tensor, grid: tuple[int, int]) -> Tensor | None:
        """Return the selection of the first part. All parts are asked, so that all see the same stream."""
        chosen = [part.select(features.to(run.device), grid) for run, part in zip(self._runs, self._parts, strict=True)]
        return None if chosen[0] is None else chosen[0].to(features.device)

    def append(self, step: StepKV) -> None:
        """Take one step; each part takes its layers, and all drop the tokens that any of them would drop."""
        usable = step.usable
        if usable is None:
            each = (find_usable(step.keys[run.layers], step.values[run.layers]).to(CPU) for run in self._runs)
            usable = torch.stack(list(each)).all(0)
        steps = [
            replace(
                step,
                keys=step.keys[run.layers].to(run.device),
                values=step.values[run.layers].to(run.device),
                positions=step.positions.to(run.device),
                coordinates=step.coordinates.to(run.device),
                usable=usable.to(run.device),
            )
            for run in self._runs
        ]
        # The first layer of the model tells which tokens repeat others.
        repeats = self._parts[0].mark_repeats(steps[0])
        for run, part, own in zip(self._runs, self._parts, steps, strict=True):
            part.append(replace(own, repeats=None if repeats is None else repeats.to(run.device)))

    def context(self) -> Context:
        """Return the contexts of all parts."""
        return ShardedContext(self._runs, [part.context() for part in self._parts])

    def recall(self) -> Context:
        """Return the contexts of a question in all parts."""
        return ShardedContext(self._runs, [part.recall() for part in self._parts])

    def specs(self) -> tuple[TensorSpec, ...]:
        """Return those of the memory of all layers."""
        return self._cls.declare(self._config, self._shape)

    def tensors(self) -> dict[str, Tensor]:
        """Return the state of the memory of all layers, on the CPU."""
        states = [part.tensors() for part in self._parts]
        joined = {}
        for spec in self.specs():
            if not any(spec.name in state for state in states):
                continue
            if spec.layer_axis is None:
                joined[spec.name] = states[0][spec.name].cpu()
                continue
            pieces = []
            for run, state in zip(self._runs, states, strict=True):
                absent = spec.name not in state
                # This part needs it no longer, others do.
                pieces.append(_narrow(spec, run).allocate(CPU) if absent else state[spec.name].cpu())
            joined[spec.name] = torch.cat(pieces, spec.layer_axis)
        return joined

    def load(self, tensors: Mapping[str, Tensor]) -> None:
        """Take a state of the memory of all layers, however it was split when it was saved."""
        specs = self.specs()
        tensors = unpack(tensors, specs)
        for run, part in zip(self._runs, self._parts, strict=True):
            part.load({spec.name: _cut_layers(spec, tensors[spec.name], run) for spec in specs if spec.name in tensors})

    def nbytes(self) -> dict[str, int]:
        """Return bytes by part over all devices; tensors that all layers share are held once a device."""
        return add_up(sizes for part in self._parts for sizes in part.nbytes().items())

    def report(self) -> dict[str, Any]:
        """Return the report of the memory of all layers."""
        reports = [part.report() for part in self._parts]
        # Where parts report different numbers, the number is a minimum over layers, such as the oldest step.
        least = {
            name: value if all(r[name] == value for r in reports) else min(r[name] for r in reports)
            for name, value in reports[0].items()
            if name != "layers"
        }
        return least | {"layers": [layer for report in reports for layer in report["layers"]]}

    def _empty_parts(self) -> list[LocalMemory]:
        parts = []
        for run in self._runs:
            shape = replace(
                self._shape,
                layers=len(run),
                device=run.device,
                layer_devices=None,
                part_of=self._shape.layers,
                first_layer=run.start,
            )
            parts.append(self._cls(self._config, shape, self._rotary))
        return parts


@dataclass(frozen=True, slots=True)
class ShardedContext(Context):
    """Contexts of consecutive layers.

    Attributes:
        runs: the layers of each.
        parts: the contexts.
    """

    runs: Sequence[DeviceLayers]
    parts: Sequence[Context]

    @property
    def shift(self) -> int:
        """The shift of all parts; the host asks a device for it."""
        return int(find_shift(self.parts[0]))

    @property
    def next_position(self) -> int | None:
        """The position after all parts; the host asks all devices for it."""
        ends = [find_next_position(part) for part in self.parts]
        return max((int(end) for end in ends if end is not None), default=None)

    def at(self, layer: int, query: Tensor) -> tuple[Segment, ...]:
        """Return the segments of the layer's part."""
        run, part = self._find_part(layer)
        return part.at(layer - run.start, query)

    def positions_at(self, layer: int) -> Tensor | None:
        """Return the positions that the layer's part knows."""
        run, part = self._find_part(layer)
        return part.positions_at(layer - run.start)

    def _find_part(self, layer: int) -> tuple[DeviceLayers, Context]:
        return next(pair for pair in zip(self.runs, self.parts, strict=True) if layer < pair[0].stop)

    def before(self, time: int) -> ShardedContext:
        """Hide later tokens in all parts."""
        return ShardedContext(self.runs, [part.before(time) for part in self.parts])

    def visible_tokens(self) -> int:
        """Return those of the part that has most."""
        return max(part.visible_tokens() for part in self.parts)

    def far_span(self) -> int:
        """Return that of the part that has most."""
        return max(int(far_span(part)) for part in self.parts)

    def compact(self, anchoring: Anchoring, span: int | Tensor) -> ShardedContext:
        """Return all parts with one span set aside, and moved by one shift.

        If no token is near, each part finds another time at which the near window would begin, and so another shift.
        The latest is that of the memory of all layers, and the parts that found an earlier one are moved to it.
        """
        parts = [compact_context(part, anchoring, span) for part in self.parts]
        shift = max(int(find_shift(part)) for part in parts)
        latest = replace(anchoring, near=anchoring.origin + int(span) + shift)
        parts = [
            moved if int(find_shift(moved)) == shift else compact_context(part, latest, span)
            for part, moved in zip(self.parts, parts, strict=True)
        ]
        return ShardedContext(self.runs, parts)


def _narrow(spec: TensorSpec, run: DeviceLayers) -> TensorSpec:
    """Return the declaration of some layers of a tensor."""
    shape = tuple(len(run) if dim == LAYER else size for dim, size in zip(spec.dims, spec.shape, strict=True))
    return replace(spec, shape=shape)


def _cut_layers(spec: TensorSpec, tensor: Tensor, run: DeviceLayers) -> Tensor:
    """Return some layers of a tensor; all of it if it has no layers."""
    axis = spec.layer_axis
    return tensor if axis is None else tensor.narrow(axis, run.start, len(run)).contiguous()


@dataclass(frozen=True, slots=True)
class DeviceLayers:
    """Layers `start` to `stop`, the last excluded, on one device."""

    start: int
    stop: int
    device: torch.device

    def __len__(self) -> int:
        return self.stop - self.start

    @property
    def layers(self) -> slice:
        """As an index into tensors whose first axis is the layers of the model."""
        return slice(self.start, self.stop)


def find_runs(devices: Sequence[torch.device]) -> list[DeviceLayers]:
    """Return the longest runs of layers that stand on one device, in order, given the device of each layer."""
    runs = []
    for device, layers in groupby(range(len(devices)), key=devices.__getitem__):
        first, *others = layers
        runs.append(DeviceLayers(first, first + 1 + len(others), device))
    return runs
