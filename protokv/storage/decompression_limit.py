"""What Icechunk's own metadata take in memory, told before Icechunk reads them.

Snapshots and manifests are flatbuffers in zstd, and Icechunk unfolds them without a limit: 33 kB may become a gigabyte.
So they are fetched once more and unfolded here, as a stream that is counted and not kept; what is so short that it
cannot become much is believed by its length. Whoever replaces an object between this and Icechunk's own request is not
caught. Knows nothing of what is in them.
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

# What a snapshot or a manifest unfolds to: four times the longest document of a state, which is in the snapshot.
OBJECT_LIMIT_BYTES = 16 << 20

# The same of all that is unfolded to read one state.
LIMIT_BYTES = 128 << 20

# The same of all that a repository holds, which is read to find out what may be deleted.
REPOSITORY_LIMIT_BYTES = 4 * LIMIT_BYTES

# Magic, the writer's name, versions; the last byte says whether zstd follows.
_HEADER_BYTES = 39

# A block of zstd is at most 128 KiB and at least four bytes, of which three are its head.
_BLOCK_BYTES, _SHORTEST_BLOCK = 128 << 10, 4

# 96 bits in Crockford's base32, in the one way that Icechunk writes them.
_ID = re.compile(r"[0-9A-HJKMNP-TV-Z]{19}[0G]")

_REQUESTS_AT_A_TIME = 8


class Unfolding:
    """Which metadata of a repository may be read.

    Every check raises StateCorrupt where they would take more than a state can need, or are not there, and StateError
    where the store cannot be asked.
    """

    def __init__(self, address: str) -> None:
        self._address = address.rstrip("/")
        self._snapshots: dict[str, int] = {}

    @cached_property
    def _place(self) -> tuple[ObjectStore, str]:
        return store_of(self._address)

    def check_snapshot(self, snapshot: str) -> None:
        """Before a snapshot is opened."""
        if snapshot not in self._snapshots:
            self._snapshots[snapshot] = self._unfolded("snapshots", snapshot)

    def made(self, snapshot: str) -> None:
        """What was committed here may be opened."""
        self._snapshots[snapshot] = 0

    def check_manifests(self, snapshot: SnapshotInfo) -> None:
        """Before chunks of a snapshot that was checked are looked up.

        Of a manifest no more bytes are requested than the snapshot says it has.
        """
        lengths: dict[str, int] = {}
        for one in snapshot.manifests:
            lengths[one.id] = max(one.size_bytes, lengths.get(one.id, 0))
        self._check_sum(self._snapshots[snapshot.id], lengths, LIMIT_BYTES)

    def check_all(self) -> None:
        """Before it is found out what no branch holds any more: every snapshot and manifest that is there."""
        store, prefix = self._place
        with _asking(), explained(self._address):
            found = {
                kind: {one["path"].rpartition("/")[2]: one["size"] for batch in listed for one in batch}
                for kind in ("snapshots", "manifests")
                for listed in [store.list(f"{prefix}/{kind}")]
            }
        with ThreadPoolExecutor(_REQUESTS_AT_A_TIME) as pool:
            list(pool.map(self.check_snapshot, found["snapshots"]))
        self._check_sum(sum(self._snapshots.values()), found["manifests"], REPOSITORY_LIMIT_BYTES)

    def _check_sum(self, total: int, manifests: dict[str, int], limit: int) -> None:
        """Whether `total` and what manifests of these lengths unfold to stay below a limit; the longest are fetched."""
        fetched = []
        for manifest, length in sorted(manifests.items(), key=lambda one: one[1]):
            if total + (most := _most_unfolded(length)) <= limit:
                total += most
            else:
                fetched.append(manifest)
        with ThreadPoolExecutor(_REQUESTS_AT_A_TIME) as pool:
            for manifest, takes in zip(
                fetched, pool.map(lambda one: self._unfolded("manifests", one), fetched), strict=True
            ):
                total += takes
                if total > limit:
                    raise _too_large(f"manifests/{manifest}", limit)

    def _unfolded(self, kind: str, name: str) -> int:
        """Bytes that an object unfolds to; StateCorrupt if they are more than the limit."""
        key = f"{kind}/{name}"
        if not _ID.fullmatch(name):
            raise StateCorrupt(f"the repository is damaged ({shown(key)}: no such name is given)")
        store, prefix = self._place
        with _asking():
            try:
                with explained(f"{self._address}/{key}"):
                    found = store.get(f"{prefix}/{key}")
                    if found.meta["size"] > OBJECT_LIMIT_BYTES:
                        raise _too_large(key, OBJECT_LIMIT_BYTES)
                    data = memoryview(found.bytes())
            except SourceNotFound as error:
                raise StateCorrupt(f"the repository is damaged ({key} is not there)") from error
        return _counted(key, data)


@contextmanager
def _asking() -> Iterator[None]:
    """What keeps an object from being read keeps the state from being read."""
    try:
        yield
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


def _most_unfolded(length: int) -> int:
    """What an object of this length can become at most."""
    return max(length, (length - _HEADER_BYTES) // _SHORTEST_BLOCK * _BLOCK_BYTES)


def _too_large(key: str, limit: int) -> StateCorrupt:
    return StateCorrupt(f"the repository is damaged ({key} would take more than {limit >> 20} MiB of memory)")
