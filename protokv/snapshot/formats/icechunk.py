"""A state in an object store: an Icechunk repository whose main branch holds the hierarchy that `.zarr` has.

A commit is one transaction: chunks that changed are uploaded under names that nothing refers to yet, and one
conditional update of the branch puts them in place. Whoever commits says on top of which snapshot, the one that it
found when it began or its own last one, and is refused if there is another by then: so there is one writer at a time
without a lock. A kept commit is a branch of its own; what no branch holds is collected. What is read is held against
our own digests, as in every form; what Icechunk itself unpacks is bounded before (`unfolding`).

Icechunk: https://icechunk.io
"""

from __future__ import annotations

import os
import secrets
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import contextmanager, suppress
from datetime import UTC, datetime
from functools import partial
from typing import Any, Self, TypeVar

from icechunk import ConflictError, IcechunkError, IcechunkStore, Repository, Session
from zarr.core.sync import sync

from protokv.errors import StateError, StateLocked
from protokv.object_store.repository import EMPTY, GRACE, MAIN, collect, explained, make_repository, open_repository
from protokv.object_store.unfolding import Unfolding
from protokv.snapshot.document import not_found, not_ours, reading
from protokv.snapshot.form import Form, StatePath, Stored, settled
from protokv.snapshot.formats.hierarchy import ROOT, Hierarchy, write_state
from protokv.state import Header, State

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
        self._headers: dict[str, Header] = {}

    def check_target(self) -> None:
        """Whether the store answers and holds nothing else there; the first commit shows if it may be written to."""
        with self._asking("write"):
            if (repo := open_repository(self._address)) is not None:
                self._check_ours(repo)

    def __enter__(self) -> Self:
        """Open the repository, or make it, and remember what is its newest snapshot."""
        with self._asking("write"):
            if (repo := make_repository(self._address)) is None:
                raise not_ours(self._address)
            self._repo = repo
            self._base = self._check_ours(repo)
        self.locked = True
        return self

    def __exit__(self, *_: Any) -> None:
        """Nothing is held."""
        self.locked, self._repo = False, None

    def replace(self, state: State) -> None:
        """Upload what changed, and put it in place unless somebody else was first."""
        with self._asking("write"):
            session = self._taken.writable_session(MAIN)
            if session.snapshot_id != self._base:
                raise self._lost()
            there = Hierarchy(session.store, partial(_sizes, session.store)).digests if self._base != EMPTY else {}
            now = write_state(state, session.store, _SEPARATOR, there)
            # Arrays and groups that are no more. Chunks that an array no longer has go with its metadata.
            for key in sorted(there.keys() - now.keys()):
                if key.endswith(f"/{ROOT}"):
                    sync(session.store.delete_dir(key.removesuffix(f"/{ROOT}")))
            if session.has_uncommitted_changes:
                self._base = self._commit(self._taken, session, f"{state.clock.stream_time_s:g} s")
                self._unfolding.made(self._base)
            if self._collected is None or datetime.now(UTC) - self._collected >= GRACE:
                # The new state is in place; who may write but not delete goes without.
                with suppress(IcechunkError, StateError):
                    collect(self._taken, self._unfolding)
                self._collected = datetime.now(UTC)

    def look(self, at: str | None, read: Callable[[Stored], T]) -> T:
        """What `read` makes of a snapshot; where None, of the tip of the main branch."""
        with self._asking("read"):
            if (repo := self._repo or open_repository(self._address)) is None:
                raise not_found(self._address)

            def newest() -> str:
                if (tip := repo.lookup_branch(MAIN)) == EMPTY:
                    raise not_found(self._address)
                return at or tip

            return settled(self._address, newest, lambda snapshot: read(self._stored(repo, snapshot)))

    def kept(self) -> Iterator[tuple[str, Header]]:
        """What the branches of kept commits hold."""
        with self._asking("read"):
            repo = self._repo or open_repository(self._address)
            for name in sorted(repo.list_branches() if repo is not None else ()):
                if name.startswith(_KEPT):
                    at = name.removeprefix(_KEPT)
                    with suppress(StateError):
                        self._headers[at] = self._headers.get(at) or self.read_header(at)
                        yield at, self._headers[at]

    def keep(self, header: Header) -> None:
        """Make a branch of what is the base of the next commit."""
        with self._asking("write"):
            try:
                self._taken.create_branch(_KEPT + self._base, self._base)
            except IcechunkError:
                # A commit that failed has made it already, or it cannot be made; who may write need not list.
                if self._taken.lookup_branch(_KEPT + self._base) != self._base:
                    raise
        self._headers[self._base] = header

    def retire(self, at: str) -> None:
        """Delete the branch; what it held is collected later."""
        with suppress(IcechunkError):
            self._taken.delete_branch(_KEPT + at)

    @property
    def _taken(self) -> Repository:
        assert self._repo is not None, "the right to write is taken before"
        return self._repo

    @contextmanager
    def _asking(self, doing: str) -> Iterator[None]:
        with reading(self._address), explained(self._address, doing):
            yield

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
        if (tip := repo.lookup_branch(MAIN)) != EMPTY:
            self._unfolding.check_snapshot(tip)
            self._unfolding.check_manifests(repo.lookup_snapshot(tip))
            try:
                self._stored(repo, tip)
            except StateError as error:
                raise not_ours(self._address) from error
        return tip

    def _lost(self) -> StateLocked:
        return StateLocked(
            f"the state {self._address} was committed to by another writer meanwhile",
            hint="nothing of it is overwritten; go on from what is there now, or write elsewhere",
        )


def _sizes(store: IcechunkStore, keys: Iterable[str]) -> dict[str, int]:
    """Bytes by key, 0 for what is not there or cannot be. A session knows them without asking the store."""

    async def sizes() -> dict[str, int]:
        found = dict.fromkeys(keys, 0)
        for key in found:
            with suppress(KeyError, ValueError):
                found[key] = await store.getsize(key)
        return found

    return sync(sizes())
