"""A real Ray cluster on this machine: a head without workers, and two nodes with room for one actor each."""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from protokv.errors import ConfigError, ModelError
from protokv.fleet import Job, Outcome, Recipe, run_fleet
from protokv.state import api as storage
from tests.fleet.conftest import FATAL_RED, ends, written
from tests.fleet.recipes import HoldingRecipe, KillingRecipe, MissingRecipe, remade

ray = pytest.importorskip("ray")

from ray.cluster_utils import Cluster  # noqa: E402

from protokv.fleet.cluster import RayPool  # noqa: E402

pytestmark = [
    pytest.mark.slow,
    # Ray closes sockets and files only when the process ends.
    pytest.mark.filterwarnings("ignore::ResourceWarning", "ignore::pytest.PytestUnraisableExceptionWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning"),
]

STORE = 80 << 20


@pytest.fixture
def cluster(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    monkeypatch.setenv("RAY_USAGE_STATS_ENABLED", "0")
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[2]))
    # Notice within two seconds that a node is gone.
    health = {"health_check_initial_delay_ms": 0, "health_check_period_ms": 500, "health_check_failure_threshold": 3}
    head = {"num_cpus": 0, "object_store_memory": STORE, "include_dashboard": False, "_system_config": health}
    cluster = Cluster(initialize_head=True, head_node_args=head)
    cluster.by_id = {}
    for _ in range(2):
        node = cluster.add_node(num_cpus=1, object_store_memory=STORE)
        cluster.by_id[node.node_id] = node
    yield cluster
    cluster.shutdown()


def run(jobs: list[Job], recipe: Recipe, cluster: Any, **options: Any) -> Iterator[Outcome]:
    with RayPool(recipe, cluster.address, 2) as pool:
        yield from run_fleet(jobs, pool, recipe.place, **options)


def test_a_node_that_is_taken_away_costs_its_video_what_was_not_committed(
    cluster: Any, jobs: list[Job], recipe: Recipe, singly: dict[str, bytes], tmp_path: Path
) -> None:
    os.mkfifo(tmp_path / "says")
    holding = remade(recipe, HoldingRecipe, at=FATAL_RED, says=tmp_path / "says", once=tmp_path / "once")

    def take_away() -> None:
        node, _ = (tmp_path / "says").read_text().split()
        cluster.remove_node(cluster.by_id[node], allow_graceful=False)

    taker = threading.Thread(target=take_away)
    taker.start()
    found = {one.job.key: one for one in run(jobs, holding, cluster)}
    taker.join()
    assert ends(found) == dict.fromkeys(singly, ("watched", 1))
    # The video went on from its last commit, after its third step.
    assert (found["b"].standing, found["b"].watched_s) == ("unfinished", 3.0)
    assert written(recipe) == singly


def test_actors_die_stop_and_fail_as_processes_of_one_machine_do(
    cluster: Any, jobs: list[Job], recipe: Recipe, singly: dict[str, bytes], tmp_path: Path
) -> None:
    (tmp_path / "lives").write_bytes(bytes(1))
    killing = remade(recipe, KillingRecipe, at=FATAL_RED, lives=tmp_path / "lives")
    found = {one.job.key: one for one in run(jobs, killing, cluster)}
    assert ends(found) == {"a": ("watched", 1), "b": ("watched", 2), "sub/c": ("watched", 1)}
    assert written(recipe) == singly

    missing = remade(recipe, MissingRecipe, place=str(tmp_path / "none"))
    with pytest.raises(ModelError, match="there is no model"):
        list(run(jobs, missing, cluster))

    os.mkfifo(tmp_path / "says")
    place = str(tmp_path / "held")
    fatal = {"at": FATAL_RED, "says": tmp_path / "says", "once": tmp_path / "once"}
    holding = remade(recipe, HoldingRecipe, place=place, **fatal)
    with RayPool(holding, cluster.address, 1) as pool:

        def stop_at_the_held_step() -> bool:
            (tmp_path / "says").read_text()
            pool.stop()
            # The actor knows before the step goes on.
            ray.get(pool._slots[0]._actor.stop.remote())
            (tmp_path / "says").write_text("go on")
            return True

        (stopped,) = run_fleet(jobs[1:2], pool, place, should_stop=stop_at_the_held_step)
    assert (stopped.job.key, stopped.status, stopped.steps) == ("b", "stopped", 4)
    assert storage.read_header(stopped.state).clock.steps == 4


def test_the_command_line_runs_a_fleet_in_the_cluster(
    cluster: Any, jobs: list[Job], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from typer.testing import CliRunner

    from protokv_cli.main import app

    monkeypatch.chdir(tmp_path)
    command = ["ingest", *(job.source for job in jobs), "-o", "states", "--ray", cluster.address, "--budget", "24"]
    for status in ("watched", "done"):
        result = CliRunner().invoke(app, [*command, "--model", "protokv/mini", "--json"])
        assert result.exit_code == 0, result.stderr
        rows = [json.loads(line) for line in result.stdout.splitlines()]
        assert [row["status"] for row in rows[:-1]] == [status] * 3


def test_a_missing_cluster_is_one_clear_error(recipe: Recipe) -> None:
    with pytest.raises(ConfigError, match=r"there is no Ray cluster at 127\.0\.0\.1:1"):
        RayPool(recipe, "127.0.0.1:1")
