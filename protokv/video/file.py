"""Video files: check a path before a decoder sees it, open it with a decoder, and identify its content."""

from __future__ import annotations

import os
import stat
from importlib import import_module
from pathlib import Path

from protokv.errors import SourceNotFound, SourceUnreadable
from protokv.video.container import MAX_PIXELS
from protokv.video.fingerprint import fingerprint
from protokv.video.probe import probe
from protokv.video.registry import DECODERS
from protokv.video.source import Source


def fingerprint_of(source: str) -> str | None:
    """The fingerprint that `open_source` would give a source, without opening it; None of one that has none.

    Raises:
        SourceError: it is not there, or cannot be read.
    """
    from protokv.object_store import fingerprint as of_object
    from protokv.object_store import is_object
    from protokv.video.registry import registered_kind

    if is_object(source):
        return of_object(source)
    if registered_kind(source) != "file":
        return None
    check_is_file(Path(source))
    return fingerprint(Path(source))


def open_file(path: str | os.PathLike[str], decoder: str, max_pixels: int | None) -> Source:
    """Open a file with a decoder of `DECODERS`. Raises as `open_source`."""
    path = Path(path)
    check_is_file(path)
    module, name = DECODERS[decoder]
    source: Source = getattr(import_module(module), name)(probe(path, max_pixels or MAX_PIXELS))
    return source


def _address(path: Path) -> str:
    """What to do about an address that a slash is missing from; empty for every other path."""
    scheme, colon, rest = os.fspath(path).partition(":/")
    if not (colon and scheme.isalnum() and len(scheme) > 1):
        return ""
    if scheme == "file":
        return f"write the path itself: /{rest.lstrip('/')}"
    return f"for an address write two slashes: {scheme}://{rest.lstrip('/')}"


def check_is_file(path: Path) -> None:
    """Refuse what is no readable file. SourceNotFound, SourceUnreadable."""
    try:
        status = path.stat()
    except (FileNotFoundError, NotADirectoryError):
        raise SourceNotFound(f"no video at {path}", hint=_address(path) or "check the spelling of the path") from None
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
