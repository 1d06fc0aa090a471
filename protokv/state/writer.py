"""`Writer`: commit to a state as its only writer, keep earlier commits, and write in the background from a GPU.

A kept commit is replaced or removed only if its header says that it is an earlier moment of the same stream.

With tensors on a GPU, a commit copies them to the host and returns; a thread writes the copy while the stream goes on.
At most one write is in flight: the next commit waits for it. On a CPU a commit is written at once: a thread would only
take cores from the model. The stored bytes are the same.
"""

from __future__ import annotations

import os
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple, Self

from protokv.core.session import Session
from protokv.errors import ConfigError, StateCorrupt, StateError, StateMismatch, StateNotFound
from protokv.state.checkpoint import to_state
from protokv.state.header import Header, State
from protokv.state.sources import is_before, list_fingerprints, same_stream
from protokv.state.store import StatePath, find_store


def save(session: Session, path: StatePath, *, source: dict[str, Any] | None = None, complete: bool = False) -> int:
    """Write a session so that the path holds the old or the new state whole; return the stored bytes.

    Args:
        session: to be saved.
        path: of the state; its suffix chooses the form.
        source: record of the watched source, plain JSON.
        complete: True if the source has ended.

    Raises:
        StateLocked: another writer is writing the state.
        StateError: the state cannot be written; the old one is still there.
    """
    return save_state(to_state(session, source=source, complete=complete), path).file_bytes


def save_state(state: State, path: StatePath) -> Committed:
    """Write a state, as `save` a session."""
    with Writer(path) as writer:
        return writer.commit(state, wait=True)[-1]


class Committed(NamedTuple):
    """A state on disk: its steps, stream time in seconds and bytes."""

    steps: int
    stream_time_s: float
    file_bytes: int


class Writer:
    """The right to write to a path, as a context manager."""

    def __init__(self, path: StatePath, *, keep: int | None = None, background: bool | None = None) -> None:
        """Touch nothing yet.

        Args:
            path: where the state goes.
            keep: number of commits to keep, including the current one; with None, keep and remove nothing.
            background: write in a thread; with None, only if tensors are on a CUDA device.

        Raises:
            ConfigError: `keep` is below 1.
            StateError: the path has no form.
        """
        if keep is not None and keep < 1:
            raise ConfigError(f"cannot keep {keep} commits", hint="1 is the state alone")
        self.path, self._keep, self._background = path, keep, background
        self._store = find_store(path)
        self._pool: ThreadPoolExecutor | None = None
        self._in_flight: Future[Committed] | None = None

    @property
    def locked(self) -> bool:
        """True if a second writer is refused; False on a file system without locks."""
        return self._store.locked

    def __enter__(self) -> Self:
        """Take the right to write. StateError if a state cannot be written there; StateLocked if another has it."""
        self._store.__enter__()
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: Any) -> None:
        """Wait for the write in flight and give the right back. Raise the error of that write."""
        try:
            if self._pool is not None:
                self._pool.shutdown()
            if kind is None:
                self.collect()
        finally:
            self._store.__exit__()

    def commit(self, state: State, *, wait: bool = False) -> list[Committed]:
        """Save a state; its tensors may change as soon as this returns. With `wait`, return when it is on disk.

        Return the commits that reached the disk since the last call, oldest first.

        Raises:
            StateLocked: another writer has committed meanwhile.
            StateError: this write or the one in flight failed; the old state is still there.
        """
        landed = self.collect(wait=True)
        on_device = any(tensor.is_cuda for tensor in state.tensors.values())
        if wait or not (on_device if self._background is None else self._background):
            return [*landed, self._write(state)]
        copy = {name: tensor.detach().to("cpu", copy=True) for name, tensor in state.tensors.items()}
        self._pool = self._pool or ThreadPoolExecutor(1, "protokv-commit")
        self._in_flight = self._pool.submit(self._write, replace(state, tensors=copy))
        return landed

    def collect(self, *, wait: bool = False) -> list[Committed]:
        """Return the write that was in flight if it has ended. Raise its error."""
        if self._in_flight is None or not (wait or self._in_flight.done()):
            return []
        write, self._in_flight = self._in_flight, None
        return [write.result()]

    def _write(self, state: State) -> Committed:
        store, before = self._store, None
        if self._keep is not None and self._keep > 1:
            with suppress(StateNotFound, StateCorrupt, StateMismatch):
                before, _ = store.read_header()
        store.replace(state, before if before is not None and is_before(before, state) else None)
        if self._keep is not None:
            # The new state is in place. A writer that may not list or remove leaves the others to the next commit.
            with suppress(StateError):
                self._retire(state, self._keep)
        return Committed(state.clock.steps, state.clock.stream_time_s, store.read_header()[1])

    def _retire(self, state: State, keep: int) -> None:
        """Remove all kept commits of this stream but the last ones, the oldest last."""
        ours = [(header, at) for at, header in self._store.list_kept() if same_stream(header, state)]
        past = sorted((header.clock.stream_time_s, at) for header, at in ours if is_before(header, state))
        stay = {at for _, at in past[max(0, len(past) - keep + 1) :]}
        for at in {at for _, at in ours} - stay:
            self._store.retire(at)


def check_target(path: StatePath) -> None:
    """Check that a state could be written to `path`, before hours of work. StateError if not."""
    find_store(path).check_target()


def check_not_read(target: StatePath, *inputs: object) -> None:
    """Refuse to overwrite an input, also under another name. Inputs that are no existing paths are ignored.

    Raises:
        ConfigError: the target is one of the inputs.
    """
    for one in inputs:
        with suppress(OSError, ValueError):
            if isinstance(one, str | os.PathLike) and Path(target).samefile(one):
                what = f"{os.fspath(target)} is what is read, and would be written over"
                raise ConfigError(what, hint="name another file with -o")


def check_replaceable(target: StatePath, state: Header) -> None:
    """Allow to replace a state of the same sources, or nothing.

    Raises:
        StateMismatch: something else is there.
        StateError: it cannot be read at the moment.
    """
    try:
        there = list_fingerprints(find_store(target, to_read=True).read_header()[0])
    except StateNotFound:
        return
    except (StateCorrupt, StateMismatch):
        there = ()
    if not there or None in there or there != list_fingerprints(state):
        what = "the state of another stream" if there else "no state that can be read"
        raise StateMismatch(f"{os.fspath(target)} is there already, and it is {what}", hint="replace it with --force")
