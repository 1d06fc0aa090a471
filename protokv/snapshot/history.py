"""Earlier commits of a state in a file system: complete states of their own beside it, named by stream time.

`video.safetensors` has `video@000123.000s.safetensors` and so on, in any form. A commit first gives the state that
stands there its own name (a second name of the same bytes), then puts the new one in place, then removes what is too
old. So a crash in between leaves one file too many at the most, and the next commit removes it. A file counts as a kept
commit only if its header says that it is a moment of the same stream: same model, memory, rate and sources. Whatever
else has such a name is never answered from, never replaced and never removed.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from protokv.errors import StateError, StateNotFound
from protokv.snapshot.commit import keep_as, recover, refused, retire, sweep
from protokv.snapshot.digest import canonical
from protokv.snapshot.formats.base import ROUNDING_S, StatePath
from protokv.snapshot.schema import Header, State
from protokv.snapshot.sources import fingerprints

if TYPE_CHECKING:
    from protokv.snapshot.formats.local import LocalForm

T = TypeVar("T")

# A reader meets a commit between looking and reading only once in a while.
_ATTEMPTS = 20


def name_at(path: Path, time_s: float, suffix: str) -> Path:
    """Where the commit at a stream time is kept."""
    return path.parent / f"{path.name.removesuffix(suffix)}@{time_s:010.3f}s{suffix}"


def kept(path: StatePath, suffix: str) -> list[Path]:
    """Everything beside a state that has the name of an earlier commit and is no link, oldest first."""
    target = Path(os.path.realpath(path))
    stem = target.name.removesuffix(suffix)
    pattern = re.compile(re.escape(stem) + r"@(\d{6,}\.\d{3})s" + re.escape(suffix))
    try:
        matches = [(pattern.fullmatch(one.name), one) for one in target.parent.iterdir() if not one.is_symlink()]
    except (FileNotFoundError, NotADirectoryError):
        return []
    return [one for _, one in sorted((float(match[1]), one) for match, one in matches if match)]


def commit(form: LocalForm, state: State, path: Path, keep: int | None = None) -> None:
    """Save a state and keep the last `keep` commits, the new one included; where None, none is kept or removed.

    Raises:
        StateError: It cannot be written; the old one is still there.
    """
    if keep is None:
        form.replace(state, path)
        return
    target = Path(os.path.realpath(path))
    try:
        recover(target, form.fs)
        sweep(target, form.fs)
        before = _header(form, target)
        if keep > 1 and before is not None and is_before(before, state):
            name = name_at(target, before.clock.stream_time_s, form.suffix)
            if not os.path.lexists(name) or (name in kept(target, form.suffix) and _is_kept(form, name, state)):
                keep_as(target, name, form.fs)
    except OSError as error:
        raise refused(path, error) from error
    form.replace(state, path)
    ours = [one for one in kept(target, form.suffix) if _is_kept(form, one, state)]
    past = [one for one in ours if (header := _header(form, one)) and is_before(header, state)]
    try:
        for one in ours:
            if one not in past[max(0, len(past) - keep + 1) :]:
                retire(target, one, form.fs)
        form.fs.sync_folder(target.parent)
    except OSError:
        # The new state is in place, and somebody may be reading an old one; the next commit removes what is left.
        return


def load_at(form: LocalForm, path: StatePath, at_s: float, *, verify: bool = True) -> State:
    """The newest of a state and its earlier commits that is not after a stream time.

    Raises:
        StateNotFound: Nothing is there, or all of it is after that time; the message lists what there is.
        StateError: As `load`.
    """
    for _ in range(_ATTEMPTS):
        place = newest_at(moments(form, path), at_s, path)
        try:
            state = form.read(place, verify=verify)
        except StateNotFound:
            continue
        if state.clock.stream_time_s <= at_s + ROUNDING_S:
            return state
    raise StateError(f"{path} is replaced faster than it can be read", hint="try again")


def moments(form: LocalForm, path: StatePath) -> list[tuple[float, StatePath]]:
    """Stream time and place of the kept commits of a state and of the state itself, ascending."""
    # Before the others are listed: what is committed meanwhile is kept as well, and later than this.
    now = form.read_header(path)
    return in_order(((one, _header(form, one)) for one in kept(path, form.suffix)), now, path)


def in_order(past: Iterable[tuple[T, Header | None]], now: Header, place: T) -> list[tuple[float, T]]:
    """Stream time and place of a state and of those kept commits that are earlier moments of its stream, ascending."""
    earlier = [(one.clock.stream_time_s, where) for where, one in past if one is not None and is_before(one, now)]
    return [*sorted(earlier, key=lambda moment: moment[0]), (now.clock.stream_time_s, place)]


def newest_at(there: list[tuple[float, T]], at_s: float, path: StatePath) -> T:
    """The place of the last of these that is not after a stream time.

    Raises:
        StateNotFound: All of them are; the message lists them.
    """
    fit = [place for time_s, place in there if time_s <= at_s + ROUNDING_S]
    if fit:
        return fit[-1]
    listed = ", ".join(f"{time_s:g} s" for time_s, _ in there)
    raise StateNotFound(
        f"{path} has no commit at or before {at_s:g} s; it has those at {listed}",
        hint="`protokv ingest --every 30s --keep 20` keeps earlier commits",
    )


def is_before(past: Header, now: Header) -> bool:
    """Whether one state is an earlier moment of the stream of another."""
    if past.clock.steps >= now.clock.steps or past.clock.stream_time_s >= now.clock.stream_time_s:
        return False
    return _same_stream(past, now) and len(fingerprints(past)) <= len(fingerprints(now))


def _same_stream(a: Header, b: Header) -> bool:
    """Whether two states are moments of one stream: what one of them has watched begins as what the other has.

    A source without a fingerprint (a camera, frames from a program) is equal to none.
    """
    same = all(x is not None and x == y for x, y in zip(fingerprints(a), fingerprints(b), strict=False))
    return same and _identity(a) == _identity(b)


def _identity(header: Header) -> str:
    """What stays the same through a stream, as text: a list and a tuple are the same setting."""
    model = asdict(header.backbone)
    del model["name"]
    return canonical({"model": model, "memory": dict(header.memory), "fps": header.clock.fps})


def _is_kept(form: LocalForm, path: Path, state: State) -> bool:
    """Whether a path is provably a kept commit of a state's stream, by its name and by its header."""
    header = _header(form, path)
    if header is None or not _same_stream(header, state):
        return False
    _, _, time = path.name.removesuffix(form.suffix).removesuffix("s").rpartition("@")
    return time == f"{header.clock.stream_time_s:010.3f}"


def _header(form: LocalForm, path: Path) -> Header | None:
    """The header of what is there, None where that is no state."""
    try:
        return form.read_header(path)
    except StateError:
        return None
