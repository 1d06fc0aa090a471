"""Doing something over and over until the user has enough, which is no failure of the program."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

import typer

from protokv_cli.exits import Exit
from protokv_cli.output import Output

# How often a state is looked at, in seconds.
LOOK_S = 2.0

pause = time.sleep


def rounds(every_s: float) -> Iterator[None]:
    """Now, and again and again, so much time after the last round began."""
    while True:
        began_s = time.monotonic()
        yield
        pause(max(0.0, began_s + every_s - time.monotonic()))


@contextmanager
def interruptible() -> Iterator[None]:
    """Ctrl-C ends the program with its exit code and nothing else."""
    try:
        yield
    except KeyboardInterrupt:
        raise typer.Exit(Exit.INTERRUPTED) from None


def await_first_commit(out: Output, state: str) -> None:
    """Return once a state is there; while it is not, say so once."""
    from protokv.errors import StateNotFound
    from protokv.storage.api import read_header

    for n, _ in enumerate(rounds(LOOK_S)):
        try:
            read_header(state)
        except StateNotFound as error:
            if not n:
                out.note(f"{error.message} yet; waiting for its first commit")
        else:
            return
