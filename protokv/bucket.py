"""Objects at `s3://`, `gs://` and `az://` addresses: list, identify, fetch. Videos and subtitles
are read through it.

`protokv.state.store` writes states with it. Credentials, region and endpoint come from the
environment (`AWS_*`, `GOOGLE_*`, `AZURE_*`). The extra `object-store` is imported when a store is
first used. https://developmentseed.org/obstore
"""

from __future__ import annotations

import fnmatch
import hashlib
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlencode, urlsplit
from xml.etree import ElementTree

from protokv.errors import ConfigError, SourceError, SourceNotFound, SourceUnreadable, escape_text

if TYPE_CHECKING:
    from obstore import ObjectMeta
    from obstore.store import ObjectStore

_ADDRESS = re.compile(r"(s3|gs|az)://([^/?#]+)/?(.*)", re.DOTALL)
_HINT = (
    "check the address, the credentials in the environment and the network, and AWS_ENDPOINT_URL "
    "if you set it"
)
_CHUNK_BYTES = 8 << 20
_ENDPOINT = re.compile(r"(AWS|AZURE|GOOGLE)_\w*ENDPOINT\w*")
_NO_KEY = "no key with an empty part, `.` or `..` between slashes can be read"


def in_bucket(address: str | os.PathLike[str]) -> bool:
    """Return True if an address is in an object store."""
    return os.fspath(address).startswith(("s3://", "gs://", "az://"))


def open_bucket(address: str) -> tuple[ObjectStore, str]:
    """Return the store of an address and the rest of the address: a key, a prefix or a pattern.

    SourceUnreadable: the address names no bucket, or the extra is not installed. ConfigError: an
    endpoint in the environment is no address.
    """
    match = _ADDRESS.fullmatch(address)
    if match is None:
        raise SourceUnreadable(
            f"{address} names no bucket", hint="expected s3://BUCKET/KEY, gs://... or az://..."
        )
    try:
        import obstore.store as stores
    except ImportError as error:
        raise SourceUnreadable(
            f"{address} is in an object store, and {error.name} is not installed",
            hint="pip install obstore",
        ) from error
    _check_endpoints()
    scheme, bucket, rest = match.groups()
    kind: Any = {"s3": stores.S3Store, "gs": stores.GCSStore, "az": stores.AzureStore}[scheme]
    # An endpoint of http:// was named on purpose.
    return kind(bucket, client_options={"allow_http": True}), rest


def _check_endpoints() -> None:
    """Refuse an endpoint that is no address: obstore would panic. Its value may hold a password."""
    for name in filter(_ENDPOINT.fullmatch, os.environ):
        try:
            found = urlsplit(value := os.environ[name])
            is_web = found.scheme in ("http", "https") and " " not in value
            # The port of an address that cannot be raises.
            good = is_web and bool(found.hostname) and found.port != 0
        except ValueError:
            good = False
        if not good:
            raise ConfigError(
                f"{name} is no address of a server", hint="write it as http://HOST:PORT"
            )


def stands_for_many(address: str) -> bool:
    """Return True if an address means the objects below it or that match it: it ends in `/`, or has
    a wildcard and no object has that very name. SourceError as `fetch_bucket_file`.
    """
    if address.endswith("/") or not any(c in address for c in "*?["):
        return address.endswith("/")
    try:
        fingerprint_bucket_video(address)
    except SourceNotFound:
        return True
    return False


def list_bucket(address: str) -> Iterator[tuple[str, str]]:
    """Yield name and address of every object below a prefix or matching a pattern; the name omits
    the fixed part.

    The address ends in `/`, or contains `*`, `?` or `[...]`, which match slashes. SourceError as
    `fetch_bucket_file`.
    """
    rest = open_bucket(address)[1]
    below = not rest or rest.endswith("/")
    wildcard = next((i for i, c in enumerate(rest) if c in "*?[" and not below), len(rest))
    fixed = rest[: rest.rfind("/", 0, wildcard) + 1]
    for path, found in _list(address, fixed.rstrip("/")):
        if below or fnmatch.fnmatchcase(path, rest):
            yield path[len(fixed) :], found


def list_by_prefix(address: str) -> Iterator[str]:
    """Yield the address of every object that begins with an address; none where these cannot be
    listed.
    """
    rest = open_bucket(address)[1]
    try:
        for path, found in _list(address, rest.rpartition("/")[0], offset=rest):
            if not path.startswith(rest):
                return  # they come in order
            yield found
    except SourceUnreadable:
        return  # a neighbour has a key that obstore cannot name
    except SourceError as error:  # obstore has no error of its own for it
        if "403 Forbidden" not in str(error.__cause__):
            raise


def _list(address: str, folder: str, offset: str | None = None) -> Iterator[tuple[str, str]]:
    from obstore.exceptions import InvalidPathError

    store, rest = open_bucket(address)
    root = address[: len(address) - len(rest)]
    last = offset or ""
    with explain_bucket_errors(address):
        try:
            for batch in store.list(folder or None, offset=offset):
                for one in batch:
                    last = one["path"]
                    yield last, root + last
        except InvalidPathError:
            # One key that obstore cannot name ends its listing of a whole page.
            if not address.startswith("s3://"):
                raise
            for key in _list_raw_keys(address, f"{folder}/" if folder else ""):
                if key > last:
                    yield key, root + key


def _list_raw_keys(address: str, prefix: str) -> Iterator[str]:
    """Yield every key of a bucket of S3 that begins with a prefix, in order.

    obstore signs them: the query goes in as a part of the endpoint, behind which it puts a slash.
    """
    from obstore import sign
    from obstore.store import S3Store

    bucket = address.split("/")[2]
    plain: Any = open_bucket(address)[0]
    signed = str(sign(plain, "GET", "key", timedelta(minutes=1)))
    place = signed.partition("?")[0].removesuffix("/key")
    token = ""
    while True:
        query = {"list-type": 2, "prefix": prefix, "x-id": "ListObjectsV2"}
        query |= {"continuation-token": token} if token else {}
        endpoint = f"{place}?{urlencode(sorted(query.items()))}"
        store = S3Store(
            bucket,
            endpoint=endpoint,
            virtual_hosted_style_request=True,
            client_options={"allow_http": True},
        )
        page = ElementTree.fromstring(store.get("").bytes().to_bytes())
        yield from (one.text or "" for one in page.iterfind(".//{*}Contents/{*}Key"))
        if not (token := page.findtext("{*}NextContinuationToken") or ""):
            return


def fingerprint_bucket_video(address: str) -> str:
    """Return what identifies the content of an object: sha256 of size and tag. SourceError as
    `fetch_bucket_file`.
    """
    store, key = open_bucket(address)
    with explain_bucket_errors(address):
        return _digest(store.head(key))


def fetch_bucket_file(address: str, path: Path) -> str:
    """Copy an object into a file and return its `fingerprint_bucket_video`.

    SourceError: the object is missing, or the store does not answer.
    """
    store, key = open_bucket(address)
    with explain_bucket_errors(address):
        found = store.get(key)
        with path.open("wb") as file:
            for chunk in found.stream(min_chunk_size=_CHUNK_BYTES):
                file.write(chunk)
        return _digest(found.meta)


def _digest(meta: ObjectMeta) -> str:
    return hashlib.sha256(f"{meta['size']} {meta.get('e_tag')}".encode()).hexdigest()


@contextmanager
def explain_bucket_errors(address: str, doing: str = "read") -> Iterator[None]:
    """Turn an error of a store into a SourceError of one line; `doing` is `read` or `write`."""
    from obstore.exceptions import BaseError, InvalidPathError

    try:
        yield
    except FileNotFoundError:
        raise SourceNotFound(
            f"there is nothing at {address}", hint="check the spelling of the address"
        ) from None
    except (ValueError, InvalidPathError) as error:
        raise SourceUnreadable(
            f"cannot {doing} {address}: {_NO_KEY}", hint="give the object another key"
        ) from error
    except (BaseError, PermissionError) as error:
        lines = [line.strip() for line in str(error).splitlines() if line.strip()]
        # AWS_ENDPOINT_URL may have a password.
        lines = [re.sub(r"://\S*@", "://", line) for line in lines]
        why = escape_text(lines[0], 240) if lines else type(error).__name__
        raise SourceError(f"cannot {doing} {address}: {why}", hint=_HINT) from error
