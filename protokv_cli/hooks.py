"""Run a command of the user's for each answer, beside the stream and never in its way."""

from __future__ import annotations

import os
import shlex
import shutil
import signal
import subprocess
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import AbstractContextManager, suppress

from protokv.errors import ConfigError
from protokv_cli.output import Row, format_json

_MOST_WAITING = 64  # answers that wait for the command; of more, the oldest is left out


class SubprocessHook(AbstractContextManager["SubprocessHook"]):
    """Runs a command, without a shell, for one answer after the other, which is a JSON line on its
    stdin.

    It has a process group of its own, so Ctrl-C does not end it, and its limit ends the group. It
    is waited for alone, not for children that it leaves. What it writes goes to stderr. At the end
    the answers that wait have one limit more, and then the one that runs.
    """

    def __init__(self, command: str, say: Callable[[str], None], limit_s: float = 30.0) -> None:
        """Find the program; `say` tells the user what fails. ConfigError: it is not there."""
        try:
            self._command = shlex.split(command)
        except ValueError:  # a quotation without its end
            self._command = []
        if not self._command or shutil.which(self._command[0]) is None:
            raise ConfigError(
                f"--exec: no program {command} can be run", hint="name one, quoted as in a shell"
            )
        self._say = say
        self._limit_s = limit_s
        self._pool = ThreadPoolExecutor(1, "protokv-exec")
        self._work = list[Future[None]]()

    def __call__(self, row: Row) -> None:
        """Take an answer, and return at once."""
        self._work = [one for one in self._work if not one.done()]
        if len(self._work) > _MOST_WAITING and self._work.pop(1).cancel():
            self._say(f"Warning: --exec: {self._command[0]} is too slow; answers are left out")
        self._work.append(self._pool.submit(self._run, format_json(row) + "\n"))

    def __exit__(self, *_: object) -> None:
        left = [one for one in wait(self._work, self._limit_s).not_done if one.cancel()]
        if left:
            self._say(
                f"Warning: --exec: {self._command[0]} is too slow; {len(left)} answers are left "
                "out at the end"
            )
        self._pool.shutdown()

    def _run(self, line: str) -> None:
        try:
            process = subprocess.Popen(
                self._command,
                stdin=subprocess.PIPE,
                stdout=2,
                encoding="utf-8",
                start_new_session=True,
            )
        except OSError as error:
            self._say(f"Warning: --exec: {error}")
            return
        try:
            process.communicate(line, self._limit_s)
            why = f"exit status {process.returncode}" if process.returncode else ""
        except subprocess.TimeoutExpired:
            why = f"timed out after {self._limit_s:g} s, and is ended with its children"
            with suppress(ProcessLookupError):
                if os.name == "posix":
                    os.killpg(process.pid, signal.SIGKILL)
                else:
                    process.kill()
            process.communicate()
        if why:
            self._say(f"Warning: --exec: {self._command[0]}: {why}")
