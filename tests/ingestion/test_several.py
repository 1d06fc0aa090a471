"""Cameras that are watched together in one process leave the states that they leave alone."""

import threading
from collections.abc import Callable
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

import pytest

from protokv.errors import SourceUnreadable
from protokv.ingestion import (
    Commit,
    Every,
    IngestOptions,
    IngestProgress,
    IngestSummary,
    SourceLost,
    ingest,
    ingest_together,
    several,
)
from protokv.ingestion.live import LiveSource
from protokv.memories import DurableConfig
from protokv.state.reader import StateReader, load_state
from protokv.stream.seeing import StepsToWatch, watch_together
from tests.cameras import World, gone
from tests.core.streams import same
from tests.mock_backbone import MockBackbone

OPTIONS = IngestOptions(
    config=DurableConfig(budget=40), backbone=MockBackbone(), every=Every(n_steps=10**6)
)


@pytest.fixture(autouse=True)
def pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(several, "IDLE_S", 0.0)


def open_camera(world: World) -> LiveSource:
    """Return a camera that is given up after the last of its scripts."""
    world.scripts.append([("away", 60.0), gone()])
    return world.source(give_up_s=30.0)


def watch(
    folder: Path, *worlds: World, follow: Callable[[str, Any], None] = lambda name, event: None
) -> list[tuple[str, Any]]:
    """Watch cameras into states of their numbers, until all are given up."""
    found = list[tuple[str, Any]]()
    with ExitStack() as opened:
        sources = {
            str(folder / f"{n}.safetensors"): opened.enter_context(open_camera(world))
            for n, world in enumerate(worlds)
        }
        for target, event in ingest_together(sources, OPTIONS):
            found.append((Path(target).stem, event))
            follow(*found[-1])
    return found


def test_states_are_those_of_each_camera_alone_and_what_is_due_together_is_one_forward(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    together = list[int]()

    def noted(due: list[Any]) -> None:
        together.append(len(due))
        watch_together(due)

    monkeypatch.setattr(several, "watch_together", noted)
    scripts = [[100, gone()], [37, gone()], [81, gone()]]
    found = watch(tmp_path, *(World(list(script)) for script in scripts))
    assert max(together) > 1
    assert sum(together) == sum(isinstance(one, IngestProgress) for _, one in found)
    ends = {name: one for name, one in found if isinstance(one, IngestSummary)}
    assert sorted(ends) == ["0", "1", "2"]
    for number, script in enumerate(scripts):
        world = World(list(script))
        path = tmp_path / f"alone{number}.safetensors"
        with open_camera(world) as source:
            alone = ingest(source, path, options=OPTIONS)
        assert alone.steps == ends[str(number)].steps > 3
        assert same(
            load_state(path).tensors, load_state(tmp_path / f"{number}.safetensors").tensors
        )


def test_a_camera_that_is_late_lost_or_wrong_holds_nobody_up(tmp_path: Path) -> None:
    may_come = threading.Event()
    late = World([may_come, 20, gone()])
    wrong = World([SourceUnreadable("it is no camera")])
    fine = World([100, gone()])
    steps = list[str]()

    def follow(name: str, event: object) -> None:
        if isinstance(event, IngestProgress):
            steps.append(name)
            if len(steps) == 3:
                may_come.set()

    found = watch(tmp_path, late, wrong, fine, follow=follow)
    assert steps[:3] == ["2", "2", "2"]
    assert "0" in steps
    assert {name for name, one in found if isinstance(one, SourceLost)} >= {"0", "2"}
    assert {name for name, one in found if isinstance(one, Commit)} >= {"0", "2"}


def test_a_step_that_fails_ends_its_own_run_and_what_was_watched_is_saved(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    failed = list[StepsToWatch]()

    def fail_one(due: list[StepsToWatch]) -> None:
        for one in due:
            if one.session.clock.steps == 4 and not failed:
                one.error = RuntimeError("no room")
                failed.append(one)
        watch_together([one for one in due if one.error is None])

    monkeypatch.setattr(several, "watch_together", fail_one)
    found = watch(tmp_path, World([60, gone()]), World([60, gone()]))
    ((name, error),) = [one for one in found if isinstance(one[1], Exception)]
    assert str(error) == "no room"
    steps = [load_state(tmp_path / f"{n}.safetensors").clock.steps for n in range(2)]
    assert steps.pop(int(name)) == 4
    assert steps[0] > 4


def test_a_caller_who_leaves_between_two_runs_loses_nothing_of_a_watched_step(
    tmp_path: Path,
) -> None:
    with ExitStack() as opened:
        sources = {
            str(tmp_path / f"{n}.safetensors"): opened.enter_context(World([60, gone()]).source())
            for n in range(2)
        }
        with closing(ingest_together(sources, OPTIONS)) as found:
            for _, event in found:
                if isinstance(event, IngestProgress) and event.steps == 2:
                    break
    for path in sources:
        clock = load_state(path).clock
        decoders = StateReader.open(path).header.source["decoders"]  # type: ignore[index]
        assert decoders == {"pyav": clock.steps * clock.frames_per_step}
