"""Which memory, and which parts of a session, a configuration means.

`MEMORIES` names the class of each memory. A new memory is a file with a `LocalMemory` and a line here. `core.session`
finds this module by its name, so that the core imports no memory.
"""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from protokv.core.backbone import Backbone
from protokv.core.capacity import DoesNotFit, allocating, check_capacity
from protokv.core.compact import CompactPlacement, PositionLimit
from protokv.core.evidence import AttentionEvidence
from protokv.core.hybrid import Carried, WithCarried
from protokv.core.memory import LocalMemory, Memory
from protokv.core.parts import Placement, SessionListener, SessionParts
from protokv.core.prototypes import ProtoKV
from protokv.core.rotary import Rotary
from protokv.core.settings import check_fps as check_fps
from protokv.core.sharding import LayerShards
from protokv.core.step import StreamClock
from protokv.core.tensors import Clock, MemoryShape, StatePart, TensorSpec, tensor_shapes
from protokv.core.validation import check_shapes
from protokv.errors import ConfigError, StateCorrupt, StateMismatch
from protokv.memories import MemoryConfig
from protokv.memories.durable.memory import Durable
from protokv.memories.dycoke import DyCoke, DyCokeDecode
from protokv.memories.exact import FullCache, SlidingWindow
from protokv.memories.hermes import Hermes
from protokv.memories.infinipot_v import InfiniPotV
from protokv.memories.last_frames import LastFrames
from protokv.memories.paper import allocation as _allocation  # noqa: F401, adds a layout
from protokv.memories.probes import ProbeListener, Probing
from protokv.memories.recent import RecentSteps, WithRecent
from protokv.memories.rekv import ReKV
from protokv.state.thumbnails import Thumbnails
from protokv.words.transcript import Transcript

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
"""The class of each memory by its name, the names of `protokv.memories.CONFIGS`."""

BESIDE = (*Thumbnails.declare(), *Transcript.declare())
"""The tensors that any state may have beside its memory."""


def shape_of(backbone: Backbone) -> MemoryShape:
    """Return what a memory must know of a backbone."""
    return MemoryShape(
        layers=backbone.layers,
        kv_heads=backbone.kv_heads,
        head_size=backbone.head_size,
        position_components=backbone.position_components,
        sink_tokens=len(backbone.prefix_ids),
        dtype=backbone.dtype,
        device=backbone.device,
        layer_devices=backbone.layer_devices,
        frames_per_step=backbone.frames_per_step,
        embedding_size=backbone.embed_text(backbone.prefix_ids).shape[1],
        carried=backbone.carried,
    )


def build_memory(config: MemoryConfig, shape: MemoryShape, rotary: Rotary) -> Memory:
    """Return the empty memory that the config names, split by layers if these are on several devices.

    Raises:
        ConfigError: the config does not fit the model, or the memory does not fit the device.
    """
    cls = MEMORIES[config.name]
    check_parts(config, shape)
    check_capacity(
        (*cls.declare(config, shape), *_carried_specs(shape)), shape.layer_devices or (shape.device,), config.budget
    )
    spread = len(set(shape.layer_devices or ())) > 1
    with allocating(config.budget):
        memory: Memory = LayerShards(cls, config, shape, rotary) if spread else cls(config, shape, rotary)
        if shape.carried is not None:
            return WithCarried(memory, shape)
    if not config.recent_frames:
        return memory
    if not cls.hides_recent:
        raise ConfigError(
            f"recent_frames: {config.name} chooses by the first forward, which must be that of the question",
            hint="use another memory, or leave recent_frames out",
        )
    return WithRecent(memory, -(-config.recent_frames // shape.frames_per_step), shape)


def declare_state(config: MemoryConfig, shape: MemoryShape) -> tuple[TensorSpec, ...]:
    """Return the tensors of a state under these settings. Allocates nothing.

    Raises:
        ConfigError: the config does not fit the model.
    """
    recent = RecentSteps.declare(shape) if config.recent_frames else ()
    return (*MEMORIES[config.name].declare(config, shape), *recent, *_carried_specs(shape), *BESIDE)


def _carried_specs(shape: MemoryShape) -> tuple[TensorSpec, ...]:
    return () if shape.carried is None else Carried.declare(shape)


def check_parts(config: MemoryConfig, shape: MemoryShape) -> None:
    """Refuse what layers with a window or a recurrent state cannot do.

    Raises:
        ConfigError: naming the setting.
    """
    if shape.carried is None:
        return
    if config.recent_frames:
        raise ConfigError(
            "recent_frames: this model has layers that read every token once, in order, so no step is read again",
            hint="leave recent_frames out, or use a model of which all layers have full attention",
        )
    if shape.carried.sliding is not None and config.positions == "compact":
        raise ConfigError(
            "positions: this model has sliding layers, whose windows do not move with a memory",
            hint="leave positions=compact out",
        )


def restore_memory(
    config: MemoryConfig, shape: MemoryShape, rotary: Rotary, tensors: Mapping[str, Tensor], clock: Clock
) -> Memory:
    """Return the memory that a state holds.

    The state is not trusted: shapes are checked before the settings allocate anything, and numbers against the clock.

    Raises:
        StateCorrupt: no stream under these settings leaves such a state; the tensor or setting is named.
        StateMismatch: the device has no room for it.
    """
    try:
        check_shapes(tensor_shapes(tensors), declare_state(config, shape))
        memory = build_memory(config, shape, rotary)
        own = {spec.name for spec in memory.specs()}
        with allocating(config.budget):
            memory.load({name: tensor for name, tensor in tensors.items() if name in own}, clock)
    except DoesNotFit as error:
        raise StateMismatch(error.message, hint="open the state on a machine with more memory") from error
    except ConfigError as error:
        raise StateCorrupt(f"the memory settings of the state: {error.message}") from error
    return memory


def restore_beside(tensors: Mapping[str, Tensor], clock: Clock) -> StatePart | None:
    """Return what a state holds beside its memory, its thumbnails. StateCorrupt if they are none of this stream."""
    return Thumbnails.of(tensors, clock)


def session_parts(
    backbone: Backbone,
    config: MemoryConfig,
    tensors: Mapping[str, Tensor] | None = None,
    clock: StreamClock | None = None,
) -> SessionParts:
    """Return what the config adds to a session of this backbone, which continues a state with these tensors.

    Raises:
        StateCorrupt: the transcript of the state is none of this stream.
    """
    transcript = Transcript.of(tensors or {}, clock)
    compact = config.positions == "compact"
    advice = "" if compact else "; positions=compact would stay inside"
    listeners: list[SessionListener] = [PositionLimit(backbone.max_position, backbone.moving, advice), transcript]
    if issubclass(MEMORIES[config.name], Probing):
        listeners.append(ProbeListener())
    placement = CompactPlacement(backbone) if compact else Placement()
    spoken = None if clock is None else transcript.spoken(clock)
    return SessionParts(placement, listeners, AttentionEvidence(), transcript, spoken)


def rotary_of(backbone: Backbone, config: MemoryConfig) -> Rotary:
    """Return the angles by which a memory removes rotations and restores them.

    At stream positions these are the model's own. At compact positions the model makes keys at small positions and they
    are rotated to the stream's, by angles that add up, so that rotating them back leaves no error.
    """
    return backbone.rotary if config.positions == "stream" else backbone.precise_rotary
