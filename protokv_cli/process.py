"""How the process starts and ends: quickly. Knows no command.

Half of what a short command costs is Python's own housekeeping: collecting garbage while modules are imported, of
which there is none, and taking apart, one by one, the modules that torch has brought.
"""

from __future__ import annotations

import gc
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import NoReturn

from protokv_cli.exits import Exit


@contextmanager
def uncollected() -> Iterator[None]:
    """Import and load without looking for garbage; what has come to stay is not looked at again later."""
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

    A command returns when its states are committed, its locks released and its threads joined, so that nothing is left
    but to flush. An exception other than SystemExit goes its usual way.
    """
    try:
        command()
        code: object = Exit.DONE
    except SystemExit as end:
        code = end.code
    if code is not None and not isinstance(code, int):
        sys.stderr.write(f"{code}\n")
        code = Exit.FAILURE
    for stream in (sys.stdout, sys.stderr):
        try:
            if stream is not None:
                stream.flush()
        except BrokenPipeError:
            pass
        except (OSError, ValueError):
            code = code or Exit.FAILURE
    os._exit(int(code or Exit.DONE))
