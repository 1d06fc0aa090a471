"""Make states of sessions, save them, make sessions of states, and load the model of a state.

A state identifies its model by architecture and weights, so the folder of a model may move. The
name of the model is untrusted data; `load_recorded_backbone` says which names are followed.
"""

from __future__ import annotations

import shlex
from contextlib import suppress
from typing import Any

from protokv.backbones import load_backbone
from protokv.backbones.files import find_cached_model, find_packaged_models
from protokv.core.backbone import Backbone, BackboneIdentity
from protokv.core.packing import trim_unused_slots
from protokv.core.session import Session
from protokv.core.settings import MEMORY_VARIABLE
from protokv.errors import (
    ConfigError,
    ModelError,
    ProtoKVError,
    StateCorrupt,
    StateMismatch,
    escape_text,
)
from protokv.memories import MEMORIES, MemoryConfig
from protokv.state.header import State, StateHeader
from protokv.state.store import StatePath, find_store
from protokv.state.thumbnails import Thumbnails
from protokv.words.transcript import Transcript

# The tensors that any state may have besides its memory.
ATTACHED_TENSORS = (*Thumbnails.declare(), *Transcript.declare())

# what the settings of a state say whose maker was a cache, not a session
CACHE_STATE_KIND = "protokv.Cache"


def make_state(
    session: Session, *, source: dict[str, Any] | None = None, complete: bool = False
) -> State:
    """Return the state of a session, without unused slots; arguments as `save`.

    The tensors may be the live ones, so save the state before the next step.
    """
    tensors = session.tensors()
    specs = session.specs()
    attached = {
        name: tensor for one in session.attachments for name, tensor in one.live_tensors().items()
    }
    return State(
        backbone=session.backbone.identity,
        memory=session.config.to_dict(),
        clock=session.clock,
        settings=session.backbone.settings,
        source=source,
        complete=complete,
        tensors=trim_unused_slots(tensors, specs) | attached,
        specs=(*specs, *ATTACHED_TENSORS),
    )


def save(
    session: Session,
    path: StatePath,
    *,
    source: dict[str, Any] | None = None,
    complete: bool = False,
) -> int:
    """Write a session so that the path holds the old or the new state whole; return the stored
    bytes.

    The suffix of the path chooses the form. `source` is the record of the watched source, plain
    JSON; `complete` says that it has ended.

    Raises:
        StateLocked: another writer is writing the state.
        StateError: the state cannot be written; the old one is still there.
    """
    return save_state(make_state(session, source=source, complete=complete), path)


def save_state(state: State, path: StatePath) -> int:
    """Write a state, as `save` a session."""
    with find_store(path) as store:
        return store.commit(state)


def restore_session(state: State, backbone: Backbone) -> Session:
    """Return the session of a state; its model has the system prompt that the state was made with.

    Raises:
        StateMismatch: another model or dtype made the state; the field is named.
        StateCorrupt: its memory, clock or system prompt makes no sense.
    """
    if state.settings.get("kind") == CACHE_STATE_KIND:
        why = "it is the state of a protokv.Cache"
        raise StateMismatch(why, hint="protokv.Cache.load(path, model) goes on with it")
    check_state_fits(state, backbone.identity)
    system = state.settings.get("system")
    if system != backbone.settings.get("system"):
        try:
            backbone = backbone.with_system(system if system is None else str(system))
        except ProtoKVError as error:
            raise StateCorrupt(f"the system prompt of the state: {error.message}") from error
    thumbnails = Thumbnails.read(state.tensors)
    attachments = [Transcript.of(state.tensors), *([thumbnails] if thumbnails else [])]
    return Session.resume(
        backbone, read_state_memory_config(state), state.clock, state.tensors, attachments
    )


def read_state_memory_config(header: StateHeader) -> MemoryConfig:
    """Return the memory settings of a state. StateMismatch: it is not known here. StateCorrupt: a
    setting is wrong.
    """
    try:
        return MemoryConfig.from_dict(header.memory)
    except ConfigError as error:
        kind = header.memory.get("kind")
        if isinstance(kind, str) and kind not in MEMORIES:
            why = f"the state is of the memory {escape_text(kind)}, which is not known here"
            raise StateMismatch(
                why, hint=f"if it is yours, export {MEMORY_VARIABLE}=MODULE:CLASS"
            ) from error
        raise StateCorrupt(f"the memory settings of the state: {error.message}") from error


def check_state_fits(header: StateHeader, identity: BackboneIdentity) -> None:
    """Check that this model made a state, under whatever name. StateMismatch, with the first field
    that differs.
    """
    for name in ("family", "config_hash", "dtype", "weights_digest"):
        saved = getattr(header.backbone, name)
        ours = getattr(identity, name)
        if saved != ours:
            why = (
                f"the state does not fit: its backbone.{name} is {saved[:24]!r}, here it is "
                f"{ours[:24]!r}"
            )
            made = f"{header.backbone.name} in {header.backbone.dtype}"
            raise StateMismatch(
                why, hint=f"it was made with {made}; load that one, or make a new state"
            )


def load_recorded_backbone(
    header: StateHeader,
    name: str | None = None,
    revision: str | None = None,
    *,
    default: str | None = None,
    **placement: Any,
) -> Backbone:
    """Load the model that the caller names, or else the one that a state names.

    A state may come from anywhere, so a name in it opens no folder and no connection. Only a
    packaged model and hub models in the local cache are loaded by such a name, the latter at the
    commit that the state names.

    `default` names the model where the state's own cannot be loaded so. Other arguments and errors
    are those of `load_backbone`; revision, dtype and cost of a frame are the
    state's unless given. ModelError if the state names a folder, or a model that is not in the
    cache.
    """
    if placement.get("dtype") is None:
        placement["dtype"] = header.backbone.dtype
    try:
        backbone = _load(header, name, revision, placement)
    except ModelError:
        if default is None:
            raise
        backbone = load_backbone(default, revision=revision, **placement)
    tokens = header.settings.get("frame_tokens")
    same_family = header.backbone.family == backbone.identity.family
    if placement.get("frame_tokens") is None and same_family and isinstance(tokens, int):
        # What the model cannot do is left, and refused when the state is continued.
        with suppress(ConfigError):
            backbone.limit_frames(tokens)
    return backbone


def _load(
    header: StateHeader, name: str | None, revision: str | None, placement: dict[str, Any]
) -> Backbone:
    named = header.backbone.name
    commit = header.backbone.revision if revision is None else revision
    if (own := name or named) not in find_packaged_models():
        folder = (
            find_cached_model(named, commit)
            if name is None or (name == named and revision is None)
            else None
        )
        if folder is not None:
            return load_backbone(named, folder=folder, **placement)
    if name is not None or named in find_packaged_models():
        return load_backbone(own, revision=revision, **placement)
    where = f" at revision {escape_text(commit)}" if commit else ""
    option = f" --revision {shlex.quote(escape_text(commit))}" if commit else ""
    raise ModelError(
        f"the state names the model {escape_text(named)}{where}, which is not in the local cache "
        "of hub models; "
        "a state does not make protokv open other folders or download anything",
        hint=(
            "if you know this model, name it yourself: --model "
            f"{shlex.quote(escape_text(named))}{option}"
        ),
    )
