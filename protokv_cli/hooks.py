"""Run a command of the user's for each event, beside the stream and never in its way."""

from __future__ import annotations

import queue
import shlex
import shutil
import subprocess
import threading
import time
from collections.abc import Callable
from typing import Self

from protokv.errors import ConfigError
from protokv.texts import cut
from protokv_cli.output import Row, format_json

LIMIT_S = 30.0

# Events that wait for the command; of more, the oldest are left out.
MOST_WAITING = 64


class Hook:
    """Runs a command for one event after the other, which is a JSON line on its stdin; a context manager.

    The command is no shell's, and what it writes goes to stderr. It is killed after its limit. At the end, events that
    wait have one more limit in all.
    """

    def __init__(self, command: str, say: Callable[[str], None], limit_s: float = LIMIT_S) -> None:
        """Find the program and start a thread; `say` tells the user of what fails. ConfigError: it is not there."""
        try:
            self._argv = shlex.split(command)
        except ValueError as error:
            raise ConfigError(f"--exec: {error}: {command}", hint="quote it as in a shell") from None
        if not self._argv or shutil.which(self._argv[0]) is None:
            raise ConfigError(f"--exec: there is no program {command!r}", hint="name one, with a path if need be")
        self._say, self._limit_s, self._until_s = say, limit_s, float("inf")
        self._rows: queue.SimpleQueue[Row | None] = queue.SimpleQueue()
        self._left_out = 0
        self._thread = threading.Thread(target=self._work, name="protokv-exec", daemon=True)
        self._thread.start()

    def __call__(self, row: Row) -> None:
        """Take an event, and return at once."""
        if self._rows.qsize() >= MOST_WAITING:
            self._left_out += self._rows.get() is not None
        self._rows.put(row)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._until_s = time.monotonic() + self._limit_s
        self._rows.put(None)
        self._thread.join()
        if self._left_out:
            self._say(f"Warning: --exec: {self._argv[0]} is too slow: {self._left_out} answers were left out")

    def _work(self) -> None:
        while (row := self._rows.get()) is not None:
            left_s = min(self._limit_s, self._until_s - time.monotonic())
            if left_s <= 0:
                self._left_out += 1
                continue
            try:
                # stdout is for our own lines.
                done = subprocess.run(
                    self._argv, input=format_json(row) + "\n", stdout=2, timeout=left_s, encoding="utf-8", check=False
                )
                failed = f"ended with {done.returncode}" if done.returncode else ""
            except subprocess.TimeoutExpired:
                failed = f"was killed after {left_s:.3g} s"
            except OSError as error:
                failed = f"cannot be run: {error.strerror or error}"
            if failed:
                self._say(f"Warning: --exec: {self._argv[0]} {failed}, at the answer {cut(str(row['answer']), 80)}")
