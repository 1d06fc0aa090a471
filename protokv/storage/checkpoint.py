"""Sessions on disk: what of a session goes into a state, and how a state becomes a session again.

Joins `Session` and `protokv.snapshot`. A state names its model by architecture and weights, so that a folder may move,
and by a name that is data from somewhere else: which of these names are followed is in `load_backbone_of`. Knows no
video formats and no command line.
"""

from __future__ import annotations

import shlex
from collections.abc import Iterable
from typing import Any

import torch

from protokv import storage
from protokv.backbones import load_backbone
from protokv.backbones.base import Backbone
from protokv.config import MemoryConfig
from protokv.core.memory import MemoryShape
from protokv.core.packing import pack
from protokv.core.records import BackboneIdentity
from protokv.core.session import Session
from protokv.core.snapshot import Found, Header, State, TensorInfo
from protokv.core.tensors import TensorSpec
from protokv.core.validation import check_shapes
from protokv.errors import ConfigError, ModelError, StateCorrupt, StateMismatch, shown
from protokv.memories import declare_state
from protokv.mini import is_embedded
from protokv.storage.form import StatePath
from protokv.storage.writer import Writer
from protokv.timings import Timings, stage


def to_state(session: Session, *, source: dict[str, Any] | None = None, complete: bool = False) -> State:
    """The state of a session without unused slots; tensors may be the live ones, so save it before the next step.

    What is handed out always loads: the memory is checked against the clock first.

    Args:
        session: what to save.
        source: what it has been watching, plain JSON.
        complete: whether that has ended.

    Raises:
        StateCorrupt: the memory holds what no stream leaves; that is a fault of this program or of the machine.
    """
    tensors, specs = session.tensors(), session.memory.specs()
    session.memory.check(session.clock, tensors)
    return State(
        backbone=session.backbone.identity,
        memory=session.config.to_dict(),
        clock=session.clock,
        settings=session.backbone.settings,
        source=source,
        complete=complete,
        tensors=pack(tensors, specs),
        legends=legends_of(specs),
    )


def legends_of(specs: Iterable[TensorSpec]) -> dict[str, TensorInfo]:
    """What the tensors of a memory are, by name, for whoever opens its state without this library."""
    return {spec.name: TensorInfo(spec.dims, spec.meaning, spec.unit) for spec in specs}


def config_of(header: Header) -> MemoryConfig:
    """The memory settings of a state.

    Raises:
        StateCorrupt: they make no sense; the setting is named.
    """
    try:
        return MemoryConfig.from_dict(header.memory)
    except ConfigError as error:
        raise StateCorrupt(f"the memory settings of the state: {error.message}") from error


def shape_of(header: Header, found: Found) -> MemoryShape:
    """The shape of the memory whose tensors these are, as far as they tell it.

    Raises:
        StateCorrupt: they do not.
    """
    try:
        (L, H, P0, D), dtype = found["sink.keys"]
        # Every memory holds positions of something, and their components come last.
        components = next(shape[-1] for name, (shape, _) in found.items() if name.endswith(".positions"))
    except (KeyError, ValueError, IndexError, StopIteration) as error:
        raise StateCorrupt("the state lacks sink.keys or positions in their form") from error
    return MemoryShape(
        layers=L,
        kv_heads=H,
        head_size=D,
        position_components=components,
        sink_tokens=P0,
        dtype=dtype,
        device=torch.device("cpu"),
        frames_per_step=header.clock.frames_per_step,
    )


def admit(header: Header, found: Found) -> None:
    """Hold what a state says it holds against its settings, as arithmetic: before memory is taken for any of it.

    Raises:
        StateCorrupt: no stream under these settings leaves such tensors; the tensor or setting is named.
    """
    config = config_of(header)
    try:
        check_shapes(found, declare_state(config, shape_of(header, found)))
    except ConfigError as error:
        raise StateCorrupt(f"the memory settings of the state: {error.message}") from error


def check_fits(header: Header, identity: BackboneIdentity) -> None:
    """Check that a state was made by this model; where the model was loaded from is not compared: a folder may move.

    Raises:
        StateMismatch: The first field that differs, with both values.
    """
    for name in ("family", "config_hash", "dtype", "weights_digest"):
        saved, ours = getattr(header.backbone, name), getattr(identity, name)
        if saved != ours:
            raise StateMismatch(
                f"the state does not fit: its backbone.{name} is {saved!r}, here it is {ours!r}",
                hint=f"the state was made with the model {header.backbone.name}; load that one, or make a new state",
            )


def from_state(state: State, backbone: Backbone) -> Session:
    """The session that a state was made of.

    Raises:
        StateMismatch: the state was made by another model or dtype; the field is named.
        StateCorrupt: its memory or clock makes no sense.
    """
    check_fits(state, backbone.identity)
    return Session.resume(backbone, config_of(state), state)


def load_backbone_of(
    header: Header, name: str | None = None, revision: str | None = None, **placement: Any
) -> Backbone:
    """Load the model of a state: the one that is named here, or that the state names.

    A state may come from anywhere, so its word opens no folder and no connection: the embedded model and hub models
    in the local cache, at the commit that the state names, are followed, nothing else.

    Args:
        header: of the state.
        name: of the model, or its folder, as for `load_backbone`; None: what the state names.
        revision: branch, tag or commit of a hub model. Where None the commit that the state names, if the model is the
            one that it names and the cache has that commit.
        placement: `device`, `dtype`, `device_map` and `quantization` as for `load_backbone`; the state's dtype where
            none is given.

    Raises:
        ModelError: the name in the state is that of a folder, or of a model that is not in the cache; or the model
            cannot be loaded.
        ConfigError: there is a revision of what is no hub model.
        StateCorrupt: the dtype in the state is none.
    """
    if placement.get("dtype") is None:
        placement["dtype"] = recorded_dtype(header)
    named = header.backbone.name
    if is_embedded(name or named):
        return load_backbone(name or named, revision=revision, **placement)
    from protokv.backbones.hub import cached_folder

    commit = header.backbone.revision if revision is None else revision
    folder = cached_folder(named, commit) if name is None or (name == named and revision is None) else None
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


def recorded_dtype(header: Header) -> str:
    """The dtype that a state names.

    Raises:
        StateCorrupt: there is no such dtype.
    """
    from protokv.backbones.loading import PlacementRequest

    dtype = header.backbone.dtype
    try:
        request = PlacementRequest.of(device="cpu", dtype=dtype, device_map=None, quantization=None)
    except ConfigError:
        request = None
    if request is None or request.dtype == "auto":
        raise StateCorrupt(f"backbone.dtype: expected a dtype such as float32, got {shown(dtype)}")
    return dtype


def save(session: Session, path: StatePath, *, source: dict[str, Any] | None = None, complete: bool = False) -> int:
    """Write a session so that the path holds the old or the new state whole; returns bytes on disk.

    Raises:
        StateLocked: somebody else is writing the state.
        StateError: the state cannot be written.
    """
    with Writer(path) as writer:
        (committed,) = writer.commit(to_state(session, source=source, complete=complete), wait=True)
    return committed.file_bytes


def load(
    path: StatePath,
    backbone: Backbone | str | None = None,
    *,
    revision: str | None = None,
    device: str = "auto",
    device_map: str | None = None,
    at_s: float | None = None,
    verify: bool = True,
    timings: Timings | None = None,
) -> Session:
    """Read a session back.

    Args:
        path: what `save` or `ingest` wrote.
        backbone: the model, or its name or folder; where None the one that the state names (`load_backbone_of`).
        revision: branch, tag or commit of a hub model; where None see `load_backbone_of`.
        device: where to load it.
        device_map: spread it over all devices instead; see `load_backbone`.
        at_s: take the newest commit that is not after this stream time, of those that `ingest` kept.
        verify: check that the tensors have the bytes that were saved; their shapes are checked in any case.
        timings: where to add up seconds by stage; None: nowhere.

    Raises:
        StateError: the state is missing, damaged, or made by another model.
        ModelError: the model cannot be loaded.
    """
    with stage(timings, "state"):
        state = storage.load_state(path, verify=verify, at_s=at_s, admit=admit)
    with stage(timings, "model"):
        if backbone is None or isinstance(backbone, str):
            backbone = load_backbone_of(state, backbone, revision, device=device, device_map=device_map)
    with stage(timings, "session"):
        return from_state(state, backbone)
