"""Make states of sessions and sessions of states, and load the model of a state.

A state identifies its model by architecture and weights, so a model's
folder may move. The name of the model is untrusted data; `load_recorded_backbone` says which names are followed.
"""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Mapping
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor

from protokv.backbones import load_backbone
from protokv.backbones.files import find_cached, find_packaged_models
from protokv.core.backbone import Backbone, BackboneIdentity
from protokv.core.layers import HybridShape
from protokv.core.packing import pack
from protokv.core.parts import Attachment
from protokv.core.session import Session
from protokv.core.tensors import MemoryShape, TensorSpec, tensor_shapes
from protokv.errors import ConfigError, ModelError, ProtoKVError, StateCorrupt, StateMismatch, shown
from protokv.memories import MemoryConfig
from protokv.state.header import Header, State
from protokv.state.thumbnails import Thumbnails
from protokv.words.transcript import Transcript

ATTACHED = (*Thumbnails.declare(), *Transcript.declare())
"""The tensors that any state may have besides its memory."""

CACHE = "protokv.Cache"
"""What the settings of a state say whose maker was a cache, not a session."""


def to_state(session: Session, *, source: dict[str, Any] | None = None, complete: bool = False) -> State:
    """Return the state of a session, without unused slots; arguments as `save`.

    The tensors may be the live ones, so save the state before the next step.

    Raises:
        StateCorrupt: the clock contradicts itself: a fault of this program or of the machine.
    """
    tensors, specs = session.tensors(), session.memory.specs()
    session.clock.check()
    attached = {name: tensor for one in session.attachments for name, tensor in one.live_tensors().items()}
    return State(
        backbone=session.backbone.identity,
        memory=session.config.to_dict(),
        clock=session.clock,
        settings=session.backbone.settings,
        source=source,
        complete=complete,
        tensors=pack(tensors, specs) | attached,
        tensor_info=name_specs((*specs, *ATTACHED)),
    )


def from_state(state: State, backbone: Backbone) -> Session:
    """Return the session of a state; its model has the system prompt that the state was made with.

    Raises:
        StateMismatch: another model or dtype made the state; the field is named.
        StateCorrupt: its memory, clock or system prompt makes no sense.
    """
    if state.settings.get("kind") == CACHE:
        raise StateMismatch(
            "it is the state of a protokv.Cache", hint="protokv.Cache.load(path, model) goes on with it"
        )
    check_fits(state, backbone.identity)
    system = state.settings.get("system")
    if system != backbone.settings.get("system"):
        try:
            backbone = backbone.with_system(system if system is None else str(system))
        except ProtoKVError as error:
            raise StateCorrupt(f"the system prompt of the state: {error.message}") from error
    return Session.resume(backbone, read_config(state), state, restore_attachments(state.tensors))


def restore_attachments(tensors: Mapping[str, Tensor]) -> list[Attachment]:
    """Return the transcript of a state, empty if it has none, and its thumbnails if it has any. StateCorrupt."""
    thumbnails = Thumbnails.read(tensors)
    return [Transcript.of(tensors), *([] if thumbnails is None else [thumbnails])]


def name_specs(specs: Iterable[TensorSpec]) -> dict[str, TensorSpec]:
    """Return the declarations by name: axes, meaning and unit, for a reader without this library."""
    return {spec.name: spec for spec in specs}


def read_config(header: Header) -> MemoryConfig:
    """Return the memory settings of a state.

    Raises:
        StateCorrupt: they make no sense; the setting is named.
    """
    try:
        return MemoryConfig.from_dict(header.memory)
    except ConfigError as error:
        raise StateCorrupt(f"the memory settings of the state: {error.message}") from error


def read_shape(state: State) -> MemoryShape:
    """Return the shape of the memory that left these tensors, on the CPU.

    Raises:
        StateCorrupt: `sink.keys` or positions are missing or have the wrong number of axes.
    """
    shapes = tensor_shapes(state.tensors)
    try:
        (L, H, P0, D), dtype = shapes["sink.keys"]
        # Every memory holds positions of something, and their components are the last axis.
        components = next(shape[-1] for name, (shape, _) in shapes.items() if name.endswith(".positions"))
        hybrid = HybridShape.of(shapes)
    except (KeyError, ValueError, IndexError, StopIteration) as error:
        raise StateCorrupt("the state lacks sink.keys, positions or layers in their form") from error
    return MemoryShape(
        layers=L,
        kv_heads=H,
        head_size=D,
        position_components=components,
        sink_tokens=P0,
        dtype=dtype,
        device=torch.device("cpu"),
        frames_per_step=state.clock.frames_per_step,
        hybrid=hybrid,
    )


def check_fits(header: Header, identity: BackboneIdentity) -> None:
    """Check that this model made a state; the model's name is not compared, because its folder may move.

    Raises:
        StateMismatch: names the first field that differs, with both values.
    """
    for name in ("family", "config_hash", "dtype", "weights_digest"):
        saved, ours = getattr(header.backbone, name), getattr(identity, name)
        if saved != ours:
            raise StateMismatch(
                f"the state does not fit: its backbone.{name} is {saved!r}, here it is {ours!r}",
                hint=f"the state was made with the model {header.backbone.name}; load that one, or make a new state",
            )


def load_recorded_backbone(
    header: Header, name: str | None = None, revision: str | None = None, **placement: Any
) -> Backbone:
    """Load the model that the caller names, or else the one that a state names.

    A state may come from anywhere, so a name in it opens no folder and no connection. Only a packaged model and hub
    models in the local cache are loaded by such a name, the latter at the commit that the state names.

    Args:
        header: of the state.
        name: model or folder, as for `load_backbone`; with None, the model that the state names.
        revision: branch, tag or commit of a hub model. With None, the commit that the state names, if the state names
            this model and the cache has that commit.
        placement: `device`, `dtype`, `device_map` and `quantization` as for `load_backbone`, and what a frame may cost;
            dtype and cost are the state's unless given.

    Raises:
        ModelError: the state names a folder or a model that is not in the cache, or the model cannot be loaded.
        ConfigError: a revision is given for a model that is not from the hub; or the dtype is unknown.
    """
    if placement.get("dtype") is None:
        placement["dtype"] = header.backbone.dtype
    backbone = _load(header, name, revision, placement)
    tokens = header.settings.get("frame_tokens")
    same_family = header.backbone.family == backbone.identity.family
    if placement.get("frame_tokens") is None and same_family and isinstance(tokens, int):
        # What the model cannot do is left, and refused when the state is continued.
        with suppress(ConfigError):
            backbone.limit_frames(tokens)
    return backbone


def _load(header: Header, name: str | None, revision: str | None, placement: dict[str, Any]) -> Backbone:
    named = header.backbone.name
    if (own := name or named) in find_packaged_models():
        return load_backbone(own, revision=revision, **placement)
    commit = header.backbone.revision if revision is None else revision
    folder = find_cached(named, commit) if name is None or (name == named and revision is None) else None
    if folder is not None:
        return load_backbone(named, folder=folder, **placement)
    if name is not None:
        return load_backbone(name, revision=revision, **placement)
    where = f" at revision {shown(commit)}" if commit else ""
    option = f" --revision {shlex.quote(shown(commit))}" if commit else ""
    raise ModelError(
        f"the state names the model {shown(named)}{where}, which is not in the local cache of hub models; "
        "a state does not make protokv open other folders or download anything",
        hint=f"if you know this model, name it yourself: --model {shlex.quote(shown(named))}{option}",
    )
