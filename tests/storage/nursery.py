"""Processes that ingest prepared frames, forked from one that has loaded everything: they start in milliseconds.

`python -m tests.storage.nursery MODEL` reads one job a line, forks, and says on stdout what the child does: `pid N`,
`commit STEPS`, `error KIND: MESSAGE`, `done`, and, when it is gone, `exit CODE`. `Nursery` is the side of the tests.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Self

import numpy as np

from protokv.backbones.base import Backbone
from protokv.config import DurableConfig
from protokv.video import Damage, Frame, SourceInfo
from protokv.video.source import from_shown_at

CONFIG = DurableConfig(budget=40)
RATE = 2.0


class Prepared:
    """A source of `n_frames` random frames, two a second; its seed is what tells it from others."""

    damage = Damage()

    def __init__(self, seed: int, n_frames: int) -> None:
        self._seed, self._n = seed, n_frames
        self.info = SourceInfo(
            name=f"{seed}.mp4",
            kind="file",
            decoder="none",
            container="none",
            codec="none",
            pixel_format="rgb24",
            width=48,
            height=32,
            rotation=0,
            rate_fps=RATE,
            duration_s=n_frames / RATE,
            size_bytes=0,
            fingerprint=f"{seed}/{n_frames}",
        )

    def frames(self, start_s: float = 0.0, **_: object) -> Iterator[Frame]:
        def image(i: int) -> np.ndarray:
            return np.random.default_rng([self._seed, i]).integers(0, 256, (32, 48, 3), dtype=np.uint8)

        return from_shown_at((Frame(i / RATE, image(i), 1 / RATE) for i in range(self._n)), start_s)

    def close(self) -> None:
        pass

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        pass


class Nursery:
    """Starts one child at a time and reads what it says."""

    def __init__(self, model: Path) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.storage.nursery", str(model)],
            cwd=Path(__file__).parents[2],
            env={**os.environ, "OMP_NUM_THREADS": "1"},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            bufsize=0,
        )
        self._buffer = b""
        self.pid, self.gone = 0, True

    def start(self, path: Path, **job: Any) -> None:
        if not self.gone:
            # The test before this one has failed.
            self.kill()
        self._process.stdin.write(json.dumps({"path": str(path), **job}).encode() + b"\n")
        self.gone = False
        self.pid = int(self.line().removeprefix("pid "))

    def line(self, timeout_s: float = 100.0) -> str | None:
        """The next line, or None after the timeout and where the child has said its last."""
        if self.gone:
            return None
        while b"\n" not in self._buffer:
            if not select.select([self._process.stdout], [], [], timeout_s)[0]:
                return None
            more = os.read(self._process.stdout.fileno(), 1 << 16)
            assert more, "the nursery is gone"
            self._buffer += more
        line, self._buffer = self._buffer.split(b"\n", 1)
        self.gone = line.startswith(b"exit ")
        return line.decode()

    def kill(self) -> list[str]:
        """SIGKILL; the rest of what the child said."""
        # It may have ended by itself, and said so in what is not read yet.
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, signal.SIGKILL)
        return self.rest()

    def rest(self) -> list[str]:
        """What the child says until it is gone, its exit code last."""
        lines = []
        while (line := self.line()) is not None:
            lines.append(line)
        return lines

    def run(self, path: Path, **job: Any) -> list[str]:
        """Start one and let it end."""
        self.start(path, **job)
        return self.rest()

    def close(self) -> None:
        self._process.stdin.close()
        self._process.wait(timeout=60)
        self._process.stdout.close()


def _say(text: str) -> None:
    os.write(1, f"{text}\n".encode())


def _ingest(job: dict[str, Any], backbone: Backbone) -> None:
    import resource

    from protokv.errors import ProtoKVError
    from protokv.ingestion import Commit, Every, ingest

    source, path = Prepared(job.get("seed", 1), job["frames"]), job["path"]
    if "limit" in job:
        resource.setrlimit(resource.RLIMIT_FSIZE, (job["limit"], job["limit"]))
    try:
        events = ingest(
            source,
            path,
            CONFIG,
            backbone=backbone,
            every=Every(n_steps=1),
            keep=job.get("keep"),
            append=job.get("append", False),
            background=job.get("background"),
        )
        for event in events:
            if isinstance(event, Commit):
                _say(f"commit {event.steps}")
    except ProtoKVError as error:
        _say(f"error {type(error).__name__}: {error.message}")
        return
    _say("done")


def _main(model: str) -> None:
    import torch

    from protokv.backbones import load_backbone
    from protokv.ingestion import ingest
    from protokv.storage.form import FORMS

    torch.set_num_threads(1)
    backbone = load_backbone(model, device="cpu", dtype="float32")
    # What is loaded when it is first needed is loaded before the first fork.
    with tempfile.TemporaryDirectory() as folder:
        for suffix in FORMS:
            for _ in ingest(Prepared(0, 6), f"{folder}/a{suffix}", CONFIG, backbone=backbone):
                pass
    for line in sys.stdin.buffer:
        child = os.fork()
        if child == 0:
            _say(f"pid {os.getpid()}")
            try:
                _ingest(json.loads(line), backbone)
            finally:
                sys.stderr.flush()
                os._exit(1 if sys.exc_info()[0] else 0)
        _say(f"exit {os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])}")


if __name__ == "__main__":
    _main(sys.argv[1])
