"""Save, load and look at a state in any form, with its kept commits; check that a target may be overwritten.

A kept commit counts only if its header says that it is an earlier moment of the same stream: same model, memory, rate
and sources. Commits of other streams are never answered from, replaced or removed.
"""

from __future__ import annotations

import os
from pathlib import Path

from protokv.core.packing import check_shapes
from protokv.errors import ConfigError, StateCorrupt, StateError, StateMismatch, StateNotFound
from protokv.state.form import Form, StatePath, Stored, form_of, is_url, read_unchanged
from protokv.state.snapshot import Admit, Header, State
from protokv.state.thumbnails import Thumbnail, Thumbnails
from protokv.state.watched import fingerprints, is_before

# Names of kept commits are rounded to milliseconds.
ROUNDING_S = 5e-4


def save_state(state: State, path: StatePath) -> None:
    """Write a state; the path holds the old or the new one whole at any time.

    Raises:
        StateError: the suffix names no form, or the state cannot be written; the old one is still there.
        StateLocked: another writer is writing it.
    """
    with form_of(path) as form:
        form.replace(state)


def load_state(path: StatePath, *, verify: bool = True, at_s: float | None = None, admit: Admit | None = None) -> State:
    """Read a state; its tensors are on the CPU.

    Args:
        path: where it is.
        verify: check the digests of the tensors.
        at_s: read the newest kept commit that is not after this stream time, in seconds.
        admit: called with header and shapes before memory is allocated; raises StateCorrupt to refuse the state.

    Raises:
        StateNotFound: nothing is there, or nothing at or before `at_s`; the message lists the commits.
        StateMismatch: a newer version wrote it.
        StateCorrupt: the state is damaged or hostile; names the tensor or field if possible.
        StateError: it cannot be read.
    """
    form = form_of(path, to_read=True)
    if at_s is None:
        return form.read(verify=verify, admit=admit)
    latest = at_s + ROUNDING_S

    def read_newest(commits: list[tuple[float, str | None]]) -> State:
        fit = [at for time_s, at in commits if time_s <= latest]
        if not fit:
            listed = ", ".join(f"{time_s:g} s" for time_s, _ in commits)
            raise StateNotFound(
                f"{path} has no commit at or before {at_s:g} s; it has those at {listed}",
                hint="`protokv ingest --every 30s --keep 20` keeps earlier commits",
            )
        state = form.read(fit[-1], verify=verify, admit=admit)
        if state.clock.stream_time_s > latest:
            raise StateError(f"{path} was replaced meanwhile")
        return state

    return read_unchanged(path, lambda: _moments(form), read_newest)


def read_header(path: StatePath) -> Header:
    """Read and verify the header alone. Raises as `load_state`."""
    return form_of(path, to_read=True).read_header()


def read_thumbnails(path: StatePath) -> tuple[Header, list[Thumbnail]]:
    """Read the header and the small pictures of a state, and no other tensor. Raises as `load_state`."""

    def read(stored: Stored) -> tuple[Header, list[Thumbnail]]:
        specs = Thumbnails.declare()
        names = {spec.name for spec in specs} & stored.found.keys()
        check_shapes({name: stored.found[name] for name in names}, specs)
        stored.header.clock.check()
        found = Thumbnails.of(stored.tensors(True, names))
        return stored.header, found.all() if found else []

    return form_of(path, to_read=True).look(None, read)


def stored_bytes(path: StatePath) -> int:
    """Return the stored bytes of a state, without kept commits. Raises as `load_state`."""
    return form_of(path, to_read=True).stored_bytes()


def moments(path: StatePath) -> list[float]:
    """Return the stream times that `at_s` of `load_state` can read, ascending; the last is the current state's.

    Raises as `load_state`.
    """
    return [time_s for time_s, _ in _moments(form_of(path, to_read=True))]


def check_target(path: StatePath) -> None:
    """Check that a state could be written to `path`, before hours of work. StateError if not."""
    form_of(path).check_target()


def check_not_read(target: StatePath, *inputs: object) -> None:
    """Refuse to overwrite an input, also under another name. Inputs that are no existing paths are ignored.

    Raises:
        ConfigError: the target is one of the inputs.
    """
    for one in inputs:
        if isinstance(one, str | os.PathLike) and not is_url(target) and _is_same_file(target, one):
            raise ConfigError(
                f"{os.fspath(target)} is what is read, and would be written over", hint="name another file with -o"
            )


def check_replaceable(target: StatePath, state: Header) -> None:
    """Allow to replace a state of the same sources, or nothing.

    Raises:
        StateMismatch: something else is there.
        StateError: it cannot be read at the moment.
    """
    try:
        there = fingerprints(read_header(target))
    except StateNotFound:
        return
    except (StateCorrupt, StateMismatch):
        there = ()
    if not there or None in there or there != fingerprints(state):
        what = "the state of another stream" if there else "no state that can be read"
        raise StateMismatch(f"{os.fspath(target)} is there already, and it is {what}", hint="replace it with --force")


def _is_same_file(target: StatePath, one: str | os.PathLike[str]) -> bool:
    try:
        return Path(target).samefile(one)
    except (OSError, ValueError):
        return False


def _moments(form: Form) -> list[tuple[float, str | None]]:
    """Return stream time and place of the kept commits and of the current state (place None), ascending."""
    # Read this first: a commit that comes in between is later than this one.
    now = form.read_header()
    past = [(header.clock.stream_time_s, at) for at, header in form.kept() if is_before(header, now)]
    return [*sorted(past), (now.clock.stream_time_s, None)]
