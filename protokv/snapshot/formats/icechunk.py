"""A state in an object store: an Icechunk repository whose main branch holds the hierarchy that `.zarr` has.

A commit is one transaction: chunks that changed are uploaded under names that nothing refers to yet, and one
conditional update of the branch puts them in place. Whoever commits says on top of which snapshot, the one that it
found when it began or its own last one, and is refused if there is another by then: so there is one writer at a time
without a lock. A kept commit is a branch of its own; what no branch holds is collected (`repository.collect`). What is
read is held against our own digests, as in every form. What Icechunk itself unpacks is bounded before (`unfolding`).

Icechunk: https://icechunk.io
"""

from __future__ import annotations

import os
import secrets
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import suppress
from datetime import UTC, datetime
from functools import partial
from typing import Any, Self, TypeVar

from icechunk import ConflictError, IcechunkError, IcechunkStore, Repository, Session
from zarr.core.sync import sync

from protokv.errors import StateError, StateLocked
from protokv.snapshot.document import not_found
from protokv.snapshot.form import Form, StatePath, Stored, settled
from protokv.snapshot.formats.hierarchy import ROOT, Hierarchy, write_state
from protokv.snapshot.formats.repository import EMPTY, GRACE, MAIN, collect, explained, make_repository, open_repository
from protokv.snapshot.formats.unfolding import Unfolding
from protokv.snapshot.schema import Header, State

T = TypeVar("T")

# Metadata of a commit by which its writer knows it again.
_MARK = "mark"

# A branch of this name holds the kept commit of this id.
_KEPT = "kept-"

# Icechunk takes no other between the numbers of a chunk.
_SEPARATOR = "/"


class IcechunkForm(Form):
    """A state at an address `s3://`, `gs://` or `az://`."""

    def __init__(self, path: StatePath) -> None:
        super().__init__(path)
        self._address = os.fspath(path)
        self._repo: Repository | None = None
        self._unfolding = Unfolding(self._address)
        self._base = ""
        self._collected: datetime | None = None
        # Headers of kept commits do not change.
        self._headers: dict[str, Header | None] = {}

    def check_target(self) -> None:
        """Whether the store answers and holds nothing else there; the first commit shows if it may be written to."""
        with explained(self._address, "write"):
            if (repo := open_repository(self._address)) is not None:
                self._check_ours(repo)

    def __enter__(self) -> Self:
        """Open the repository, or make it, and remember what is its newest snapshot."""
        with explained(self._address, "write"):
            self._repo = make_repository(self._address)
            self._base = self._check_ours(self._repo)
        self.locked = True
        return self

    def __exit__(self, *_: Any) -> None:
        """Nothing is held."""
        self.locked, self._repo = False, None

    def replace(self, state: State) -> None:
        """Upload what changed, and put it in place unless somebody else was first."""
        assert self._repo is not None, "the right to write is taken before"
        with explained(self._address, "write"):
            session = self._repo.writable_session(MAIN)
            if session.snapshot_id != self._base:
                raise self._lost()
            there: Mapping[str, str] = {}
            with suppress(StateError):
                there = Hierarchy(session.store, partial(_sizes, session.store)).digests
            now = write_state(state, session.store, _SEPARATOR, there)
            # Arrays and groups that are no more. Chunks that an array no longer has go with its metadata.
            for folder in sorted(_folders(there) - _folders(now)):
                sync(session.store.delete_dir(folder))
            if session.has_uncommitted_changes:
                self._base = self._commit(self._repo, session, f"{state.clock.stream_time_s:g} s")
                self._unfolding.made(self._base)
            if self._collected is None or datetime.now(UTC) - self._collected >= GRACE:
                # The new state is in place; who may write but not delete goes without.
                with suppress(IcechunkError, StateError):
                    collect(self._repo, self._unfolding)
                self._collected = datetime.now(UTC)

    def look(self, at: str | None, read: Callable[[Stored], T]) -> T:
        """What `read` makes of a snapshot; where None, of the tip of the main branch."""
        with explained(self._address, "read"):
            if (repo := self._repo or open_repository(self._address)) is None:
                raise not_found(self._address)

            def newest() -> str:
                if (tip := repo.lookup_branch(MAIN)) == EMPTY:
                    raise not_found(self._address)
                return at or tip

            return settled(self._address, newest, lambda snapshot: read(self._stored(repo, snapshot)))

    def kept(self) -> Iterator[tuple[str, Header]]:
        """What the branches of kept commits hold."""
        with explained(self._address, "read"):
            repo = self._repo or open_repository(self._address)
            for name in sorted(repo.list_branches() if repo is not None else ()):
                if name.startswith(_KEPT):
                    at = name.removeprefix(_KEPT)
                    if at not in self._headers:
                        with suppress(StateError):
                            self._headers[at] = self.read_header(at)
                    if (header := self._headers.get(at)) is not None:
                        yield at, header

    def keep(self, header: Header) -> None:
        """Make a branch of what is the base of the next commit."""
        assert self._repo is not None, "the right to write is taken before"
        with explained(self._address, "write"):
            try:
                self._repo.create_branch(_KEPT + self._base, self._base)
            except IcechunkError:
                # A commit that failed has made it already, or it cannot be made.
                if self._repo.lookup_branch(_KEPT + self._base) != self._base:
                    raise
        self._headers[self._base] = header

    def retire(self, at: str) -> None:
        """Delete the branch; what it held is collected later."""
        with suppress(IcechunkError):
            assert self._repo is not None, "the right to write is taken before"
            self._repo.delete_branch(_KEPT + at)

    def _stored(self, repo: Repository, snapshot: str) -> Stored:
        """A snapshot; what is larger than it may be is not unfolded."""
        self._unfolding.check_snapshot(snapshot)
        store = repo.readonly_session(snapshot_id=snapshot).store

        def sizes(keys: Collection[str]) -> dict[str, int]:
            if set(keys) != {ROOT}:
                self._unfolding.check_manifests(repo.lookup_snapshot(snapshot))
            return _sizes(store, keys)

        return Hierarchy(store, sizes)

    def _commit(self, repo: Repository, session: Session, message: str) -> str:
        mark = secrets.token_hex(8)
        try:
            return session.commit(message, metadata={_MARK: mark})
        except (ConflictError, IcechunkError) as error:
            # The store may have taken a commit whose answer was lost; asked again, it refuses it.
            tip = repo.lookup_branch(MAIN)
            self._unfolding.check_snapshot(tip)
            if repo.lookup_snapshot(tip).metadata.get(_MARK) == mark:
                return tip
            if isinstance(error, ConflictError):
                raise self._lost() from error
            raise

    def _check_ours(self, repo: Repository) -> str:
        """The newest snapshot, StateError if it is no state; nothing at all is as good as one."""
        tip = repo.lookup_branch(MAIN)
        try:
            if tip != EMPTY:
                self._stored(repo, tip)
        except StateError as error:
            raise StateError(
                f"cannot write the state {self._address}: what is there is no state of ours",
                hint="Remove it, or choose another name.",
            ) from error
        return tip

    def _lost(self) -> StateLocked:
        return StateLocked(
            f"the state {self._address} was committed to by another writer meanwhile",
            hint="nothing of it is overwritten; go on from what is there now, or write elsewhere",
        )


def _sizes(store: IcechunkStore, keys: Iterable[str]) -> dict[str, int]:
    """Bytes by key, 0 for what is not there or cannot be. A session knows them without asking the store."""

    async def size(key: str) -> int:
        try:
            return await store.getsize(key)
        except (KeyError, ValueError):
            return 0

    async def each() -> dict[str, int]:
        return {key: await size(key) for key in keys}

    return sync(each())


def _folders(keys: Iterable[str]) -> set[str]:
    """Where the arrays and groups of these keys are."""
    return {key.removesuffix(f"/{ROOT}") for key in keys if key.endswith(f"/{ROOT}")}
