"""Limit the memory that Icechunk's metadata take when Icechunk reads them.

Snapshots and manifests are flatbuffers compressed with zstd. Icechunk decompresses them without a limit: 33 kB may
become a gigabyte. So this module fetches them first and counts their decompressed bytes without keeping them; an object
too short to become large is not fetched. An object that is replaced before Icechunk fetches it again is not caught.
File: https://icechunk.io/en/latest/spec/ ; zstd: https://www.rfc-editor.org/rfc/rfc8878
"""

from __future__ import annotations

import io
import re
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import cached_property
from typing import TYPE_CHECKING

from icechunk import SnapshotInfo
from zstandard import ZstdDecompressor, ZstdError

from protokv.errors import SourceError, SourceNotFound, StateCorrupt, StateError, shown
from protokv.object_store import explained, store_of

if TYPE_CHECKING:
    from obstore.store import ObjectStore

# One snapshot or manifest, decompressed: four times the longest document of a state, which is in the snapshot.
OBJECT_LIMIT_BYTES = 16 << 20

# All metadata that are read for one state, decompressed.
LIMIT_BYTES = 128 << 20

# All metadata of a repository, decompressed; garbage collection reads them all.
REPOSITORY_LIMIT_BYTES = 4 * LIMIT_BYTES

# Magic number, writer and versions; the last byte is not 0 if zstd follows.
_HEADER_BYTES = 39

# A block of zstd holds at most 128 KiB and takes at least four bytes.
_BLOCK_BYTES, _SHORTEST_BLOCK = 128 << 10, 4

# 96 bits in Crockford's base32, in Icechunk's only spelling.
_ID = re.compile(r"[0-9A-HJKMNP-TV-Z]{19}[0G]")

_REQUESTS_AT_A_TIME = 8


class DecompressionLimit:
    """Check which metadata of a repository are small enough to read.

    Every check raises StateCorrupt if an object is missing or too large, and StateError if the store does not answer.
    """

    def __init__(self, address: str) -> None:
        self._address = address.rstrip("/")
        self._snapshots: dict[str, int] = {}

    @cached_property
    def _place(self) -> tuple[ObjectStore, str]:
        return store_of(self._address)

    def check_snapshot(self, snapshot: str) -> None:
        """Check a snapshot before it is opened."""
        if snapshot not in self._snapshots:
            self._snapshots[snapshot] = self._decompressed_bytes("snapshots", snapshot)

    def trust(self, snapshot: str) -> None:
        """Accept a snapshot that this process committed."""
        self._snapshots[snapshot] = 0

    def check_manifests(self, snapshot: SnapshotInfo) -> None:
        """Check the manifests of a checked snapshot before its chunks are looked up.

        Icechunk requests no more bytes of a manifest than the snapshot claims.
        """
        lengths: dict[str, int] = {}
        for one in snapshot.manifests:
            lengths[one.id] = max(one.size_bytes, lengths.get(one.id, 0))
        self._check_sum(self._snapshots[snapshot.id], lengths, LIMIT_BYTES)

    def check_all(self) -> None:
        """Check every snapshot and manifest before garbage collection."""
        store, prefix = self._place
        found: dict[str, dict[str, int]] = {"snapshots": {}, "manifests": {}}
        for kind, sizes in found.items():
            with self._asking(kind):
                for batch in store.list(f"{prefix}/{kind}"):
                    sizes.update({one["path"].rpartition("/")[2]: one["size"] for one in batch})
        with ThreadPoolExecutor(_REQUESTS_AT_A_TIME) as pool:
            list(pool.map(self.check_snapshot, found["snapshots"]))
        self._check_sum(sum(self._snapshots.values()), found["manifests"], REPOSITORY_LIMIT_BYTES)

    def _check_sum(self, total: int, manifests: dict[str, int], limit: int) -> None:
        """Check that `total` and the decompressed manifests, given by length, stay below a limit. Fetch the longest."""
        fetched = []
        for manifest, length in sorted(manifests.items(), key=lambda one: one[1]):
            if total + (most := _most_decompressed(length)) <= limit:
                total += most
            else:
                fetched.append(manifest)
        with ThreadPoolExecutor(_REQUESTS_AT_A_TIME) as pool:
            sizes = pool.map(lambda one: self._decompressed_bytes("manifests", one), fetched)
            for manifest, size in zip(fetched, sizes, strict=True):
                total += size
                if total > limit:
                    raise _too_large(f"manifests/{manifest}", limit)

    def _decompressed_bytes(self, kind: str, name: str) -> int:
        """Return the decompressed bytes of an object; StateCorrupt if they exceed the limit."""
        key = f"{kind}/{name}"
        if not _ID.fullmatch(name):
            raise StateCorrupt(f"the repository is damaged ({shown(key)}: no such name is given)")
        store, prefix = self._place
        with self._asking(key):
            found = store.get(f"{prefix}/{key}")
            if found.meta["size"] > OBJECT_LIMIT_BYTES:
                raise _too_large(key, OBJECT_LIMIT_BYTES)
            data = memoryview(found.bytes())
        return _counted(key, data)

    @contextmanager
    def _asking(self, key: str) -> Iterator[None]:
        """Turn an error of the store into a StateError; the repository is damaged if there is no such object."""
        try:
            with explained(f"{self._address}/{key}"):
                yield
        except SourceNotFound as error:
            raise StateCorrupt(f"the repository is damaged ({key} is not there)") from error
        except SourceError as error:
            raise StateError(error.message, hint=error.hint) from error


def _counted(key: str, data: memoryview) -> int:
    if len(data) < _HEADER_BYTES or not data[_HEADER_BYTES - 1]:
        return len(data)
    total = 0
    try:
        with ZstdDecompressor().stream_reader(io.BytesIO(data[_HEADER_BYTES:]), read_across_frames=True) as stream:
            while part := stream.read(_BLOCK_BYTES):
                total += len(part)
                if total > OBJECT_LIMIT_BYTES:
                    raise _too_large(key, OBJECT_LIMIT_BYTES)
    except ZstdError as error:
        raise StateCorrupt(f"the repository is damaged ({key}: {error})") from error
    return total


def _most_decompressed(length: int) -> int:
    """Return the most bytes that an object of this length can decompress to."""
    return max(length, (length - _HEADER_BYTES) // _SHORTEST_BLOCK * _BLOCK_BYTES)


def _too_large(key: str, limit: int) -> StateCorrupt:
    return StateCorrupt(f"the repository is damaged ({key} would take more than {limit >> 20} MiB of memory)")
