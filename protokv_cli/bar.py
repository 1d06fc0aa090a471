"""How far a command is: on a terminal one line that is drawn anew and gone at the end, elsewhere a line now and then.

Owns how often that is, what fits into the line, and that a terminal that goes takes nothing with it but the bar. Knows
nothing of what is done.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from protokv_cli.output import Output
from protokv_cli.printable import printable
from protokv_cli.tables import time_text

if TYPE_CHECKING:
    from rich.progress import Progress

# Drawing is not free: at every step of a small model it takes as long as the model. A log wants a sign of life.
BAR_EVERY_S = 0.25
LOG_EVERY_S = 10.0


class Bar:
    """The name of what is done, if it has one, a bar, and what is told beside it.

    What does not fit is left out from the right; a long name loses its middle. Whatever else is written to the terminal
    takes the bar away (`Output.hide`), and the next time that it is shown brings it back.
    """

    def __init__(self, out: Output, told: str, name: str = "", *, logs: bool = True) -> None:
        """Draw it.

        Args:
            out: where to.
            told: before anything is done.
            name: what is done.
            logs: where no bar can be drawn, notes stand in for it.
        """
        self._out, self._name = out, name
        self._bar: Progress | None = None
        self._pause_s = LOG_EVERY_S if logs else math.inf
        self._shown_s = time.monotonic()
        if out.draws:
            self._pause_s, self._shown_s = BAR_EVERY_S, -math.inf
            self._build(told)

    def _build(self, told: str) -> None:
        from rich.progress import BarColumn, Progress, TextColumn

        width = self._out.messages.width
        length, name = max(8, width // 5), elided(printable(self._name), max(12, width // 4))
        self._room = width - 4 - len(name) - length
        self._bar = Progress(
            *([TextColumn("{task.description}", markup=False)] if name else []),
            BarColumn(bar_width=length),
            TextColumn("{task.fields[told]}", markup=False),
            console=self._out.messages,
            transient=True,
            auto_refresh=False,
            # Data goes where the user sent it, and lines to stderr hide the bar themselves.
            redirect_stdout=False,
            redirect_stderr=False,
        )
        self._task = self._bar.add_task(name, total=None, told=told)
        self._out.hide = self.stop
        self._draw(self._bar.start)

    def due(self) -> bool:
        """Whether it is time to show it again; whoever asks then does."""
        now_s = time.monotonic()
        if now_s - self._shown_s < self._pause_s:
            return False
        self._shown_s = now_s
        return True

    def show(self, parts: Sequence[str], done: float, total: float | None) -> None:
        """Say how far things are.

        Args:
            parts: what is told, the most important first.
            done: of `total`, in any unit.
            total: None where there is no end.
        """
        if self._bar is None:
            told = ", ".join(part.strip() for part in parts)
            self._out.note(f"{self._name}: {told}" if self._name else told)
            return
        told = fitting([printable(part) for part in parts], self._room)
        self._draw(self._bar.start)
        self._draw(self._bar.update, self._task, total=total, completed=done, told=told, refresh=True)

    def stop(self) -> None:
        """Take the bar off the terminal."""
        if self._bar is not None:
            self._draw(self._bar.stop)

    def _draw(self, act: Callable[..., object], *arguments: Any, **options: Any) -> None:
        # The terminal may be gone; for a broken pipe rich raises SystemExit.
        with suppress(OSError, ValueError, SystemExit):
            act(*arguments, **options)


def left_text(done: float, left: float, elapsed_s: float) -> list[str]:
    """How long the rest takes at the speed until now; nothing where that is not known."""
    return [f"{time_text(math.ceil(max(0.0, left) * elapsed_s / done))} left"] if done > 0 else []


def fitting(parts: Sequence[str], room: int) -> str:
    """As many of them as a line has room for, at least the first."""
    while len(parts) > 1 and len("  ".join(parts)) > room:
        parts = parts[:-1]
    return "  ".join(parts)


def elided(name: str, length: int) -> str:
    """A long name without its middle: what tells files apart stands at the beginning and at the end."""
    if len(name) <= length:
        return name
    end = (length - 1) // 2
    return f"{name[: length - 1 - end]}\N{HORIZONTAL ELLIPSIS}{name[len(name) - end :]}"
