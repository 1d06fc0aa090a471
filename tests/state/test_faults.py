"""Each system call and each allocation of an operation fails once, in turn, as SQLite's tests do it.

Whatever failed, every state on the disk is the one before or one that the operation commits, and verifies; the error is
one line; and the same operation again ends as if nothing had failed and leaves no other file.
"""

from __future__ import annotations

import builtins
import errno
import itertools
import os
import re
import resource
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

from protokv import errors
from protokv.core.backbone import Backbone, PreparedStep
from protokv.errors import ProtoKVError, StateNotFound
from protokv.fleet import Job
from protokv.fleet.records import Failure
from protokv.fleet.worker import Worker
from protokv.ingestion import Commit, Event, Every, IngestOptions, ingest
from protokv.memories import MemoryConfig
from protokv.state.api import load_state
from protokv.state.checkpoint import load
from protokv.state.describe import convert
from protokv.state.form import FORMS, form_of
from protokv.state.snapshot import State
from protokv.state.writer import Writer
from tests import faults
from tests.faults import Ended, Fault
from tests.fleet.conftest import write_video
from tests.fleet.recipes import MockRecipe
from tests.mock_backbone import MockBackbone
from tests.prepared import Prepared
from tests.state.conftest import same

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
    """An operation on copies of one folder, with a fault each.

    What follows depends on the folder alone, so it is looked at once for equal contents.
    """

    def __init__(self, operation: Operation, suffix: str, commits: list[State], tmp_path: Path) -> None:
        self.operation, self.suffix, self._commits, self._tmp = operation, suffix, commits, tmp_path
        self._seen: set[int] = set()
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
                done, last = ended.status == 0 and ended.error is None, fault is several[-1]
                if (left := hash((done, last, *contents(work)))) not in self._seen:
                    self._check_states(work, done=done)
                    if last:
                        self._check_next(work)
                    self._seen.add(left)
            except BaseException as error:
                error.add_note(f"{fault} at {ended.failed_call}: {ended.status} {ended.error}")
                raise
            found.append(ended)
        shutil.rmtree(work)
        return found

    def places(self, fault: Fault) -> list[int]:
        """Return the number of the first call at each place of the program."""
        shutil.copytree(self.base, self._tmp / "work", copy_function=os.link)
        ended = faults.run(lambda: self.operation.act(self._tmp / "work") and None, self._tmp, fault, places=True)
        shutil.rmtree(self._tmp / "work")
        return ended.first

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


def contents(folder: Path) -> list[tuple[str, bytes]]:
    """Return the names in a folder, without their random parts, and what is in the files."""
    found = [(str(one.relative_to(folder)), one.read_bytes() if one.is_file() else b"") for one in folder.rglob("*")]
    return sorted((re.sub(r"\d+-[0-9a-f]{8}", "", name), content) for name, content in found)


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
# A state in `.zarr` is many files, with the same calls for each: 23,600 at 3,700 places.
EVERYTHING = [
    pytest.param(name, suffix, error, 0 if suffix == ".zarr" and error != errno.ENOMEM else 1, marks=SLOW)
    for suffix, name, error in itertools.product(FORMS, OPERATIONS, BY_ERROR)
]


def fail_in_turn(trial: Trial, fault: Fault, every: int) -> int:
    """Let every n-th call fail, or with 0 the first one at each place of the program; return how many failed."""
    failed, ended = 0, Ended()
    for n in itertools.count(every, every) if every else [*trial.places(fault), 1 << 20]:
        (ended,) = trial.run(replace(fault, at=n))
        if len(ended.calls) < n:
            break
        failed += 1
    print(f"{errno.errorcode[fault.error]}: {failed} of {len(ended.calls)} calls")
    return failed


@pytest.mark.parametrize(("name", "suffix", "error", "every"), [*SOME, *EVERYTHING])
def test_a_failed_call_leaves_the_old_or_the_new_state_and_one_line(
    name, suffix, error, every, commits, tmp_path
) -> None:
    trial = Trial(operations(suffix, commits)[name], suffix, commits, tmp_path)
    assert fail_in_turn(trial, BY_ERROR[error], every) or (name, error) in NONE


@dataclass(frozen=True, kw_only=True)
class WideRecipe(MockRecipe):
    """Loads a wide model."""

    def load(self, device: str) -> Backbone:
        return Wide()


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("error", BY_ERROR)
def test_a_failed_call_of_a_fleet_s_worker_leaves_the_old_or_the_new_state_and_one_line(error, tmp_path) -> None:
    """`tests/cli/test_refusals.py` has the whole command; its workers are threads, where no memory is counted."""
    film = str(write_video(tmp_path / "a.mp4", [10, 60, 110]))
    options = IngestOptions(config=CONFIG, every=Every(n_steps=1), keep=KEEP, thumbnails=0)
    whole = tmp_path / "whole.safetensors"
    steps = ingest(film, whole, options=replace(options, backbone=Wide()))
    states = [load_state(whole) for event in steps if isinstance(event, Commit)]

    def act(folder: Path) -> None:
        worker, job = Worker(WideRecipe(place=str(folder), options=options), "cpu"), Job(film, "a")
        found = worker.look(job)
        worker.load()
        failure = found if isinstance(found, Failure) else worker.watch(job, found).failure
        if failure is not None:
            kind = {**vars(builtins), **vars(errors)}[failure.kind]
            raise kind(failure.message, **({"hint": failure.hint} if issubclass(kind, ProtoKVError) else {}))

    trial = Trial(Operation(1, len(states), act), ".safetensors", states, tmp_path)
    assert fail_in_turn(trial, BY_ERROR[error], 1)


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("suffix", [".safetensors", ".pt"])
@pytest.mark.parametrize("name", ["commit", "load", "convert"])
def test_any_limit_of_memory_leaves_the_old_or_the_new_state_and_one_line(name, suffix, commits, tmp_path) -> None:
    """The address space ends a page later each time, until the operation fits 32 times in a row.

    What the process holds already is enough for small allocations; `Fault` of kind "memory" takes that away. Not for
    `.zarr`: a thread of Python that finds no memory to begin makes the one that starts it wait for ever.
    """
    trial, fits, failed = Trial(operations(suffix, commits)[name], suffix, commits, tmp_path), 0, 0
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
