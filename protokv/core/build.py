"""Build the memory that settings mean for a model, and take a saved one up again.

A state of a few bytes can claim any budget, so sizes are checked before anything is allocated.
"""

from __future__ import annotations

import gc
import math
from collections.abc import Mapping, Sequence
from typing import Protocol

import torch
from torch import Tensor

from protokv.core.layers import LayerKind
from protokv.core.memory import Memory
from protokv.core.packing import check_tensor_shapes
from protokv.core.rotary import Rotary
from protokv.core.settings import MemoryConfig
from protokv.core.sharding import LayerShards
from protokv.core.tensors import MemoryShape
from protokv.errors import ConfigError, OutOfMemory, StateCorrupt
from protokv.machine import measure_machine_memory


class ModelFacts(Protocol):
    """What a memory must know of a model; each as `Backbone` has it."""

    layers: int
    kv_heads: int
    head_size: int
    position_components: int
    layer_kinds: Sequence[LayerKind]
    frames_per_step: int
    dtype: torch.dtype
    device: torch.device
    layer_devices: Sequence[torch.device] | None

    @property
    def rotary(self) -> Rotary:
        """The angles of positions."""

    @property
    def precise_rotary(self) -> Rotary:
        """Angles that add up."""


def make_memory_shape(model: ModelFacts, config: MemoryConfig, sink_tokens: int) -> MemoryShape:
    """Return what a memory must know of a model, with a prompt prefix of so many tokens.

    ConfigError: the model has layers that cannot do what a setting says.
    """
    others = set(model.layer_kinds) - {LayerKind.FULL}
    if others and config.recent_frames:
        why = (
            "recent_frames: this model has layers that read every token once, in order, so no step "
            "is read again"
        )
        raise ConfigError(
            why,
            hint="leave recent_frames out, or use a model of which all layers have full attention",
        )
    if LayerKind.SLIDING in others and config.positions == "compact":
        why = "positions: this model has sliding layers, whose windows do not move with a memory"
        raise ConfigError(why, hint="leave positions=compact out")
    return MemoryShape(
        layers=model.layers,
        kv_heads=model.kv_heads,
        head_size=model.head_size,
        position_components=model.position_components,
        sink_tokens=sink_tokens,
        dtype=model.dtype,
        device=model.device,
        layer_devices=model.layer_devices,
        frames_per_step=model.frames_per_step,
    )


def choose_rotary(model: ModelFacts, config: MemoryConfig) -> Rotary:
    """Return the angles by which a memory removes rotations: the model's own, or ones that add up
    if it is compact.
    """
    return model.rotary if config.positions == "stream" else model.precise_rotary


def build_memory(config: MemoryConfig, shape: MemoryShape, rotary: Rotary) -> Memory:
    """Return the empty memory of a config. ConfigError: it does not fit the model. OutOfMemory: nor
    the device.
    """
    cls = config.memory
    spread = len(set(shape.layer_devices or ())) > 1

    def make() -> Memory:
        return LayerShards(cls, config, shape, rotary) if spread else cls(config, shape, rotary)

    wanted = sum(spec.nbytes for spec in cls.declare(config, shape))
    there = sum(map(_device_bytes, set(shape.layer_devices or (shape.device,))))
    if wanted > there / 16:
        # A memory of tensors without data tells how many bytes one holds. A commit copies what is
        # saved, so both count. The import takes a second or two, and leaves cycles that would keep
        # the memories of all callers.
        from torch._subclasses.fake_tensor import FakeTensorMode

        # A tensor of numbers would be made on the device in inference mode.
        with torch.inference_mode(False), FakeTensorMode(allow_non_fake_inputs=True):
            wanted += make().bytes_held
        gc.collect()
    if wanted > there:
        raise OutOfMemory(
            f"budget: {config.budget} tokens of this model take {wanted / 2**30:.1f} GiB, "
            f"and the device has {there / 2**30:.1f} GiB",
            hint="choose a smaller budget",
        )
    return make()


def restore_memory(
    config: MemoryConfig, shape: MemoryShape, rotary: Rotary, tensors: Mapping[str, Tensor]
) -> Memory:
    """Return the memory of these tensors.

    The state is not trusted: shapes are checked before the settings allocate anything.
    StateCorrupt: no stream under these settings leaves such a state; the tensor or setting is
    named.
    """
    try:
        check_tensor_shapes(tensors, config.memory.declare(config, shape))
        memory = build_memory(config, shape, rotary)
        memory.load(tensors)
    except ConfigError as error:
        raise StateCorrupt(f"the memory settings of the state: {error.message}") from error
    return memory


def _device_bytes(device: torch.device) -> float:
    """Return the memory of a device, used and free; infinite if unknown."""
    if device.type == "cuda":
        return int(torch.cuda.get_device_properties(device).total_memory)
    return measure_machine_memory() or math.inf
