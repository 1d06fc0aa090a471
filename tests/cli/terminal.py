"""The program on a pseudo-terminal, in this process: what a user sees, and what goes where it was
sent meanwhile.
"""

import os
import pty
import sys
import termios
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO
from unittest import mock

import pyte
import typer

from protokv_cli.main import app

ROWS = 24
COLUMNS = 100


@dataclass(frozen=True)
class Seen:
    """The exit code of a command, and everything written to its terminal, control sequences
    included.
    """

    code: int
    screen: str

    def lines(self) -> list[str]:
        """Return the lines on the terminal at the end, without empty ones."""
        screen = pyte.Screen(COLUMNS, 10 * ROWS)
        pyte.Stream(screen).feed(self.screen)
        return [line.rstrip() for line in screen.display if line.strip()]


@contextmanager
def pseudo_terminal(typed: str = "") -> Iterator[tuple[IO[str], IO[str], list[bytes]]]:
    """A terminal of ROWS and COLUMNS: its keyboard, its screen, and what was written until now."""
    ours, theirs = pty.openpty()
    termios.tcsetwinsize(ours, (ROWS, COLUMNS))
    written: list[bytes] = []

    def drain() -> None:
        while True:
            try:
                chunk = os.read(ours, 65536)
            except OSError:
                return
            written.append(chunk)

    reader = threading.Thread(target=drain)
    reader.start()
    os.write(ours, typed.encode())
    try:
        with (
            open(os.dup(theirs), encoding="utf-8") as keyboard,  # noqa: PTH123
            open(theirs, "w", encoding="utf-8") as screen,  # noqa: PTH123
        ):
            yield keyboard, screen, written
    finally:
        reader.join()
        os.close(ours)


def run_on_terminal(
    environment: Mapping[str, str],
    *arguments: object,
    stdout: Path | None = None,
    typed: str = "",
    term: str = "xterm-256color",
) -> Seen:
    """Run the program with stdin, stderr and, unless it is sent to a file, stdout on a terminal."""
    variables = {**environment, "TERM": term}
    with (
        pseudo_terminal(typed) as (keyboard, screen, written),
        mock.patch.dict(os.environ, variables, clear=True),
    ):
        sent = stdout.open("w", encoding="utf-8") if stdout else screen
        with mock.patch.multiple(sys, stdin=keyboard, stdout=sent, stderr=screen):
            try:
                code = app([str(a) for a in arguments], standalone_mode=False) or 0
            except typer.Exit as end:
                code = end.exit_code
            finally:
                sent.flush()
        if stdout:
            sent.close()
    return Seen(code, b"".join(written).decode())
