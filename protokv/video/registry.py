"""`open_source`: every kind of source, and the decoders of files. No decoder is imported before it is needed.

A kind of source that lives in another package registers its scheme (`name` in `name://...`) as an entry point of the
group `protokv.sources`: a function `(address, max_pixels) -> Source`.
"""

from __future__ import annotations

import os
import tempfile
from dataclasses import replace
from importlib.metadata import entry_points
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Literal, get_args

from protokv.errors import ConfigError, SourceError, SourceUnreadable, suggest_name
from protokv.video import bucket
from protokv.video.address import STREAMED, source_kind
from protokv.video.file import check_is_file, fingerprint
from protokv.video.source import Source

if TYPE_CHECKING:
    from protokv.video.av_source import AVSource

Decoder = Literal["auto", "pyav", "decord"]


def open_source(source: str | os.PathLike[str], decoder: Decoder = "auto", *, max_pixels: int | None = None) -> Source:
    """Open a video.

    Args:
        source: path of a file, address of an object (`s3://`, `gs://`, `az://`), or an address of another kind
            (`protokv.video.address.STREAMED`, or one of another package).
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
        return _open_object(text, decoder, max_pixels)
    if kind in STREAMED:
        from protokv.video.av_source import AVSource

        return AVSource(text, max_pixels)
    others = entry_points(group="protokv.sources")
    if kind not in others.names:
        known = ", ".join(("file", *STREAMED, *sorted(others.names)))
        raise SourceUnreadable(f"{kind}: is no kind of source that can be read", hint=f"kinds of source: {known}")
    found: Source = others[kind].load()(text, max_pixels)
    return found


def _open_file(path: Path, decoder: Decoder, max_pixels: int | None) -> AVSource:
    check_is_file(path)
    if decoder == "decord":
        from protokv.video.decord_source import DecordSource

        return DecordSource(path, max_pixels)
    from protokv.video.av_source import AVSource

    return AVSource(path, max_pixels)


def _open_object(address: str, decoder: Decoder, max_pixels: int | None) -> Source:
    """Open a copy, because decoders seek, and FFmpeg's own readers of stores do not know our credentials.

    The fingerprint comes from metadata of the store: it is known without a copy, and differs from that of the file.
    """
    folder = tempfile.TemporaryDirectory(prefix="protokv-", ignore_cleanup_errors=True)
    path = Path(folder.name, PurePosixPath(address).name or "video")
    try:
        digest = bucket.fetch(address, path)
        source = _open_file(path, decoder, max_pixels)
    except SourceError as error:
        folder.cleanup()
        raise type(error)(error.message.replace(str(path), address), hint=error.hint) from error
    except OSError as error:
        folder.cleanup()
        raise SourceUnreadable(
            f"cannot copy {address} to {path.parent}: {error.strerror or error}",
            hint="make room there, or name another folder with TMPDIR",
        ) from error
    source.info, source.copy = replace(source.info, kind=address.partition("://")[0], fingerprint=digest), folder
    return source


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
