"""Files that grow: a recording that is still being written is watched as far as it goes, and on when there is more.

A file has grown if its beginning, as long as it was, has the fingerprint that it had. A state tells such a source by
its first `fingerprint` and `size_bytes` for good, so that its commits stay moments of one stream, and names the latest
under `grown`. What rewrites its beginning at the end (an MP4, whose index comes last) is another file by then. A step
that was short because the file ended there stays as it was filled. Knows no sessions and no states.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

from protokv.video import SourceInfo
from protokv.video.fingerprint import fingerprint


class _HasInfo(Protocol):
    @property
    def info(self) -> SourceInfo: ...


class GrowingFile:
    """What is known of a source as a file; nothing grows where it is none.

    Args:
        source: that is watched.
        path: where it is; None of what is no file.
        followed: it is read on while it grows, so that its end is the end.
    """

    def __init__(self, source: _HasInfo, path: str | os.PathLike[str] | None, *, followed: bool = False) -> None:
        self._followed = followed
        info = source.info
        self._info = {"fingerprint": info.fingerprint, "size_bytes": info.size_bytes}
        self._path = Path(path) if path is not None and info.kind == "file" else None

    def has_grown_from(self, record: Mapping[str, Any]) -> bool:
        """Whether the file is what a state has on record, and more behind it."""
        now = self._info["size_bytes"]
        return self._path is not None and type(now) is int and has_grown_from(self._path, now, record)

    def grows(self) -> bool:
        """Whether there is more of the file by now than when it was opened."""
        if self._followed:
            return False
        try:
            return self._path is not None and self._path.stat().st_size != self._info["size_bytes"]
        except OSError:
            return False

    def record(self, before: Mapping[str, Any]) -> dict[str, Any]:
        """What tells the file from others, to put on record after `before`."""
        if not before or (_latest(before).get("fingerprint") == self._info["fingerprint"] and "grown" not in before):
            return dict(self._info)
        first = {name: before.get(name) for name in self._info}
        return {**first, "grown": dict(self._info)}


def has_grown_from(path: Path, now: int, record: Mapping[str, Any]) -> bool:
    """Whether a file of `now` bytes is what a state has on record, and more behind it."""
    known = _latest(record)
    size = known.get("size_bytes")
    return type(size) is int and 0 < size < now and fingerprint(path, size) == known.get("fingerprint")


def watched_fingerprint(record: Mapping[str, Any]) -> object:
    """Of a source as it was when it was last watched; None of what has none."""
    return _latest(record).get("fingerprint")


def _latest(record: Mapping[str, Any]) -> Mapping[str, Any]:
    grown = record.get("grown")
    return grown if isinstance(grown, dict) else record
