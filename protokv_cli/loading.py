"""What is shown while a model is loaded: that it is, and on a terminal the hub's own bars while it is downloaded."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress

from protokv_cli.output import Output
from protokv_cli.printable import printable

CLEAR_LINE = "\r\x1b[2K"


@contextmanager
def loading(out: Output, name: str | None, revision: str | None) -> Iterator[None]:
    """Say on a terminal that a model is loaded, on a line that is gone afterwards; show downloads.

    A model that is neither here nor on a hub within reach is refused before anything heavy is imported. ModelError;
    ConfigError where there is a revision of what is no hub model.
    """
    from protokv.backbones import require_model

    if name is not None:
        require_model(name, revision)
    with downloads_shown(out):
        if not out.draws:
            yield
            return
        _say(f"loading {printable(name or 'model')} ...")
        hide, out.hide = out.hide, lambda: _say(CLEAR_LINE)
        try:
            yield
        finally:
            _say(CLEAR_LINE)
            out.hide = hide


@contextmanager
def downloads_shown(out: Output) -> Iterator[None]:
    """Inside, files that are brought from the hub are shown, if there is a terminal to draw on."""
    if not out.draws:
        yield
        return
    from protokv.backbones.hub import showing_downloads

    with showing_downloads(lambda: out.hide()):
        yield


def _say(text: str) -> None:
    with suppress(OSError, ValueError):
        sys.stderr.write(text)
        sys.stderr.flush()
