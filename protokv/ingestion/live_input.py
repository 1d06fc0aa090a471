"""What is read as a stream, opened: like a file where it has an end or grows, as a `LiveSource` otherwise."""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import partial

from protokv.errors import SourceError
from protokv.ingestion.live import LiveSource
from protokv.ingestion.live_options import LiveOptions
from protokv.video import Source, address
from protokv.video.isolated import IsolatedSource
from protokv.video.registry import SOURCES

# Where the process that reads a source is to notice itself that nothing comes, it has this long to say so.
GRACE_S = 10.0

OPENER = "protokv.video.stream:open_stream"


def open_input(
    source: str | os.PathLike[str], options: LiveOptions, max_pixels: int | None
) -> Source | LiveSource | None:
    """The source as it is read as a stream; None: it is a file.

    Raises:
        SourceError: it is not there, or not one frame of it can be read.
    """
    text = os.fspath(source)
    kind = address.kind_of(text)
    if kind not in SOURCES or (kind == "file" and not options.follow):
        return None
    connect = partial(_connect, text, options, max_pixels)
    if kind in ("file", "http", "https"):
        try:
            opened = connect()
        except SourceError:
            # A playlist may be there later; anything else is a video on a server, which is there or not.
            if ".m3u8" not in text:
                raise
            return LiveSource(text, options, connect)
        if opened.info.seekable:
            return opened
        return LiveSource(text, options, connect, opened)
    return LiveSource(text, options, connect)


def _connect(
    text: str,
    options: LiveOptions,
    max_pixels: int | None,
    should_stop: Callable[[], bool] = lambda: False,
    size: tuple[int, int] | None = None,
) -> Source:
    stall_s = options.lost_after_s(address.kind_of(text))
    return IsolatedSource(
        text,
        opener=OPENER,
        stall_s=stall_s + GRACE_S,
        should_stop=should_stop,
        max_pixels=max_pixels,
        options=dict(options.input),
        timeout_s=min(stall_s, 1e6),
        size=size,
        follow=options.follow,
    )
