"""Video files: check a path before a decoder sees it, and identify its content."""

from __future__ import annotations

import hashlib
import os
import stat
from pathlib import Path

from protokv.errors import SourceNotFound, SourceUnreadable
from protokv.video.address import NETWORK

# At most 64 MiB are read, whatever the size: a fraction of a second.
PIECES, PIECE = 1024, 64 << 10


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
    wrong = hint = ""
    if stat.S_ISDIR(status.st_mode):
        wrong, hint = "a folder", "name one file in it"
    elif not stat.S_ISREG(status.st_mode):
        # Such as /dev/stdin, a named pipe, or <(...) of a shell.
        wrong, hint = "not a regular file", f"pipe it in: `... | protokv ingest -`, or `protokv ingest - < {path}`"
    elif status.st_size == 0:
        wrong, hint = "empty", "copy or record it again"
    elif not os.access(path, os.R_OK):
        wrong, hint = "not to be read by this user", "change its permissions, or copy it"
    if wrong:
        raise SourceUnreadable(f"expected a video file, {path} is {wrong}", hint=hint)


def _advice(path: Path) -> str:
    """Return a hint for a missing path, which may be an address that lacks a slash."""
    scheme, colon, rest = os.fspath(path).partition(":")
    name = rest.lstrip("/")
    if scheme == "file":
        return f"write the path itself: /{name}"
    if scheme.lower() in NETWORK or (colon and rest.startswith("/") and scheme.isalnum() and len(scheme) > 1):
        return f"an address has two slashes: {scheme.lower()}://{name}"
    return "check the spelling of the path"


def fingerprint(path: Path, size: int | None = None) -> str:
    """Return the hex sha256 of size and content; of the first `size` bytes, if given, as of a file that ends there.

    A file of up to 64 MiB is hashed whole. Of a larger one, 1,024 pieces of 64 KiB are: the first, the last, and evenly
    spaced ones between them. A change of the size, or of a run of bytes longer than 1/1022 of the file, is seen; a
    shorter one may not be.
    """
    size = path.stat().st_size if size is None else size
    digest = hashlib.sha256(size.to_bytes(8, "little"))
    with path.open("rb") as file:
        if size <= PIECES * PIECE:
            for begin in range(0, size, 1 << 20):
                digest.update(file.read(min(size - begin, 1 << 20)))
            return digest.hexdigest()
        for i in range(PIECES):
            file.seek((size - PIECE) * i // (PIECES - 1))
            digest.update(file.read(PIECE))
    return digest.hexdigest()
