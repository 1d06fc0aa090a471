"""Videos of one colour a second, a recipe with the mock, and a pool whose workers are called in this process."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from fractions import Fraction
from pathlib import Path
from typing import Any

import av
import numpy as np
import pytest

from protokv.fleet import Job, Outcome, Recipe, plan, run_fleet
from protokv.fleet.worker import Worker
from protokv.ingestion import Every, IngestOptions, ingest
from protokv.memories import DurableConfig
from tests.fleet.recipes import MockRecipe
from tests.mock_backbone import MockBackbone
from tests.state.conftest import store

__all__ = ["store"]

CONFIG = DurableConfig(budget=40)


def write_video(path: Path, reds: Sequence[int], rate: int = 4) -> Path:
    """Write a video with one second of each redness."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with av.open(str(path), "w") as container:
        stream = container.add_stream("mpeg4", rate=rate, bit_rate=4_000_000)
        stream.width, stream.height, stream.pix_fmt = 48, 32, "yuv420p"
        stream.time_base = Fraction(1, rate)
        for red in reds:
            image = np.zeros((32, 48, 3), np.uint8)
            image[..., 0] = red
            for _ in range(rate):
                container.mux(stream.encode(av.VideoFrame.from_ndarray(image, format="rgb24")))
        container.mux(stream.encode())
    return path


# Recipes with accidents have them at a step of this redness.
FATAL_RED = 250


@pytest.fixture(scope="session")
def films(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three good videos, one of them in a folder of its own, and files that are no videos."""
    folder = tmp_path_factory.mktemp("films")
    write_video(folder / "a.mp4", [10, 60, 110, 160])
    write_video(folder / "b.mkv", [20, 70, 120, FATAL_RED, 170, 30])
    write_video(folder / "sub" / "c.mp4", [30, 80, 130])
    (folder / "broken.mp4").write_bytes(b"no video")
    (folder / "notes.txt").write_text("not ours")
    (folder / ".hidden.mp4").write_bytes(b"not ours")
    return folder


@pytest.fixture(scope="session")
def jobs(films: Path) -> list[Job]:
    return [job for job in plan([str(films)]) if job.key != "broken"]


@pytest.fixture(scope="session")
def singly(jobs: list[Job], tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    """The bytes of each state by key, written by single runs of `ingest`."""
    folder, states = tmp_path_factory.mktemp("singly"), {}
    for job in jobs:
        path = folder / f"{Path(job.key).name}.safetensors"
        list(ingest(job.source, path, CONFIG, backbone=MockBackbone(), every=Every(n_steps=1)))
        states[job.key] = path.read_bytes()
    return states


@pytest.fixture
def recipe(tmp_path: Path) -> Recipe:
    options = IngestOptions(config=CONFIG, every=Every(n_steps=1))
    return MockRecipe(place=str(tmp_path / "states"), options=options, log=tmp_path / "loads")


class InlinePool:
    """Workers of this process; `between` is called before each of their calls and may raise."""

    def __init__(
        self, recipe: Recipe, size: int = 1, between: Callable[[int, str, tuple[Any, ...]], None] | None = None
    ) -> None:
        self.size, self.between, self.watched_s = size, between, 0.0
        self._workers = [Worker(recipe, "cpu", add_watched=self._add_watched) for _ in range(size)]

    def _add_watched(self, seconds: float) -> None:
        self.watched_s += seconds

    def call(self, index: int, verb: str, *args: Any) -> Any:
        if self.between is not None:
            self.between(index, verb, args)
        return getattr(self._workers[index], verb)(*args)

    def stop(self) -> None:
        for worker in self._workers:
            worker.stop()


def outcomes(jobs: Sequence[Job], pool: Any, recipe: Recipe, **options: Any) -> dict[str, Outcome]:
    return {one.job.key: one for one in run_fleet(jobs, pool, recipe.place, **options)}


def ends(found: Mapping[str, Outcome]) -> dict[str, tuple[str, int]]:
    """Return status and attempts of each video by key."""
    return {key: (one.status, one.attempts) for key, one in found.items()}


def written(recipe: Recipe) -> dict[str, bytes]:
    """Return the bytes of each state of a fleet by key."""
    place = Path(recipe.place)
    states = place.rglob("*.safetensors")
    return {path.relative_to(place).with_suffix("").as_posix(): path.read_bytes() for path in states}
