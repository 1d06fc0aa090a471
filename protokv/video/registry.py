"""`open_source`: every kind of source, and the decoders of files.

A kind of source that lives in another package registers its scheme (`name` in `name://...`) as an entry point of the
group `protokv.sources`: a function `(address, max_pixels) -> Source`. No decoder is imported before it is needed.
"""

from __future__ import annotations

import os
from functools import partial
from importlib.metadata import entry_points
from pathlib import Path
from typing import Final, Literal, get_args

from protokv.errors import ConfigError, SourceUnreadable, suggest_name
from protokv.video import bucket
from protokv.video.address import STREAMED, source_kind
from protokv.video.file import check_is_file, fingerprint
from protokv.video.source import Source

GROUP: Final = "protokv.sources"

Decoder = Literal["auto", "pyav", "decord"]


def open_source(source: str | os.PathLike[str], decoder: Decoder = "auto", *, max_pixels: int | None = None) -> Source:
    """Open a video.

    Args:
        source: path of a file, address of an object (`s3://`, `gs://`, `az://`), or an address of another kind
            (`protokv.video.address.STREAMED`, `GROUP`).
        decoder: of a file. `pyav`, which is `auto`, reads whatever FFmpeg reads. `decord` reads ordinary files, gives
            the same frames, and leaves doubtful files to PyAV; its wheel carries an FFmpeg of 2021, so choose it only
            for files that you trust.
        max_pixels: the most that a frame may have, checked before it is decoded; None: 8K.

    Raises:
        SourceNotFound: nothing is there.
        SourceUnreadable: no video can be read from it, or not by this decoder; or there is no such kind of source.
        ConfigError: there is no such decoder.
    """
    if decoder not in get_args(Decoder):
        raise ConfigError(f"there is no decoder {decoder!r}", hint=suggest_name(decoder, get_args(Decoder)))
    text = os.fspath(source)
    kind = source_kind(text)
    if kind == "file":
        return _open_file(Path(source), decoder, max_pixels)
    if bucket.is_object(text):
        from protokv.video.object_source import ObjectSource

        return ObjectSource(text, partial(_open_file, decoder=decoder, max_pixels=max_pixels))
    if kind in STREAMED:
        from protokv.video.stream import StreamSource

        return StreamSource(text, max_pixels)
    others = entry_points(group=GROUP)
    if kind not in others.names:
        known = ", ".join(("file", *STREAMED, *sorted(others.names)))
        raise SourceUnreadable(f"{kind}: is no kind of source that can be read", hint=f"kinds of source: {known}")
    found: Source = others[kind].load()(text, max_pixels)
    return found


def _open_file(path: Path, decoder: Decoder, max_pixels: int | None) -> Source:
    check_is_file(path)
    if decoder == "decord":
        from protokv.video.decord_source import DecordSource

        return DecordSource(path, max_pixels)
    from protokv.video.pyav_source import PyAVSource

    return PyAVSource(path, max_pixels)


def fingerprint_source(source: str) -> str | None:
    """Return the fingerprint of a source without opening it; None for a source that has none.

    Raises:
        SourceError: it is not there, or cannot be read.
    """
    if bucket.is_object(source):
        return bucket.fingerprint_object(source)
    if source_kind(source) != "file":
        return None
    check_is_file(Path(source))
    return fingerprint(Path(source))
