"""Sources that misbehave, opened by name in a process of their own."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import Any

import numpy as np

from protokv.errors import SourceUnreadable
from protokv.video import Damage, Frame, SourceInfo

INFO = SourceInfo("double", "double", "none", "none", "none", "rgb24", 4, 2, 0, rate_fps=10.0, duration_s=10.0)


class Double:
    """Ten frames a second for ten seconds; at frame `at` it does something else."""

    info = INFO
    texts, streams_text = (), False
    damage = Damage()

    def __init__(self, source: str, *, at: int, deed: str, pid_file: str | None = None) -> None:
        if pid_file:
            Path(pid_file).write_text(str(os.getpid()))
        self._at, self._deed = at, deed
        if at < 0:
            self._misbehave()

    def new_lines(self) -> tuple[()]:
        return ()

    def frames(self, start_s: float = 0.0, *, should_stop: Any = None, **_: object) -> Any:
        for i in range(round(start_s * 10), 100):
            if i == self._at:
                self._misbehave()
            yield Frame(i / 10, np.full((2, 4, 3), i, np.uint8), 0.1)

    def _misbehave(self) -> None:
        if self._deed == "crash":
            os.kill(os.getpid(), signal.SIGSEGV)
        if self._deed == "hang":
            time.sleep(3600)
        if self._deed == "refuse":
            raise SourceUnreadable("double cannot be read", hint="leave it")
        if self._deed == "hog":
            np.ones(1 << 35, np.uint8)
        if self._deed == "chatter":
            os.write(1, b"something printed by a library\n")


def by_name(source: str, **kwargs: Any) -> Any:
    return Double(source, **kwargs)
