"""Progress on stderr: a bar that is drawn in place, the note that a model is loading, and the seconds of each stage.

Where no bar can be drawn, a line now and then takes its place.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any, Self

from protokv_cli.output import Output
from protokv_cli.tables import format_time, make_printable

if TYPE_CHECKING:
    from rich.progress import Progress

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
        self._out, self._name = out, name
        self._bar: Progress | None = None
        self._pause_s = LOG_EVERY_S if logs else math.inf
        self._shown_s = time.monotonic()
        if out.draws:
            self._pause_s, self._shown_s = BAR_EVERY_S, -math.inf
            self._build(text)

    def _build(self, text: str) -> None:
        from rich.progress import BarColumn, Progress, TextColumn
        from rich.table import Column

        self._bar = Progress(
            TextColumn("{task.description}", markup=False, table_column=Column(no_wrap=True, max_width=30)),
            BarColumn(bar_width=20),
            # What has no room on the right is left out.
            TextColumn("{task.fields[text]}", markup=False, table_column=Column(no_wrap=True, overflow="crop")),
            console=self._out.messages,
            transient=True,
            auto_refresh=False,
            # Results may go elsewhere, and lines on stderr hide the bar themselves.
            redirect_stdout=False,
            redirect_stderr=False,
        )
        self._task = self._bar.add_task(make_printable(self._name), total=None, text=text)
        self._out.hide = self.stop
        self._draw(self._bar.start)

    def due(self) -> bool:
        """Return True, once, when it is time to call `show` again."""
        now_s = time.monotonic()
        if now_s - self._shown_s < self._pause_s:
            return False
        self._shown_s = now_s
        return True

    def show(self, parts: Sequence[str], done: float, total: float | None) -> None:
        """Show the parts of a text, the most important first, and the share `done` of `total`; None: no end."""
        if self._bar is None:
            text = ", ".join(part.strip() for part in parts)
            self._out.note(f"{self._name}: {text}" if self._name else text)
            return
        text = make_printable("  ".join(parts))
        self._draw(self._bar.start)
        self._draw(self._bar.update, self._task, total=total, completed=done, text=text, refresh=True)

    def stop(self) -> None:
        """Take the bar off the terminal."""
        if self._bar is not None:
            self._draw(self._bar.stop)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def _draw(self, act: Callable[..., object], *arguments: Any, **options: Any) -> None:
        # The terminal may be gone; for a broken pipe rich raises SystemExit.
        with suppress(OSError, ValueError, SystemExit):
            act(*arguments, **options)


def format_time_left(done: float, left: float, elapsed_s: float) -> list[str]:
    """Return the time that the rest takes at the speed until now; nothing if that is unknown."""
    return [f"{format_time(math.ceil(max(0.0, left) * elapsed_s / done))} left"] if done > 0 else []


@contextmanager
def loading(out: Output, name: str | None, revision: str | None) -> Iterator[None]:
    """Show on a terminal that a model is loading, and its downloads.

    Raises:
        ModelError: the model is neither local nor on a reachable hub; raised before anything heavy is imported.
        ConfigError: a model that is not of a hub has a revision.
    """
    from protokv.backbones import require_model

    if name is not None:
        require_model(name, revision)
    with Bar(out, "loading model", name or "", logs=False), draw_downloads(out):
        yield


@contextmanager
def draw_downloads(out: Output) -> Iterator[None]:
    """Show downloads from the hub if there is a terminal to draw on."""
    if not out.draws:
        yield
        return
    from protokv.backbones.files import show_downloads

    with show_downloads(lambda: out.hide()):
        yield


def round_timings(seconds: Mapping[str, float]) -> dict[str, float]:
    """Return the seconds of each stage for JSON, with the CPU time of the process so far."""
    return {**{name: round(value, 4) for name, value in seconds.items()}, "process cpu": round(time.process_time(), 4)}


def show_timings(out: Output, seconds: Mapping[str, float]) -> None:
    """Write one line a stage to stderr, the CPU time of the process last."""
    rows = round_timings(seconds)
    width = max(map(len, rows))
    for name, value in rows.items():
        out.error(f"{name:<{width}}  {value:9.3f} s{' (beside the others)' if name in _PARALLEL_STAGES else ''}")
