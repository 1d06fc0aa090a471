"""Memories: bounded state that a stream is written into and that attention reads.

`MEMORIES` names them; `build_memory` makes the one a config asks for, `restore_memory` the one that a state holds.
Adding one is a file with a `LocalMemory` and a line here. Nothing in this package knows of transformers, files or
sessions.

Letters, in all of this package: `L` layers, `H` KV heads, `D` head size, `P` position components, `T` tokens of a step,
`P0` tokens of the prompt prefix, `W` tokens of the near window, `M` tokens of a budget, `K` prototypes of a head, `S`
pseudo-tokens of a prototype, `B = L * H` heads of all layers (of an archive: blocks), `G` subquantizers, `C` codewords,
`R` residuals of a reservoir, `N` slots of a context.
"""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from protokv.baselines.dycoke import DyCoke, DyCokeDecode
from protokv.baselines.exact import FullCache, SlidingWindow
from protokv.baselines.hermes import Hermes
from protokv.baselines.infinipot_v import InfiniPotV
from protokv.baselines.last_frames import LastFrames
from protokv.baselines.rekv import ReKV
from protokv.config import MemoryConfig
from protokv.core.capacity import DoesNotFit, allocating, check_capacity
from protokv.core.local import LocalMemory
from protokv.core.memory import Memory, MemoryShape, StepKV
from protokv.core.prototypes import ProtoKV
from protokv.core.rotary import Rotary
from protokv.core.tensors import Clock, TensorSpec, check_shapes, shapes_of
from protokv.durable.memory import Durable
from protokv.errors import ConfigError, StateCorrupt, StateMismatch
from protokv.extras import allocation as _allocation  # noqa: F401, adds a layout
from protokv.extras.recent import RecentStep, RecentSteps, WithRecent
from protokv.extras.sharding import LayerShards

__all__ = [
    "MEMORIES",
    "Memory",
    "MemoryShape",
    "RecentStep",
    "StepKV",
    "WithRecent",
    "build_memory",
    "declare_state",
    "restore_memory",
]

MEMORIES: dict[str, type[LocalMemory]] = {
    "durable": Durable,
    "paper": ProtoKV,
    "continuity": ProtoKV,
    "infinipot-v": InfiniPotV,
    "hermes": Hermes,
    "rekv": ReKV,
    "dycoke": DyCoke,
    "dycoke-decode": DyCokeDecode,
    "last-frames": LastFrames,
    "sliding-window": SlidingWindow,
    "full": FullCache,
}
"""The class of each memory by its name, the names of `protokv.config.CONFIGS`."""


def build_memory(config: MemoryConfig, shape: MemoryShape, rotary: Rotary) -> Memory:
    """The empty memory that the config names; where the layers of a model are, if these are several places.

    Raises:
        ConfigError: the config does not fit the model, or the memory does not fit the device.
    """
    cls = MEMORIES[config.name]
    check_capacity(cls.declare(config, shape), shape.layer_devices or (shape.device,), config.budget)
    spread = len(set(shape.layer_devices or ())) > 1
    with allocating(config.budget):
        memory = LayerShards(cls, config, shape, rotary) if spread else cls(config, shape, rotary)
    if not config.recent_frames:
        return memory
    if not cls.hides_recent:
        raise ConfigError(
            f"recent_frames: {config.name} chooses by what is forwarded first, which must be the question",
            hint="use another memory, or leave recent_frames out",
        )
    return WithRecent(memory, -(-config.recent_frames // shape.frames_per_step), shape)


def declare_state(config: MemoryConfig, shape: MemoryShape) -> tuple[TensorSpec, ...]:
    """The tensors of a state under these settings. Allocates nothing.

    Raises:
        ConfigError: the config does not fit the model.
    """
    recent = RecentSteps.declare(shape) if config.recent_frames else ()
    return (*MEMORIES[config.name].declare(config, shape), *recent)


def restore_memory(
    config: MemoryConfig, shape: MemoryShape, rotary: Rotary, tensors: Mapping[str, Tensor], clock: Clock
) -> Memory:
    """The memory that a state holds. The state is not trusted: sizes are compared before anything is allocated by the
    settings, and numbers are held against the clock.

    Raises:
        StateCorrupt: no stream under these settings leaves such a state; the tensor or setting is named.
        StateMismatch: the device has no room for it.
    """
    try:
        check_shapes(shapes_of(tensors), declare_state(config, shape))
        memory = build_memory(config, shape, rotary)
        with allocating(config.budget):
            memory.load(tensors, clock)
    except DoesNotFit as error:
        raise StateMismatch(error.message, hint="open the state on a machine with more memory") from error
    except ConfigError as error:
        raise StateCorrupt(f"the memory settings of the state: {error.message}") from error
    return memory
