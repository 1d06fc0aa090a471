"""What is left of a fleet, before it runs and while it does."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import pytest

from protokv.fleet import InWork, Job, Outcome, Recipe, Remaining, forecast, look_fleet, run_fleet
from protokv.fleet.run import WorkerDied
from tests.fleet.conftest import InlinePool, outcomes, write_video
from tests.mock_backbone import MockBackbone


def test_a_forecast_counts_what_is_left_and_names_what_cannot_be_opened(
    films: Path, jobs: list[Job], recipe: Recipe
) -> None:
    pool = InlinePool(recipe)
    broken = Job(str(films / "broken.mp4"), "broken")
    looked = list(look_fleet([broken, *jobs], pool, recipe.place))
    assert [(one.job.key, one.status) for one in looked] == [
        ("broken", "failed"), ("a", "new"), ("b", "new"), ("sub/c", "new")
    ]  # fmt: skip
    assert [one.left_s for one in looked] == [None, 4.0, 6.0, 3.0]
    found = forecast(looked, pool)
    step_s = MockBackbone.frames_per_step / MockBackbone.default_fps
    assert (found.videos, found.unmeasured, found.left_s, found.tried) == (3, 0, 13.0, 1)
    assert found.steps == sum(math.ceil(seconds / step_s) for seconds in (4, 6, 3))
    assert found.work_s is not None
    assert found.work_s > 0
    assert found.most_bytes is not None

    outcomes(jobs[:1], InlinePool(recipe), recipe)
    rest = forecast(look_fleet(jobs, pool, recipe.place), pool)
    assert (rest.videos, rest.left_s, rest.most_bytes) == (2, 9.0, found.most_bytes // 3 * 2)
    outcomes(jobs, InlinePool(recipe), recipe)
    done = forecast(look_fleet(jobs, pool, recipe.place), pool)
    assert (done.videos, done.steps, done.tried) == (0, None, 0)


def test_every_size_and_rate_is_tried_once_and_one_that_kills_the_worker_takes_the_mean(
    tmp_path: Path, recipe: Recipe
) -> None:
    rates = {"a": 4, "b": 4, "c": 8}
    jobs = [Job(str(write_video(tmp_path / f"{key}.mp4", [1, 2], rate)), key) for key, rate in rates.items()]
    asked: list[str] = []

    def between(index: int, verb: str, args: tuple[Job, ...]) -> None:
        if verb == "estimate":
            asked.append(args[0].key)
            if args[0].key == "c":
                raise WorkerDied("it was killed")

    pool = InlinePool(recipe, between=between)
    found = forecast(look_fleet(jobs, pool, recipe.place), pool)
    assert sorted(asked) == ["a", "c"]
    assert (found.videos, found.left_s, found.tried) == (3, 6.0, 1)
    assert found.work_s is not None


def test_an_unfinished_video_counts_in_part_and_one_of_unknown_length_in_no_sum(
    jobs: list[Job], recipe: Recipe
) -> None:
    (looked,) = look_fleet(jobs[:1], InlinePool(recipe), recipe.place)
    assert looked.verdict is not None
    assert looked.footage is not None
    half = replace(looked, verdict=replace(looked.verdict, standing="unfinished", stream_time_s=3.0))
    assert half.left_s == 1.0
    unknown = replace(looked, footage=replace(looked.footage, duration_s=None))
    found = forecast([half, unknown], InlinePool(recipe))
    assert (found.videos, found.unmeasured, found.left_s) == (2, 1, 1.0)


def test_the_time_left_weighs_waiting_videos_by_their_bytes(tmp_path: Path) -> None:
    for key, size in {"a": 100, "b": 300, "c": 200}.items():
        (tmp_path / key).write_bytes(bytes(size))
    a, b, c = (Job(str(tmp_path / key), key) for key in "abc")
    remote = Job("s3://bucket/d.mp4", "d")
    remaining = Remaining.of([a, b, c, remote])
    assert remaining.left_s([]) is None
    # a has 10 s in 100 bytes: b 30 s, c 20 s, d as the mean of all.
    assert remaining.left_s([InWork(a, 4.0, 6.0)]) == pytest.approx(6 + 30 + 20 + 20)
    remaining.add(Outcome(a, "a", "watched", stream_time_s=10.0, watched_s=10.0))
    assert remaining.left_s([]) == pytest.approx(30 + 20 + 20)
    remaining.add(Outcome(b, "b", "failed"))
    assert remaining.left_s([InWork(c, 0.0, None)]) == pytest.approx(20 + 20)


def test_videos_in_work_say_how_far_they_are(jobs: list[Job], recipe: Recipe) -> None:
    pool, seen = InlinePool(recipe), list[InWork]()
    list(run_fleet(jobs, pool, recipe.place, follow=seen.extend))
    # The last report of a video is that of its last step.
    assert pool.standings[0][0][0] == pytest.approx(3.0, abs=1.0)
    assert all(one.watched_s > 0 for one in seen)
