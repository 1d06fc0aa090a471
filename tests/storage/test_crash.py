"""Commits that are cut off: by a crash that loses what was not synced, by a full disk, by SIGKILL, beside a reader."""

from __future__ import annotations

import errno
import os
import shutil
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from random import Random

import pytest
import torch

from protokv.core.step import StreamClock
from protokv.errors import StateError, StateNotFound
from protokv.storage import filesystem
from protokv.storage.api import commit, load_state, save_state
from protokv.storage.form import FORMS, form_of
from tests.storage.disk import Disk
from tests.storage.lossy import Fast, Killed, Lossy, survivor
from tests.storage.nursery import Nursery

EVERY_FORM = pytest.mark.parametrize("suffix", sorted(FORMS))


def at(make_state, step: int):
    """The state of a stream at a step: one tensor that changes and one that stays."""
    tensors = {"near.keys": torch.full((2, 3), float(step)), "sink.keys": torch.arange(6.0)}
    return make_state(clock=StreamClock(step, float(step), step, step, 1.0, 1), tensors=tensors)


def put(state, path: Path, keep: int | None, disk: Disk) -> None:
    with disk:
        commit(form_of(path), state, keep)


def kept(path: Path) -> list[Path]:
    return [Path(at) for at, _ in form_of(path).kept()]


def times(path: Path) -> list[float]:
    """Of every state that is there, each of which must load and verify."""
    found = []
    for one in kept(path):
        state = load_state(one)
        assert state.tensors["near.keys"].eq(state.clock.steps).all()
        found.append(state.clock.stream_time_s)
    return found


def crash_points(suffix: str, keep: int | None, folder: Path, make_state) -> tuple[Path, int]:
    """A folder as three commits leave it, and how many calls the next one makes."""
    base, count = folder / "base", folder / "count"
    base.mkdir()
    for step in (3, 4, 5):
        put(at(make_state, step), base / f"a{suffix}", keep, Fast())
    shutil.copytree(base, count)
    fs = Lossy(count)
    put(at(make_state, 6), count / f"a{suffix}", keep, fs)
    assert {"write", "sync", "sync_folder"} <= set(fs.calls)
    assert {"replace", "exchange"} & set(fs.calls)
    return base, len(fs.calls)


def survives_a_crash(suffix, keep, make_state, same_state, folder, chances, every=1) -> tuple[int, int]:
    """Crash after each call; whatever reached the disk is whole. Returns crash points and folders looked at."""
    base, calls = crash_points(suffix, keep, folder, make_state)
    random, seen, outcomes = Random(f"{suffix} {keep}"), 0, []
    old, new = at(make_state, 5), at(make_state, 6)
    points = [*range(1 + random.randrange(every), calls, every), calls]
    for n in points:
        work = folder / f"work-{n}"
        shutil.copytree(base, work)
        fs = Lossy(work, n)
        with pytest.raises(Killed):
            put(new, work / f"a{suffix}", keep, fs)
        for i, tree in enumerate(fs.survivors(random, chances)):
            place = survivor(tree, folder / f"after-{n}-{i}")
            path = place / f"a{suffix}"
            found = load_state(path)
            assert same_state(found, old) or same_state(found, new)
            outcomes.append(found.clock.steps)
            if keep:
                past = times(path)
                assert {4.0, 5.0} <= {*past, found.clock.stream_time_s} or keep == 1
                assert len(past) <= keep
            # The next commit needs nothing of what the crash left, and leaves nothing of it.
            put(at(make_state, 7), path, keep, Fast())
            assert load_state(path).clock.steps == 7
            visible = [p.name for p in place.iterdir()]
            if keep:
                assert len(times(path)) == len(visible) - 1 <= keep - 1
            else:
                assert visible == [path.name]
            seen += 1
            shutil.rmtree(place)
        shutil.rmtree(work)
    assert outcomes[0] == 5
    assert outcomes[-1] == 6
    return len(points), seen


@EVERY_FORM
@pytest.mark.parametrize("keep", [None, 3])
def test_what_is_left_after_a_crash_at_any_call_is_the_old_or_the_new_state(
    suffix, keep, make_state, same_state, tmp_path
):
    survives_a_crash(suffix, keep, make_state, same_state, tmp_path, chances=2, every=7 if suffix == ".zarr" else 2)


def test_nor_where_two_names_cannot_change_places_in_one_act(make_state, same_state, tmp_path, monkeypatch):
    monkeypatch.setattr(Lossy, "exchanges", False)
    survives_a_crash(".zarr", None, make_state, same_state, tmp_path, chances=4, every=3)


@pytest.mark.slow
@pytest.mark.timeout(1200)
@EVERY_FORM
@pytest.mark.parametrize("keep", [None, 1, 3])
def test_what_is_left_after_any_crash_is_the_old_or_the_new_state(suffix, keep, make_state, same_state, tmp_path):
    points, seen = survives_a_crash(suffix, keep, make_state, same_state, tmp_path, chances=40)
    print(f"{suffix} keep {keep}: {points} crash points, {seen} folders")


def test_a_commit_that_does_not_sync_is_caught(make_state, same_state, tmp_path):
    """The disk of these tests does lose what was not synced: without the sync calls they fail."""

    class Forgetful(Lossy):
        def sync(self, file) -> None:
            file.flush()
            self._called("sync")

    base, calls = crash_points(".safetensors", None, tmp_path, make_state)
    fs = Forgetful(base, calls)
    with pytest.raises(Killed):
        put(at(make_state, 6), base / "a.safetensors", None, fs)
    lost = survivor(list(fs.survivors(Random(0), 0))[1], tmp_path / "lost")
    with pytest.raises(StateError):
        load_state(lost / "a.safetensors")


class Full(Fast):
    """A disk on which call number `at` and all further ones that need room fail."""

    def __init__(self, at: int) -> None:
        self.at, self.calls = at, 0


def _needs_room(name: str):
    def call(self: Full, *arguments):
        self.calls += 1
        if self.calls >= self.at:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return getattr(super(Full, self), name)(*arguments)

    return call


for _name in ("create", "write", "sync", "make_folder", "link"):
    setattr(Full, _name, _needs_room(_name))


def refusal(state, path: Path, keep: int | None, fs: Disk) -> StateError | None:
    """What the commit is refused with, if it is."""
    try:
        put(state, path, keep, fs)
    except StateError as error:
        return error
    return None


@EVERY_FORM
@pytest.mark.parametrize("keep", [None, 3])
def test_a_full_disk_is_one_error_with_a_hint_and_the_old_state_stays(suffix, keep, make_state, same_state, tmp_path):
    path, n = tmp_path / f"a{suffix}", 0
    for step in (3, 4, 5):
        put(at(make_state, step), path, keep, Fast())
    while (error := refusal(at(make_state, 6), path, keep, Full(n := n + 1))) is not None:
        assert os.strerror(errno.ENOSPC) in error.message
        assert "free some space" in error.hint
        assert same_state(load_state(path), at(make_state, 5))
        assert {4.0} <= set(times(path)) if keep else times(path) == []
        # A failed commit takes its own pieces with it, or a full disk stays full.
        assert not [one.name for one in tmp_path.iterdir() if one.name.startswith(".")]
    assert n > 3
    assert same_state(load_state(path), at(make_state, 6))
    assert len([*tmp_path.iterdir()]) == (keep or 1)


@EVERY_FORM
def test_a_folder_or_a_file_in_the_place_of_the_state_is_refused_and_left(suffix, make_state, tmp_path):
    path = tmp_path / f"a{suffix}"
    if suffix == ".zarr":
        path.write_text("mine")
    else:
        path.mkdir()
        (path / "mine").write_text("mine")
    with pytest.raises(StateError, match=r"cannot write the state .*: it is a f"):
        save_state(at(make_state, 1), path)
    assert (path if suffix == ".zarr" else path / "mine").read_text() == "mine"
    assert [p.name for p in tmp_path.iterdir()] == [path.name]


@pytest.fixture(scope="module")
def nursery(tiny_folder: Path) -> Iterator[Nursery]:
    found = Nursery(tiny_folder)
    yield found
    found.close()


def content(path: Path) -> object:
    """Everything that a state is: the file's bytes, or header and tensors where it is a folder."""
    if path.is_file():
        return path.read_bytes()
    state = load_state(path)
    return state.to_json(), {name: (tensor.dtype, tensor.tolist()) for name, tensor in state.tensors.items()}


def check_kept(path: Path, keep: int | None) -> None:
    """Every earlier commit loads and verifies; at most one is too many."""
    steps = [load_state(one).clock.steps for one in kept(path)]
    assert steps == sorted(steps)
    assert len(steps) <= (keep or 0)


def killed_at_random(nursery, suffix, folder, n_kills, *, keep, background, frames=24) -> int:
    """Kill, verify, resume, over and over; every run that gets to its end has the bytes of one that was left alone.
    Returns how many did."""
    whole, path = folder / f"whole{suffix}", folder / f"a{suffix}"
    began = time.perf_counter()
    assert nursery.run(whole, frames=frames)[-2:] == ["done", "exit 0"]
    # What one step and its commit take here: the instants are spread over twice that.
    step_s = (time.perf_counter() - began) / (frames / 2)
    random, kills, ended, reached = Random(f"{suffix} {n_kills}"), 0, 0, 0
    while kills < n_kills:
        nursery.start(path, frames=frames, keep=keep, background=background)
        lines = [nursery.line() for _ in range(random.randrange(4))]
        lines.append(nursery.line(random.random() * 2 * step_s))
        if not nursery.gone:
            lines += nursery.kill()
        kills += f"exit {-signal.SIGKILL}" in lines
        assert not [line for line in lines if line and line.startswith("error")]
        told = [int(line.split()[1]) for line in lines if line and line.startswith("commit")]
        try:
            steps = load_state(path).clock.steps
        except StateNotFound:
            steps = 0
        # What was said to be committed is on disk, and nothing ever goes back.
        assert steps >= max([reached, *told])
        reached = steps
        check_kept(path, keep)
        if "done" in lines:
            assert content(path) == content(whole)
            assert len(kept(path)) == (keep or 1) - 1
            assert not [p.name for p in folder.iterdir() if p.name.startswith(f".a{suffix}") and "lock" not in p.name]
            for one in (path, *kept(path)):
                filesystem.remove(one)
            ended, reached = ended + 1, 0
    return ended


@EVERY_FORM
@pytest.mark.parametrize(("keep", "background"), [(3, False), (None, True)])
def test_a_kill_at_any_instant_leaves_a_whole_state_that_resumes_to_the_same_bytes(
    suffix, keep, background, nursery, tmp_path
):
    killed_at_random(nursery, suffix, tmp_path, 3, keep=keep, background=background, frames=8)
    nursery.run(tmp_path / f"a{suffix}", frames=8, keep=keep)
    assert content(tmp_path / f"a{suffix}") == content(tmp_path / f"whole{suffix}")


@pytest.mark.slow
@pytest.mark.timeout(1200)
@EVERY_FORM
@pytest.mark.parametrize(("keep", "background"), [(3, False), (3, True)])
def test_two_hundred_kills_leave_whole_states_that_resume_to_the_same_bytes(
    suffix, keep, background, nursery, tmp_path
):
    began = time.perf_counter()
    ended = killed_at_random(nursery, suffix, tmp_path, 200, keep=keep, background=background)
    print(f"{suffix} background {background}: 200 kills, {ended} runs to the end, {time.perf_counter() - began:.0f} s")
    assert ended >= 5


@EVERY_FORM
def test_every_read_beside_a_writer_is_a_whole_state(suffix, nursery, tmp_path):
    path, seen, reads = tmp_path / f"a{suffix}", [], 0
    # A hierarchy is many files, and each is synced.
    steps = 10 if suffix == ".zarr" else 30
    nursery.start(path, frames=2 * steps, keep=3, background=True)
    assert nursery.line() == "commit 1"
    line = None
    while line != "done":
        asked = Random(reads).random() * steps
        for state in (load_state(path), read_at(path, asked)):
            # Tensors and header are of one moment: the newest step in the window is the last one of the clock.
            assert state is None or int(state.tensors["near.step"].max()) == state.clock.steps - 1
        seen.append(load_state(path).clock.steps)
        reads += 1
        line = nursery.line(0)
    nursery.rest()
    assert seen == sorted(seen)
    assert load_state(path).clock.steps == steps
    assert reads > 3


def read_at(path: Path, time_s: float):
    """The state at a time, None where the writer has removed all that is not after it."""
    try:
        state = load_state(path, at_s=time_s)
    except StateNotFound:
        return None
    assert state.clock.stream_time_s <= time_s
    return state


@EVERY_FORM
def test_a_file_that_may_not_grow_is_one_error_and_the_old_state_stays(suffix, nursery, tmp_path):
    path = tmp_path / f"a{suffix}"
    assert nursery.run(path, frames=6, keep=2)[-2] == "done"
    before = content(path)
    lines = nursery.run(path, seed=2, frames=6, keep=2, append=True, limit=4096)
    assert lines[0].startswith("error StateError: cannot write the state"), lines
    assert "File too large" in lines[0]
    assert content(path) == before
    check_kept(path, 2)
    assert nursery.run(path, seed=2, frames=6, keep=2, append=True)[-2] == "done"


@EVERY_FORM
def test_an_append_that_is_killed_continues_with_the_same_command(suffix, nursery, tmp_path):
    whole, path = tmp_path / f"whole{suffix}", tmp_path / f"a{suffix}"
    for target in (whole, path):
        assert nursery.run(target, frames=5)[-2] == "done"
    assert nursery.run(whole, seed=2, frames=9, append=True)[-2] == "done"
    for commits in (1, 2):
        nursery.start(path, seed=2, frames=9, append=True)
        assert [nursery.line().split()[0] for _ in range(commits)] == ["commit"] * commits
        assert nursery.kill()[-1] == f"exit {-signal.SIGKILL}"
    assert nursery.run(path, seed=2, frames=9, append=True)[-2] == "done"
    assert content(path) == content(whole)
    # Once more, after it has ended: nothing is watched twice.
    assert nursery.run(path, seed=2, frames=9, append=True) == ["done", "exit 0"]
    assert content(path) == content(whole)
