"""Which session to ingest a source with: a new one, or the one that an earlier run left at the path.

Continuing is refused, with the difference named, unless source, model, memory and sampling rate are the same: the
continuation must end in the bytes of one uninterrupted run. Knows no command line.
"""

from __future__ import annotations

from pathlib import Path

from protokv import snapshot
from protokv.backbones import EMBEDDED, load_backbone
from protokv.config import MemoryConfig
from protokv.errors import StateMismatch, StateNotFound
from protokv.persist import config_of, from_state
from protokv.session import Session
from protokv.video import Source


def open_session(
    source: Source,
    path: str | Path,
    config: MemoryConfig,
    *,
    model: str | None = None,
    fps: float | None = None,
    device: str = "auto",
    dtype: str | None = None,
    must_exist: bool = False,
    start_over: bool = False,
) -> Session:
    """A session that stands where the source has to be read on.

    Args:
        source: what will be watched.
        path: where the state goes, or stands.
        config: the memory.
        model: name or folder; where None that of the state, or the embedded model.
        fps: sampled frames a second; the model's default where None.
        device: where the model is loaded.
        dtype: of its weights; that of the state, or `auto`, where None.
        must_exist: a missing state is an error.
        start_over: a state at `path` is not looked at; the first commit replaces it.

    Raises:
        StateError: a state could not be written to `path`; told now, not after the work.
        StateNotFound: there is no state, but `must_exist`.
        StateMismatch: the state is of another source, model, memory or rate; the field is named with both values.
    """
    snapshot.check_target(path)
    exists = Path(path).exists()
    if must_exist and not exists:
        raise StateNotFound(f"there is no state at {path} to continue", hint="leave --resume out to start one")
    if start_over or not exists:
        return Session(load_backbone(model or EMBEDDED, device=device, dtype=dtype or "auto"), config, fps=fps)
    state = snapshot.load(path)
    _compare(path, "source", (state.source or {}).get("fingerprint"), source.info.fingerprint)
    # Through the config, so that a setting which is newer than the state has its default there.
    theirs, ours = config_of(state).to_dict(), config.to_dict()
    for field in theirs:
        _compare(path, f"memory.{field}", theirs[field], ours.get(field))
    backbone = load_backbone(model or state.backbone.name, device=device, dtype=dtype or state.backbone.dtype)
    _compare(path, "fps", state.clock.fps, backbone.default_fps if fps is None else fps)
    return from_state(state, backbone)


def _compare(path: str | Path, field: str, found: object, wanted: object) -> None:
    if found != wanted:
        raise StateMismatch(
            f"the state at {path} cannot be continued: its {field} is {found}, this run's is {wanted}",
            hint="write to another file with -o, or start over with --force",
        )
