"""Which videos are done, continued, started over or refused."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from protokv.fleet import Job, Recipe, locate_state
from protokv.fleet.worker import Failure, Worker, examine
from protokv.ingestion import Progress, ingest
from protokv.state.reader import load_state
from protokv.state.writer import save_state
from tests.fleet.conftest import CONFIG, write_video
from tests.mock_backbone import MockBackbone
from tests.words.subtitled import write_subtitled

MOCK = MockBackbone().identity


@pytest.fixture
def job(tmp_path: Path) -> Job:
    return Job(str(write_video(tmp_path / "v.mp4", [10, 60, 110])), "v")


def find(job: Job, recipe: Recipe) -> tuple[str, int, float]:
    """The status of a video, and the steps and the stream time of its state."""
    found = examine(job, recipe, MOCK)
    assert found.failure is None, found.failure
    return found.status, found.steps, found.stream_time_s


def refuse(job: Job, recipe: Recipe) -> str:
    """Why a video fails: the error and its message."""
    found = examine(job, recipe, MOCK)
    assert found.status == "failed"
    assert found.failure is not None
    return f"{found.failure.kind}: {found.failure.message}"


def changed(recipe: Recipe, **options: Any) -> Recipe:
    return replace(recipe, options=replace(recipe.options, **options))


def watch(job: Job, recipe: Recipe) -> None:
    worker = Worker(recipe, "cpu")
    outcome = worker.watch(worker.examine(job))
    assert outcome.failure is None, outcome.failure


def test_a_video_is_new_without_a_state_and_done_with_a_complete_one(job: Job, recipe: Recipe) -> None:
    assert find(job, recipe) == ("new", 0, 0.0)
    watch(job, recipe)
    # `overwrite` leaves a finished video alone.
    assert find(job, recipe) == find(job, changed(recipe, overwrite=True)) == ("done", 3, 3.0)
    assert examine(job, recipe, MOCK).file_bytes == Path(locate_state(recipe.place, "v")).stat().st_size


def test_a_state_that_is_not_complete_is_unfinished(job: Job, recipe: Recipe) -> None:
    Path(recipe.place).mkdir()
    run = ingest(job.source, locate_state(recipe.place, "v"), CONFIG, backbone=MockBackbone())
    while not isinstance(event := next(run), Progress) or event.steps < 2:
        pass
    run.close()
    assert find(job, recipe) == ("unfinished", 2, 2.0)


def test_a_video_whose_content_changed_under_its_name_is_started_over(job: Job, recipe: Recipe) -> None:
    watch(job, recipe)
    write_video(Path(job.source), [10, 60, 110, 160])
    assert find(job, recipe) == ("changed", 0, 0.0)


def test_a_video_whose_subtitles_came_changed_or_went_is_started_over(job: Job, recipe: Recipe) -> None:
    beside = Path(job.source).with_suffix(".en.srt")
    watch(job, recipe)
    for text in ("one", "two", None):
        assert find(job, recipe)[0] == "done"
        beside.write_text(f"1\n00:00:00,000 --> 00:00:01,000\n{text}\n") if text else beside.unlink()
        assert find(job, recipe) == ("changed", 0, 0.0)
        watch(job, recipe)


def test_forced_subtitles_beside_a_full_track_change_nothing_and_full_ones_do(recipe: Recipe, tmp_path: Path) -> None:
    job = Job(str(write_subtitled(tmp_path / "t.mkv", {"eng": [(1.0, 2.0, "all")]}, seconds=3)), "t")
    for name, status in (("en.forced", "done"), ("en", "changed")):
        watch(job, recipe)
        assert find(job, recipe)[0] == "done"
        (tmp_path / f"t.{name}.srt").write_text("1\n00:00:00,000 --> 00:00:01,000\nparts\n")
        assert find(job, recipe)[0] == status


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"config": CONFIG.with_fields({"budget": 48})}, "memory.budget is 40, this run's is 48"),
        ({"fps": 1.0}, "fps is 2.0, this run's is 1.0"),
        ({}, r"is of v\.mp4, not of w\.mp4"),
    ],
)
def test_a_state_of_other_settings_or_another_video_is_refused_and_started_over_by_force(
    change: dict[str, object], named: str, job: Job, recipe: Recipe, tmp_path: Path
) -> None:
    watch(job, recipe)
    if not change:
        job = Job(str(write_video(tmp_path / "w.mp4", [40])), "v")
    other = changed(recipe, **change)
    assert re.search(f"StateMismatch: .*{named}", refuse(job, other))
    assert find(job, changed(other, overwrite=True)) == ("changed", 0, 0.0)


def test_a_state_of_another_model_is_refused(job: Job, recipe: Recipe) -> None:
    watch(job, recipe)
    found = examine(job, recipe, replace(MOCK, weights_digest="1"))
    assert found.failure is not None
    assert "weights_digest" in found.failure.message


def test_another_file_is_corrupt_and_replaced_by_force_alone(job: Job, recipe: Recipe) -> None:
    target = Path(locate_state(recipe.place, "v"))
    target.parent.mkdir()
    target.write_bytes(b"mine")
    assert refuse(job, recipe).startswith("StateCorrupt: ")
    assert find(job, changed(recipe, overwrite=True)) == ("changed", 0, 0.0)


def test_damage_of_a_complete_state_is_reported_again(job: Job, recipe: Recipe) -> None:
    watch(job, recipe)
    path = locate_state(recipe.place, "v")
    state = load_state(path)
    damaged = {**(state.source or {}), "damage": {"ok": False, "message": "2 frames lost", "frames_lost": 2}}
    save_state(replace(state, source=damaged), path)
    found = examine(job, recipe, MOCK)
    assert (found.status, found.failure) == ("done", Failure("Damaged", "2 frames lost"))


def test_a_missing_video_is_not_found_although_it_has_a_state(job: Job, recipe: Recipe) -> None:
    watch(job, recipe)
    Path(job.source).unlink()
    assert refuse(job, recipe).startswith("SourceNotFound: ")
