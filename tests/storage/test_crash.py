"""Commits that are cut off: by a crash that loses what was not synced, by a full disk, by SIGKILL."""

from __future__ import annotations

import errno
import itertools
import os
import shutil
import subprocess
import sys
from pathlib import Path
from random import Random

import pytest
import torch

from protokv.core.step import StreamClock
from protokv.errors import StateError
from protokv.storage.api import load_state, save_state
from protokv.storage.form import FORMS, form_of
from protokv.storage.writer import commit
from tests.storage.disk import Disk, Failing, Fast
from tests.storage.lossy import Killed, Lossy, survivor

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


def survives_a_crash(suffix, keep, make_state, same_state, folder, chances, every) -> None:
    """Crash after each call, or some of them; whatever reached the disk is whole."""
    base, calls = crash_points(suffix, keep, folder, make_state)
    random, outcomes = Random(f"{suffix} {keep}"), []
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
            shutil.rmtree(place)
        shutil.rmtree(work)
    assert outcomes[0] == 5
    assert outcomes[-1] == 6


SLOW = [pytest.mark.slow, pytest.mark.timeout(1200)]


@EVERY_FORM
@pytest.mark.parametrize(
    ("keep", "thorough"),
    [(None, False), (3, False), *(pytest.param(keep, True, marks=SLOW) for keep in (None, 1, 3))],
)
def test_what_is_left_after_a_crash_at_any_call_is_the_old_or_the_new_state(
    suffix, keep, thorough, make_state, same_state, tmp_path
):
    every = 1 if thorough else 2 if suffix == ".safetensors" else 7
    survives_a_crash(suffix, keep, make_state, same_state, tmp_path, chances=40 if thorough else 2, every=every)


def test_a_crash_leaves_the_old_or_the_new_state_where_names_cannot_be_exchanged(
    make_state, same_state, tmp_path, monkeypatch
):
    monkeypatch.setattr(Lossy, "exchanges", False)
    survives_a_crash(".zarr", None, make_state, same_state, tmp_path, chances=4, every=3)


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


@EVERY_FORM
@pytest.mark.parametrize("keep", [None, 3])
@pytest.mark.parametrize(
    ("error", "once", "hint"), [(errno.ENOSPC, False, "free some space"), (errno.EIO, True, "")], ids=["full", "broken"]
)
def test_a_call_that_fails_is_one_error_and_the_old_or_the_new_state_stays(
    suffix, keep, error, once, hint, make_state, same_state, tmp_path
):
    base, old, new = tmp_path / "base", at(make_state, 5), at(make_state, 6)
    base.mkdir()
    for step in (3, 4, 5):
        put(at(make_state, step), base / f"a{suffix}", keep, Fast())
    committed = []
    for n in itertools.count(1):
        work = tmp_path / f"work-{n}"
        shutil.copytree(base, work)
        path, disk, refusal = work / f"a{suffix}", Failing(n, error, once=once), None
        try:
            put(new, path, keep, disk)
        except StateError as caught:
            refusal = caught
        found = load_state(path)
        committed.append(same_state(found, new))
        assert committed[-1] or same_state(found, old)
        assert not keep or 4.0 in times(path)
        # A failed commit removes its own files, or a full disk stays full.
        assert not [one.name for one in work.iterdir() if one.name.startswith(".")]
        if disk.count < n:
            break
        # An error after the new state is in place may be left to the next commit.
        assert refusal is not None or committed[-1]
        if refusal is not None:
            assert os.strerror(error) in refusal.message
            assert hint in refusal.hint
        put(at(make_state, 7), path, keep, Fast())
        assert load_state(path).clock.steps == 7
        shutil.rmtree(work)
    assert committed == sorted(committed)
    assert n > 5
    assert len([*work.iterdir()]) == (keep or 1)


CHILD = """
import sys
from protokv.storage.api import load_state
from protokv.storage.writer import Writer
from tests.storage.conftest import make
from tests.storage.test_crash import at
with Writer(sys.argv[1], keep=3, background=sys.argv[2] == "True") as writer:
    step = int(sys.argv[3])
    while True:
        step += 1
        for one in writer.commit(at(make, step)):
            print(one.steps, flush=True)
"""


@pytest.mark.slow
@EVERY_FORM
@pytest.mark.parametrize("background", [False, True])
def test_a_killed_writer_leaves_what_it_said_it_committed(suffix, background, make_state, tmp_path):
    path, random, reached = tmp_path / f"a{suffix}", Random(suffix), 1
    save_state(at(make_state, reached), path)
    for _ in range(20):
        command = [sys.executable, "-c", CHILD, str(path), str(background), str(reached)]
        with subprocess.Popen(command, cwd=Path(__file__).parents[2], stdout=subprocess.PIPE, text=True) as child:
            told = [int(child.stdout.readline()) for _ in range(random.randrange(1, 9))]
            child.kill()
            told += map(int, child.stdout.read().split())
        steps = load_state(path).clock.steps
        assert steps >= max(told)
        reached = steps
        assert len(times(path)) <= 3
    put(at(make_state, reached + 1), path, 3, Fast())
    assert not [one.name for one in tmp_path.iterdir() if one.name.endswith((".partial", ".previous"))]
