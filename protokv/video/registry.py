"""`open_source`, and the registries of kinds of sources and of decoders of files.

A new kind of source is a module with a function that opens it, and a line here. Nothing is imported before it is
needed.
"""

from __future__ import annotations

import os
from importlib import import_module
from typing import TYPE_CHECKING, Literal

from protokv.errors import ConfigError, SourceNotFound, SourceUnreadable
from protokv.object_store import is_object
from protokv.video.address import DEVICES, NETWORK, PIPE, kind_of

if TYPE_CHECKING:
    from protokv.video.source import Source

_STREAM = ("protokv.video.stream", "StreamSource")

# kind -> module and function `(source, decoder, max_pixels) -> Source`
SOURCES = {
    "file": ("protokv.video.file", "open_file"),
    **dict.fromkeys((PIPE, *NETWORK, *DEVICES), _STREAM),
}

# decoder of files -> module and class; `auto` reads every file
DECODERS = {
    "auto": ("protokv.video.pyav_source", "PyAVSource"),
    "pyav": ("protokv.video.pyav_source", "PyAVSource"),
    "decord": ("protokv.video.decord_source", "DecordSource"),
}

Decoder = Literal["auto", "pyav", "decord"]


def registered_kind(source: str | os.PathLike[str]) -> str:
    """Return the kind that a source's text names: one of `SOURCES`, or a scheme that nothing here reads."""
    text = os.fspath(source)
    prefix = text.partition(":")[0]
    return prefix if ":" in text and prefix in SOURCES else kind_of(text)


def open_source(
    source: str | os.PathLike[str],
    decoder: Decoder = "auto",
    *,
    max_pixels: int | None = None,
    isolate: bool = False,
) -> Source:
    """Open a video.

    Args:
        source: path of a file, address of an object (`s3://`, `gs://`, `az://`), or a text of another kind of
            `SOURCES`.
        decoder: one of `DECODERS`. `pyav`, which is `auto`, reads whatever FFmpeg reads. `decord` reads ordinary
            files, gives the same frames, and leaves doubtful files to PyAV; its wheel carries an FFmpeg of 2021, so
            choose it only for files that you trust.
        max_pixels: the most that a frame may have, checked before it is decoded; None: 8K.
        isolate: read in a process of its own, which decodes ahead. If it crashes, hangs or takes too much memory, that
            is damage of the source and nothing worse (`protokv.video.isolated`).

    Raises:
        SourceNotFound: nothing is there.
        SourceUnreadable: no video can be read from it, or not by this decoder; or there is no such kind of source.
        ConfigError: there is no such decoder.
    """
    if decoder not in DECODERS:
        raise ConfigError(f"there is no decoder {decoder!r}", hint=f"use one of: {', '.join(DECODERS)}")
    if is_object(source):
        from protokv.video.objects import ObjectSource

        return ObjectSource(os.fspath(source), decoder, max_pixels, isolate)
    _check_slashes(os.fspath(source))
    kind = registered_kind(source)
    if kind not in SOURCES:
        raise SourceUnreadable(
            f"{kind}: is no kind of source that can be read", hint=f"kinds of source: {', '.join(SOURCES)}"
        )
    if isolate:
        from protokv.video.isolated import IsolatedSource

        return IsolatedSource(source, decoder=decoder, max_pixels=max_pixels)
    module, name = SOURCES[kind]
    opened: Source = getattr(import_module(module), name)(source, decoder, max_pixels)
    return opened


def _check_slashes(source: str) -> None:
    """Refuse an address that lacks a slash, which FFmpeg would guess. SourceNotFound."""
    scheme, colon, rest = source.partition(":")
    if colon and scheme.lower() in NETWORK and not rest.startswith("//"):
        raise SourceNotFound(
            f"no video at {source}", hint=f"an address has two slashes: {scheme.lower()}://{rest.lstrip('/')}"
        )
