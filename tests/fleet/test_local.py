"""Workers in processes of their own, and what happens when one is killed."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from protokv import storage
from protokv.errors import ModelError
from protokv.fleet import Job, LocalPool, Recipe
from tests.fleet.conftest import CONFIG, FATAL_RED, outcomes, written
from tests.fleet.models import HeavyModel, KillingModel


@pytest.mark.parametrize(("lives", "status", "attempts"), [(1, "watched", 2), (2, "failed", 2)])
def test_a_killed_worker_is_replaced_and_its_video_tried_once_more(
    lives: int, status: str, attempts: int, jobs: list[Job], recipe: Recipe, singly: dict[str, bytes], tmp_path: Path
) -> None:
    (tmp_path / "lives").write_bytes(bytes(lives))
    killing = replace(recipe, model=KillingModel(at=FATAL_RED, lives=tmp_path / "lives", log=tmp_path / "loads"))
    with LocalPool(killing, 1, ["cpu"]) as pool:
        found = outcomes(jobs, pool, killing)
    assert {key: (one.status, one.attempts) for key, one in found.items()} == {
        "a": ("watched", 1),
        "b": (status, attempts),
        "sub/c": ("watched", 1),
    }
    states = written(recipe)
    unlucky = states.pop("b")
    if status == "watched":
        assert unlucky == singly["b"]
    else:
        # Three steps were committed before it, and the second attempt began there.
        assert storage.read_header(found["b"].state).clock.steps == 3
    assert states.items() <= singly.items()
    pids = [line.split()[0] for line in (tmp_path / "loads").read_text().splitlines()]
    assert len(set(pids)) == len(pids) == 1 + lives


def test_a_worker_that_is_killed_by_its_model_ends_the_fleet(jobs: list[Job], recipe: Recipe) -> None:
    heavy = replace(recipe, model=HeavyModel())
    with LocalPool(heavy, 1, ["cpu"]) as pool, pytest.raises(ModelError, match="died while it loaded the model"):
        outcomes(jobs, pool, heavy)


SCRIPT = """
import sys
from pathlib import Path
from protokv.fleet import LocalPool, Job, Recipe, run_fleet
from protokv.ingestion import NEVER
from tests.fleet.conftest import CONFIG
from tests.fleet.models import MockModel
from tests.fleet.waiting import WaitingModel

if __name__ == "__main__":
    source, place, gate = sys.argv[1:]
    recipe = Recipe(place=place, model=WaitingModel(gate=Path(gate)), config=CONFIG, every=NEVER)
    with LocalPool(recipe, 1, ["cpu"]) as pool:
        list(run_fleet([Job(source, "v")], pool, place))
"""


def test_a_worker_whose_coordinator_is_killed_commits_and_ends(jobs: list[Job], tmp_path: Path) -> None:
    script, gate = tmp_path / "coordinator.py", tmp_path / "gate"
    script.write_text(SCRIPT)
    os.mkfifo(gate)
    process = subprocess.Popen(
        [sys.executable, str(script), jobs[1].source, str(tmp_path), str(gate)],
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(Path(__file__).parents[2]), *sys.path])},
        stdout=subprocess.PIPE,
    )
    assert process.stdout is not None
    with process.stdout, gate.open("wb", buffering=0) as step:
        # Two steps are watched, and the third waits at the gate.
        step.write(b"12")
        assert process.stdout.read(2) == b"..", "the worker says a dot behind every gate"
        process.send_signal(signal.SIGKILL)
        process.wait()
        step.write(b"3")
        # The worker has this pipe, too: its end is that of the worker.
        assert set(process.stdout.read()) <= set(b".")
    header = storage.read_header(tmp_path / "v.safetensors")
    assert 2 <= header.clock.steps <= 3
    assert not header.complete
    assert header.memory == CONFIG.to_dict()
