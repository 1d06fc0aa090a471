"""Videos of one colour a second, a recipe with the mock, and a pool whose workers are called in
this process.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from protokv.fleet import JobRecipe, VideoJob, VideoOutcome, list_video_jobs, run_fleet
from protokv.fleet.worker import FleetWorker
from protokv.ingestion import Every, IngestOptions, ingest_events
from protokv.memories import DurableConfig
from tests.fleet.recipes import MockRecipe
from tests.mock_backbone import MockBackbone
from tests.state.conftest import store
from tests.video.conftest import encode

__all__ = ["store"]

CONFIG = DurableConfig(budget=40)
StateBytes = dict[str, bytes]

# `KillingRecipe` kills its process at the step of this redness.
FATAL_RED = 250


def write_video(path: Path, reds: Sequence[int], rate: int = 4) -> Path:
    """Write a video with one second of each redness."""
    images = (np.full((32, 48, 3), (red, 0, 0), np.uint8) for red in np.repeat(reds, rate))
    encode(path, (48, 32), images, rate, "mpeg4", b="4000000")
    return path


@pytest.fixture(scope="session")
def films(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three good videos, one of them in a folder of its own, and files that are no videos."""
    folder = tmp_path_factory.mktemp("films")
    write_video(folder / "a.mp4", [10, 60, 110, 160])
    write_video(folder / "b.mkv", [20, 70, 120, FATAL_RED, 170, 30])
    (folder / "sub").mkdir()
    write_video(folder / "sub" / "c.mp4", [30, 80, 130])
    for name in ("broken.mp4", "notes.txt", ".hidden.mp4"):
        (folder / name).write_bytes(b"no video")
    return folder


@pytest.fixture(scope="module")
def server(films: Path) -> Iterator[Any]:
    """An object store with these files."""
    from tests.state.s3 import S3Server

    with S3Server() as made:
        for path in films.rglob("*.*"):
            made.put(f"videos/{path.relative_to(films).as_posix()}", path.read_bytes())
        yield made


@pytest.fixture(scope="session")
def jobs(films: Path) -> list[VideoJob]:
    return [job for job in list_video_jobs([str(films)]) if job.key != "broken"]


@pytest.fixture(scope="session")
def singly(jobs: list[VideoJob], tmp_path_factory: pytest.TempPathFactory) -> StateBytes:
    """The bytes of each state by key, written by single runs of `ingest`."""
    folder = tmp_path_factory.mktemp("singly")
    states = {}
    for job in jobs:
        path = folder / f"{Path(job.key).name}.safetensors"
        list(
            ingest_events(job.source, path, CONFIG, backbone=MockBackbone(), every=Every(n_steps=1))
        )
        states[job.key] = path.read_bytes()
    return states


@pytest.fixture
def recipe(tmp_path: Path) -> MockRecipe:
    options = IngestOptions(config=CONFIG, every=Every(n_steps=1))
    return MockRecipe(place=str(tmp_path / "states"), options=options, log=tmp_path / "loads")


class InlinePool:
    """Workers of this process; `between` is called before each of their calls and may raise."""

    def __init__(
        self,
        recipe: JobRecipe,
        size: int = 1,
        between: Callable[[str, VideoJob | None], None] = lambda verb, job: None,
    ) -> None:
        self.size = size
        self.between = between
        self.stopped = False
        self._workers = [FleetWorker(recipe, "cpu", lambda: self.stopped) for _ in range(size)]

    def call(self, index: int, verb: str, *args: Any) -> Any:
        self.between(verb, getattr(args[0], "job", args[0]) if args else None)
        return getattr(self._workers[index], verb)(*args)

    def stop(self) -> None:
        self.stopped = True


def outcomes(
    jobs: Sequence[VideoJob], pool: Any, recipe: JobRecipe, **options: Any
) -> dict[str, VideoOutcome]:
    return {one.job.key: one for one in run_fleet(jobs, pool, recipe.place, **options)}


def ends(found: Mapping[str, VideoOutcome]) -> dict[str, tuple[str, int]]:
    """Return status and attempts of each video by key."""
    return {key: (one.status, one.attempts) for key, one in found.items()}


def written(recipe: JobRecipe) -> StateBytes:
    """Return the bytes of each state of a fleet by key."""
    states = Path(recipe.place).rglob("*.safetensors")
    return {
        path.relative_to(recipe.place).with_suffix("").as_posix(): path.read_bytes()
        for path in states
    }
