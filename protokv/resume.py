"""Which session to ingest a source with: a new one, or the one that an earlier run left at the path.

Continuing is refused, with the difference named, unless source, model, memory and sampling rate are the same: the
continuation must end in the bytes of one uninterrupted run. A finished state can be continued with another source:
times and positions go on where the state ends. A source is told by its content, and none is watched twice, so the
command that appends one can be repeated, after a crash as after its end. Knows no command line.
"""

from __future__ import annotations

from protokv import snapshot
from protokv.backbones import EMBEDDED, load_backbone
from protokv.backbones.base import Backbone
from protokv.config import MemoryConfig
from protokv.errors import ConfigError, StateMismatch, StateNotFound
from protokv.persist import config_of, from_state
from protokv.session import Session
from protokv.snapshot import State, StatePath
from protokv.snapshot.sources import Segment, fingerprints, next_segment, segment_of
from protokv.video import Source


def open_session(
    source: Source,
    path: StatePath,
    config: MemoryConfig,
    *,
    model: str | None = None,
    fps: float | None = None,
    device: str = "auto",
    dtype: str | None = None,
    device_map: str | None = None,
    quantization: str | None = None,
    must_exist: bool = False,
    start_over: bool = False,
    append: bool = False,
) -> tuple[Session, Segment]:
    """A session that stands where the source has to be read on, and where in its stream the source begins.

    Enter a `Writer` for `path` before, so that nobody else writes the state between this and the first commit.

    Args:
        source: what will be watched.
        path: where the state goes, or stands.
        config: the memory.
        model: name or folder; where None that of the state, or the embedded model.
        fps: sampled frames a second; the model's default where None.
        device: where the model is loaded.
        device_map: spread it over all devices instead; see `load_backbone`.
        dtype: of its weights; that of the state, or `auto`, where None.
        quantization: of its weights; that of the state where None.
        must_exist: a missing state is an error.
        start_over: a state at `path` is not looked at; the first commit replaces it.
        append: watch the source behind what a finished state at `path` has watched; start a state where there is none.

    Raises:
        ConfigError: `append` and `start_over` together.
        StateError: a state could not be written to `path`; told now, not after the work.
        StateNotFound: there is no state, but `must_exist`.
        StateMismatch: the state is of another source, model, memory or rate; the field is named with both values.
    """
    if append and start_over:
        raise ConfigError("cannot append to a state and start it over", hint="leave --append or --force out")
    snapshot.check_target(path)

    def loaded(name: str, numbers: str) -> Backbone:
        return load_backbone(name, device=device, dtype=numbers, device_map=device_map, quantization=quantization)

    state = None if start_over else _existing(path)
    if must_exist and state is None and not start_over:
        raise StateNotFound(f"there is no state at {path} to continue", hint="leave --resume out to start one")
    if state is None:
        return Session(loaded(model or EMBEDDED, dtype or "auto"), config, fps=fps), Segment()
    segment = _stretch(path, state, source, append=append)
    # Through the config, so that a setting which is newer than the state has its default there.
    theirs, ours = config_of(state).to_dict(), config.to_dict()
    for field in theirs:
        _compare(path, f"memory.{field}", theirs[field], ours.get(field))
    backbone = loaded(model or state.backbone.name, dtype or state.backbone.dtype)
    _compare(path, "fps", state.clock.fps, backbone.default_fps if fps is None else fps)
    for field in state.settings.keys() & backbone.settings.keys():
        _compare(path, field, state.settings[field], backbone.settings[field])
    return from_state(state, backbone), segment


def _existing(path: StatePath) -> State | None:
    try:
        return snapshot.load(path)
    except StateNotFound:
        return None


def _stretch(path: StatePath, state: State, source: Source, *, append: bool) -> Segment:
    """Where the source goes in the stream of a state, or stands in it already."""
    watched, ours, segment = fingerprints(state), source.info.fingerprint, segment_of(state)
    if not append:
        _compare(path, "source", watched[0], ours)
    if ours == watched[-1]:
        return segment
    if ours in watched:
        # What was watched behind it began at its end.
        return Segment(done=True)
    if not state.complete and state.source is not None:
        name = state.source.get("name")
        raise StateMismatch(
            f"cannot append {source.info.name} to {path}: its last source {name} is not watched to the end",
            hint=f"finish it first: the command with {name} again",
        )
    return next_segment(state)


def _compare(path: StatePath, field: str, found: object, wanted: object) -> None:
    if found != wanted:
        raise StateMismatch(
            f"the state at {path} cannot be continued: its {field} is {found}, this run's is {wanted}",
            hint="write to another file with -o, or start over with --force",
        )
