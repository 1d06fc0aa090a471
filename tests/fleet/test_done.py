"""Which videos are done, continued, started over or refused."""

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from protokv.fleet import JobRecipe, VideoJob
from protokv.fleet.worker import FleetWorker, VideoFailure, check_video_status
from protokv.state.checkpoint import save_state
from protokv.state.reader import load_state
from tests.fleet.conftest import CONFIG, write_video
from tests.mock_backbone import MockBackbone

MOCK = MockBackbone().identity


@pytest.fixture
def job(tmp_path: Path) -> VideoJob:
    return VideoJob(str(write_video(tmp_path / "v.mp4", [10, 60, 110])), "v")


def find(job: VideoJob, recipe: JobRecipe) -> tuple[str, int, float]:
    """The status of a video, and the steps and the stream time of its state."""
    found = check_video_status(job, recipe, MOCK)
    assert found.failure is None, found.failure
    return found.status, found.steps, found.stream_time_s


def check_refused(job: VideoJob, recipe: JobRecipe, why: str) -> None:
    """Check that a video fails for this reason, and is started over by force."""
    found = check_video_status(job, recipe, MOCK)
    assert found.status == "failed"
    assert found.failure is not None
    assert re.search(why, f"{found.failure.kind}: {found.failure.message}")
    assert find(job, changed(recipe, overwrite=True)) == ("changed", 0, 0.0)


def changed(recipe: JobRecipe, **options: Any) -> JobRecipe:
    return replace(recipe, options=replace(recipe.options, **options))


def watch(job: VideoJob, recipe: JobRecipe) -> Path:
    worker = FleetWorker(recipe, "cpu")
    outcome = worker.watch(worker.examine(job))
    assert outcome.failure is None, outcome.failure
    return Path(outcome.state)


def test_a_video_is_new_without_a_state_and_done_with_a_complete_one(
    job: VideoJob, recipe: JobRecipe
) -> None:
    assert find(job, recipe) == ("new", 0, 0.0)
    path = watch(job, recipe)
    # `overwrite` leaves a finished video alone.
    assert find(job, recipe) == find(job, changed(recipe, overwrite=True)) == ("done", 3, 3.0)
    assert check_video_status(job, recipe, MOCK).file_bytes == path.stat().st_size
    state = load_state(path)
    damage = {"ok": False, "message": "2 frames lost", "frames_lost": 2}
    save_state(replace(state, source={**(state.source or {}), "damage": damage}), path)
    found = check_video_status(job, recipe, MOCK)
    assert (found.status, found.failure) == ("done", VideoFailure("Damaged", "2 frames lost"))


def test_a_video_whose_content_or_subtitles_changed_is_started_over(
    job: VideoJob, recipe: JobRecipe
) -> None:
    beside = Path(job.source).with_suffix(".en.srt")
    watch(job, recipe)
    for text in ("one", "two", None):
        assert find(job, recipe)[0] == "done"
        beside.write_text(
            f"1\n00:00:00,000 --> 00:00:01,000\n{text}\n"
        ) if text else beside.unlink()
        assert find(job, recipe) == ("changed", 0, 0.0)
        watch(job, recipe)
    write_video(Path(job.source), [10, 60, 110, 160])
    assert find(job, recipe) == ("changed", 0, 0.0)


def test_a_state_of_other_settings_or_video_is_refused_and_started_over_by_force(
    job: VideoJob, recipe: JobRecipe, tmp_path: Path
) -> None:
    path = watch(job, recipe)
    other = changed(recipe, config=CONFIG.with_fields({"budget": 48}))
    check_refused(job, other, "StateMismatch: .*memory.budget is 40, this run's is 48")
    named = VideoJob(str(write_video(tmp_path / "w.mp4", [40])), "v")
    check_refused(named, recipe, r"StateMismatch: .*is of v\.mp4, not of w\.mp4")
    path.write_bytes(b"mine")
    check_refused(job, recipe, "StateCorrupt: ")
