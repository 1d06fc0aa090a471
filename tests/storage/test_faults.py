"""Each system call and each allocation of an operation fails once, in turn, as SQLite's tests do it.

Whatever failed, every state on the disk is the one before or one that the operation commits, and verifies; the error is
one line; and the same operation again ends as if nothing had failed and leaves no other file.
"""

from __future__ import annotations

import errno
import itertools
import os
import resource
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

from protokv.backbones.base import PreparedStep
from protokv.config import MemoryConfig
from protokv.core.snapshot import State
from protokv.errors import StateNotFound
from protokv.ingestion import Commit, Event, Every, ingest
from protokv.inspection.states import convert
from protokv.storage.api import load_state
from protokv.storage.checkpoint import load
from protokv.storage.form import FORMS, form_of
from protokv.storage.writer import Writer
from tests import faults
from tests.faults import Ended, Fault
from tests.mock_backbone import MockBackbone
from tests.prepared import Prepared
from tests.storage.conftest import same

pytestmark = faults.needs_linux

A, B = Prepared(1, 6), Prepared(2, 2)
CONFIG = MemoryConfig.of("sliding-window", budget=40)
KEEP = 2
SLOW = [pytest.mark.slow, pytest.mark.timeout(3600)]


class Wide(MockBackbone):
    """The mock with keys of 8 KiB a step, so that every copy of a tensor asks the system for memory."""

    head_size = 512

    def prepare(self, images: Any) -> PreparedStep:
        step = super().prepare(images)
        return replace(step, pixels=step.pixels.repeat(1, 128))

    def embed_text(self, ids: list[int]) -> Any:
        return super().embed_text(ids).repeat(1, 128)


def watch(path: Path, source: Prepared, *, most: int | None = None) -> Iterator[Event]:
    """Watch a source into a state, commit after every step, and stop after `most` commits."""
    commits = 0
    options = {"every": Every(n_steps=1), "keep": KEEP, "append": source is B, "thumbnails": 0}
    events = ingest(source, path, CONFIG, backbone=Wide(), **options)
    for event in events:
        yield event
        commits += isinstance(event, Commit)
        if commits == most:
            events.close()


@pytest.fixture(scope="session")
def commits(tmp_path_factory: pytest.TempPathFactory) -> list[State]:
    """Every commit of a stream of both sources that nothing interrupts."""
    path = tmp_path_factory.mktemp("whole") / "a.safetensors"
    return [load_state(path) for one in (A, B) for event in watch(path, one) if isinstance(event, Commit)]


def put(state: State, path: Path) -> None:
    with Writer(path, keep=KEEP) as writer:
        writer.commit(state, wait=True)


@dataclass(frozen=True)
class Operation:
    """What is done to a folder whose state is commit number `before`, and the number of the one that it ends in.

    `before` 0: there is no state. `other` is the state that it writes, if that is not the one it reads.
    """

    before: int
    after: int
    act: Callable[[Path], Any]
    other: str = ""


OPERATIONS = ("commit", "load", "convert", "start", "resume", "append")
# These do not ask for what fails, or not always: memory that the process holds already may do.
NONE = {("load", errno.ENOSPC), ("commit", errno.ENOMEM), ("load", errno.ENOMEM)}


def operations(suffix: str, commits: list[State]) -> dict[str, Operation]:
    a, b = f"a{suffix}", f"b{suffix}"
    return {
        "commit": Operation(2, 3, lambda folder: put(commits[2], folder / a)),
        "load": Operation(4, 4, lambda folder: load(folder / a, Wide()).clock.steps == 3 or 1 / 0),
        "convert": Operation(4, 4, lambda folder: convert(folder / a, folder / b), b),
        "start": Operation(0, 4, lambda folder: [*watch(folder / a, A)]),
        "resume": Operation(3, 4, lambda folder: [*watch(folder / a, A)]),
        "append": Operation(4, 6, lambda folder: [*watch(folder / a, B)]),
    }


class Trial:
    """An operation on copies of one folder, with a fault each."""

    def __init__(self, name: str, suffix: str, commits: list[State], tmp_path: Path) -> None:
        self.operation = operations(suffix, commits)[name]
        self.suffix, self._commits, self._tmp = suffix, commits, tmp_path
        self.base = tmp_path / "base"
        self.base.mkdir()
        for state in commits[: self.operation.before]:
            put(state, self.base / f"a{suffix}")

    def run(self, *several: Fault) -> list[Ended]:
        """Do it with a fault each time, check what is left every time, and then do it without one."""
        work, act = self._tmp / "work", self.operation.act
        shutil.copytree(self.base, work, copy_function=os.link)
        found = []
        for fault in several:
            ended = faults.run(lambda: act(work) and None, work, fault)
            try:
                if ended.error is not None:
                    self._check_error(fault.error, *ended.error)
                self._check_states(work, done=ended.status == 0 and ended.error is None)
                if fault is several[-1]:
                    self._check_next(work)
            except BaseException as error:
                error.add_note(f"{fault} at {ended.failed_call}: {ended.status} {ended.error}")
                raise
            found.append(ended)
        shutil.rmtree(work)
        return found

    def _check_error(self, number: int, kind: str, ours: bool, message: str, hint: str) -> None:
        if not ours:
            # The session's own allocations and threads; the command line has one line for both.
            assert number == errno.ENOMEM
            assert kind == "MemoryError" or "can't start new thread" in message or "allocate memory" in message
        assert "\n" not in message + hint
        if self.suffix != ".pt":
            # zipfile says of a disk that cannot be read that the file is no archive.
            assert kind not in ("StateCorrupt", "StateMismatch", "StateNotFound"), "the state is whole and there"
        if number == errno.ENOSPC and "cannot write" in message:
            assert "free some space" in hint

    def _check_states(self, folder: Path, *, done: bool) -> None:
        before, after = self.operation.before, self.operation.after
        allowed = self._commits[max(0, before - 1) : after]
        for name in {"a", "b" if self.operation.other else "a"}:
            path, last = folder / f"{name}{self.suffix}", self._commits[after - 1]
            try:
                found = load_state(path)
            except StateNotFound:
                assert not done
                assert not before or name == "b"
                continue
            assert same(found, last) if done else any(same(found, one) for one in allowed)
            for one, _ in form_of(path).kept():
                past = load_state(one)
                assert any(same(past, each) for each in self._commits[:after])
            if name == "a" and before > 1:
                # The moment before this one is still kept.
                assert len([*form_of(path).kept()]) >= 1

    def _check_next(self, folder: Path) -> None:
        self.operation.act(folder)
        self._check_states(folder, done=True)
        written = folder / (self.operation.other or f"a{self.suffix}")
        put(load_state(written), written)
        names = {one.name for one in folder.iterdir()}
        kept = {name for name in names if "@" in name}
        assert names - kept == {f"a{self.suffix}", written.name}
        assert len(kept) == KEEP - 1


BY_ERROR = {
    errno.EIO: Fault(error=errno.EIO),
    errno.ENOSPC: Fault(error=errno.ENOSPC, lasting=True, names=frozenset(faults.TAKES_SPACE)),
    errno.EACCES: Fault(error=errno.EACCES, names=frozenset(faults.ASKS)),
    errno.EINTR: Fault(error=errno.EINTR, names=frozenset(faults.WAITS)),
    errno.ENOMEM: Fault(error=errno.ENOMEM, kind="memory"),
}
SOME = [
    ("commit", ".safetensors", errno.EIO, 23),
    ("commit", ".safetensors", errno.ENOSPC, 7),
    ("commit", ".pt", errno.ENOSPC, 13),
    ("commit", ".zarr", errno.EIO, 901),
    ("commit", ".zarr", errno.ENOSPC, 301),
    ("load", ".safetensors", errno.ENOMEM, 5),
]
EVERYTHING = [
    pytest.param(name, suffix, error, 1, marks=SLOW)
    for suffix, name, error in itertools.product(FORMS, OPERATIONS, BY_ERROR)
]


@pytest.mark.parametrize(("name", "suffix", "error", "every"), [*SOME, *EVERYTHING])
def test_a_failed_call_leaves_the_old_or_the_new_state_and_one_line(
    name, suffix, error, every, commits, tmp_path
) -> None:
    trial = Trial(name, suffix, commits, tmp_path)
    for n in itertools.count(every, every):
        (ended,) = trial.run(replace(BY_ERROR[error], at=n))
        if len(ended.calls) < n:
            break
    print(f"{name} {suffix} {errno.errorcode[error]}: {len(ended.calls)} calls")
    assert n > every or (name, error) in NONE


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("suffix", [".safetensors", ".pt"])
@pytest.mark.parametrize("name", ["commit", "load", "convert"])
def test_any_limit_of_memory_leaves_the_old_or_the_new_state_and_one_line(name, suffix, commits, tmp_path) -> None:
    """The address space ends a page later each time, until the operation fits 32 times in a row.

    What the process holds already is enough for small allocations; `Fault` of kind "memory" takes that away. Not for
    `.zarr`: a thread of Python that finds no memory to begin makes the one that starts it wait for ever.
    """
    trial, fits, failed = Trial(name, suffix, commits, tmp_path), 0, 0
    work, act = tmp_path / "work", trial.operation.act

    def within(spare: int) -> None:
        used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (used + spare, -1))
        try:
            act(work)
        finally:
            resource.setrlimit(resource.RLIMIT_AS, (-1, -1))

    for spare in itertools.count(0, 4096):
        shutil.copytree(trial.base, work, copy_function=os.link)
        if not spare:
            act(work)  # imports what it needs
            shutil.rmtree(work)
            shutil.copytree(trial.base, work, copy_function=os.link)
        ended = faults.run(lambda spare=spare: within(spare), work)
        assert ended.status == 0, spare
        if ended.error is not None:
            trial._check_error(errno.ENOMEM, *ended.error)
        trial._check_states(work, done=ended.error is None)
        shutil.rmtree(work)
        fits, failed = (0, failed + 1) if ended.error else (fits + 1, failed)
        if fits == 32:
            break
    print(f"{name} {suffix}: {failed} limits failed, up to {spare >> 10} KiB")
    assert failed
