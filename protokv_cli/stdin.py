"""The user's stdin, kept from every library: what is piped in are questions, and no answers to somebody else's.

A library that asks a question on the terminal (whether to run code, whether to download) would read its answer from
there. Inside `withheld_stdin` both `sys.stdin` and file descriptor 0 are empty for whoever does not hold the real one.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import IO


@contextmanager
def withheld_stdin() -> Iterator[IO[str] | None]:
    """The real stdin, which nothing else can read meanwhile; None where there is none."""
    mine = sys.stdin
    with open(os.devnull, encoding="utf-8") as empty:  # noqa: PTH123
        try:
            number = mine.fileno() if mine is not None else -1
        except (OSError, ValueError):
            number = -1
        if number != 0:
            # None, closed, or put in its place by a program that calls this one.
            sys.stdin = empty
            try:
                yield mine
            finally:
                sys.stdin = mine
            return
        kept = os.dup(0)
        with open(kept, encoding="utf-8", errors="replace", closefd=False) as real:
            os.dup2(empty.fileno(), 0)
            sys.stdin = empty
            try:
                yield real
            finally:
                sys.stdin = mine
                os.dup2(kept, 0)
                os.close(kept)


@contextmanager
def lent_stdin(real: IO[str]) -> Iterator[None]:
    """Give the real stdin back for as long as somebody types: readline wants it where the system has it."""
    withheld = sys.stdin
    try:
        number = real.fileno()
        empty = os.dup(0) if real is not withheld and os.isatty(number) else None
    except (OSError, ValueError):
        empty = None
    if empty is None:
        sys.stdin = real
        try:
            yield
        finally:
            sys.stdin = withheld
        return
    try:
        os.dup2(number, 0)
        with open(0, encoding="utf-8", errors="replace", closefd=False) as keyboard:
            sys.stdin = keyboard
            yield
    finally:
        sys.stdin = withheld
        os.dup2(empty, 0)
        os.close(empty)
