"""`StateReader`: the way in to a saved state, for whoever shows it or asks it.

`StateReader.open` reads the header alone, and the rest is read when it is first used. A kept commit
counts only if its header says that it is an earlier moment of the same stream: same model, memory,
rate and sources.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property

from protokv.errors import StateError, StateNotFound
from protokv.state.forms import StoredState
from protokv.state.header import State, StateHeader
from protokv.state.sources import WallClockLog, is_earlier_state, list_state_sources
from protokv.state.store import StatePath, StateStore, find_store
from protokv.state.thumbnails import Thumbnail, Thumbnails
from protokv.words.transcript import Transcript

_ROUNDING_S = 5e-4  # names of kept commits are rounded to milliseconds


@dataclass(frozen=True)
class StateReader:
    """One commit of a state. What is read from the path raises as `load_state`.

    A commit that comes meanwhile may be newer than `header`; what `state` holds is one commit.
    """

    path: StatePath
    header: StateHeader  # header of the current commit
    file_bytes: int  # stored, without kept commits
    # `state` is the newest kept commit not after this stream time; None: the last
    at_s: float | None = None
    verify: bool = True  # whether the digests of the tensors are checked

    @classmethod
    def open(
        cls, path: StatePath, *, at_s: float | None = None, verify: bool = True
    ) -> StateReader:
        """Read and verify the header of a state; arguments as the attributes. Raises as
        `load_state`.
        """
        header, nbytes = find_store(path, to_read=True).read_header()
        return cls(path, header, nbytes, at_s, verify)

    def at(self, at_s: float | None) -> StateReader:
        """Return the reader of the newest kept commit not after this stream time; nothing is read
        yet.
        """
        return replace(self, at_s=at_s)

    @property
    def _store(self) -> StateStore:
        return find_store(self.path, to_read=True)

    @cached_property
    def wall_clocks(self) -> list[WallClockLog]:
        """The log of each live source, in order; empty for files. StateCorrupt if one makes no
        sense.
        """
        return [
            found
            for one in list_state_sources(self.header)
            if (found := WallClockLog.read(one)) is not None
        ]

    @cached_property
    def commits_s(self) -> list[float]:
        """The stream times that `at` can read, in seconds, ascending; the last is the current
        commit's.
        """
        return [time_s for time_s, _ in _list_commits(self._store)]

    @cached_property
    def place(self) -> str | None:
        """Where the kept commit at `at_s` lies; None: it is the current one, at `path`."""
        if self.at_s is None:
            return None
        return _find_commit(self._store, self.at_s)

    @property
    def stored_bytes(self) -> int:
        """Of the commit at `at_s`, on disk."""
        return self._store.read_header(self.place)[1]

    @cached_property
    def state(self) -> State:
        """The header and the tensors of the commit at `at_s`, on the CPU."""
        return load_state(self.path, verify=self.verify, at_s=self.at_s)

    @cached_property
    def transcript(self) -> Transcript:
        """What was said, as the commit at `at_s` knows it."""
        return Transcript.of(self.state.tensors)


def load_state(path: StatePath, *, verify: bool = True, at_s: float | None = None) -> State:
    """Read a state; its tensors are on the CPU. Arguments as `load`.

    Raises:
        StateNotFound: nothing is there, or nothing at or before `at_s`; the message names the first
            commit.
        StateMismatch: a newer version wrote it.
        StateCorrupt: the state is damaged or hostile; names the tensor or field if possible.
        StateError: it cannot be read.
    """

    def read(stored: StoredState) -> State:
        return State(**vars(stored.header), tensors=stored.read(verify))

    store = find_store(path, to_read=True)
    if at_s is None:
        return store.look(read)
    state = store.look(read, _find_commit(store, at_s))
    if state.clock.stream_time_s > at_s + _ROUNDING_S:
        raise StateError(f"{path} was replaced meanwhile", hint="try again")
    return state


def _find_commit(store: StateStore, at_s: float) -> str | None:
    """Return where the newest commit not after a stream time lies; None: it is the current one.
    StateNotFound: there is none; the message names the first.
    """
    commits = _list_commits(store)
    fit = [at for time_s, at in commits if time_s <= at_s + _ROUNDING_S]
    if not fit:
        raise StateNotFound(
            f"{store.path} has no commit at or before {at_s:g} s; the first of {len(commits)} is "
            f"at {commits[0][0]:g} s",
            hint="`protokv ingest --every 30s --keep 20` keeps earlier commits",
        )
    return fit[-1]


def read_thumbnails(path: StatePath) -> tuple[StateHeader, list[Thumbnail]]:
    """Read the header and the small pictures of a state, and no other tensor. Raises as
    `load_state`.
    """

    def read(stored: StoredState) -> tuple[StateHeader, list[Thumbnail]]:
        found = Thumbnails.read(stored.read(names=[spec.name for spec in Thumbnails.declare()]))
        return stored.header, found.all() if found else []

    return find_store(path, to_read=True).look(read)


def _list_commits(store: StateStore) -> list[tuple[float, str | None]]:
    """Return stream time and place of the kept commits and of the current state (place None),
    ascending.
    """
    # Read this first: a commit that comes in between is later than this one.
    now, _ = store.read_header()
    past = [
        (header.clock.stream_time_s, at)
        for at, header in store.list_kept()
        if is_earlier_state(header, now)
    ]
    return [*sorted(past), (now.clock.stream_time_s, None)]
