"""The process: a quick start and end, its signals, and its stdin. Knows no command.

Half of the time of a short command is Python's own: collecting garbage during imports, and taking torch's modules apart
at the end. Both are skipped here.
"""

from __future__ import annotations

import gc
import io
import os
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from types import FrameType
from typing import IO, NoReturn

import typer

from protokv_cli.exits import Exit

_EXITS = {signal.SIGINT: Exit.INTERRUPTED, signal.SIGTERM: Exit.TERMINATED}
# Windows has no SIGHUP.
_HANG_UP = getattr(signal, "SIGHUP", None)
if _HANG_UP is not None:
    _EXITS[_HANG_UP] = Exit.HUNG_UP


@contextmanager
def pause_collection() -> Iterator[None]:
    """Import and load without collecting garbage; later collections skip the objects made here."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.freeze()
            gc.enable()


def run_and_leave(command: Callable[[], object]) -> NoReturn:
    """Run a command and end the process at once, with its exit code.

    When a command returns, its states are committed, its locks released and its threads joined; only the streams are
    left to flush. An exception other than SystemExit passes.
    """
    code = 0
    try:
        command()
    except SystemExit as end:
        code = int(end.code or 0)
    for stream in (sys.stdout, sys.stderr):
        try:
            if stream is not None:
                stream.flush()
        except BrokenPipeError:
            pass
        except (OSError, ValueError):
            code = code or Exit.FAILURE
    os._exit(code)


class Stop:
    """True once the user has asked to stop; `exit` is the code of the signal."""

    def __init__(self) -> None:
        self.exit: Exit | None = None

    def __bool__(self) -> bool:
        return self.exit is not None


@contextmanager
def handle_signals(say: Callable[[str], None]) -> Iterator[Stop]:
    """Stop in two stages: the first SIGINT, SIGTERM or SIGHUP sets the `Stop`, the second ends the process at once.

    A closed terminal sends SIGHUP twice, so a second SIGHUP is ignored. `say` tells the user of the first signal.
    """
    stop = Stop()

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
    handled = [number for number in _EXITS if number != _HANG_UP or signal.getsignal(number) != signal.SIG_IGN]
    before = {number: signal.signal(number, handle) for number in handled}
    try:
        yield stop
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextmanager
def allow_interrupt() -> Iterator[None]:
    """Let Ctrl-C end the program with its exit code and without a message."""
    try:
        yield
    except KeyboardInterrupt:
        raise typer.Exit(Exit.INTERRUPTED) from None


@contextmanager
def replace_stdin(stream: IO[str]) -> Iterator[None]:
    """Put another stream in the place of `sys.stdin` for this block."""
    before, sys.stdin = sys.stdin, stream
    try:
        yield
    finally:
        sys.stdin = before


@contextmanager
def withhold_stdin() -> Iterator[IO[str] | None]:
    """Yield the real stdin and give everybody else an empty one; None if there is no stdin.

    A library that asks on the terminal whether to run code or to download would otherwise read its answer from the
    questions that the user pipes in.
    """
    real = sys.stdin
    if isinstance(real, io.TextIOWrapper):
        # Bytes that are no UTF-8 are told with their line.
        real.reconfigure(encoding="utf-8", errors="surrogateescape")
    with replace_stdin(io.StringIO()):
        yield real
