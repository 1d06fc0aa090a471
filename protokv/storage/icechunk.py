"""A state in an object store: an Icechunk repository whose main branch holds the hierarchy that `.zarr` has.

A commit is one transaction: chunks that changed are uploaded under names that nothing refers to yet, and one
conditional update of the branch puts them in place. Whoever commits says on top of which snapshot, the one that it
found when it began or its own last one, and is refused if there is another by then: so there is one writer at a time
without a lock. A kept commit is a branch of its own; what no branch holds is collected. What is read is held against
our own digests, as in every form; what Icechunk itself unpacks is bounded before (`unfolding`).

Icechunk: https://icechunk.io

Icechunk repositories by their address: opened, made, cleaned up, and their errors said in one line.

Credentials, region and endpoint are those of the environment (`AWS_*`, `GOOGLE_*`, `AZURE_*`). Knows nothing of what is
in a repository.
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
from zarr.core.sync import sync

from protokv.core.snapshot import Header, State, not_found, not_ours, reading
from protokv.errors import StateCorrupt, StateError, StateLocked, shown
from protokv.object_store import ADDRESS, HINT, s3_environment, store_of
from protokv.storage.decompression_limit import Unfolding
from protokv.storage.form import Form, StatePath, Stored, settled
from protokv.storage.zarr import ROOT, Hierarchy, write_state

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


MAIN = "main"

# As long a reader may take to read a state, and a writer to upload one.
GRACE = timedelta(hours=1)

_NAME = re.compile(r"[^?#]*[^/?#]")

_GONE = re.compile(r"NoSuchKey|InvalidRange|404 Not Found", re.IGNORECASE)
_NO_BUCKET = re.compile(r"NoSuchBucket|ContainerNotFound|bucket does not exist", re.IGNORECASE)
_STORE = re.compile(r"object store|dispatch failure|service error|timed? ?out", re.IGNORECASE)

# The snapshot that every repository begins with.
EMPTY = "1CECHNKREP0F1RSTCMT0"

# A writer that finds a repository half made waits this often for another to finish it.
_ATTEMPTS = 5


def storage_of(address: str) -> Storage:
    """Where the repository of an address is.

    Raises:
        StateError: The address names no such place.
    """
    match = ADDRESS.fullmatch(address)
    if match is None or not _NAME.fullmatch(match[3].rstrip("/")):
        raise StateError(
            f"{address} does not name a place for a state",
            hint="expected s3://BUCKET/NAME, gs://BUCKET/NAME or az://CONTAINER/NAME",
        )
    if "ICECHUNK_LOG" not in os.environ:
        # What it logs it raises as well.
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
        # An address that begins with http:// was given on purpose.
        allow_http=True,
        force_path_style=endpoint is not None,
        from_env=True,
    )


def open_repository(address: str) -> Repository | None:
    """The repository at an address; None where there is none. Call it, and all that follows, within `explained`."""
    storage = storage_of(address)
    # `open` asks for something else first, and is not told the reason if that is refused.
    return Repository.open(storage) if Repository.exists(storage) else None


def make_repository(address: str) -> Repository | None:
    """The repository at an address, made if there is none; several may make it. None where something else is there."""
    for _ in range(_ATTEMPTS):
        if (found := open_repository(address)) is not None:
            return found
        try:
            return Repository.create(storage_of(address))
        except IcechunkError as error:
            # Others are making it or have made it, somebody was killed while making it, or it is something else.
            if not re.search(r"clean prefixes|update conflict", str(error)):
                raise
        _finish(address)
    return None


def _finish(address: str) -> None:
    """Give a repository that holds nothing but its first, empty snapshot the branch that names it.

    That is what is left to do when its maker was killed, and Icechunk does not take the place as it is.
    """
    with suppress(BaseError, FileExistsError):
        store, prefix = store_of(address.rstrip("/"))
        there = [one["path"] for one in next(iter(store.list(prefix, chunk_size=2)), [])]
        if there == [f"{prefix}/snapshots/{EMPTY}"]:
            branch = f'{{"snapshot":"{EMPTY}"}}'.encode()
            store.put(f"{prefix}/refs/branch.{MAIN}/ref.json", branch, mode="create")


@contextmanager
def explained(address: str, doing: str) -> Iterator[None]:
    """Turn what Icechunk raises into one line of ours; `doing` is `read` or `write`.

    Raises:
        StateCorrupt: The repository is damaged: an object is missing, or is not what was written.
        StateError: The store cannot be reached, refuses, or has no such bucket.
    """
    try:
        yield
    except IcechunkError as error:
        why = _cause(str(error))
        if not _NO_BUCKET.search(why) and (_GONE.search(why) or not _STORE.search(str(error))):
            raise StateCorrupt(f"the repository is damaged ({why})") from error
        raise StateError(f"cannot {doing} the state {address}: {why}", hint=HINT) from error


def _cause(text: str) -> str:
    """The last, most particular one of the causes that Icechunk prints, on one line."""
    joined = re.sub(r"\n\s*\|\s{2,}(?=\S)", " ", text)
    causes = re.findall(r"^\s*[|`]->\s*(.+)$", joined, re.MULTILINE) or [joined.strip().removeprefix("x ")]
    last = str(causes[-1]).splitlines()[0].strip()
    named = re.match(r'Error \{ code: "([^"]*)"(?:, message: "([^"]*)")?', last)
    why = ": ".join(part for part in named.groups() if part) if named else last
    return shown(why, 240)


def collect(repo: Repository, unfolding: Unfolding, now: datetime | None = None) -> None:
    """Remove what no branch holds any more, and what was not the state within the last `GRACE`.

    Whoever began to read what was the state then has that long to finish. Uploads that no commit names stay as long,
    for their commit may be on its way. Clocks that differ by minutes do no harm.

    Raises:
        StateError: what must be read for that may not be unfolded.
    """
    horizon = (now or datetime.now(UTC)) - GRACE
    # The one that was the state at that time, and all after it, stay.
    standing = next((info for info in _ancestry(repo, unfolding) if info.written_at <= horizon), None)
    if standing is not None and standing.parent_id is not None:
        unfolding.check_all()
        repo.expire_snapshots(older_than=standing.written_at)
        repo.garbage_collect(horizon)


def _ancestry(repo: Repository, unfolding: Unfolding) -> Iterator[SnapshotInfo]:
    """From the newest snapshot back, each of which is checked before it is opened. StateError."""
    at: str | None = repo.lookup_branch(MAIN)
    seen: set[str] = set()
    while at is not None and at not in seen:
        unfolding.check_snapshot(at)
        seen.add(at)
        yield (info := repo.lookup_snapshot(at))
        at = info.parent_id
