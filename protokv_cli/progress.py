"""Progress on stderr: a bar that is drawn in place, the note that a model is loading, and the seconds of each stage.

Where no bar can be drawn, a line now and then takes its place.
"""

from __future__ import annotations

import math
import shutil
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Self

from protokv_cli.output import Output, format_time, make_printable

# Drawing at every step of a small model would take as long as the model.
BAR_EVERY_S = 0.25
LOG_EVERY_S = 10.0

# These stages run in the thread that reads ahead.
_PARALLEL_STAGES = ("decode", "preprocess")


class Bar:
    """A name, a bar and a text in one line of the terminal; a context manager that takes it off again.

    Every other line that is written to the terminal hides the bar (`Output.hide`); the next `show` draws it again.
    """

    def __init__(self, out: Output, text: str, name: str = "", *, logs: bool = True) -> None:
        """Draw it with a first text and the name of the work; with `logs`, write notes if no bar can be drawn."""
        self._out, self._name, self._draws, self._is_drawn = out, name, out.draws, False
        self._pause_s = BAR_EVERY_S if self._draws else LOG_EVERY_S if logs else math.inf
        self._shown_s = -math.inf if self._draws else time.monotonic()
        if self._draws:
            out.hide = self.stop
            self.show([text], 0, None)

    def due(self) -> bool:
        """Return True, once, when it is time to call `show` again."""
        now_s = time.monotonic()
        is_due = now_s - self._shown_s >= self._pause_s
        self._shown_s = now_s if is_due else self._shown_s
        return is_due

    def show(self, parts: Sequence[str], done: float, total: float | None) -> None:
        """Show the parts of a text, the most important first, and the share `done` of `total`; None: no end."""
        name = f"{self._name}: " if self._name else ""
        if not self._draws:
            self._out.note(name + ", ".join(part.strip() for part in parts))
            return
        from rich.cells import set_cell_size

        bar = f"[{'#' * int(20 * done / total):20}] " if total else ""
        text = make_printable(f"{self._name[-30:]} {bar}{'  '.join(parts)}".strip())
        # What has no room on the right is left out. Characters may be two columns wide.
        self._write(set_cell_size(text, shutil.get_terminal_size().columns - 1).rstrip())

    def stop(self, *_: object) -> None:
        """Take the bar off the terminal."""
        if self._is_drawn:
            self._write("")

    def __enter__(self) -> Self:
        return self

    __exit__ = stop

    def _write(self, text: str) -> None:
        self._is_drawn = bool(text)
        # The terminal may be gone.
        with suppress(OSError, ValueError):
            sys.stderr.write(f"\r\x1b[2K{text}")
            sys.stderr.flush()


def format_time_left(done: float, left: float, elapsed_s: float) -> list[str]:
    """Return the time that the rest takes at the speed until now; nothing if that is unknown."""
    return [f"{format_time(math.ceil(max(0.0, left) * elapsed_s / done))} left"] if done > 0 else []


def round_timings(seconds: Mapping[str, float]) -> dict[str, float]:
    """Return the seconds of each stage for JSON, with the CPU time of the process so far."""
    return {name: round(value, 4) for name, value in {**seconds, "process cpu": time.process_time()}.items()}


def show_timings(out: Output, timings: Mapping[str, float]) -> None:
    """Write a line to stderr for each stage that `round_timings` gives."""
    for name, value in timings.items():
        out.error(f"{name:<16}  {value:9.3f} s{' (beside the others)' if name in _PARALLEL_STAGES else ''}")
