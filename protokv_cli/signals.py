"""Stopping in two stages: the first Ctrl-C or SIGTERM finishes the step and commits, the second stops at once.

A terminal that is closed (SIGHUP) is heard as the first; its second signal, which follows at once from the shell, is no
second wish.
"""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from types import FrameType

from protokv_cli.exits import Exit

_EXITS = {signal.SIGINT: Exit.INTERRUPTED, signal.SIGTERM: Exit.TERMINATED}
# Windows has no terminal that hangs up.
_HANG_UP = getattr(signal, "SIGHUP", None)
if _HANG_UP is not None:
    _EXITS[_HANG_UP] = Exit.HUNG_UP


class Stop:
    """Whether, and by which signal, the user has asked to stop."""

    def __init__(self) -> None:
        """Nothing asked yet."""
        self.exit: Exit | None = None

    def __bool__(self) -> bool:
        return self.exit is not None


@contextmanager
def stopping(say: Callable[[str], None]) -> Iterator[Stop]:
    """Catch SIGINT, SIGTERM and SIGHUP inside the block; `say` tells the user at once that the first was heard."""
    stop = Stop()

    def heard(number: int, _: FrameType | None) -> None:
        if stop and number == _HANG_UP:
            return
        if stop:
            # What was committed before stays valid, so nothing is lost by leaving now.
            signal.signal(number, signal.SIG_DFL)
            signal.raise_signal(number)
        stop.exit = _EXITS[signal.Signals(number)]
        # The terminal may be gone, and stderr may be in the middle of a line.
        with suppress(OSError, RuntimeError, ValueError):
            say("stopping after this step; once more to stop at once")

    # Who starts this with nohup wants it to outlive the terminal.
    wanted = [number for number in _EXITS if number != _HANG_UP or signal.getsignal(number) != signal.SIG_IGN]
    before = {number: signal.signal(number, heard) for number in wanted}
    try:
        yield stop
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
