"""Sessions on disk: what of a session goes into a state, and how a state becomes a session again.

Joins `Session` and `protokv.snapshot`. A state names its model by architecture and weights, not by the path it was
loaded from, so a folder may move. Knows no video formats and no command line.
"""

from __future__ import annotations

from typing import Any

from protokv import snapshot
from protokv.backbones import load_backbone
from protokv.backbones.base import Backbone
from protokv.config import MemoryConfig, migrate
from protokv.errors import ConfigError, StateCorrupt
from protokv.session import Session
from protokv.snapshot import State, StatePath
from protokv.snapshot.writer import Writer


def to_state(session: Session, *, source: dict[str, Any] | None = None, complete: bool = False) -> State:
    """The state of a session; its tensors are the live ones, so save it before the next step.

    Args:
        session: what to save.
        source: what it has been watching, plain JSON.
        complete: whether that has ended.
    """
    return State(
        backbone=session.backbone.identity,
        memory=session.config.to_dict(),
        clock=session.clock,
        settings=session.backbone.settings,
        source=source,
        complete=complete,
        tensors=session.tensors(),
    )


def config_of(state: State) -> MemoryConfig:
    """The memory settings of a state.

    Raises:
        StateCorrupt: they make no sense; the setting is named.
    """
    try:
        return MemoryConfig.from_dict(migrate(state.memory))
    except ConfigError as error:
        raise StateCorrupt(f"the memory settings of the state: {error.message}") from error


def from_state(state: State, backbone: Backbone) -> Session:
    """The session that a state was made of.

    Raises:
        StateMismatch: the state was made by another model or dtype; the field is named.
        StateCorrupt: its memory or clock makes no sense.
    """
    snapshot.check_fits(state, backbone.identity)
    session = Session(backbone, config_of(state), fps=state.clock.fps)
    session.restore(state.tensors, state.clock)
    return session


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
    backbone: Backbone | None = None,
    *,
    model: str | None = None,
    device: str = "auto",
    device_map: str | None = None,
    at_s: float | None = None,
    verify: bool = True,
) -> Session:
    """Read a session back.

    Args:
        path: what `save` wrote.
        backbone: the model, if it is loaded already.
        model: name or folder to load it from; the name in the state where None.
        device: where to load it.
        device_map: spread it over all devices instead; see `load_backbone`.
        at_s: take the newest commit that is not after this stream time, of those that `ingest` kept.
        verify: check that the tensors have the bytes that were saved; their shapes are checked in any case.

    Raises:
        StateError: the state is missing, damaged, or made by another model.
        ModelError: the model cannot be loaded.
    """
    state = snapshot.load(path, verify=verify, at_s=at_s)
    if backbone is None:
        backbone = load_backbone(
            model or state.backbone.name, device=device, dtype=state.backbone.dtype, device_map=device_map
        )
    return from_state(state, backbone)
