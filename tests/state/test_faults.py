"""Each call of a commit and of a load fails once, or the process is killed there: the state is the old or the new one.

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
from protokv.state import commit
from protokv.state.header import State
from protokv.state.reader import commit_times, load_state
from protokv.state.writer import Writer
from tests.state.conftest import EVERY_FORM, make, moment, same

WRITING = ("replace", "link", "mkdir", "unlink", "rmdir", "fsync")
READING = ("stat", "lstat", "listdir", "scandir", "open")
FIRST, SECOND, THIRD = (moment(make, step) for step in (1, 2, 3))
# Moments of an operation in the suite; with -m slow all of them.
EVERY = pytest.mark.parametrize(
    "instants", [10, pytest.param(10**6, marks=[pytest.mark.slow, pytest.mark.timeout(3600)])]
)


class CountedFile:
    """A file whose writes are counted like calls."""

    def __init__(self, file: Any, count: Callable[..., None]) -> None:
        self._file, self._count = file, count

    def __getattr__(self, name: str) -> Any:
        return getattr(self._file, name)

    def __enter__(self) -> CountedFile:
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()

    def write(self, data: Any) -> int:
        self._count("write", lambda: self._file.write(memoryview(data)[: len(data) // 2]) and self._file.flush())
        return int(self._file.write(data))


@contextmanager
def counted(act: Callable[[int, str, Callable[[], object]], None]) -> Iterator[itertools.count[int]]:
    """Call `act` with a number, from 1, and a name before each call; of a write also with what writes half of it."""
    numbers = itertools.count(1)

    def count(name: str, half: Callable[[], object] = lambda: None) -> None:
        act(next(numbers), name, half)

    def wrapped(name: str, real: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any, **options: Any) -> Any:
            count(name)
            made = real(*arguments, **options)
            return CountedFile(made, count) if real is io_open and "x" in str(arguments[1:]) else made

        return call

    io_open = io.open
    with pytest.MonkeyPatch.context() as patch:
        for name in (*WRITING, *READING):
            patch.setattr(os, name, wrapped(name, getattr(os, name)))
        patch.setattr(io, "open", wrapped("open", io_open))
        patch.setattr(commit, "exchange", wrapped("exchange", commit.exchange))
        yield numbers


def save(path: Path, state: State) -> None:
    with Writer(path, keep=2) as writer:
        writer.commit(state, wait=True)


def count_calls(act: Callable[[], object]) -> int:
    act()
    with counted(lambda *_: None) as numbers:
        act()
    return next(numbers)


@pytest.fixture
def path(suffix: str, tmp_path: Path) -> Path:
    return tmp_path / "work" / f"a{suffix}"


def begin_anew(path: Path) -> None:
    shutil.rmtree(path.parent, ignore_errors=True)
    path.parent.mkdir()
    save(path, FIRST)
    save(path, SECOND)


def check_whole(path: Path) -> None:
    """Check that the state is the old or the new one, and that the next commit keeps it and leaves no rest."""
    found = load_state(path)
    assert same(found, SECOND) or same(found, THIRD)
    assert commit_times(path)[-1] == found.clock.stream_time_s
    save(path, moment(make, 4))
    assert same(load_state(path), moment(make, 4))
    assert commit_times(path) == [found.clock.stream_time_s, 8.0]
    names = {path.name, f"{path.name}@{found.clock.stream_time_s:010.3f}s"}
    assert {one.name for one in path.parent.iterdir()} - {f".{path.name}.lock"} == names


@EVERY
@EVERY_FORM
@pytest.mark.parametrize(("error", "lasting"), [(errno.EIO, False), (errno.ENOSPC, True), (errno.EACCES, False)])
def test_a_commit_of_which_a_call_fails_leaves_a_whole_state(error, lasting, instants, path) -> None:
    begin_anew(path)
    calls = count_calls(lambda: save(path, THIRD))
    names = (*WRITING, "write") if error == errno.ENOSPC else (*WRITING, *READING, "write", "exchange")
    for fatal in range(1, calls, -(-calls // instants)):

        def fail(number: int, name: str, _: object, fatal: int = fatal) -> None:
            if name in names and (number >= fatal if lasting else number == fatal):
                raise OSError(error, os.strerror(error))

        begin_anew(path)
        try:
            with counted(fail):
                save(path, THIRD)
        except StateError as refused:
            assert not isinstance(refused, StateCorrupt | StateNotFound), refused  # noqa: PT017
            assert "\n" not in refused.message  # noqa: PT017
        check_whole(path)


@EVERY
@EVERY_FORM
def test_a_load_of_which_a_call_fails_says_so_and_never_that_the_state_is_damaged(instants, path) -> None:
    begin_anew(path)
    calls = count_calls(lambda: load_state(path, at_s=2.5))
    for fatal in range(1, calls, -(-calls // instants)):

        def fail(number: int, name: str, _: object, fatal: int = fatal) -> None:
            if number == fatal:
                raise OSError(errno.EIO, os.strerror(errno.EIO))

        with counted(fail):
            try:
                assert same(load_state(path), SECOND)
            except StateError as refused:
                assert not isinstance(refused, StateCorrupt | StateNotFound), refused  # noqa: PT017


@EVERY
@EVERY_FORM
def test_a_commit_that_is_killed_at_any_call_leaves_a_whole_state(instants, path) -> None:
    begin_anew(path)
    calls = count_calls(lambda: save(path, THIRD))
    for fatal in range(1, calls, -(-calls // instants)):

        def kill(number: int, name: str, half: Callable[[], object], fatal: int = fatal) -> None:
            if number == fatal:
                half()
                os.kill(os.getpid(), signal.SIGKILL)

        begin_anew(path)
        if not (child := os.fork()):
            with counted(kill):
                save(path, THIRD)
            os._exit(0)
        os.waitpid(child, 0)
        check_whole(path)
