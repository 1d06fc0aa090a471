"""Video files: check a path before a decoder sees it, open it with a decoder, and identify its content."""

from __future__ import annotations

import os
import stat
from importlib import import_module
from pathlib import Path

from protokv import object_store
from protokv.errors import SourceNotFound, SourceUnreadable
from protokv.video.fingerprint import fingerprint
from protokv.video.registry import DECODERS, registered_kind
from protokv.video.source import Source


def open_file(path: str | os.PathLike[str], decoder: str, max_pixels: int | None) -> Source:
    """Open a file with a decoder of `DECODERS`. Raises as `open_source`."""
    from protokv.video.container import MAX_PIXELS
    from protokv.video.probe import probe

    path = Path(path)
    check_is_file(path)
    module, name = DECODERS[decoder]
    source: Source = getattr(import_module(module), name)(probe(path, max_pixels or MAX_PIXELS))
    return source


def fingerprint_of(source: str) -> str | None:
    """Return the fingerprint of a source without opening it; None for a source that has none.

    Raises:
        SourceError: it is not there, or cannot be read.
    """
    if object_store.is_object(source):
        return object_store.fingerprint(source)
    if registered_kind(source) != "file":
        return None
    check_is_file(Path(source))
    return fingerprint(Path(source))


def check_is_file(path: Path) -> None:
    """Refuse a path that is no readable file.

    Raises:
        SourceNotFound: nothing is there.
        SourceUnreadable: it is a folder or a device, empty, or not to be read by this user.
    """
    try:
        status = path.stat()
    except (FileNotFoundError, NotADirectoryError):
        raise SourceNotFound(f"no video at {path}", hint=_advice(path)) from None
    except (OSError, ValueError) as error:
        raise SourceUnreadable(f"cannot read {path}: {getattr(error, 'strerror', None) or error}") from error
    if stat.S_ISDIR(status.st_mode):
        raise SourceUnreadable(f"expected a video file, {path} is a folder", hint="name one file in it")
    if not stat.S_ISREG(status.st_mode):
        raise SourceUnreadable(f"expected a video file, {path} is not a regular file")
    if status.st_size == 0:
        raise SourceUnreadable(f"expected a video file, {path} is empty", hint="copy or record it again")
    if not os.access(path, os.R_OK):
        raise SourceUnreadable(f"no permission to read {path}", hint="change its permissions, or copy it")


def _advice(path: Path) -> str:
    """Say what to do about a missing path; it may be an address that lacks a slash."""
    scheme, colon, rest = os.fspath(path).partition(":/")
    if not (colon and scheme.isalnum() and len(scheme) > 1):
        return "check the spelling of the path"
    if scheme == "file":
        return f"write the path itself: /{rest.lstrip('/')}"
    return f"for an address write two slashes: {scheme}://{rest.lstrip('/')}"
