"""The coordinator of a fleet: every video ends in one outcome, even if its worker dies."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest

from protokv.errors import ModelError
from protokv.fleet import Job, Recipe, locate_state, preview
from protokv.fleet.run import ATTEMPTS, WorkerDied
from protokv.ingestion import ingest
from protokv.state.commit import lock
from tests.fleet.conftest import InlinePool, ends, outcomes, written
from tests.fleet.recipes import MissingRecipe, remade


@pytest.mark.parametrize("workers", [1, 3])
def test_order_and_number_of_workers_change_no_byte_of_any_state(
    workers: int, jobs: list[Job], recipe: Recipe, singly: dict[str, bytes]
) -> None:
    shuffled = random.Random(workers).sample(jobs, len(jobs))
    found = outcomes(shuffled, InlinePool(recipe, workers), recipe)
    assert ends(found) == dict.fromkeys(singly, ("watched", 1))
    assert written(recipe) == singly


def test_only_what_is_missing_is_done_and_then_nothing_is_loaded(
    jobs: list[Job], recipe: Recipe, singly: dict[str, bytes], tmp_path: Path
) -> None:
    outcomes(jobs[:1], InlinePool(recipe), recipe)
    assert [(one.job.key, one.status) for one in preview(jobs, recipe)] == [
        ("a", "done"),
        ("b", "new"),
        ("sub/c", "new"),
    ]
    assert written(recipe).keys() == {"a"}
    first = outcomes(jobs, InlinePool(recipe, 2), recipe)
    assert [first[key].status for key in singly] == ["done", "watched", "watched"]
    assert written(recipe) == singly
    before = {path: path.stat().st_mtime_ns for path in Path(recipe.place).rglob("*.safetensors")}
    # Each worker loads its model once for all of its videos.
    assert len((tmp_path / "loads").read_text().splitlines()) <= 3
    (tmp_path / "loads").unlink()
    again = outcomes(jobs, InlinePool(recipe, 2), recipe)
    assert {one.status for one in again.values()} == {"done"}
    assert {key: (one.steps, one.file_bytes) for key, one in again.items()} == {
        key: (one.steps, one.file_bytes) for key, one in first.items()
    }
    assert {path: path.stat().st_mtime_ns for path in before} == before
    assert not (tmp_path / "loads").exists()


def test_what_fails_is_an_outcome_with_its_reason_and_stops_nothing(
    films: Path, jobs: list[Job], recipe: Recipe, singly: dict[str, bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    def slip(source: str, *arguments: Any, **options: Any) -> Any:
        if source.endswith("b.mkv"):
            raise ZeroDivisionError("a slip")
        return ingest(source, *arguments, **options)

    monkeypatch.setattr("protokv.fleet.worker.ingest", slip)
    bad = [Job(str(films / "broken.mp4"), "broken"), Job(str(films / "gone.mp4"), "gone")]
    Path(recipe.place).mkdir()
    with lock(locate_state(recipe.place, "a")):  # as while another run watches it
        found = outcomes([*bad, *jobs], InlinePool(recipe), recipe)
    assert {key: one.failure and one.failure.kind for key, one in found.items()} == {
        "broken": "SourceUnreadable",
        "gone": "SourceNotFound",
        "a": "StateLocked",
        "b": "ZeroDivisionError",
        "sub/c": None,
    }
    assert str(found["b"].failure and found["b"].failure.message) == "ZeroDivisionError: a slip"
    assert written(recipe) == {"sub/c": singly["sub/c"]}


def dying(times: int, verb: str) -> Any:
    left = [times]

    def between(index: int, called: str, args: tuple[Any, ...]) -> None:
        job = getattr(args[0], "job", args[0]) if args else None
        if called == verb and (job is None or job.key == "b") and left[0]:
            left[0] -= 1
            raise WorkerDied("it was killed")

    return between


@pytest.mark.parametrize("verb", ["examine", "watch"])
def test_a_video_whose_worker_died_is_tried_once_more(
    verb: str, jobs: list[Job], recipe: Recipe, singly: dict[str, bytes]
) -> None:
    found = outcomes(jobs, InlinePool(recipe, 2, dying(1, verb)), recipe)
    assert ends(found) == {"a": ("watched", 1), "b": ("watched", 2), "sub/c": ("watched", 1)}
    assert written(recipe) == singly


def test_a_video_that_kills_every_worker_is_reported_and_the_others_are_done(jobs: list[Job], recipe: Recipe) -> None:
    found = outcomes(jobs, InlinePool(recipe, 1, dying(99, "watch")), recipe)
    assert (found["b"].status, found["b"].attempts) == ("failed", ATTEMPTS)
    assert found["b"].failure is not None
    assert found["b"].failure.kind == "WorkerDied"
    assert written(recipe).keys() == {"a", "sub/c"}


@pytest.mark.parametrize("n_workers", [1, 3])
def test_a_model_that_cannot_be_loaded_ends_the_fleet(n_workers: int, jobs: list[Job], recipe: Recipe) -> None:
    pool = InlinePool(remade(recipe, MissingRecipe), n_workers)
    with pytest.raises(ModelError, match="there is no model"):
        outcomes(jobs, pool, recipe)
    pool = InlinePool(recipe, n_workers, dying(1, "load"))
    with pytest.raises(ModelError, match="a worker died while it loaded the model"):
        outcomes(jobs, pool, recipe)


def test_after_the_most_failures_no_other_video_is_begun(films: Path, jobs: list[Job], recipe: Recipe) -> None:
    bad = [Job(str(films / f"gone{i}.mp4"), f"gone{i}") for i in range(50)]
    found = outcomes([*bad, *jobs], InlinePool(recipe), recipe, max_failures=2)
    assert len(found) == 2
    assert not written(recipe)


def test_a_stop_commits_the_video_in_work_and_the_next_run_continues_it(
    jobs: list[Job], recipe: Recipe, singly: dict[str, bytes]
) -> None:
    pool = InlinePool(recipe)

    def stop_in_the_second(index: int, verb: str, args: tuple[Any, ...]) -> None:
        if verb == "watch" and args[0].job.key == "b":
            pool.stop()
            asked.append(True)

    asked: list[bool] = []
    pool.between = stop_in_the_second
    found = outcomes(jobs, pool, recipe, should_stop=lambda: bool(asked))
    assert {key: one.status for key, one in found.items() if key != "sub/c"} == {"a": "watched", "b": "stopped"}
    assert written(recipe)["b"] != singly["b"]
    outcomes(jobs, InlinePool(recipe), recipe)
    assert written(recipe) == singly
