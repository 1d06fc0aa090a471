"""A prompt on a terminal: lines that are typed, with the history of those before where the system has readline.

The history is kept in `protokv/history` of `XDG_STATE_HOME`, readable to its user alone. Ctrl-D or an empty standard
input ends it; Ctrl-C drops the line that is being typed.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO

from protokv.errors import ProtoKVError
from protokv_cli.output import Output
from protokv_cli.stdin import lent_stdin

PROMPT = "? "
# Lines of history.
KEPT = 1000


def typed_lines(stdin: IO[str]) -> Iterator[str]:
    """What a user types, a line each, without empty ones."""
    history = _history()
    try:
        while True:
            try:
                with lent_stdin(stdin):
                    line = _read()
            except EOFError:
                sys.stderr.write("\n")
                return
            except KeyboardInterrupt:
                sys.stderr.write("\n")
                continue
            if line.strip():
                yield line.strip()
    finally:
        _keep(history)


def _read() -> str:
    if sys.stdout.isatty():
        return input(PROMPT)
    # stdout is for answers, and the prompt is none.
    sys.stderr.write(PROMPT)
    sys.stderr.flush()
    return input()


def _history() -> Path | None:
    """The file of the history, read; None where there is no readline or no place for it."""
    base = os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state"
    file = Path(base) / "protokv" / "history"
    try:
        import readline

        file.parent.mkdir(parents=True, exist_ok=True)
        file.touch(mode=0o600)
        readline.read_history_file(file)
    except (ImportError, OSError):
        return None
    return file


def _keep(file: Path | None) -> None:
    if file is not None:
        with suppress(ImportError, OSError):
            import readline

            readline.set_history_length(KEPT)
            readline.write_history_file(file)


@contextmanager
def told_at_prompt(out: Output, at_prompt: bool) -> Iterator[None]:
    """At a prompt a question that cannot be asked, or an answer that is not wanted any more, does not end it."""
    try:
        yield
    except KeyboardInterrupt:
        if not at_prompt:
            raise
        out.warn("")
    except ProtoKVError as error:
        if not at_prompt:
            raise
        out.warn(f"Error: {error.message}")
