"""A small video, a tiny model and two ways to call the program: in this process, and as one of its
own.
"""

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer import testing

from protokv.texts import JsonObject
from protokv_cli.main import app
from tests.mock_backbone import MockBackbone
from tests.video.conftest import encode

Watch = Callable[..., Path]

# Typer builds all commands for every call; one build serves all tests of a process.
testing._get_command = cache(testing._get_command)  # type: ignore[attr-defined]


def write_video(path: Path, seconds: int, *, seed: int = 0, rate: int = 8) -> Path:
    """Coloured noise blocks that change every second, so that every step is another one."""
    blocks = [
        np.random.default_rng([seed, n]).integers(0, 256, (4, 6, 3), dtype=np.uint8)
        for n in range(seconds)
    ]
    encode(
        path,
        (96, 64),
        (one.repeat(16, 0).repeat(16, 1) for one in blocks for _ in range(rate)),
        rate,
    )
    return path


@pytest.fixture(scope="session")
def video(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_video(tmp_path_factory.mktemp("video") / "clip.mp4", 12)


@pytest.fixture(scope="session")
def watched(video: Path, tiny_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Watch:
    """The state of the video at a budget of 24, by further options of `ingest`; made once, and to
    be copied.
    """

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

    def rows(self) -> list[JsonObject]:
        return [json.loads(line) for line in self.out.splitlines()]


# The tests themselves may run under nohup, which makes children ignore SIGHUP.
RUN = (
    "import signal; signal.signal(signal.SIGHUP, signal.SIG_DFL); from protokv_cli.main import "
    "run; run()"
)


class Program:
    """`protokv` called in a folder of its own, with the tiny model, away from the user's
    settings.
    """

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

    def __call__(self, *arguments: object, stdin: Any = "", **options: Any) -> Result:
        """Run it in this process."""
        options = {"env": self.environment, **options}
        result = testing.CliRunner().invoke(
            app, [str(a) for a in arguments], input=stdin, **options
        )
        return Result(result.exit_code, result.stdout, result.stderr)

    @contextmanager
    def start(
        self, *arguments: object, new_session: bool = False
    ) -> Iterator[subprocess.Popen[str]]:
        """Start it as a process, for signals. Its pipes hold one page, so it waits for a test that
        reads its lines.
        """
        process = subprocess.Popen(
            [sys.executable, "-c", RUN, *map(str, arguments)],
            cwd=self.folder,
            env=self.environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            pipesize=4096,
            start_new_session=new_session,
        )
        with process:
            try:
                yield process
            finally:
                process.kill()


def wait_for_commit(process: subprocess.Popen[str]) -> None:
    """Read the lines of a process until it has committed."""
    assert any('"type": "commit"' in line for line in process.stdout or ())


def read_to_the_end(process: subprocess.Popen[str]) -> tuple[str, str]:
    """Return the rest of stdout and stderr once the process has ended; its stderr fits into a
    page.
    """
    assert process.stdout
    assert process.stderr
    out = process.stdout.read()
    err = process.stderr.read()
    process.wait(timeout=120)
    return out, err


@pytest.fixture
def protokv(tmp_path: Path, tiny_folder: Path, monkeypatch: pytest.MonkeyPatch) -> Program:
    monkeypatch.chdir(tmp_path)
    return Program(tmp_path, tiny_folder)


@pytest.fixture
def embedded(protokv: Program) -> Program:
    """The program with the embedded model, which loads in a moment."""
    protokv.environment["PROTOKV_MODEL"] = "protokv/mini"
    return protokv


@pytest.fixture
def mocked(monkeypatch: pytest.MonkeyPatch) -> None:
    """Load the mock in place of every model in this process."""
    for home in ("protokv.ingestion.options", "protokv.stream.opening", "protokv.backbones"):
        monkeypatch.setattr(f"{home}.load_backbone", MockBackbone)
