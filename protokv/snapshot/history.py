"""Earlier commits of a state, kept beside it: complete states of their own, named by stream time.

`video.safetensors` has `video@000123.000s.safetensors` and so on, in any form of the file system. A commit first gives
the state that stands there its own name (a second name of the same bytes), then puts the new one in place, then
removes what is too old. So a crash in between leaves one file too many at the most, and the next commit removes it.
A file counts as an earlier commit only if it is a moment of the same stream: same model, memory, rate and sources;
what another stream left under such a name is never answered from.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

from protokv import snapshot
from protokv.errors import ConfigError, StateError, StateNotFound
from protokv.snapshot.atomic import DISK, FileSystem, keep_as, refused, retire, sweep
from protokv.snapshot.digest import canonical
from protokv.snapshot.forms import StatePath, is_url, suffix_of
from protokv.snapshot.schema import Header, State
from protokv.snapshot.sources import fingerprints

# Names are rounded to milliseconds; who asks for the time in a name means that commit.
_ROUNDING_S = 5e-4

# A reader meets a commit between looking and reading only once in a while.
_ATTEMPTS = 20


def check_keep(path: StatePath, keep: int | None) -> None:
    """Refuse what cannot be kept.

    Raises:
        ConfigError: less than the current commit, or a state in an object store, where nothing has two names.
    """
    if keep is not None and keep < 1:
        raise ConfigError(f"cannot keep {keep} commits", hint="1 is the state alone")
    if keep is not None and is_url(path):
        raise ConfigError(f"cannot keep earlier commits of {path}", hint="keep them for states in a folder")


def name_at(path: Path, time_s: float) -> Path:
    """Where the commit at a stream time is kept."""
    stem, suffix = _split(path)
    return path.parent / f"{stem}@{time_s:010.3f}s{suffix}"


def kept(path: StatePath) -> list[Path]:
    """Everything beside a state that has the name of an earlier commit, oldest first."""
    if is_url(path):
        return []
    target = Path(os.path.realpath(path))
    stem, suffix = _split(target)
    pattern = re.compile(re.escape(stem) + r"@(\d{6,}\.\d{3})s" + re.escape(suffix))
    try:
        matches = [(pattern.fullmatch(one.name), one) for one in target.parent.iterdir()]
    except (FileNotFoundError, NotADirectoryError):
        return []
    return [one for _, one in sorted((float(match[1]), one) for match, one in matches if match)]


def commit(
    state: State,
    path: StatePath,
    keep: int | None = None,
    *,
    save: Callable[[State, StatePath], None] = snapshot.save,
    fs: FileSystem = DISK,
) -> None:
    """Save a state and keep the last `keep` commits, the new one included; where None, none is kept or removed.

    Raises:
        StateError: It cannot be written; the old one is still there.
    """
    if keep is None:
        save(state, path)
        return
    target = Path(os.path.realpath(path))
    try:
        sweep(target, fs)
        before = _header(target)
        if keep > 1 and before is not None and is_before(before, state):
            keep_as(target, name_at(target, before.clock.stream_time_s), fs)
    except OSError as error:
        raise refused(path, error) from error
    save(state, path)
    past = [one for one in kept(target) if (header := _header(one)) and is_before(header, state)]
    try:
        for one in kept(target):
            if one not in past[max(0, len(past) - keep + 1) :]:
                retire(target, one, fs)
        fs.sync_folder(target.parent)
    except OSError:
        # The new state is in place, and somebody may be reading an old one; the next commit removes what is left.
        return


def load_at(path: StatePath, at_s: float, *, verify: bool = True) -> State:
    """The newest of a state and its earlier commits that is not after a stream time.

    Raises:
        StateNotFound: Nothing is there, or all of it is after that time; the message lists what there is.
        StateError: As `load`.
    """
    for _ in range(_ATTEMPTS):
        now = snapshot.read_header(path)
        moments: list[tuple[float, StatePath]] = [(now.clock.stream_time_s, path)]
        for one in kept(path):
            try:
                header = snapshot.read_header(one)
            except StateNotFound:
                continue
            if is_before(header, now):
                moments.append((header.clock.stream_time_s, one))
        fit = [moment for moment in moments if moment[0] <= at_s + _ROUNDING_S]
        if not fit:
            times = ", ".join(f"{time_s:g} s" for time_s, _ in sorted(moments, key=lambda moment: moment[0]))
            raise StateNotFound(
                f"{path} has no commit at or before {at_s:g} s; it has those at {times}",
                hint="`protokv ingest --every 30s --keep 20` keeps earlier commits",
            )
        try:
            state = snapshot.load(max(fit, key=lambda moment: moment[0])[1], verify=verify)
        except StateNotFound:
            continue
        if state.clock.stream_time_s <= at_s + _ROUNDING_S:
            return state
    raise StateError(f"{path} is replaced faster than it can be read", hint="try again")


def is_before(past: Header, now: Header) -> bool:
    """Whether one state is an earlier moment of the stream of another."""
    if past.clock.steps >= now.clock.steps or past.clock.stream_time_s >= now.clock.stream_time_s:
        return False
    theirs, ours = fingerprints(past), fingerprints(now)
    # A source without a fingerprint (a camera, frames from a program) cannot be told from another.
    return _identity(past) == _identity(now) and None not in theirs and theirs == ours[: len(theirs)]


def _identity(header: Header) -> str:
    """What stays the same through a stream, as text: a list and a tuple are the same setting."""
    model = asdict(header.backbone)
    del model["name"]
    return canonical({"model": model, "memory": dict(header.memory), "fps": header.clock.fps})


def _header(path: Path) -> Header | None:
    """The header of what is there, None where that is no state."""
    try:
        return snapshot.read_header(path)
    except StateError:
        return None


def _split(path: Path) -> tuple[str, str]:
    suffix = suffix_of(path) or ""
    return path.name.removesuffix(suffix), suffix
