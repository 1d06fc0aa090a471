"""Workers in processes of their own, and the death of a worker or of the coordinator."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

from protokv.fleet import Job, LocalPool, Recipe
from protokv.state.reader import Reader
from tests.fleet.conftest import FATAL_RED, ends, outcomes, written
from tests.fleet.recipes import KillingRecipe, remade


def test_a_killed_worker_is_replaced_and_its_video_tried_once_more(
    jobs: list[Job], recipe: Recipe, singly: dict[str, bytes], tmp_path: Path
) -> None:
    (tmp_path / "lives").write_bytes(bytes(1))
    log = tmp_path / "loads"
    killing = remade(recipe, KillingRecipe, at=FATAL_RED, lives=tmp_path / "lives", log=log)
    with LocalPool(killing, 1, ["cpu"]) as pool:
        found = outcomes(jobs, pool, killing)
    assert ends(found) == {"a": ("watched", 1), "b": ("watched", 2), "sub/c": ("watched", 1)}
    # Three steps were committed before the worker died, and the second attempt continued there.
    assert (found["b"].standing, found["b"].watched_s) == ("unfinished", 3.0)
    assert written(recipe) == singly
    pids = [line.split()[0] for line in log.read_text().splitlines()]
    assert len(set(pids)) == len(pids) == 2


SCRIPT = """
import sys
from pathlib import Path
from protokv.fleet import LocalPool, Job, run_fleet
from protokv.ingestion import Every, IngestOptions
from tests.fleet.conftest import CONFIG
from tests.fleet.recipes import WaitingRecipe

if __name__ == "__main__":
    source, place, gate = sys.argv[1:]
    recipe = WaitingRecipe(place=place, gate=Path(gate), options=IngestOptions(config=CONFIG, every=Every(n_steps=1)))
    with LocalPool(recipe, 1, ["cpu"]) as pool:
        list(run_fleet([Job(source, "v")], pool, place))
"""


def test_a_worker_ends_when_its_coordinator_is_killed(jobs: list[Job], tmp_path: Path) -> None:
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
        # Two steps are watched and committed, and the third waits at the gate.
        step.write(b"12")
        assert process.stdout.read(2) == b"..", "the worker writes a dot after every gate"
        process.send_signal(signal.SIGKILL)
        process.wait()
        # The worker shares this pipe, so the end of the pipe is its end.
        assert process.stdout.read() == b""
    header = Reader.open(tmp_path / "v.safetensors").header
    assert (header.clock.steps, header.complete) in [(1, False), (2, False)]
