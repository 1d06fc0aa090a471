"""`LayerShards`: the memory of a model whose layers differ, one part for each run of equal layers.

They stand on several devices, or some do not rotate their keys.

Steps are split by layers, and states and contexts are joined: a state has the names, shapes and
bytes of the memory of all layers, and one may load what the other saved. Knows no kind of memory;
`TensorSpec` says which tensors have layers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import groupby

import torch
from torch import Tensor

from protokv.core.context import Context, KVSegment, PositionFacts
from protokv.core.memory import Memory, SingleDeviceMemory
from protokv.core.packing import restore_unused_slots
from protokv.core.rotary import Rotary, keep_still
from protokv.core.sanitize import find_finite
from protokv.core.settings import MemoryConfig
from protokv.core.step import Grid, StepKV
from protokv.core.tensors import MemoryShape, Specs, TensorDict, Tensors, sum_by_group
from protokv.errors import ConfigError
from protokv.texts import JsonObject

_CPU = torch.device("cpu")


class LayerShards(Memory):
    """Memories of one kind, one for each run of layers."""

    def __init__(
        self,
        cls: type[SingleDeviceMemory],
        config: MemoryConfig,
        shape: MemoryShape,
        rotary: Rotary,
    ) -> None:
        """Make a `cls` for each run of layers of `shape`. ConfigError: it does not fit, or needs
        all on one device.
        """
        if cls.undivided:
            raise ConfigError(
                f"the memory {config.name} cannot be divided by layers: {cls.undivided}",
                hint="load the model on one device, or use another memory",
            )
        self.bounded = cls.bounded
        self.one_by_one = cls.one_by_one
        self._specs = cls.declare(config, shape)
        # shapes of the longest runs of layers that are alike, in order
        self._runs: list[MemoryShape] = []
        self._parts: list[SingleDeviceMemory] = []
        devices = shape.layer_devices or [shape.device] * shape.layers
        rotated = shape.rotated or [True] * shape.layers
        for (device, turns), layers in groupby(zip(devices, rotated, strict=True)):
            n = len(list(layers))
            first = sum(run.layers for run in self._runs)
            part = replace(
                shape,
                layers=n,
                device=device,
                layer_devices=None,
                rotated=None,
                part_of=shape.layers,
                first_layer=first,
            )
            self._runs.append(part)
            self._parts.append(cls(config, part, rotary if turns else keep_still))

    def start(self, keys: Tensor, values: Tensor) -> None:
        """Take the prompt prefix; each part takes its layers."""
        for run, part in zip(self._runs, self._parts, strict=True):
            part.start(keys[run.own_layers].to(run.device), values[run.own_layers].to(run.device))

    def select(self, features: Tensor, grid: Grid) -> Tensor | None:
        """Return the selection of the first part. All parts are asked, so that all see the same
        stream.
        """
        chosen = [
            part.select(features.to(run.device), grid)
            for run, part in zip(self._runs, self._parts, strict=True)
        ]
        return None if chosen[0] is None else chosen[0].to(features.device)

    def append(self, step: StepKV) -> None:
        """Take one step; each part takes its layers, and all drop the tokens that any of them would
        drop.
        """
        usable = step.usable
        if usable is None:
            each = (
                find_finite(step.keys[run.own_layers], step.values[run.own_layers]).to(_CPU)
                for run in self._runs
            )
            usable = torch.stack(list(each)).all(0)
        steps = [
            replace(
                step,
                queries=None
                if step.queries is None
                else step.queries[run.own_layers].to(run.device),
                keys=step.keys[run.own_layers].to(run.device),
                values=step.values[run.own_layers].to(run.device),
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
        return _ShardedContext(self._runs, [part.context() for part in self._parts])

    def recall(self) -> Context:
        """Return the contexts of a question in all parts."""
        return _ShardedContext(self._runs, [part.recall() for part in self._parts])

    def specs(self) -> Specs:
        """Return those of the memory of all layers."""
        return self._specs

    def tensors(self) -> TensorDict:
        """Return the state of the memory of all layers, on the CPU."""
        states = [part.tensors() for part in self._parts]
        joined = {}
        for whole, *own in zip(self._specs, *(part.specs() for part in self._parts), strict=True):
            if any(whole.name in state for state in states):
                # A part that needs it no longer has left it out.
                pieces = [
                    state[whole.name].cpu() if whole.name in state else spec.allocate(_CPU)
                    for state, spec in zip(states, own, strict=True)
                ]
                joined[whole.name] = (
                    pieces[0] if whole.layer_axis is None else torch.cat(pieces, whole.layer_axis)
                )
        return joined

    def load(self, tensors: Tensors) -> None:
        """Take a state of the memory of all layers, however it was split when it was saved."""
        tensors = restore_unused_slots(tensors, self._specs)
        for run, part in zip(self._runs, self._parts, strict=True):
            own = dict(tensors)
            for spec in self._specs:
                if spec.layer_axis is not None and spec.name in own:
                    own[spec.name] = (
                        own[spec.name]
                        .narrow(spec.layer_axis, run.first_layer, run.layers)
                        .contiguous()
                    )
            part.load(own)

    def nbytes(self) -> dict[str, int]:
        """Return bytes by part over all devices; tensors that all layers share are held once a
        device.
        """
        return sum_by_group(sizes for part in self._parts for sizes in part.nbytes().items())

    def report(self) -> JsonObject:
        """Return the report of the memory of all layers."""
        reports = [part.report() for part in self._parts]
        # If parts report different numbers, the number is a minimum over layers, such as the
        # oldest step.
        least = {
            name: value if all(r[name] == value for r in reports) else min(r[name] for r in reports)
            for name, value in reports[0].items()
            if name != "layers"
        }
        return least | {"layers": [layer for report in reports for layer in report["layers"]]}


@dataclass(frozen=True, slots=True)
class _ShardedContext(Context):
    runs: Sequence[MemoryShape]
    parts: Sequence[Context]

    @property
    def shift(self) -> int:  # type: ignore[override]
        """The shift of all parts; the host asks a device for it."""
        return int(self.parts[0].shift)

    @property
    def next_position(self) -> int | None:  # type: ignore[override]
        """The position after all parts; the host asks all devices for it."""
        ends = (part.next_position for part in self.parts)
        return max((int(end) for end in ends if end is not None), default=None)

    def at(self, layer: int, query: Tensor) -> tuple[KVSegment, ...]:
        """Return the segments of the layer's part."""
        part, own = self._find_part(layer)
        return part.at(own, query)

    def positions_at(self, layer: int) -> Tensor | None:
        """Return the positions that the layer's part knows."""
        part, own = self._find_part(layer)
        return part.positions_at(own)

    def _find_part(self, layer: int) -> tuple[Context, int]:
        """Return the part of a layer, and which of its layers it is."""
        pairs = zip(self.runs, self.parts, strict=True)
        return next(
            (part, layer - run.first_layer) for run, part in pairs if layer < run.own_layers.stop
        )

    def before(self, time: int) -> _ShardedContext:
        """Hide later tokens in all parts."""
        return _ShardedContext(self.runs, [part.before(time) for part in self.parts])

    def visible_tokens(self) -> int:
        """Return those of the part that has most."""
        return max(part.visible_tokens() for part in self.parts)

    def far_span(self) -> int:
        """Return that of the part that has most."""
        return max(int(part.far_span()) for part in self.parts)

    def compact(
        self, anchoring: PositionFacts, span: int | Tensor | None = None
    ) -> _ShardedContext:
        """Return all parts with one span set aside, and moved by one shift.

        If no token is near, each part finds another time at which the near window would begin, and
        so another shift. The latest is that of the memory of all layers, and the parts that found
        an earlier one are moved to it.
        """
        span = self.far_span() if span is None else span
        parts = [part.compact(anchoring, span) for part in self.parts]
        shift = max(int(part.shift) for part in parts)
        latest = replace(anchoring, near=anchoring.origin + int(span) + shift)
        pairs = zip(self.parts, parts, strict=True)
        return _ShardedContext(
            self.runs,
            [
                moved if int(moved.shift) == shift else part.compact(latest, span)
                for part, moved in pairs
            ],
        )
