"""A small video, a tiny model and two ways to call the program: in this process, and as one of its own."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from fractions import Fraction
from functools import cache
from pathlib import Path
from typing import Any

import av
import numpy as np
import pytest
from typer.testing import CliRunner

from protokv_cli.main import app
from tests.mock_backbone import MockBackbone
from tests.warmed import Warmed, WarmedProgram


def write_video(path: Path, seconds: int, *, seed: int = 0, rate: int = 8, frames: int | None = None) -> Path:
    """Coloured noise blocks that change every second, so that every step is another one."""
    with av.open(str(path), "w") as container:
        stream = container.add_stream("libx264", rate=rate)
        stream.width, stream.height, stream.pix_fmt = 96, 64, "yuv420p"
        stream.time_base = Fraction(1, rate)
        for i in range(frames or seconds * rate):
            rng = np.random.default_rng([seed, i // rate])
            blocks = rng.integers(0, 256, (4, 6, 3), dtype=np.uint8)
            frame = av.VideoFrame.from_ndarray(blocks.repeat(16, 0).repeat(16, 1), format="rgb24")
            container.mux(stream.encode(frame))
        container.mux(stream.encode())
    return path


@pytest.fixture(scope="session")
def video(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_video(tmp_path_factory.mktemp("video") / "clip.mp4", 12)


@pytest.fixture(scope="session")
def watched(video: Path, tiny_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """The state of the video at a budget of 24, by further options of `ingest`; made once, and to be copied."""

    @cache
    def watch(*options: str) -> Path:
        program = Program(tmp_path_factory.mktemp("watched"), tiny_folder)
        path = program.folder / f"{video.stem}.safetensors"
        result = program("ingest", video, "--budget", "24", "--json", "-o", path, *options)
        assert result.code == 0, result.err
        return path

    return watch


@dataclass(frozen=True)
class Result:
    code: int
    out: str
    err: str

    def rows(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in self.out.splitlines()]


class Program:
    """`protokv` called in a folder of its own, with the tiny model, away from the user's settings."""

    def __init__(self, folder: Path, model: Path) -> None:
        self.folder = folder
        self.environment = {
            **{k: v for k, v in os.environ.items() if not k.startswith("PROTOKV_")},
            "PROTOKV_MODEL": str(model),
            "HF_HUB_OFFLINE": "1",
            "NO_COLOR": "1",
            # Sums run in another order on more threads, and this process has one.
            "OMP_NUM_THREADS": "1",
        }

    def __call__(self, *arguments: object, stdin: str = "", **options: Any) -> Result:
        result = CliRunner().invoke(app, [str(a) for a in arguments], input=stdin, env=self.environment, **options)
        return Result(result.exit_code, result.stdout, result.stderr)


def wait_for_commits(process: WarmedProgram, n_commits: int) -> None:
    """Read what a process says until it has committed this often."""
    for line in process.stdout:
        n_commits -= '"type": "commit"' in line
        if not n_commits:
            return
    pytest.fail(f"it ended before that: {process.stderr.read()}")


@pytest.fixture(scope="session")
def warmed() -> Iterator[Warmed]:
    with Warmed() as nursery:
        yield nursery


@pytest.fixture
def protokv(tmp_path: Path, tiny_folder: Path, monkeypatch: pytest.MonkeyPatch) -> Program:
    monkeypatch.chdir(tmp_path)
    return Program(tmp_path, tiny_folder)


@pytest.fixture
def start(protokv: Program, warmed: Warmed) -> Callable[..., WarmedProgram]:
    """The program as a process, for signals and pipes; else as `protokv`."""

    def start(*arguments: object, new_session: bool = False) -> WarmedProgram:
        return warmed.start(list(map(str, arguments)), protokv.folder, protokv.environment, new_session=new_session)

    return start


@pytest.fixture
def mocked(monkeypatch: pytest.MonkeyPatch) -> None:
    """No model is loaded in this process: whatever is named is the mock."""
    for home in ("protokv.ingestion.run", "protokv.storage.checkpoint", "protokv.backbones"):
        monkeypatch.setattr(f"{home}.load_backbone", MockBackbone)
