"""A real Ray cluster on this machine, with room for two actors."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from protokv.errors import ConfigError, ModelError
from protokv.fleet import VideoJob
from tests.fleet.conftest import check_killed_worker, outcomes
from tests.fleet.recipes import MissingRecipe, MockRecipe

pytest.importorskip("ray")

from ray.cluster_utils import Cluster

from protokv.fleet.cluster import RayWorkerPool

pytestmark = [
    pytest.mark.slow,
    # Ray closes sockets and files only when the process ends.
    pytest.mark.filterwarnings(
        "ignore::ResourceWarning", "ignore::pytest.PytestUnraisableExceptionWarning"
    ),
    pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning"),
]


@pytest.fixture
def address(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    monkeypatch.setenv("RAY_USAGE_STATS_ENABLED", "0")
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[2]))
    head = {"num_cpus": 2, "object_store_memory": 80 << 20, "include_dashboard": False}
    cluster = Cluster(initialize_head=True, head_node_args=head)
    yield cluster.address
    cluster.shutdown()


def test_an_actor_that_is_killed_is_replaced_and_a_missing_model_ends_the_fleet(
    address: str, jobs: list[VideoJob], recipe: MockRecipe, singly: dict[str, bytes], tmp_path: Path
) -> None:
    check_killed_worker(lambda killing: RayWorkerPool(killing, address, 2), jobs, recipe, singly)
    missing = MissingRecipe(place=str(tmp_path / "none"), options=recipe.options)
    with (
        RayWorkerPool(missing, address, 2) as pool,
        pytest.raises(ModelError, match="there is no model"),
    ):
        outcomes(jobs, pool, missing)


def test_the_command_line_runs_a_fleet_in_the_cluster(
    address: str, jobs: list[VideoJob], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from typer.testing import CliRunner

    from protokv_cli.main import app

    monkeypatch.chdir(tmp_path)
    command = [
        "ingest",
        *(job.source for job in jobs),
        "-o",
        "states",
        "--ray",
        address,
        "--budget",
        "24",
    ]
    result = CliRunner().invoke(app, [*command, "--model", "protokv/mini", "--json"])
    assert result.exit_code == 0, result.stderr
    rows = [json.loads(line) for line in result.stdout.splitlines()]
    assert [row["status"] for row in rows if row["type"] == "video"] == ["watched"] * 3


def test_a_missing_cluster_is_one_clear_error(recipe: MockRecipe) -> None:
    with pytest.raises(ConfigError, match=r"there is no Ray cluster at 127\.0\.0\.1:1"):
        RayWorkerPool(recipe, "127.0.0.1:1")
