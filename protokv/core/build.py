"""Build the memory that settings mean for a model, and take a saved one up again.

A state of a few bytes can claim any budget, so sizes are checked before anything is allocated.
"""

from __future__ import annotations

import gc
import math

import torch

from protokv.core.backbone import StreamModel
from protokv.core.layers import LayerKind
from protokv.core.memory import Memory
from protokv.core.packing import check_steps, check_tensor_shapes
from protokv.core.rotary import Rotary
from protokv.core.settings import MemoryConfig
from protokv.core.sharding import LayerShards
from protokv.core.tensors import MemoryShape, Tensors
from protokv.errors import ConfigError, OutOfMemory, StateCorrupt
from protokv.machine import measure_free_memory


def make_memory_shape(model: StreamModel, config: MemoryConfig, sink_tokens: int) -> MemoryShape:
    """Return what a memory must know of a model, with a prompt prefix of so many tokens.

    ConfigError: the model has layers that cannot do what a setting says.
    """
    others = set(model.layer_kinds) - {LayerKind.FULL}
    if others and config.recent_frames:
        raise ConfigError(
            "recent_frames: this model has layers that read every token once, in order, so no step "
            "is read again",
            hint="leave recent_frames out, or use a model of which all layers have full attention",
        )
    stays = LayerKind.SLIDING in others or model.rotated is not None
    if stays and config.positions == "compact":
        raise ConfigError(
            "positions: this model has layers that do not move with a memory: sliding ones, or "
            "some that rotate no keys",
            hint="leave positions=compact out",
        )
    return MemoryShape(
        layers=model.layers,
        kv_heads=model.kv_heads,
        head_size=model.head_size,
        position_components=model.position_components,
        sink_tokens=sink_tokens,
        dtype=model.dtype,
        device=model.device,
        layer_devices=model.layer_devices,
        rotated=model.rotated,
        frames_per_step=model.frames_per_step,
    )


def choose_rotary(model: StreamModel, config: MemoryConfig) -> Rotary:
    """Return the angles by which a memory removes rotations: the model's own, or ones that add up
    if it is compact.
    """
    return model.rotary if config.positions == "stream" else model.precise_rotary


def build_memory(config: MemoryConfig, shape: MemoryShape, rotary: Rotary) -> Memory:
    """Return the empty memory of a config. ConfigError: it does not fit the model. OutOfMemory: nor
    the device.
    """
    there = sum(map(measure_device_memory, set(shape.layer_devices or (shape.device,))))
    wanted = measure_memory(config, shape, rotary, there / 16)
    if wanted > there:
        raise OutOfMemory(
            f"budget: {config.budget} tokens of this model take {wanted / 2**30:.1f} GiB, "
            f"and the device has {there / 2**30:.1f} GiB for it",
            hint="choose a smaller budget",
        )
    return _make(config, shape, rotary)


def measure_memory(config: MemoryConfig, shape: MemoryShape, rotary: Rotary, small: float) -> int:
    """Return the bytes that a memory and a commit of it take, without making one.

    Those of a commit alone if they are at most `small`, as the rest costs a second to find out.
    """
    wanted = sum(spec.nbytes for spec in config.memory.declare(config, shape))
    if wanted > small:
        # A memory of tensors without data tells how many bytes one holds. A commit copies what is
        # saved, so both count. The import takes a second or two, and leaves cycles that would keep
        # the memories of all callers.
        from torch._subclasses.fake_tensor import FakeTensorMode

        # A tensor of numbers would be made on the device in inference mode.
        with torch.inference_mode(False), FakeTensorMode(allow_non_fake_inputs=True):
            wanted += _make(config, shape, rotary).bytes_held
        gc.collect()
    return wanted


def _make(config: MemoryConfig, shape: MemoryShape, rotary: Rotary) -> Memory:
    if len(set(shape.layer_devices or ())) > 1 or shape.rotated is not None:
        return LayerShards(config.memory, config, shape, rotary)
    return config.memory(config, shape, rotary)


def restore_memory(
    config: MemoryConfig,
    shape: MemoryShape,
    rotary: Rotary,
    tensors: Tensors,
    steps: int,
) -> Memory:
    """Return the memory of these tensors, which a stream of so many `steps` left.

    The state is not trusted: shapes are checked before the settings allocate anything.
    StateCorrupt: no stream under these settings leaves such a state; the tensor or setting is
    named.
    """
    try:
        specs = config.memory.declare(config, shape)
        check_tensor_shapes(tensors, specs)
        check_steps(tensors, specs, steps)
        memory = build_memory(config, shape, rotary)
        memory.load(tensors)
    except ConfigError as error:
        raise StateCorrupt(f"the memory settings of the state: {error.message}") from error
    return memory


def measure_device_memory(device: torch.device) -> float:
    """Return the free memory of a machine, or all of another device; infinite if unknown."""
    if device.type == "cuda":
        return int(torch.cuda.get_device_properties(device).total_memory)
    return measure_free_memory() or math.inf
