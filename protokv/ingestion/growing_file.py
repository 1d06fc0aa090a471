"""Growing files: a recording that is still being written is watched to its present end, and on when there is more.

A file has grown if its beginning, at the old length, still has the old fingerprint. A state keeps the first
`fingerprint` and `size_bytes` of such a source, so that its commits stay moments of one stream, and the latest ones
under `grown`. An MP4, whose index comes last, is another file once it is finished. A short step at the old end keeps
the repeats of its last frame. Knows no sessions and no states.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from protokv.video import SourceInfo
from protokv.video.file import fingerprint


class GrowingFile:
    """The fingerprint and size of a source, and whether its file grows; a source that is no file never does.

    Args:
        info: of the source that is watched.
        path: where it is; None if it is no file.
        followed: it is read on while it grows, so its end is final.
    """

    def __init__(self, info: SourceInfo, path: str | os.PathLike[str] | None, *, followed: bool = False) -> None:
        self._followed = followed
        self._info = {"fingerprint": info.fingerprint, "size_bytes": info.size_bytes}
        self._path = Path(path) if path is not None and info.kind == "file" else None

    def has_grown_from(self, record: Mapping[str, Any]) -> bool:
        """Return True if the file begins with the file on record and is longer."""
        now = self._info["size_bytes"]
        return self._path is not None and type(now) is int and has_grown_from(self._path, now, record)

    def grows(self) -> bool:
        """Return True if the file has changed its size since it was opened."""
        if self._followed:
            return False
        try:
            return self._path is not None and self._path.stat().st_size != self._info["size_bytes"]
        except OSError:
            return False

    def record(self, before: Mapping[str, Any]) -> dict[str, Any]:
        """Return the file's identity for the record that follows `before`."""
        if not before or (_latest(before).get("fingerprint") == self._info["fingerprint"] and "grown" not in before):
            return dict(self._info)
        first = {name: before.get(name) for name in self._info}
        return {**first, "grown": dict(self._info)}


def has_grown_from(path: Path, now: int, record: Mapping[str, Any]) -> bool:
    """Return True if a file of `now` bytes begins with the file on record and is longer."""
    known = _latest(record)
    size = known.get("size_bytes")
    return type(size) is int and 0 < size < now and fingerprint(path, size) == known.get("fingerprint")


def watched_fingerprint(record: Mapping[str, Any]) -> object:
    """Return the fingerprint that a source had when it was last watched; None if it has none."""
    return _latest(record).get("fingerprint")


def _latest(record: Mapping[str, Any]) -> Mapping[str, Any]:
    grown = record.get("grown")
    return grown if isinstance(grown, dict) else record
