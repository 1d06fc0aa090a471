"""`open_source`, and the registries of kinds of sources and of decoders of files.

A new kind of source is a module with a function that opens it, and a line here. No decoder is imported before it is
needed.
"""

from __future__ import annotations

import os
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Literal

from protokv.errors import ConfigError, SourceUnreadable, use_one_of
from protokv.video import bucket
from protokv.video.address import DEVICES, NETWORK, PIPE, kind_of
from protokv.video.file import check_is_file, fingerprint
from protokv.video.source import Source

_STREAM = ("protokv.video.stream", "StreamSource")

# kind -> module and function `(source, decoder, max_pixels) -> Source`
SOURCES = {
    "file": (__name__, "open_file"),
    **dict.fromkeys((PIPE, *NETWORK, *DEVICES), _STREAM),
}

# decoder of files -> module and class; `auto` reads every file
DECODERS = {
    "auto": ("protokv.video.pyav_source", "PyAVSource"),
    "pyav": ("protokv.video.pyav_source", "PyAVSource"),
    "decord": ("protokv.video.decord_source", "DecordSource"),
}

Decoder = Literal["auto", "pyav", "decord"]


def open_source(
    source: str | os.PathLike[str],
    decoder: Decoder = "auto",
    *,
    max_pixels: int | None = None,
) -> Source:
    """Open a video.

    Args:
        source: path of a file, address of an object (`s3://`, `gs://`, `az://`), or a text of another kind of
            `SOURCES`.
        decoder: one of `DECODERS`. `pyav`, which is `auto`, reads whatever FFmpeg reads. `decord` reads ordinary
            files, gives the same frames, and leaves doubtful files to PyAV; its wheel carries an FFmpeg of 2021, so
            choose it only for files that you trust.
        max_pixels: the most that a frame may have, checked before it is decoded; None: 8K.

    Raises:
        SourceNotFound: nothing is there.
        SourceUnreadable: no video can be read from it, or not by this decoder; or there is no such kind of source.
        ConfigError: there is no such decoder.
    """
    if decoder not in DECODERS:
        raise ConfigError(f"there is no decoder {decoder!r}", hint=use_one_of(decoder, DECODERS))
    if bucket.is_object(source):
        from protokv.video.derived import ObjectSource

        opened = partial(open_source, decoder=decoder, max_pixels=max_pixels)
        return ObjectSource(os.fspath(source), opened)
    kind = kind_of(os.fspath(source))
    if kind not in SOURCES:
        raise SourceUnreadable(
            f"{kind}: is no kind of source that can be read", hint=f"kinds of source: {', '.join(SOURCES)}"
        )
    module, name = SOURCES[kind]
    found: Source = getattr(import_module(module), name)(source, decoder, max_pixels)
    return found


def open_file(path: str | os.PathLike[str], decoder: str, max_pixels: int | None) -> Source:
    """Open a file with a decoder of `DECODERS`. Raises as `open_source`."""
    from protokv.video.container import MAX_PIXELS
    from protokv.video.probe import probe

    check_is_file(Path(path))
    module, name = DECODERS[decoder]
    source: Source = getattr(import_module(module), name)(probe(path, max_pixels or MAX_PIXELS))
    return source


def fingerprint_source(source: str) -> str | None:
    """Return the fingerprint of a source without opening it; None for a source that has none.

    Raises:
        SourceError: it is not there, or cannot be read.
    """
    if bucket.is_object(source):
        return bucket.fingerprint(source)
    if kind_of(source) != "file":
        return None
    check_is_file(Path(source))
    return fingerprint(Path(source))
