"""Stopping in two stages: the first Ctrl-C (or SIGTERM) finishes the step and commits, the second stops at once."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

from protokv_cli.exits import Exit

_EXITS = {signal.SIGINT: Exit.INTERRUPTED, signal.SIGTERM: Exit.TERMINATED}


class Stop:
    """Whether, and by which signal, the user has asked to stop."""

    def __init__(self) -> None:
        """Nothing asked yet."""
        self.exit: Exit | None = None

    def __bool__(self) -> bool:
        return self.exit is not None


@contextmanager
def stopping(say: Callable[[str], None]) -> Iterator[Stop]:
    """Catch SIGINT and SIGTERM inside the block; `say` tells the user at once that the first was heard."""
    stop = Stop()

    def heard(number: int, _: FrameType | None) -> None:
        if stop:
            # What was committed before stays valid, so nothing is lost by leaving now.
            signal.signal(number, signal.SIG_DFL)
            signal.raise_signal(number)
        stop.exit = _EXITS[signal.Signals(number)]
        say("stopping after this step; once more to stop at once")

    before = {number: signal.signal(number, heard) for number in _EXITS}
    try:
        yield stop
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
