"""The videos that the page may show: those that a state has watched, in folders that the server was given.

A state is untrusted and could name any file. A file is shown only if its name in the state is a bare name, it lies in
one of the folders with links resolved, its content has the fingerprint in the state, and it opens as a video.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from protokv.errors import SourceNotFound
from protokv.state.original import Original, find_originals
from protokv.state.snapshot import Header
from protokv.state.watched import fingerprints
from protokv.video import open_source

# What browsers call a container; they try others by their content.
_TYPES = {"mov": "video/mp4", "matroska": "video/webm", "ogg": "video/ogg", "avi": "video/x-msvideo"}

HINT = "name the folder of the videos with --videos"


class Video(NamedTuple):
    """A video that may be shown: the file and its stream times, its media type, and which file it is."""

    original: Original
    media_type: str
    version: tuple[int, ...]

    def open(self) -> int:
        """Return a descriptor of the file. SourceNotFound if another one, or a link, has its name by now."""
        try:
            # A pipe would be waited for.
            number = os.open(self.original.path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0))
        except OSError:
            raise SourceNotFound(f"{self.original.path.name} cannot be read", hint=HINT) from None
        if _version(os.fstat(number)) != self.version:
            os.close(number)
            raise SourceNotFound(f"{self.original.path.name} has changed", hint=HINT)
        return number


class Footage:
    """Finds the videos of states. One that does not change is looked into once."""

    def __init__(self, folders: Sequence[Path]) -> None:
        """Read nothing yet."""
        self._folders = [folder.resolve() for folder in folders]
        # Of each state: what its videos were found by, and the videos.
        self._known: dict[Path, tuple[object, list[Video]]] = {}

    def find(self, header: Header, below: Path) -> list[Video]:
        """Return the videos of a state that stands at `below` in its own folder, in the order of the stream.

        Raises:
            SourceError, StateMismatch: one is not at hand, has changed, or is no video.
        """
        if not self._folders:
            raise SourceNotFound("the server has no folder of videos", hint=HINT)
        asked = fingerprints(header), header.clock.stream_time_s
        known = self._known.get(below)
        if known is None or known[0] != asked or any(_version_at(one.original.path) != one.version for one in known[1]):
            places = [place for folder in self._folders for place in (folder / below.parent, folder)]
            originals = find_originals(header, [one for one in dict.fromkeys(places) if one.is_dir()], HINT)
            known = self._known[below] = asked, [self._look_into(one) for one in originals]
        return known[1]

    def _look_into(self, original: Original) -> Video:
        version = _version_at(original.path)
        if version is None or not any(original.path.resolve().is_relative_to(one) for one in self._folders):
            raise SourceNotFound(f"{original.path.name} is a link that leads elsewhere", hint=HINT)
        with open_source(original.path, isolate=True) as source:
            return Video(original, _TYPES.get(source.info.container, "application/octet-stream"), version)


def _version_at(path: Path) -> tuple[int, ...] | None:
    try:
        return _version(path.stat())
    except OSError:
        return None


def _version(status: os.stat_result) -> tuple[int, ...]:
    """Return a value that is of one file alone; a name, a size and a time of change can be made the same."""
    return status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns
