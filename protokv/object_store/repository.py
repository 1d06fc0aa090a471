"""Icechunk repositories by their address: opened, made, cleaned up, and their errors said in one line.

Credentials, region and endpoint are those of the environment (`AWS_*`, `GOOGLE_*`, `AZURE_*`). Knows nothing of what is
in a repository.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import UTC, datetime, timedelta

import icechunk
from icechunk import IcechunkError, Repository, SnapshotInfo, Storage
from obstore.exceptions import BaseError

from protokv.errors import StateCorrupt, StateError, shown
from protokv.object_store import ADDRESS, HINT, s3_environment, store_of
from protokv.object_store.unfolding import Unfolding

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
