"""Make sessions of states, and load the model of a state.

A state identifies its model by architecture and weights, so the folder of a model may move. The
name of the model is untrusted data; `load_recorded_backbone` says which names are followed.
"""

from __future__ import annotations

import shlex
from collections.abc import Iterable
from contextlib import suppress
from typing import Any

from typing_extensions import TypeVar

from protokv.backbones import load_backbone
from protokv.backbones.files import find_cached_model, find_entry_points
from protokv.core.backbone import Backbone
from protokv.errors import ConfigError, ModelError, StateError, StateMismatch, escape_text
from protokv.state.checkpoint import check_state_fits
from protokv.state.header import StateHeader
from protokv.state.reader import StateReader
from protokv.state.store import StatePath
from protokv.stream.session import Session
from protokv.texts import JsonObject, Keywords
from protokv.timings import Timings, time_stage

_AnySession = TypeVar("_AnySession", bound=Session, default=Session)


def save(
    session: Session,
    path: StatePath,
    *,
    source: JsonObject | None = None,
    complete: bool = False,
) -> int:
    """Write a session to a path; arguments, result and errors are those of `Session.save`."""
    return session.save(path, source=source, complete=complete)


def load(
    path: StatePath,
    backbone: Backbone | str | None = None,
    *,
    revision: str | None = None,
    device: str = "auto",
    device_map: str | None = None,
    at_s: float | None = None,
    verify: bool = True,
) -> Session:
    """Read a session back.

    Args:
        path: of a state, whether a session or a `protokv.Cache` saved it.
        backbone: the model, or its name or folder; with None, the one that the state names
            (`load_recorded_backbone`).
        revision: branch, tag or commit of a hub model; with None, see `load_recorded_backbone`.
        device: where to load it.
        device_map: spread it over all devices instead; see `load_backbone`.
        at_s: read the newest kept commit that is not after this stream time, in seconds.
        verify: check the digests of the tensors; their shapes are checked in any case.

    Raises:
        StateError: the state is missing, damaged, or made by another model.
        ModelError: the model cannot be loaded.
    """
    reader = StateReader.open(path, at_s=at_s, verify=verify)
    return open_session(reader, backbone, revision=revision, device=device, device_map=device_map)


def open_session(
    reader: StateReader,
    backbone: Backbone | str | None = None,
    *,
    timings: Timings | None = None,
    kind: type[_AnySession] = Session,  # type: ignore[assignment]
    **placement: Any,
) -> _AnySession:
    """Return a session of the commit that a reader stands at; arguments and errors as `load`."""
    with time_stage(timings, "state"):
        state = reader.state
    with time_stage(timings, "model"):
        if backbone is None or isinstance(backbone, str):
            backbone = load_recorded_backbone(state, backbone, **placement)
    with time_stage(timings, "session"):
        return kind.restore(state, backbone)


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
    are those of `load_backbone`; revision, dtype and cost of a frame are the state's unless given.
    ModelError if the state names a folder, or a model that is not in the cache.
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
        # Settings that the model cannot follow are left, and refused when the state is continued.
        with suppress(ConfigError):
            backbone.limit_frames(tokens)
    return backbone


def _load(
    header: StateHeader, name: str | None, revision: str | None, placement: Keywords
) -> Backbone:
    named = header.backbone.name
    own = name or named
    commit = header.backbone.revision if revision is None else revision
    if own in find_entry_points(packaged=True):
        return load_backbone(own, revision=revision, **placement)
    if own == named and (name is None or revision is None):
        folder = find_cached_model(named, commit)
        if folder is not None:
            return load_backbone(named, folder=folder, **placement)
    if name is not None:
        return load_backbone(name, revision=revision, **placement)
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


def load_fitting_backbone(
    loaded: Backbone | None, header: StateHeader, backbone: str | None = None, **how: Any
) -> Backbone:
    """Return the model that is `loaded` if it made a state, else that of the state; `backbone` and
    `how` are as for `load_recorded_backbone`. A model that is named is loaded once.
    """
    if loaded is not None:
        with suppress(StateMismatch):
            if backbone is None:
                check_state_fits(header, loaded.identity)
            return loaded
    return load_recorded_backbone(header, backbone, **how)


def load_backbone_for_states(states: Iterable[str], **how: Any) -> Backbone:
    """Load the model of the first readable state; arguments as for `load_fitting_backbone`.

    StateError: no state can be read; the first reason is given. ModelError: the model cannot be
    loaded.
    """
    reasons = list[StateError]()
    for state in states:
        try:
            return load_fitting_backbone(None, StateReader.open(state).header, **how)
        except StateError as error:
            reasons.append(error)
    raise reasons[0]
