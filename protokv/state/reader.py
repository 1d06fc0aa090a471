"""`Reader`: the front door to a saved state, for whoever shows it or asks it.

`Reader.open` reads the header alone. The rest is read when it is first used: the tensors (`state`), the small pictures
and what was said. `session` makes a session of it, which answers questions.
"""

from __future__ import annotations

import os
from functools import cached_property
from pathlib import Path
from typing import Any

from protokv.core.backbone import Backbone
from protokv.core.session import Session
from protokv.memories import MemoryConfig
from protokv.state.api import load_state, moments, read_header, read_thumbnails, stored_bytes
from protokv.state.checkpoint import admit, config_of, from_state, load_backbone_of
from protokv.state.form import StatePath
from protokv.state.snapshot import Header, State
from protokv.state.thumbnails import Thumbnail
from protokv.state.watched import WallClockLog, records_of, sources_of
from protokv.timings import Timings, stage
from protokv.words.transcript import Transcript


class Reader:
    """One commit of a state.

    Every property that is read from the path raises a `StateError`: `StateNotFound` if nothing is there any more,
    `StateCorrupt` if it is damaged. A commit that comes meanwhile may be newer than `header`; what `state` and
    `session` hold is one commit.

    Attributes:
        path: where the state is.
        header: of the current commit.
        at_s: `state` and `session` are the newest kept commit not after this stream time, in seconds; None: the last.
        verify: whether the digests of the tensors are checked.
    """

    def __init__(self, path: StatePath, header: Header, *, at_s: float | None = None, verify: bool = True) -> None:
        self.path, self.header, self.at_s, self.verify = path, header, at_s, verify

    @classmethod
    def open(cls, path: StatePath, *, at_s: float | None = None, verify: bool = True) -> Reader:
        """Read and verify the header of a state; arguments as the attributes.

        Raises:
            StateNotFound: nothing is there.
            StateMismatch: a newer version wrote it.
            StateCorrupt: it is damaged or hostile; names the field if possible.
            StateError: it cannot be read.
        """
        return cls(path, read_header(path), at_s=at_s, verify=verify)

    def at(self, at_s: float | None) -> Reader:
        """Return the reader of the newest kept commit not after this stream time; nothing is read yet."""
        return Reader(self.path, self.header, at_s=at_s, verify=self.verify)

    @cached_property
    def config(self) -> MemoryConfig:
        """The settings of the memory. StateCorrupt if they make no sense."""
        return config_of(self.header)

    @property
    def model(self) -> str:
        """The name of the model that made it: a folder, a hub model or an embedded one; it leads nowhere by itself."""
        return self.header.backbone.name

    @cached_property
    def sources(self) -> list[dict[str, Any]]:
        """A plain JSON record of each watched source, in order (`sources_of`). StateCorrupt if they make no sense."""
        return sources_of(self.header)

    @cached_property
    def wall_clocks(self) -> list[WallClockLog]:
        """The log of each live source, in order; empty for files. StateCorrupt if one makes no sense."""
        return [found for one in records_of(self.header) if (found := WallClockLog.of(one)) is not None]

    @cached_property
    def commits_s(self) -> list[float]:
        """The stream times that `at` can read, in seconds, ascending; the last is the current commit's."""
        return moments(self.path)

    @cached_property
    def file_bytes(self) -> int:
        """The stored bytes, without kept commits."""
        return stored_bytes(self.path)

    @cached_property
    def committed_at(self) -> float | None:
        """When it was last committed, in seconds since 1970; None if the place does not tell."""
        try:
            return Path(os.fspath(self.path)).stat().st_mtime
        except (OSError, ValueError):
            return None

    @cached_property
    def state(self) -> State:
        """The header and the tensors of the commit at `at_s`, on the CPU; shapes are checked before memory is taken."""
        return load_state(self.path, verify=self.verify, at_s=self.at_s, admit=admit)

    def read_thumbnails(self) -> list[Thumbnail]:
        """Read the small pictures of the current commit, and no other tensor."""
        return read_thumbnails(self.path)[1]

    @cached_property
    def transcript(self) -> Transcript:
        """What was said, as the commit at `at_s` knows it."""
        self.state.clock.check()
        return Transcript.of(self.state.tensors)

    def load_backbone(self, name: str | None = None, revision: str | None = None, **placement: Any) -> Backbone:
        """Load the model that the caller names, or else the one that the state names: see `load_backbone_of`."""
        return load_backbone_of(self.header, name, revision, **placement)

    def session(
        self,
        backbone: Backbone | str | None = None,
        *,
        revision: str | None = None,
        timings: Timings | None = None,
        **placement: Any,
    ) -> Session:
        """Return a session of the commit at `at_s`; arguments as `protokv.load`.

        Raises:
            StateError: the state is missing, damaged, or made by another model.
            ModelError: the model cannot be loaded.
        """
        with stage(timings, "state"):
            state = self.state
        with stage(timings, "model"):
            if backbone is None or isinstance(backbone, str):
                backbone = load_backbone_of(state, backbone, revision, **placement)
        with stage(timings, "session"):
            return from_state(state, backbone)
