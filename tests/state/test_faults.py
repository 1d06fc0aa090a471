"""Each call of a commit and of a load fails once, or the process is killed there: the state is the
old or the new one.

The calls are those of `os`, of `open` and of its files, which all forms go through.
"""

from __future__ import annotations

import errno
import io
import itertools
import os
import shutil
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from protokv.errors import StateCorrupt, StateError, StateNotFound
from protokv.state.header import State
from protokv.state.reader import StateReader, load_state
from protokv.state.store import find_store
from tests.conftest import wide
from tests.state.conftest import EVERY_FORM, moment, names, same

CALLS = (
    "replace",
    "link",
    "mkdir",
    "unlink",
    "rmdir",
    "fsync",
    "stat",
    "lstat",
    "listdir",
    "scandir",
    "open",
)
FIRST, SECOND, THIRD, FOURTH = (moment(step) for step in (1, 2, 3, 4))

# Instants of an operation in the suite; with -m slow all of them.
ALL = pytest.param(10**6, marks=[pytest.mark.slow, pytest.mark.timeout(3600)])


class CountedFile:
    """A new file whose writes are counted like calls."""

    def __init__(self, file: Any, count: Callable[..., None]) -> None:
        self._file = file
        self._count = count

    def __getattr__(self, name: str) -> Any:
        return getattr(self._file, name)

    def __enter__(self) -> CountedFile:
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()

    def write(self, data: Any) -> int:
        self._count(
            lambda: self._file.write(memoryview(data)[: len(data) // 2]) and self._file.flush()
        )
        return int(self._file.write(data))


@contextmanager
def counted(act: Callable[[int, Callable[[], object]], None]) -> Iterator[itertools.count[int]]:
    """Before each call, call `act` with its number, from 1, and for a write with what writes half
    of it.
    """
    numbers = itertools.count(1)
    real_open = io.open

    def count(half: Callable[[], object] = lambda: None) -> None:
        act(next(numbers), half)

    def wrapped(real: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any, **options: Any) -> Any:
            count()
            made = real(*arguments, **options)
            return (
                CountedFile(made, count)
                if real is real_open and "x" in str(arguments[1:])
                else made
            )

        return call

    with pytest.MonkeyPatch.context() as patch:
        for module, name in (
            *((os, name) for name in CALLS),
            (io, "open"),
        ):
            patch.setattr(module, name, wrapped(getattr(module, name)))
        yield numbers


def save(path: Path, state: State) -> None:
    with find_store(path, keep=2) as store:
        store.commit(state)


def load(path: Path, _: State) -> None:
    assert same(load_state(path), SECOND)


def fatal_calls(act: Callable[[], object], instants: int) -> range:
    """Return which calls of an operation are to fail, at most so many."""
    with counted(lambda *_: None) as numbers:
        act()
    calls = next(numbers)
    return range(1, calls, -(-calls // instants))


def begin_anew(path: Path, made: Path) -> None:
    """Put a copy of the folder `made`, where both commits were saved, in place of the folder."""
    shutil.rmtree(path.parent, ignore_errors=True)
    shutil.copytree(made, path.parent)


def check_whole(path: Path) -> None:
    """Check that the state is the old or the new one, and that the next commit keeps it and leaves
    no rest.
    """
    found = load_state(path)
    assert same(found, SECOND) or same(found, THIRD)
    save(path, FOURTH)
    assert same(load_state(path), FOURTH)
    assert StateReader.open(path).commits_s == [found.clock.stream_time_s, 8.0]
    left = {*names(path.parent)} - {f".{path.name}.lock"}
    assert left == {path.name, f"{path.name}@{found.clock.stream_time_s:010.3f}s"}


def fault(kind: Any, fatal: int) -> Callable[[int, Callable[[], object]], None]:
    """Return what happens at the call `fatal`: an error of the system, which stays if the disk is
    full, or the end.
    """

    def act(number: int, half: Callable[[], object]) -> None:
        if number == fatal and kind == "killed":
            half()
            os.kill(os.getpid(), signal.SIGKILL)
        if number == fatal or (number > fatal and kind == errno.ENOSPC):
            raise OSError(kind, os.strerror(kind))

    return act


@EVERY_FORM
@pytest.mark.parametrize("instants", [10, ALL])
@pytest.mark.parametrize(
    ("act", "kind"),
    [
        (load, errno.EIO),
        (save, errno.ENOSPC),
        (save, "killed"),
        *wide((save, errno.EIO), (save, errno.EACCES)),
    ],
)
def test_whatever_fails_at_any_call_leaves_a_whole_state(
    act: Callable[..., object],
    kind: Any,
    instants: Any,
    suffix: str,
    tmp_path: Path,
) -> None:
    made = tmp_path / "made"
    made.mkdir()
    for state in (FIRST, SECOND):
        save(made / f"a{suffix}", state)
    begin_anew(path := tmp_path / "work" / f"a{suffix}", made)  # in a folder of its own
    for fatal in fatal_calls(lambda: act(path, THIRD), instants):
        begin_anew(path, made)
        child = os.fork() if kind == "killed" else None
        if child:
            os.waitpid(child, 0)
        else:
            try:
                with counted(fault(kind, fatal)):
                    act(path, THIRD)
            except StateError as refused:
                # An error of the system in one line never says that the state is damaged or
                # missing.
                assert type(refused) not in (StateCorrupt, StateNotFound), refused  # noqa: PT017
                assert "\n" not in refused.message  # noqa: PT017
        if child == 0:
            os._exit(0)
        check_whole(path)
