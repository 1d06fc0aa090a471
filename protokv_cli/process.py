"""The process: a quick start and end, its standard streams, and its signals. Knows no command."""

from __future__ import annotations

import gc
import os
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from io import TextIOWrapper
from types import FrameType
from typing import NoReturn

from protokv_cli.exits import ExitCode

# Windows has no hang-up.
_HANG_UP = getattr(signal, "SIGHUP", None)
_EXITS = {signal.SIGINT: ExitCode.INTERRUPTED, signal.SIGTERM: ExitCode.TERMINATED}
if _HANG_UP is not None:
    _EXITS[_HANG_UP] = ExitCode.HUNG_UP


def run_and_exit(command: Callable[[], object]) -> NoReturn:
    """Run a command and end the process at once, with its exit code: states are committed, threads
    joined by then.

    Half of the time of a short command would be Python's own: taking torch's modules apart at the
    end, and looking for garbage among the 700,000 objects that imports make. Neither a step nor a
    question leaves any.
    """
    gc.set_threshold(1_000_000)
    # /dev/null for each closed stream (`>&-`), so that no file that is opened later becomes stdout
    # or stderr.
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        try:
            os.fstat(number)
        except OSError:
            # The lowest free descriptor is the one that is closed.
            os.open(os.devnull, os.O_RDWR)
            opened = os.fdopen(number, "w" if number else "r", encoding="utf-8")
            setattr(sys, name, opened)
    for stream in (sys.stdout, sys.stderr):
        # A name may have characters that the encoding of a terminal or a pipe has not.
        if isinstance(stream, TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")
    code = 0
    try:
        command()
    except SystemExit as end:
        code = int(end.code or 0)
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except (OSError, ValueError) as error:
            code = code if isinstance(error, BrokenPipeError) else code or ExitCode.FAILURE
    os._exit(code)


@dataclass
class StopSignal:
    """True once the user has asked to stop; `exit` is the code of the signal."""

    exit: ExitCode | None = None

    def __bool__(self) -> bool:
        return self.exit is not None


@contextmanager
def handle_signals(say: Callable[[str], None]) -> Iterator[StopSignal]:
    """Stop in two stages: the first SIGINT, SIGTERM or SIGHUP sets the `StopSignal`, the second
    ends the process.

    A closed terminal sends SIGHUP twice, so a second SIGHUP is ignored. `say` tells the user of the
    first signal.
    """
    stop = StopSignal()

    def handle(number: int, _: FrameType | None) -> None:
        if stop and number == _HANG_UP:
            return
        if stop:
            # The last commit is valid, so nothing is lost by leaving now.
            signal.signal(number, signal.SIG_DFL)
            signal.raise_signal(number)
        stop.exit = _EXITS[signal.Signals(number)]
        # The terminal may be gone, and stderr may be in the middle of a line.
        with suppress(OSError, RuntimeError, ValueError):
            say("stopping after this step; once more to stop at once")

    # nohup ignores SIGHUP, and that is kept.
    handled = [
        number
        for number in _EXITS
        if number != _HANG_UP or signal.getsignal(number) != signal.SIG_IGN
    ]
    before = {number: signal.signal(number, handle) for number in handled}
    try:
        yield stop
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
