"""Commits interrupted by a crash that loses data that was not synced. Failed calls are in `test_faults`."""

from __future__ import annotations

import shutil
from pathlib import Path
from random import Random

import pytest
import torch

from protokv.core.step import StreamClock
from protokv.errors import StateError
from protokv.state.api import load_state
from protokv.state.form import FORMS, form_of
from protokv.state.writer import commit
from tests.state.disk import Disk, Fast, Recorded, after_crash

OLD, NEW, LATER = 5, 6, 7


def at(make_state, step: int):
    """Return the state of a stream at a step: one tensor changes and one stays."""
    tensors = {"near.keys": torch.full((2, 3), float(step)), "sink.keys": torch.arange(6.0)}
    return make_state(clock=StreamClock(step, float(step), step, step, 1.0, 1), tensors=tensors)


def put(state, path: Path, keep: int | None, disk: Disk) -> None:
    with disk:
        commit(form_of(path), state, keep)


def times(path: Path) -> list[float]:
    """Return the stream times of the kept commits; each must load and verify."""
    found = []
    for one, _ in form_of(path).kept():
        state = load_state(one)
        assert state.tensors["near.keys"].eq(state.clock.steps).all()
        found.append(state.clock.stream_time_s)
    return found


@pytest.fixture
def base(suffix, keep, make_state, tmp_path) -> Path:
    """A folder with a state after three commits."""
    folder = tmp_path / "base"
    folder.mkdir()
    for step in (3, 4, OLD):
        put(at(make_state, step), folder / f"a{suffix}", keep, Fast())
    return folder


def copied(base: Path, name: str) -> Path:
    return Path(shutil.copytree(base, base.parent / name))


SLOW = [pytest.mark.slow, pytest.mark.timeout(1200)]


@pytest.mark.parametrize(
    ("suffix", "keep", "every", "cases", "exchanges"),
    [
        (".safetensors", None, 2, 2, True),
        (".safetensors", 3, 2, 2, True),
        (".zarr", None, 7, 1, True),
        (".zarr", 3, 19, 1, True),
        (".zarr", None, 5, 1, False),
        *(pytest.param(one, keep, 1, 40, True, marks=SLOW) for one in FORMS for keep in (None, 1, 3)),
    ],
)
def test_a_crash_at_any_call_leaves_the_old_or_the_new_state(
    suffix, keep, every, cases, exchanges, base, make_state, same_state, monkeypatch
):
    monkeypatch.setattr(Recorded, "exchanges", exchanges)
    old, new, disk = at(make_state, OLD), at(make_state, NEW), Recorded(copied(base, "work"))
    put(new, disk.root / f"a{suffix}", keep, disk)
    names = {name for name, *_ in disk.calls}
    assert {"write", "sync", "sync_folder"} <= names
    assert {"replace", "exchange"} & names
    random, outcomes, calls = Random(f"{suffix} {keep}"), [], len(disk.calls)
    # Everything reached the disk, only synced data did, or something between.
    lucks = [lambda: 1.0, lambda: 0.0, *[random.random] * cases]
    for n in [*range(1 + random.randrange(every), calls, every), calls]:
        for i, luck in enumerate(lucks):
            place = after_crash(base, disk.root, disk.calls[:n], luck, base.parent / f"after-{n}-{i}")
            path = place / f"a{suffix}"
            found = load_state(path)
            assert same_state(found, old) or same_state(found, new)
            outcomes.append(found.clock.steps)
            if keep:
                past = times(path)
                assert {4.0, 5.0} <= {*past, found.clock.stream_time_s} or keep == 1
                assert len(past) <= keep
            # The next commit needs nothing that the crash left, and removes it.
            put(at(make_state, LATER), path, keep, Fast())
            assert load_state(path).clock.steps == LATER
            visible = [p.name for p in place.iterdir()]
            if keep:
                assert len(times(path)) == len(visible) - 1 <= keep - 1
            else:
                assert visible == [path.name]
            shutil.rmtree(place)
    assert outcomes[0] == OLD
    assert outcomes[-1] == NEW


@pytest.mark.parametrize(("suffix", "every"), [(".safetensors", 2), (".zarr", 23)])
@pytest.mark.parametrize("keep", [3])
def test_a_crash_while_going_back_loses_neither_the_damaged_state_nor_the_commit(suffix, every, base, make_state):
    disk = Recorded(copied(base, "work"))
    form = form_of(disk.root / f"a{suffix}")
    before = next(at for at, header in form.kept() if header.clock.steps == 4)
    with disk, form.repairing():
        aside = form.go_back(before)
    seen = []
    for n in [*range(1, len(disk.calls), every), len(disk.calls)]:
        for i, luck in enumerate((lambda: 1.0, lambda: 0.0)):
            place = after_crash(base, disk.root, disk.calls[:n], luck, base.parent / f"after-{n}-{i}")
            found = form_of(place / f"a{suffix}").read()
            assert found.clock.steps in (4, OLD)
            if found.clock.steps == 4:
                assert found.tensors["near.keys"].eq(4).all()
                assert form_of(place / f"a{suffix}").read(str(place / Path(aside).name)).clock.steps == OLD
            assert times(place / f"a{suffix}")[:2] == [3.0, 4.0]
            seen.append(found.clock.steps)
    assert (seen[0], seen[-1]) == (OLD, 4)


@pytest.mark.parametrize(("suffix", "keep"), [(".safetensors", None)])
def test_a_commit_that_does_not_sync_is_caught(suffix, keep, base, make_state):
    """The model loses data that was not synced, so the test above fails without the calls of sync."""
    disk = Recorded(copied(base, "work"))
    put(at(make_state, NEW), disk.root / f"a{suffix}", keep, disk)
    forgetful = [call for call in disk.calls if call[0] != "sync"]
    lost = after_crash(base, disk.root, forgetful, lambda: 0.0, base.parent / "lost")
    with pytest.raises(StateError):
        load_state(lost / f"a{suffix}")
