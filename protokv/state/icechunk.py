"""A state in an object store: an Icechunk repository whose main branch holds the hierarchy that `.zarr` has.

A commit is one transaction: it uploads changed chunks under new names, and one conditional update of the branch puts
them in place. The update names the snapshot it builds on and fails if the branch has moved, so there is one writer at
a time without a lock. A kept commit is a branch of its own. Garbage collection removes the rest. Digests
are verified as in every form; `decompression_limit` bounds the memory that Icechunk's own metadata take. Credentials,
region and endpoint come from the environment (`AWS_*`, `GOOGLE_*`, `AZURE_*`).
Icechunk: https://icechunk.io
"""

from __future__ import annotations

import os
import re
import secrets
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import contextmanager, suppress
from datetime import UTC, datetime, timedelta
from functools import partial
from typing import Any, Self, TypeVar

import icechunk
from icechunk import ConflictError, IcechunkError, IcechunkStore, Repository, Session, SnapshotInfo, Storage
from obstore.exceptions import BaseError
from zarr.core.buffer import default_buffer_prototype

from protokv import object_store
from protokv.errors import SourceError, SourceNotFound, StateCorrupt, StateError, StateLocked, shown
from protokv.object_store import ADDRESS, HINT, s3_environment, store_of
from protokv.state.decompression_limit import DecompressionLimit
from protokv.state.form import Form, StatePath, Stored, read_unchanged
from protokv.state.signatures import LIMIT_BYTES, SUFFIX, check_fits_memory, statement
from protokv.state.snapshot import Header, State, not_found, not_ours, reading
from protokv.state.zarr import ROOT, Hierarchy, in_memory, sync, write_state

T = TypeVar("T")

MAIN = "main"

# Readers have this long to read a state that was replaced, and writers to upload one.
GRACE = timedelta(hours=1)

# The empty snapshot that every repository begins with.
EMPTY = "1CECHNKREP0F1RSTCMT0"

# Metadata of a commit by which its writer recognizes it.
_MARK = "mark"

# The branch of a kept commit is this and the id of its snapshot.
_KEPT = "kept-"

# Icechunk allows no other separator in chunk keys.
_SEPARATOR = "/"

# Wait this often for another writer that is creating the repository.
_ATTEMPTS = 5

_NAME = re.compile(r"[^?#]*[^/?#]")
_GONE = re.compile(r"NoSuchKey|InvalidRange|404 Not Found", re.IGNORECASE)
_NO_BUCKET = re.compile(r"NoSuchBucket|ContainerNotFound|bucket does not exist", re.IGNORECASE)
# A refused look for a snapshot is told as a missing one; `check_snapshot` has found before whether it is there.
_STORE = re.compile(r"object store|dispatch failure|service error|timed? ?out|snapshot not found", re.IGNORECASE)


class IcechunkForm(Form):
    """A state at an address `s3://`, `gs://` or `az://`."""

    def __init__(self, path: StatePath) -> None:
        super().__init__(path)
        self._address = os.fspath(path)
        self._repo: Repository | None = None
        self._limit = DecompressionLimit(self._address)
        self._base = ""
        self._collected: datetime | None = None
        # Headers of kept commits do not change.
        self._headers: dict[str, Header] = {}

    def check_target(self) -> None:
        """Raise StateError if the store does not answer or holds something else there.

        Only the first commit shows whether it is writable.
        """
        with self._asking("write"):
            if (repo := open_repository(self._address)) is not None:
                self._check_ours(repo)

    def __enter__(self) -> Self:
        """Open or create the repository, and remember its newest snapshot."""
        with self._asking("write"):
            if (repo := make_repository(self._address)) is None:
                raise not_ours(self._address)
            self._repo = repo
            self._base = self._check_ours(repo)
        self.locked = True
        return self

    def __exit__(self, *_: Any) -> None:
        """Close the repository."""
        self.locked, self._repo = False, None

    def replace(self, state: State) -> None:
        """Upload the changes, and put them in place unless another writer was first."""
        with self._asking("write"):
            session = self._open_repo.writable_session(MAIN)
            if session.snapshot_id != self._base:
                raise self._lost()
            there = Hierarchy(session.store, partial(_sizes, session.store)).digests if self._base != EMPTY else {}
            now = write_state(state, session.store, _SEPARATOR, there)
            # Remove former arrays and groups; superfluous chunks go with the metadata of their array.
            for key in sorted(there.keys() - now.keys()):
                if key.endswith(f"/{ROOT}"):
                    sync(session.store.delete_dir(key.removesuffix(f"/{ROOT}")))
            if session.has_uncommitted_changes:
                self._base = self._commit(self._open_repo, session, f"{state.clock.stream_time_s:g} s")
                self._limit.trust(self._base)
            if self._collected is None or datetime.now(UTC) - self._collected >= GRACE:
                # The new state is in place; a writer that may not delete collects nothing.
                with suppress(IcechunkError, StateError):
                    collect(self._open_repo, self._limit)
                self._collected = datetime.now(UTC)

    def look(self, at: str | None, read: Callable[[Stored], T]) -> T:
        """Read the snapshot `at`, or the tip of the main branch."""
        with self._asking("read"):
            if (repo := self._repo or open_repository(self._address)) is None:
                raise not_found(self._address)

            def newest() -> str:
                if (tip := repo.lookup_branch(MAIN)) == EMPTY:
                    raise not_found(self._address)
                return at or tip

            return read_unchanged(self._address, newest, lambda snapshot: read(self._stored(repo, snapshot)))

    def kept(self) -> Iterator[tuple[str, Header]]:
        """Yield the snapshots that branches of kept commits hold."""
        with self._asking("read"):
            repo = self._repo or open_repository(self._address)
            for name in sorted(repo.list_branches() if repo is not None else ()):
                if name.startswith(_KEPT):
                    at = name.removeprefix(_KEPT)
                    with suppress(StateError):
                        self._headers[at] = self._headers.get(at) or self.read_header(at)
                        yield at, self._headers[at]

    def keep(self, header: Header) -> None:
        """Create a branch at the snapshot that the next commit builds on."""
        with self._asking("write"):
            try:
                self._open_repo.create_branch(_KEPT + self._base, self._base)
            except IcechunkError:
                # A failed commit may have created it; a writer may not be allowed to list branches.
                there = ""
                with suppress(IcechunkError):
                    there = self._open_repo.lookup_branch(_KEPT + self._base)
                if there != self._base:
                    raise
        self._headers[self._base] = header

    def retire(self, at: str) -> None:
        """Delete the branch; garbage collection removes its snapshot later."""
        with suppress(IcechunkError):
            self._open_repo.delete_branch(_KEPT + at)

    @contextmanager
    def repairing(self) -> Iterator[None]:
        """Open the repository, and remember its newest snapshot without a look into it."""
        with self._asking("read"):
            if (repo := open_repository(self._address)) is None:
                raise not_found(self._address)
            self._repo, self._base = repo, repo.lookup_branch(MAIN)
        yield
        self._repo = None

    def go_back(self, at: str | None) -> str | None:
        """Move the main branch to the kept commit; a branch of its own holds the damaged snapshot."""
        aside = f"damaged-{self._base}"
        with self._asking("write"):
            if self._base != EMPTY and aside not in self._open_repo.list_branches():
                self._open_repo.create_branch(aside, self._base)
            try:
                self._open_repo.reset_branch(MAIN, at or EMPTY, from_snapshot_id=self._base)
            except IcechunkError as error:
                if self._open_repo.lookup_branch(MAIN) != self._base:
                    raise self._lost() from error
                raise
        return None if self._base == EMPTY else f"{self._address} (branch {aside})"

    @property
    def _open_repo(self) -> Repository:
        assert self._repo is not None, "enter the form before writing"
        return self._repo

    @contextmanager
    def _asking(self, doing: str) -> Iterator[None]:
        with reading(self._address), explained(self._address, doing):
            yield

    def write_signature(self, signature: bytes) -> str:
        """Put the signature into an object beside the repository."""
        with self._beside() as (store, key):
            store.put(key, signature)
        return f"{self._address.rstrip('/')}{SUFFIX}"

    def _read_signature(self) -> bytes | None:
        with suppress(SourceNotFound), self._beside() as (store, key):
            found = store.get(key)
            return found.bytes().to_bytes() if found.meta["size"] <= LIMIT_BYTES else b""
        return None

    @contextmanager
    def _beside(self) -> Iterator[tuple[Any, str]]:
        """Yield the store and the key of the signature. SourceNotFound if it is not there."""
        address = self._address.rstrip("/") + SUFFIX
        store, key = store_of(address)
        try:
            with object_store.explained(address):
                yield store, key
        except SourceNotFound:
            raise
        except SourceError as error:
            raise StateError(error.message, hint=error.hint) from error

    def _check_signed(self, store: IcechunkStore) -> Stored:
        """Read all objects of a snapshot, and open what was read if it is signed."""

        async def contents() -> dict[str, bytes]:
            keys = [key async for key in store.list()]
            check_fits_memory(sum([await store.getsize(key) for key in keys]))
            found = {key: await store.get(key, default_buffer_prototype()) for key in keys}
            return {key: b"" if data is None else data.to_bytes() for key, data in found.items()}

        read = sync(contents())
        assert self.guard is not None
        self.guard(self._address, statement(read), self._read_signature())
        return in_memory(read)

    def _stored(self, repo: Repository, snapshot: str) -> Stored:
        """Open a snapshot after a check of its decompressed size, and of its signature if it needs one."""
        self._limit.check_snapshot(snapshot)
        store = repo.readonly_session(snapshot_id=snapshot).store
        if self.guard is not None:
            self._limit.check_manifests(repo.lookup_snapshot(snapshot))
            return self._check_signed(store)

        def sizes(keys: Collection[str]) -> dict[str, int]:
            if set(keys) != {ROOT}:
                self._limit.check_manifests(repo.lookup_snapshot(snapshot))
            return _sizes(store, keys)

        return Hierarchy(store, sizes)

    def _commit(self, repo: Repository, session: Session, message: str) -> str:
        mark = secrets.token_hex(8)
        try:
            return session.commit(message, metadata={_MARK: mark})
        except (ConflictError, IcechunkError) as error:
            # The store may have accepted the commit although its answer was lost and the retry was refused.
            tip = repo.lookup_branch(MAIN)
            self._limit.check_snapshot(tip)
            if repo.lookup_snapshot(tip).metadata.get(_MARK) == mark:
                return tip
            if isinstance(error, ConflictError):
                raise self._lost() from error
            raise

    def _check_ours(self, repo: Repository) -> str:
        """Return the newest snapshot; StateError if it is neither empty nor a state."""
        if (tip := repo.lookup_branch(MAIN)) != EMPTY:
            self._limit.check_snapshot(tip)
            self._limit.check_manifests(repo.lookup_snapshot(tip))
            try:
                self._stored(repo, tip)
            except StateError as error:
                raise not_ours(self._address) from error
        return tip

    def _lost(self) -> StateLocked:
        return StateLocked(
            f"the state {self._address} was committed to by another writer meanwhile",
            hint="it is not overwritten; continue from the state that is there now, or write elsewhere",
        )


def _sizes(store: IcechunkStore, keys: Iterable[str]) -> dict[str, int]:
    """Return bytes by key, 0 for a missing or impossible key. A session knows them without a request."""

    async def sizes() -> dict[str, int]:
        found = dict.fromkeys(keys, 0)
        for key in found:
            with suppress(KeyError, ValueError):
                found[key] = await store.getsize(key)
        return found

    return sync(sizes())


def storage_of(address: str) -> Storage:
    """Return the storage of the repository at an address.

    Raises:
        StateError: the address names no such place.
    """
    match = ADDRESS.fullmatch(address)
    if match is None or not _NAME.fullmatch(match[3].rstrip("/")):
        raise StateError(
            f"{address} does not name a place for a state",
            hint="expected s3://BUCKET/NAME, gs://BUCKET/NAME or az://CONTAINER/NAME",
        )
    if "ICECHUNK_LOG" not in os.environ:
        # Icechunk raises everything that it logs.
        icechunk.set_logs_filter("off")
    scheme, bucket, prefix = match[1], match[2], match[3].rstrip("/")
    if scheme == "gs":
        return icechunk.gcs_storage(bucket=bucket, prefix=prefix, from_env=True)
    if scheme == "az":
        if not (account := os.environ.get("AZURE_STORAGE_ACCOUNT_NAME")):
            raise StateError(f"{address} is in no storage account", hint="set AZURE_STORAGE_ACCOUNT_NAME")
        return icechunk.azure_storage(account=account, container=bucket, prefix=prefix, from_env=True)
    endpoint, region = s3_environment()
    return icechunk.s3_storage(
        bucket=bucket,
        prefix=prefix,
        region=region,
        endpoint_url=endpoint,
        # An http:// endpoint was given on purpose.
        allow_http=True,
        force_path_style=endpoint is not None,
        from_env=True,
    )


def open_repository(address: str) -> Repository | None:
    """Return the repository at an address, or None. Call this and use the repository within `explained`."""
    storage = storage_of(address)
    # Repository.open hides why the store refused its first request.
    return Repository.open(storage) if Repository.exists(storage) else None


def make_repository(address: str) -> Repository | None:
    """Return the repository at an address, and create it if missing. None if something else is there."""
    for _ in range(_ATTEMPTS):
        if (found := open_repository(address)) is not None:
            return found
        try:
            return Repository.create(storage_of(address))
        except IcechunkError as error:
            # Others are creating it, somebody was killed while creating it, or it is something else.
            if not re.search(r"clean prefixes|update conflict", str(error)):
                raise
        _complete_repository(address)
    return None


def _complete_repository(address: str) -> None:
    """Create the main branch of a repository that holds only its empty snapshot.

    A killed writer leaves it so, and Icechunk does not accept it.
    """
    with suppress(BaseError, FileExistsError):
        store, prefix = store_of(address.rstrip("/"))
        there = [one["path"] for one in next(iter(store.list(prefix, chunk_size=2)), [])]
        if there == [f"{prefix}/snapshots/{EMPTY}"]:
            branch = f'{{"snapshot":"{EMPTY}"}}'.encode()
            store.put(f"{prefix}/refs/branch.{MAIN}/ref.json", branch, mode="create")


@contextmanager
def explained(address: str, doing: str) -> Iterator[None]:
    """Turn errors of Icechunk into one-line errors of ours; `doing` is `read` or `write`.

    Raises:
        StateCorrupt: the repository is damaged: an object is missing or changed.
        StateError: the store cannot be reached, refuses, or has no such bucket.
    """
    try:
        yield
    except IcechunkError as error:
        why = _cause(str(error))
        if not _NO_BUCKET.search(why) and (_GONE.search(why) or not _STORE.search(str(error))):
            raise StateCorrupt(f"the repository is damaged ({why})") from error
        raise StateError(f"cannot {doing} the state {address}: {why}", hint=HINT) from error


def _cause(text: str) -> str:
    """Return the last and most specific of the causes that Icechunk prints, on one line."""
    joined = re.sub(r"\n *\| {2,}(?=\S)", " ", text)
    causes = re.findall(r"^\s*[|`]->\s*(.+)$", joined, re.MULTILINE) or [joined.strip().removeprefix("x ")]
    last = str(causes[-1]).splitlines()[0].strip()
    named = re.match(r'Error \{ code: "([^"]*)"(?:, message: "([^"]*)")?', last)
    why = ": ".join(part for part in named.groups() if part) if named else last
    return shown(why, 240)


def collect(repo: Repository, limit: DecompressionLimit, now: datetime | None = None) -> None:
    """Remove everything that no branch holds and that was not the current state within the last `GRACE`.

    This leaves time to readers of a replaced state and to uploads before their commit, even if clocks differ.

    Raises:
        StateError: the metadata exceed the decompression limit.
    """
    horizon = (now or datetime.now(UTC)) - GRACE
    # Keep the snapshot that was current at that time, and all after it.
    current = next((info for info in _ancestry(repo, limit) if info.written_at <= horizon), None)
    if current is not None and current.parent_id is not None:
        limit.check_all()
        repo.expire_snapshots(older_than=current.written_at)
        repo.garbage_collect(horizon)


def _ancestry(repo: Repository, limit: DecompressionLimit) -> Iterator[SnapshotInfo]:
    """Yield the snapshots from the newest back; each is checked before it is opened."""
    at: str | None = repo.lookup_branch(MAIN)
    seen: set[str] = set()
    while at is not None and at not in seen:
        limit.check_snapshot(at)
        seen.add(at)
        yield (info := repo.lookup_snapshot(at))
        at = info.parent_id
