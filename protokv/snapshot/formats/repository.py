"""Icechunk repositories at `s3://`, `gs://` and `az://` addresses: opening, what goes wrong in one line, collecting.

Credentials come from the environment, as each cloud's own tools take them (`AWS_ACCESS_KEY_ID`, a profile, an instance
role; `GOOGLE_APPLICATION_CREDENTIALS`; `AZURE_STORAGE_ACCOUNT_NAME` and a key). `AWS_ENDPOINT_URL` names a store other
than Amazon's that speaks S3. Knows nothing of states: what a repository holds is for `icechunk`.

How Icechunk keeps its promises (snapshots, manifests, conditional updates of refs): https://icechunk.io/en/stable/spec/
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING

import icechunk
import obstore
from icechunk import IcechunkError, Repository, SnapshotInfo, Storage
from obstore.exceptions import BaseError
from obstore.store import AzureStore, GCSStore, ObjectStore, S3Store

from protokv.errors import StateError
from protokv.snapshot.document import corrupt

if TYPE_CHECKING:
    from obstore.store import S3Config

MAIN = "main"

# As long a reader may take to read a state, and a writer to upload one.
GRACE = timedelta(hours=1)

# Metadata of a commit under which it names others, by their ids, that are to be kept.
PAST = "past"

# A branch of this name holds a kept commit that the history of the main branch no longer reaches.
_PIN = "kept-"

_ADDRESS = re.compile(r"(s3|gs|az)://([^/?#]+)/([^?#]*[^/?#])/*")

_GONE = re.compile(r"NoSuchKey|InvalidRange|404 Not Found", re.IGNORECASE)
_NO_BUCKET = re.compile(r"NoSuchBucket|ContainerNotFound|bucket does not exist", re.IGNORECASE)
_DENIED = re.compile(r"AccessDenied|Signature|AccessKey|credential|token|Forbidden|\b40[13]\b", re.IGNORECASE)
_STORE = re.compile(r"object store|dispatch failure|service error|timed? ?out", re.IGNORECASE)

# The snapshot that every repository begins with.
_EMPTY = "1CECHNKREP0F1RSTCMT0"

# A writer that finds a repository half made waits this often for another to finish it.
_ATTEMPTS = 5


def storage_of(address: str) -> Storage:
    """Where the repository of an address is.

    Raises:
        StateError: The address names no such place.
    """
    if "ICECHUNK_LOG" not in os.environ:
        # What it logs it raises as well.
        icechunk.set_logs_filter("off")
    scheme, bucket, prefix = _parts(address)
    if scheme == "gs":
        return icechunk.gcs_storage(bucket=bucket, prefix=prefix, from_env=True)
    if scheme == "az":
        account = _account(address)
        return icechunk.azure_storage(account=account, container=bucket, prefix=prefix, from_env=True)
    endpoint = _endpoint()
    return icechunk.s3_storage(
        bucket=bucket,
        prefix=prefix,
        region=_region(),
        endpoint_url=endpoint,
        allow_http=endpoint is not None and endpoint.startswith("http://"),
        force_path_style=endpoint is not None,
        from_env=True,
    )


def _parts(address: str) -> tuple[str, str, str]:
    """Scheme, bucket and prefix."""
    match = _ADDRESS.fullmatch(address)
    if match is None:
        raise StateError(
            f"{address} does not name a place for a state",
            hint="expected s3://BUCKET/NAME, gs://BUCKET/NAME or az://CONTAINER/NAME",
        )
    return match[1], match[2], match[3]


def _region() -> str | None:
    # Stores other than Amazon's ignore it, but no request is signed without one.
    return (
        os.environ.get("AWS_REGION") or os.environ.get("AWS_DEFAULT_REGION") or ("us-east-1" if _endpoint() else None)
    )


def _account(address: str) -> str:
    account = os.environ.get("AZURE_STORAGE_ACCOUNT_NAME")
    if not account:
        raise StateError(f"{address} is in no storage account", hint="set AZURE_STORAGE_ACCOUNT_NAME")
    return account


def _endpoint() -> str | None:
    return os.environ.get("AWS_ENDPOINT_URL_S3") or os.environ.get("AWS_ENDPOINT_URL")


def open_repository(address: str) -> Repository | None:
    """The repository at an address; None where there is none. Call it, and all that follows, within `explained`."""
    storage = storage_of(address)
    # `open` asks for something else first, and is not told the reason if that is refused.
    return Repository.open(storage) if Repository.exists(storage) else None


def make_repository(address: str) -> Repository:
    """The repository at an address, made if there is none; several may make it at a time.

    Raises:
        StateError: Something else is there.
    """
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
    raise StateError(
        f"cannot write the state {address}: what is there is no state of ours",
        hint="Remove it, or choose another name.",
    )


def _finish(address: str) -> None:
    """Give a repository that holds nothing but its first, empty snapshot the branch that names it.

    That is what is left to do when its maker was killed, and Icechunk does not take the place as it is.
    """
    scheme, bucket, prefix = _parts(address)
    with suppress(BaseError, FileExistsError):
        store: ObjectStore
        if scheme == "gs":
            store = GCSStore(bucket, prefix=prefix)
        elif scheme == "az":
            store = AzureStore(bucket, prefix=prefix, account_name=_account(address))
        else:
            endpoint, region = _endpoint(), _region()
            config: S3Config = {"virtual_hosted_style_request": endpoint is None}
            if endpoint is not None:
                config["endpoint"] = endpoint
            if region is not None:
                config["region"] = region
            # An address that begins with http:// was given on purpose.
            store = S3Store(bucket, prefix=prefix, config=config, client_options={"allow_http": True})
        there = [one["path"] for one in next(iter(obstore.list(store, chunk_size=2)), [])]
        if there == [f"snapshots/{_EMPTY}"]:
            branch = f'{{"snapshot":"{_EMPTY}"}}'.encode()
            obstore.put(store, f"refs/branch.{MAIN}/ref.json", branch, mode="create")


@contextmanager
def explained(address: str, doing: str) -> Iterator[None]:
    """Turn what Icechunk and zarr raise into one line of ours; `doing` is `read` or `write`.

    Raises:
        StateCorrupt: The repository is damaged: an object is missing, or is not what was written.
        StateError: The store cannot be reached, refuses, or has no such bucket.
    """
    try:
        yield
    except IcechunkError as error:
        why = _cause(str(error))
        what = f"cannot {doing} the state {address}: {why}"
        if _NO_BUCKET.search(why):
            raise StateError(what, hint="make the bucket first, or check its name") from error
        if _GONE.search(why) or not _STORE.search(str(error)):
            raise corrupt(address, f"the repository is damaged ({why})") from error
        if _DENIED.search(why):
            raise StateError(what, hint="check the credentials in the environment, and what they allow") from error
        raise StateError(what, hint="check the address and the network, and AWS_ENDPOINT_URL if you set it") from error


def _cause(text: str) -> str:
    """The last, most particular one of the causes that Icechunk prints, on one line."""
    joined = re.sub(r"\n\s*\|\s{2,}(?=\S)", " ", text)
    causes = re.findall(r"^\s*[|`]->\s*(.+)$", joined, re.MULTILINE) or [joined.strip().removeprefix("x ")]
    last = str(causes[-1]).splitlines()[0].strip()
    named = re.match(r'Error \{ code: "([^"]*)"(?:, message: "([^"]*)")?', last)
    why = ": ".join(part for part in named.groups() if part) if named else last
    return ascii(why[:240])[1:-1]


def collect(repo: Repository, now: datetime | None = None) -> None:
    """Remove what nobody needs any more.

    What was the state within the last `GRACE`, and what such a state named as its kept commits, stays: whoever began to
    read any of it has that long to finish. Uploads that no commit names stay as long, for their commit may be on its
    way. Clocks that differ by minutes do no harm.

    Args:
        repo: the repository.
        now: the time, now if None.
    """
    horizon = (now or datetime.now(UTC)) - GRACE
    line: list[SnapshotInfo] = []
    for info in repo.ancestry(branch=MAIN):
        line.append(info)
        if info.written_at <= horizon:
            break
    wanted = {one for info in line for one in past_of(info)} - {info.id for info in line}
    pinned = {name.removeprefix(_PIN) for name in repo.list_branches() if name.startswith(_PIN)}
    for one in wanted - pinned:
        repo.create_branch(_PIN + one, one)
    for one in pinned - wanted:
        repo.delete_branch(_PIN + one)
    repo.expire_snapshots(older_than=line[-1].written_at)
    repo.garbage_collect(horizon)


def past_of(info: SnapshotInfo) -> list[str]:
    """The ids of the commits that a commit keeps, oldest first, as far as its metadata makes sense."""
    found = info.metadata.get(PAST)
    return [one for one in found if isinstance(one, str)] if isinstance(found, list) else []
