"""A state in an object store: an Icechunk repository whose main branch holds the hierarchy that `.zarr` has.

A commit is one transaction: chunks that changed are uploaded under names that nothing refers to yet, and one
conditional update of the branch puts them in place. Whoever commits says on top of which snapshot, the one that it
found when it began or its own last one, and is refused if there is another by then: so there is one writer at a time
without a lock. Every commit is a snapshot; which earlier ones are kept stands in its metadata, in the same transaction,
and what is not kept is collected once nobody can be reading it (`repository.collect`). What is read is held against our
own digests, as in every form. But Icechunk itself unpacks its snapshots and manifests, without a limit: one made for
that purpose takes 33 kB in the store and 1 GiB in memory. So load only from stores whose writers you trust that far.
Knows nothing of how tensors are laid out (`session_store`).

Icechunk: https://icechunk.io
"""

from __future__ import annotations

import os
import secrets
from contextlib import suppress
from datetime import UTC, datetime
from types import TracebackType
from typing import Any, Self

from icechunk import ConflictError, IcechunkError, IcechunkStore, Repository, Session, SnapshotInfo

from protokv.errors import StateCorrupt, StateError, StateLocked
from protokv.snapshot.document import not_found
from protokv.snapshot.formats.base import Committer, Form, StatePath
from protokv.snapshot.formats.repository import (
    GRACE,
    MAIN,
    PAST,
    collect,
    explained,
    make_repository,
    open_repository,
    past_of,
)
from protokv.snapshot.formats.session_store import read_header, read_state, state_bytes, write_state
from protokv.snapshot.history import in_order, is_before, newest_at
from protokv.snapshot.schema import Header, State

# A reader is overtaken by a writer, and what it reads collected, only once in a while.
_ATTEMPTS = 5

# Metadata of a commit by which its writer knows it again.
_MARK = "mark"


class IcechunkForm(Form):
    """A state at an address `s3://`, `gs://` or `az://`."""

    def check_target(self, path: StatePath) -> None:
        """Whether the store answers and holds nothing else there; the first commit shows if it may be written to."""
        address = os.fspath(path)
        with explained(address, "write"):
            repo = open_repository(address)
            tip = None if repo is None else _tip(repo)
            if repo is None or tip is None:
                return
            _check_ours(repo, tip, address)

    def committer(self, path: StatePath, keep: int | None = None) -> IcechunkCommitter:
        """The right to commit on top of what is there when it is entered."""
        return IcechunkCommitter(os.fspath(path), keep)

    def load(self, path: StatePath, *, verify: bool = True, at_s: float | None = None) -> State:
        """Read the tip of the main branch, or the newest kept commit that is not after `at_s`."""
        address = os.fspath(path)
        for _ in range(_ATTEMPTS):
            with explained(address, "read"):
                repo, tip = _standing(address)
                try:
                    chosen = tip.id if at_s is None else newest_at(_moments(repo, tip, address), at_s, address)
                    return read_state(_store(repo, chosen), address, verify=verify)
                except (IcechunkError, StateCorrupt):
                    if repo.lookup_branch(MAIN) == tip.id:
                        raise
        raise StateError(f"{address} is replaced faster than it can be read", hint="try again")

    def read_header(self, path: StatePath) -> Header:
        """Read and verify the header at the tip of the main branch."""
        address = os.fspath(path)
        with explained(address, "read"):
            repo, tip = _standing(address)
            return read_header(_store(repo, tip.id), address)

    def stored_bytes(self, path: StatePath) -> int:
        """Bytes of the tensors and of what names them at the tip of the main branch."""
        address = os.fspath(path)
        with explained(address, "read"):
            repo, tip = _standing(address)
            return _stored_bytes(repo, tip, address)

    def moments(self, path: StatePath) -> list[float]:
        """Stream times of the kept commits and of the tip, ascending."""
        address = os.fspath(path)
        with explained(address, "read"):
            return [time_s for time_s, _ in _moments(*_standing(address), address)]


class IcechunkCommitter(Committer):
    """Commits on top of the snapshot that it found, and of its own."""

    def __init__(self, address: str, keep: int | None) -> None:
        self._address, self._keep = address, keep
        self._repo: Repository | None = None
        self._base = ""
        self._collected: datetime | None = None
        # Headers of kept commits do not change.
        self._headers: dict[str, Header | None] = {}

    def __enter__(self) -> Self:
        """Open the repository, or make it, and remember what is its newest snapshot."""
        with explained(self._address, "write"):
            self._repo = make_repository(self._address)
            tip = self._repo.lookup_snapshot(self._repo.lookup_branch(MAIN))
            if tip.parent_id is not None:
                _check_ours(self._repo, tip, self._address)
            self._base = tip.id
        self.locked = True
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Nothing is held."""
        self.locked, self._repo = False, None

    def commit(self, state: State) -> int:
        """Upload what changed, and put it in place unless somebody else was first."""
        assert self._repo is not None, "a committer is entered before it commits"
        repo, mark = self._repo, secrets.token_hex(8)
        with explained(self._address, "write"):
            session = repo.writable_session(MAIN)
            if session.snapshot_id != self._base:
                raise self._lost()
            past = self._past(repo, state)
            write_state(session.store, state, self._address)
            if session.has_uncommitted_changes:
                metadata = {PAST: past, _MARK: mark}
                self._base = self._commit(repo, session, f"{state.clock.stream_time_s:g} s", metadata)
            self._collect(repo)
            return _stored_bytes(repo, repo.lookup_snapshot(self._base), self._address)

    def _commit(self, repo: Repository, session: Session, message: str, metadata: dict[str, Any]) -> str:
        try:
            return session.commit(message, metadata=metadata)
        except (ConflictError, IcechunkError) as error:
            # The store may have taken a commit whose answer was lost; asked again, it refuses it.
            tip = repo.lookup_snapshot(repo.lookup_branch(MAIN))
            if tip.metadata.get(_MARK) == metadata[_MARK]:
                return tip.id
            if isinstance(error, ConflictError):
                raise self._lost() from error
            raise

    def _past(self, repo: Repository, state: State) -> list[str]:
        """The ids of the commits to keep when this state is the newest, oldest first."""
        tip = repo.lookup_snapshot(self._base)
        if self._keep is None:
            return past_of(tip)
        found = []
        for one in [*past_of(tip), tip.id] if tip.parent_id is not None else []:
            if one not in self._headers:
                self._headers[one] = _header(repo, one, self._address)
            header = self._headers[one]
            if header is not None and is_before(header, state):
                found.append(one)
        return found[max(0, len(found) - self._keep + 1) :]

    def _collect(self, repo: Repository) -> None:
        now = datetime.now(UTC)
        if self._collected is not None and now - self._collected < GRACE:
            return
        # The new state is in place; who may write but not delete goes without.
        with suppress(IcechunkError):
            collect(repo, now)
        self._collected = now

    def _lost(self) -> StateLocked:
        return StateLocked(
            f"the state {self._address} was committed to by another writer meanwhile",
            hint="nothing of it is overwritten; go on from what is there now, or write elsewhere",
        )


def _standing(address: str) -> tuple[Repository, SnapshotInfo]:
    repo = open_repository(address)
    tip = None if repo is None else _tip(repo)
    if repo is None or tip is None:
        raise not_found(address)
    return repo, tip


def _tip(repo: Repository) -> SnapshotInfo | None:
    """The newest commit; None where there is none yet."""
    info = repo.lookup_snapshot(repo.lookup_branch(MAIN))
    return None if info.parent_id is None else info


def _store(repo: Repository, snapshot_id: str) -> IcechunkStore:
    return repo.readonly_session(snapshot_id=snapshot_id).store


def _header(repo: Repository, snapshot_id: str, address: str) -> Header | None:
    """The header of a commit; None where that is no state, or was collected."""
    try:
        return read_header(_store(repo, snapshot_id), address)
    except (IcechunkError, StateError):
        return None


def _moments(repo: Repository, tip: SnapshotInfo, address: str) -> list[tuple[float, str]]:
    """Stream time and id of the commits that the newest one keeps, and of itself, ascending."""
    now = read_header(_store(repo, tip.id), address)
    return in_order(((one, _header(repo, one, address)) for one in past_of(tip)), now, tip.id)


def _check_ours(repo: Repository, tip: SnapshotInfo, address: str) -> None:
    """StateError if what is there is no state."""
    try:
        read_header(_store(repo, tip.id), address)
    except StateError as error:
        raise StateError(
            f"cannot write the state {address}: what is there is no state of ours",
            hint="Remove it, or choose another name.",
        ) from error


def _stored_bytes(repo: Repository, tip: SnapshotInfo, address: str) -> int:
    tensors = state_bytes(_store(repo, tip.id), address)
    return tensors + sum(manifest.size_bytes for manifest in tip.manifests)
