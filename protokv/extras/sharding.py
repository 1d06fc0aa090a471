"""`LayerShards`: the memory of a model whose layers stand on several devices, as one memory for each run of layers.

Every memory treats layers apart, so a part that is given the keys and values of some layers does to them what the whole
would do; only the choice of a device differs. Owns the dealing out of steps and the joining of states and contexts: the
state has the names, shapes and bytes of the memory of all layers, and one may load what the other saved. Knows no kind
of memory: which tensors have layers, and where, is declared (`TensorSpec`).

Which layers of a model stand on which device, as runs of consecutive ones.

A model that is larger than one device is spread over several by layers. What belongs to a layer (keys, values, its part
of a memory) stays where the layer is, so attention never moves it. Knows nothing of models and memories.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from typing import Any

import torch
from torch import Tensor

from protokv.config import MemoryConfig
from protokv.core.context import Anchoring, Context, Segment
from protokv.core.local import LocalMemory
from protokv.core.memory import Memory, MemoryShape, StepKV
from protokv.core.rotary import Rotary
from protokv.core.sanitize import find_usable
from protokv.core.tensors import LAYER, Clock, TensorSpec, add_up, check_shapes, shapes_of, unpack
from protokv.errors import ConfigError

CPU = torch.device("cpu")


class LayerShards(Memory):
    """Memories of one kind, one for each run of layers."""

    def __init__(self, cls: type[LocalMemory], config: MemoryConfig, shape: MemoryShape, rotary: Rotary) -> None:
        """Empty memories.

        Args:
            cls: their kind.
            config: of each.
            shape: of the whole model, with `layer_devices`.
            rotary: gives angles on the device of the positions.

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
        """Take one step; each part takes its layers, and all drop what any of them would."""
        usable = step.usable
        if usable is None:
            each = (find_usable(step.keys[run.layers], step.values[run.layers]).to(CPU) for run in self._runs)
            usable = torch.stack(list(each)).all(0)
        for run, part in zip(self._runs, self._parts, strict=True):
            part.append(
                StepKV(
                    keys=step.keys[run.layers].to(run.device),
                    values=step.values[run.layers].to(run.device),
                    positions=step.positions.to(run.device),
                    coordinates=step.coordinates.to(run.device),
                    step=step.step,
                    usable=usable.to(run.device),
                )
            )

    def context(self) -> Context:
        """The contexts of all parts."""
        return ShardedContext.of(self._runs, [part.context() for part in self._parts])

    def recall(self) -> Context:
        """What a question attends to in all parts."""
        return ShardedContext.of(self._runs, [part.recall() for part in self._parts])

    def specs(self) -> tuple[TensorSpec, ...]:
        """Those of the memory of all layers."""
        return self._cls.declare(self._config, self._shape)

    def tensors(self) -> dict[str, Tensor]:
        """The state of the memory of all layers, on the CPU."""
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
                # A part that needs it no longer, while others do.
                pieces.append(_narrow(spec, run).allocate(CPU) if absent else state[spec.name].cpu())
            joined[spec.name] = torch.cat(pieces, spec.layer_axis)
        return joined

    def load(self, tensors: Mapping[str, Tensor], clock: Clock | None = None) -> None:
        """Take a state of the memory of all layers, from wherever it was saved."""
        specs = self.specs()
        check_shapes(shapes_of(tensors), specs)
        tensors = unpack(tensors, specs)
        # Into new parts, so that nothing has changed when the last of them refuses.
        parts = self._empty_parts()
        for run, part in zip(self._runs, parts, strict=True):
            part.load({spec.name: _cut(spec, tensors[spec.name], run) for spec in specs if spec.name in tensors}, clock)
        self._parts = parts

    def check(self, clock: Clock, tensors: Mapping[str, Tensor] | None = None) -> None:
        """Refuse to go on with a part that no stream leaves; each is looked at where it is."""
        for part in self._parts:
            part.check(clock)

    def promises(self) -> list[str]:
        """What `check` holds the state to, a line each."""
        return self._parts[0].promises()

    def nbytes(self) -> dict[str, int]:
        """Bytes by part of the state, over all devices; what all layers share is held once a device."""
        return add_up(sizes for part in self._parts for sizes in part.nbytes().items())

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

    def _empty_parts(self) -> list[LocalMemory]:
        return [self._cls(self._config, _part(self._shape, run), self._rotary) for run in self._runs]


@dataclass(frozen=True, slots=True)
class ShardedContext(Context):
    """Contexts of consecutive layers, asked one after the other.

    Attributes:
        runs: which layers each is of.
        parts: the contexts.
        shift, next_position: the same for all parts; see `Context`. The host asks all devices for them.
    """

    runs: Sequence[LayerRun]
    parts: Sequence[Context]
    shift: int
    next_position: int | None

    @classmethod
    def of(cls, runs: Sequence[LayerRun], parts: Sequence[Context]) -> ShardedContext:
        """Of parts that agree in how far they were moved; text stands behind all of them."""
        ends = [int(part.next_position) for part in parts if part.next_position is not None]
        return cls(runs, parts, int(parts[0].shift), max(ends, default=None))

    def at(self, layer: int, query: Tensor) -> tuple[Segment, ...]:
        """What the layer's part shows it."""
        run, part = self._part_of(layer)
        return part.at(layer - run.start, query)

    def places(self, layer: int) -> Tensor | None:
        """As the layer's part knows them."""
        run, part = self._part_of(layer)
        return part.places(layer - run.start)

    def _part_of(self, layer: int) -> tuple[LayerRun, Context]:
        return next(pair for pair in zip(self.runs, self.parts, strict=True) if layer < pair[0].stop)

    def without_far(self) -> ShardedContext:
        """All parts without what is far."""
        return ShardedContext.of(self.runs, [part.without_far() for part in self.parts])

    def before(self, time: int) -> ShardedContext:
        """All parts without what is later."""
        return ShardedContext.of(self.runs, [part.before(time) for part in self.parts])

    def visible_tokens(self) -> int:
        """Of the part that sees most."""
        return max(part.visible_tokens() for part in self.parts)

    def far_span(self) -> int:
        """Of the part that has most."""
        return max(int(part.far_span()) for part in self.parts)

    def compacted(self, anchoring: Anchoring, span: int | Tensor) -> ShardedContext:
        """All parts with one span set aside, and moved by one shift.

        Where no token is near, each part finds another time at which the near window would begin, and so another shift.
        The latest is that of the memory of all layers, and the parts that found an earlier one are told.
        """
        parts = [part.compacted(anchoring, span) for part in self.parts]
        shift = max(int(part.shift) for part in parts)
        told = replace(anchoring, near=anchoring.origin + int(span) + shift)
        parts = [
            moved if int(moved.shift) == shift else part.compacted(told, span)
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


def _narrow(spec: TensorSpec, run: LayerRun) -> TensorSpec:
    """The declaration of some layers of a tensor."""
    shape = tuple(len(run) if dim == LAYER else size for dim, size in zip(spec.dims, spec.shape, strict=True))
    return replace(spec, shape=shape)


def _cut(spec: TensorSpec, tensor: Tensor, run: LayerRun) -> Tensor:
    """Some layers of a tensor; all of it where it has none."""
    axis = spec.layer_axis
    return tensor if axis is None else tensor.narrow(axis, run.start, len(run)).contiguous()


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
