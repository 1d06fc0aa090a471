"""`open_source`: every kind of source, the decoders of files, and what identifies a file. No
decoder is imported early.

A kind of source that lives in another package registers its scheme (`name` in `name://...`) as an
entry point of the group `protokv.sources`: a function `(address, max_pixels) -> Source`.
"""

from __future__ import annotations

import hashlib
import os
import stat
import tempfile
from dataclasses import replace
from importlib.metadata import entry_points
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Literal, get_args

from protokv import bucket
from protokv.errors import ConfigError, SourceError, SourceNotFound, SourceUnreadable, suggest_name
from protokv.video.address import NETWORK_SCHEMES, STREAMED_SOURCES, source_kind
from protokv.video.source import Source

if TYPE_CHECKING:
    from protokv.video.av_source import AVSource

Decoder = Literal["auto", "pyav", "decord"]

# At most 64 MiB are read, whatever the size: a fraction of a second.
_PIECES = 1024
_PIECE = 64 << 10


def open_source(
    source: str | os.PathLike[str], decoder: Decoder = "auto", *, max_pixels: int | None = None
) -> Source:
    """Open a video.

    Args:
        source: path of a file, address of an object (`s3://`, `gs://`, `az://`), or an address of
            another kind (`protokv.video.address.STREAMED_SOURCES`, or one of another package).
        decoder: of a file. `pyav`, which is `auto`, reads whatever FFmpeg reads. `decord` reads
            ordinary files, gives the same frames, and leaves doubtful files to PyAV; its wheel
            carries an FFmpeg of 2021, so choose it only for files that you trust.
        max_pixels: the most that a frame may have, checked before it is decoded; None: 8K.

    Raises:
        SourceNotFound: nothing is there.
        SourceUnreadable: no video can be read from it, or not by this decoder; or there is no such
            kind of source.
        ConfigError: there is no such decoder.
    """
    if decoder not in get_args(Decoder):
        raise ConfigError(
            f"there is no decoder {decoder!r}", hint=suggest_name(decoder, get_args(Decoder))
        )
    text = os.fspath(source)
    kind = source_kind(text)
    if kind == "file":
        return _open_file(Path(source), decoder, max_pixels)
    if bucket.in_bucket(text):
        return _open_object(text, decoder, max_pixels)
    if kind in STREAMED_SOURCES:
        from protokv.video.av_source import AVSource

        return AVSource(text, max_pixels)
    others = entry_points(group="protokv.sources")
    if kind not in others.names:
        known = ", ".join(("file", *STREAMED_SOURCES, *sorted(others.names)))
        raise SourceUnreadable(
            f"{kind}: is no kind of source that can be read", hint=f"kinds of source: {known}"
        )
    found: Source = others[kind].load()(text, max_pixels)
    return found


def _open_file(path: Path, decoder: Decoder, max_pixels: int | None) -> AVSource:
    _check_is_file(path)
    from protokv.video.av_source import AVSource

    kind: type[AVSource] = AVSource
    if decoder == "decord":
        from protokv.video.decord_source import DecordSource

        kind = DecordSource
    source = kind(path, max_pixels)
    source.info = replace(
        source.info, size_bytes=path.stat().st_size, fingerprint=fingerprint_video_file(path)
    )
    return source


def _open_object(address: str, decoder: Decoder, max_pixels: int | None) -> Source:
    """Open a copy, because decoders seek, and FFmpeg's own readers of stores do not know our
    credentials.

    The fingerprint comes from metadata of the store: it is known without a copy, and differs from
    that of the file.
    """
    folder = tempfile.TemporaryDirectory(prefix="protokv-", ignore_cleanup_errors=True)
    path = Path(folder.name, PurePosixPath(address).name or "video")
    try:
        digest = bucket.fetch_bucket_file(address, path)
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
    source.info = replace(source.info, kind=address.partition("://")[0], fingerprint=digest)
    source.copy = folder
    return source


def fingerprint_source(source: str) -> str | None:
    """Return the fingerprint of a source without opening it; None for a source that has none.

    SourceError: it is not there, or cannot be read.
    """
    if bucket.in_bucket(source):
        return bucket.fingerprint_bucket_video(source)
    if source_kind(source) != "file":
        return None
    _check_is_file(Path(source))
    return fingerprint_video_file(Path(source))


def _check_is_file(path: Path) -> None:
    """Refuse a path that is no file.

    SourceNotFound: nothing is there. SourceUnreadable: it is a folder or a device.
    """
    try:
        mode = path.stat().st_mode
    except (FileNotFoundError, NotADirectoryError):
        raise SourceNotFound(f"no video at {path}", hint=_advice(path)) from None
    except (OSError, ValueError) as error:
        raise SourceUnreadable(
            f"cannot read {path}: {getattr(error, 'strerror', None) or error}"
        ) from error
    if stat.S_ISDIR(mode):
        raise SourceUnreadable(
            f"expected a video file, {path} is a folder", hint="name one file in it"
        )
    if not stat.S_ISREG(mode):
        # Such as /dev/stdin, a named pipe, or <(...) of a shell.
        raise SourceUnreadable(
            f"expected a video file, {path} is not a regular file",
            hint=f"pipe it in: `... | protokv ingest -`, or `protokv ingest - < {path}`",
        )


def _advice(path: Path) -> str:
    """Return a hint for a missing path, which may be an address that lacks a slash."""
    scheme, colon, rest = os.fspath(path).partition(":")
    name = rest.lstrip("/")
    if scheme == "file":
        return f"write the path itself: /{name}"
    if scheme.lower() in NETWORK_SCHEMES or (
        colon and rest.startswith("/") and scheme.isalnum() and len(scheme) > 1
    ):
        return f"an address has two slashes: {scheme.lower()}://{name}"
    return "check the spelling of the path"


def fingerprint_video_file(path: Path) -> str:
    """Return the hex sha256 of size and content.

    A file of up to 64 MiB is hashed whole. Of a larger one, 1,024 pieces of 64 KiB are: the first,
    the last, and evenly spaced ones between them. A change of the size, or of a run of bytes longer
    than 1/1022 of the file, is seen; a shorter one may not be.
    """
    size = path.stat().st_size
    digest = hashlib.sha256(size.to_bytes(8, "little"))
    with path.open("rb") as file:
        if size <= _PIECES * _PIECE:
            return hashlib.file_digest(file, lambda: digest).hexdigest()
        for i in range(_PIECES):
            file.seek((size - _PIECE) * i // (_PIECES - 1))
            digest.update(file.read(_PIECE))
    return digest.hexdigest()
