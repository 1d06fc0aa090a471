"""Objects at `s3://`, `gs://` and `az://` addresses: list, identify, fetch. Videos and subtitles are read through it.

`protokv.state.store` writes states with it. Credentials, region and endpoint come from the environment (`AWS_*`,
`GOOGLE_*`, `AZURE_*`). The extra `object-store` is imported when a store is first used.
https://developmentseed.org/obstore
"""

from __future__ import annotations

import fnmatch
import hashlib
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from protokv.errors import SourceError, SourceNotFound, SourceUnreadable, shown

if TYPE_CHECKING:
    from obstore import ObjectMeta
    from obstore.store import ObjectStore, S3Config

_ADDRESS = re.compile(r"(s3|gs|az)://([^/?#]+)/?(.*)", re.DOTALL)
_HINT = "check the address, the credentials in the environment and the network, and AWS_ENDPOINT_URL if you set it"
_CHUNK_BYTES = 8 << 20


def is_object(address: str | os.PathLike[str]) -> bool:
    """Return True if an address is in an object store."""
    return os.fspath(address).startswith(("s3://", "gs://", "az://"))


def open_store(address: str) -> tuple[ObjectStore, str]:
    """Return the store of an address and the rest of the address: a key, a prefix or a pattern.

    Raises:
        SourceUnreadable: the address names no bucket, or the extra is not installed.
    """
    match = _ADDRESS.fullmatch(address)
    if match is None:
        raise SourceUnreadable(f"{address} names no bucket", hint="expected s3://BUCKET/KEY, gs://... or az://...")
    try:
        from obstore.store import AzureStore, GCSStore, S3Store
    except ImportError as error:
        raise SourceUnreadable(
            f"{address} is in an object store, and {error.name} is not installed",
            hint="pip install 'protokv[object-store]'",
        ) from error
    scheme, bucket, rest = match.groups()
    if scheme != "s3":
        return (GCSStore(bucket) if scheme == "gs" else AzureStore(bucket)), rest
    endpoint = os.environ.get("AWS_ENDPOINT_URL_S3") or os.environ.get("AWS_ENDPOINT_URL")
    config: S3Config = {"virtual_hosted_style_request": endpoint is None}
    if endpoint is not None:
        # Other stores ignore the region, but no request is signed without one.
        config |= {"endpoint": endpoint, "region": "us-east-1"}
    if region := os.environ.get("AWS_REGION") or os.environ.get("AWS_DEFAULT_REGION"):
        config["region"] = region
    # An http:// endpoint was given on purpose.
    return S3Store(bucket, config=config, client_options={"allow_http": endpoint is not None}), rest


def list_objects(address: str) -> Iterator[tuple[str, str]]:
    """Yield name and address of every object below a prefix or matching a pattern; the name omits the fixed part.

    Args:
        address: ends in `/`, or contains `*`, `?` or `[...]`, which match slashes too.

    Raises:
        SourceError: the store does not answer.
    """
    store, rest = open_store(address)
    wildcard = next((i for i, c in enumerate(rest) if c in "*?["), len(rest))
    fixed = rest[: rest.rfind("/", 0, wildcard) + 1]
    root = address[: len(address) - len(rest)]
    with explain_errors(address):
        for batch in store.list(fixed.rstrip("/") or None):
            for one in batch:
                path = one["path"]
                if rest == fixed or fnmatch.fnmatchcase(path, rest):
                    yield path[len(fixed) :], root + path


def list_beginning(address: str) -> Iterator[str]:
    """Yield the address of every object that begins with an address; none where listing is not allowed.

    Raises:
        SourceError: the store does not answer.
    """
    store, rest = open_store(address)
    root = address[: len(address) - len(rest)]
    with explain_errors(address):
        try:
            for batch in store.list(rest.rpartition("/")[0] or None, offset=rest):
                for one in batch:
                    if not one["path"].startswith(rest):
                        return  # they come in order
                    yield root + one["path"]
        except Exception as error:  # obstore has no error of its own for it
            if "403 Forbidden" not in str(error):
                raise


def fingerprint_object(address: str) -> str:
    """Return what identifies the content of an object: the sha256 of its size and its tag. SourceError as `fetch`."""
    store, key = open_store(address)
    with explain_errors(address):
        return _digest(store.head(key))


def fetch(address: str, path: Path) -> str:
    """Copy an object into a file and return its `fingerprint_object`.

    Raises:
        SourceError: the object is missing, or the store does not answer.
    """
    store, key = open_store(address)
    with explain_errors(address):
        found = store.get(key)
        with path.open("wb") as file:
            for chunk in found.stream(min_chunk_size=_CHUNK_BYTES):
                file.write(chunk)
        return _digest(found.meta)


def _digest(meta: ObjectMeta) -> str:
    return hashlib.sha256(f"{meta['size']} {meta.get('e_tag')}".encode()).hexdigest()


@contextmanager
def explain_errors(address: str, doing: str = "read") -> Iterator[None]:
    """Turn an error of a store into a SourceError of one line; `doing` is `read` or `write`."""
    from obstore.exceptions import BaseError

    try:
        yield
    except FileNotFoundError:
        raise SourceNotFound(f"there is nothing at {address}", hint="check the spelling of the address") from None
    except (BaseError, PermissionError) as error:
        lines = [line.strip() for line in str(error).splitlines() if line.strip()]
        why = shown(lines[0], 240) if lines else type(error).__name__
        raise SourceError(f"cannot {doing} {address}: {why}", hint=_HINT) from error
