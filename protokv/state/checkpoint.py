"""Check that a state fits a model, read its memory settings, and write a state."""

from __future__ import annotations

from protokv.core.backbone import BackboneIdentity
from protokv.core.parts import SessionAttachment
from protokv.core.settings import MEMORY_VARIABLE
from protokv.core.tensors import Tensors
from protokv.errors import ConfigError, StateCorrupt, StateMismatch, escape_text
from protokv.memories import MEMORIES, MemoryConfig
from protokv.state.header import State, StateHeader
from protokv.state.store import StatePath, find_store
from protokv.state.thumbnails import Thumbnails
from protokv.words.transcript import Transcript

# The tensors that any state may have besides its memory.
ATTACHED_TENSORS = (*Thumbnails.declare(), *Transcript.declare())

OUTSIDE_KIND = "protokv.Cache"
"""What the settings of a state say whose tokens a model placed by itself."""


def save_state(state: State, path: StatePath) -> int:
    """Write a state so that the path holds the old or the new one whole; return the stored
    bytes.
    """
    with find_store(path) as store:
        return store.commit(state)


def read_attachments(tensors: Tensors) -> list[SessionAttachment]:
    """Return what a state has besides its memory. StateCorrupt: a tensor holds no such thing."""
    thumbnails = Thumbnails.read(tensors)
    return [Transcript.of(tensors), *([thumbnails] if thumbnails else [])]


def read_state_memory_config(header: StateHeader) -> MemoryConfig:
    """Return the memory settings of a state. StateMismatch: it is not known here. StateCorrupt: a
    setting is wrong.
    """
    try:
        return MemoryConfig.from_dict(header.memory)
    except ConfigError as error:
        kind = header.memory.get("kind")
        if isinstance(kind, str) and kind not in MEMORIES:
            raise StateMismatch(
                f"the state is of the memory {escape_text(kind)}, which is not known here",
                hint=f"if it is yours, export {MEMORY_VARIABLE}=MODULE:CLASS",
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
