"""Every video of a fleet ends in one outcome, even if its worker dies."""

import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from protokv.errors import ModelError
from protokv.fleet import LocalWorkerPool, VideoJob, locate_fleet_state, preview_fleet
from protokv.fleet.run import VIDEO_ATTEMPTS, WorkerDied
from protokv.ingestion import ingest_events
from protokv.state.commit import lock
from tests.fleet.conftest import FATAL_RED, InlinePool, StateBytes, ends, outcomes, written
from tests.fleet.recipes import KillingRecipe, MissingRecipe, MockRecipe


def test_only_what_is_missing_is_done_in_any_order_and_then_nothing_is_loaded(
    jobs: list[VideoJob], recipe: MockRecipe, singly: StateBytes, tmp_path: Path
) -> None:
    outcomes(jobs[:1], InlinePool(recipe), recipe)
    assert [one.status for one in preview_fleet(jobs, recipe)] == ["done", "new", "new"]
    assert written(recipe).keys() == {"a"}
    first = outcomes(jobs[::-1], InlinePool(recipe, 2), recipe)
    assert [first[key].status for key in singly] == ["done", "watched", "watched"]
    assert written(recipe) == singly
    # Each worker loads its model once for all of its videos.
    assert len((tmp_path / "loads").read_text().splitlines()) <= 3
    (tmp_path / "loads").unlink()
    again = outcomes(jobs, InlinePool(recipe, 2), recipe)
    assert {one.status for one in again.values()} == {"done"}
    assert all(
        (again[key].steps, again[key].file_bytes) == (one.steps, one.file_bytes)
        for key, one in first.items()
    )
    assert not (tmp_path / "loads").exists()


def test_what_fails_is_an_outcome_with_its_reason_and_stops_nothing(
    films: Path,
    jobs: list[VideoJob],
    recipe: MockRecipe,
    singly: StateBytes,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def slip(source: str, *arguments: Any, **options: Any) -> Any:
        if source.endswith("b.mkv"):
            raise ZeroDivisionError("a slip")
        return ingest_events(source, *arguments, **options)

    monkeypatch.setattr("protokv.fleet.worker.ingest_events", slip)
    bad = [VideoJob(str(films / f"{name}.mp4"), name) for name in ("broken", "gone")]
    Path(recipe.place).mkdir()
    with lock(locate_fleet_state(recipe.place, "a")):  # as while another run watches it
        found = outcomes([*bad, *jobs], InlinePool(recipe), recipe)
    assert {key: one.failure and one.failure.kind for key, one in found.items()} == {
        "broken": "SourceUnreadable",
        "gone": "SourceNotFound",
        "a": "StateLocked",
        "b": "ZeroDivisionError",
        "sub/c": None,
    }
    assert written(recipe) == {"sub/c": singly["sub/c"]}


def dying(times: int, verb: str) -> Any:
    left = [times]

    def between(called: str, job: VideoJob | None) -> None:
        if called == verb and (job is None or job.key == "b") and left[0]:
            left[0] -= 1
            raise WorkerDied("it was killed")

    return between


@pytest.mark.parametrize("verb", ["examine", "watch"])
@pytest.mark.parametrize("times", [1, 99])
def test_a_video_whose_worker_died_is_tried_again_and_at_last_reported(
    verb: str, times: int, jobs: list[VideoJob], recipe: MockRecipe, singly: StateBytes
) -> None:
    found = outcomes(jobs, InlinePool(recipe, 2, dying(times, verb)), recipe)
    end = ("watched", 2) if times == 1 else ("failed", VIDEO_ATTEMPTS)
    assert ends(found) == {"a": ("watched", 1), "b": end, "sub/c": ("watched", 1)}
    assert times == 1 or (
        found["b"].failure is not None and found["b"].failure.kind == "WorkerDied"
    )
    assert written(recipe) == {
        key: state for key, state in singly.items() if times == 1 or key != "b"
    }


@pytest.mark.parametrize("n_workers", [1, 3])
def test_a_model_that_cannot_be_loaded_ends_the_fleet(
    n_workers: int, jobs: list[VideoJob], recipe: MockRecipe
) -> None:
    missing = MissingRecipe(place=recipe.place, options=recipe.options)
    with pytest.raises(ModelError, match="there is no model"):
        outcomes(jobs, InlinePool(missing, n_workers), missing)
    with pytest.raises(ModelError, match="a worker died while it loaded the model"):
        outcomes(jobs, InlinePool(recipe, n_workers, dying(1, "load")), recipe)


def test_a_stop_commits_the_video_in_work_and_the_next_run_continues_it(
    jobs: list[VideoJob], recipe: MockRecipe, singly: StateBytes
) -> None:
    pool = InlinePool(recipe)
    asked = list[bool]()

    def stop_in_the_second(verb: str, job: VideoJob | None) -> None:
        if verb == "watch" and job is not None and job.key == "b":
            pool.stop()
            asked.append(True)

    pool.between = stop_in_the_second
    found = outcomes(jobs, pool, recipe, should_stop=lambda: bool(asked))
    assert {key: one.status for key, one in found.items() if key != "sub/c"} == {
        "a": "watched",
        "b": "stopped",
    }
    assert written(recipe)["b"] != singly["b"]
    outcomes(jobs, InlinePool(recipe), recipe)
    assert written(recipe) == singly


def test_a_process_that_is_killed_is_replaced_and_its_video_goes_on_from_its_last_commit(
    jobs: list[VideoJob], recipe: MockRecipe, singly: StateBytes, tmp_path: Path
) -> None:
    (life := tmp_path / "life").touch()
    killing = KillingRecipe(
        place=recipe.place, options=recipe.options, at=FATAL_RED, life=life, log=recipe.log
    )
    with LocalWorkerPool(killing, 1, ["cpu"]) as pool:
        found = outcomes(jobs, pool, killing)
    assert ends(found) == {"a": ("watched", 1), "b": ("watched", 2), "sub/c": ("watched", 1)}
    # Three steps were committed before the worker died.
    assert (found["b"].standing, found["b"].watched_s) == ("unfinished", 3.0)
    assert written(recipe) == singly
    pids = [line.split()[0] for line in (tmp_path / "loads").read_text().splitlines()]
    assert len(set(pids)) == len(pids) == 2


SCRIPT = """
import sys
from protokv.fleet import LocalWorkerPool, VideoJob, run_fleet
from tests.fleet.recipes import OrphanedRecipe

if __name__ == "__main__":
    source, place = sys.argv[1:]
    with LocalWorkerPool(OrphanedRecipe(place=place), 1, ["cpu"]) as pool:
        list(run_fleet([VideoJob(source, "v")], pool, place))
"""


UNREADY = """
import multiprocessing, os, threading
from concurrent.futures import ProcessPoolExecutor
from protokv.machine import begin_pool_process

class Heavy:
    # A worker that is still at its imports when its coordinator is killed.
    def __reduce__(self):
        code = "import os, threading; os.kill(os.getppid(), 9); threading.Event().wait()"
        return exec, (code,)

if __name__ == "__main__":
    spawn = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(1, spawn, begin_pool_process, (0,)) as pool:
        pool.submit(print, Heavy()).result()
"""


@pytest.mark.parametrize("text", [SCRIPT, UNREADY], ids=["at work", "not ready"])
def test_a_worker_ends_when_its_coordinator_is_killed(
    text: str, jobs: list[VideoJob], tmp_path: Path
) -> None:
    script = tmp_path / "coordinator.py"
    script.write_text(text)
    path = os.pathsep.join([str(Path(__file__).parents[2]), *sys.path])
    command = [sys.executable, str(script), jobs[0].source, str(tmp_path)]
    # The worker shares the pipe, so that this returns when both have ended.
    found = subprocess.run(
        command, env={**os.environ, "PYTHONPATH": path}, stdout=subprocess.PIPE, timeout=50
    )
    assert found.returncode == -signal.SIGKILL
