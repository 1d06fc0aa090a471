"""A state in the store of an Icechunk session: a writer puts what changed, a reader checks before it decodes.

The hierarchy is that of `.zarr` with `/` in the keys of chunks, the only one that Icechunk takes. A session knows the
size of every chunk without asking for it, so nothing larger than expected is fetched. Knows nothing of commits.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from functools import partial

import numpy as np
from icechunk import IcechunkStore
from numpy.typing import NDArray
from zarr.core.buffer import cpu, default_buffer_prototype
from zarr.core.sync import sync

from protokv.errors import StateCorrupt, StateMismatch
from protokv.snapshot.document import corrupt, parse_json
from protokv.snapshot.formats.hierarchy import (
    DOCUMENT_LIMIT_BYTES,
    METADATA_LIMIT_BYTES,
    ROOT,
    Stored,
    decode,
    document_of,
    encode_state,
    path_of,
    read_document,
)
from protokv.snapshot.parallel import parallel
from protokv.snapshot.schema import Header, State
from protokv.snapshot.text import shown

_SEPARATOR = "/"

# Requests in flight at a time: a store is far away, whatever the number of cores.
_AT_ONCE = 8


def write_state(store: IcechunkStore, state: State, address: str) -> None:
    """Put what differs from the state that the session stands on, and remove the arrays and groups that are no more.

    Chunks that an array no longer has go by themselves when its metadata change.

    Raises:
        StateError: The state could not be read again, so nothing is put.
    """
    document_of(state, {})
    stored = _standing(store, address)
    for folders in (_arrays, _groups):
        for folder in sorted(folders(stored) - folders(state.tensors)):
            sync(store.delete_dir(folder))
    known = {
        key: digest
        for name, one in stored.items()
        for key, digest in zip(one.layout.chunk_keys(name, _SEPARATOR), one.digests, strict=True)
    }

    def changes() -> Iterator[partial[None]]:
        for key, data, digest in encode_state(state, _SEPARATOR):
            if digest is None:
                # An array is there before its chunks. What is unchanged the session leaves out by itself.
                _put(store, key, data)
            elif known.get(key) != digest:
                yield partial(_put, store, key, data)

    for _ in parallel(changes(), _AT_ONCE):
        pass


def read_state(store: IcechunkStore, address: str, *, verify: bool = True) -> State:
    """Read the state that a session stands on.

    Raises:
        StateCorrupt, StateMismatch: as `Form.load`.
    """
    header, stored = _document(store, address)
    tensors = {}
    for name, one in stored.items():
        expected = one.layout.chunk_bytes
        keys = list(one.layout.chunk_keys(name, _SEPARATOR))
        for key in keys:
            if (size := sync(store.getsize(key))) != expected:
                found = f"{size} bytes instead of {expected}" if size else "missing"
                raise corrupt(address, f"tensor {shown(name)}: its chunk {shown(key)} is {found}")
        metadata = _get(store, f"{path_of(name)}/{ROOT}", METADATA_LIMIT_BYTES)
        chunks = parallel((partial(_get, store, key, expected) for key in keys), _AT_ONCE)
        tensors[name] = decode(
            name,
            one,
            None if metadata is None else metadata.tobytes(),
            chunks,
            address,
            verify=verify,
            separator=_SEPARATOR,
        )
    return State.of(header, tensors)


def read_header(store: IcechunkStore, address: str) -> Header:
    """Read and verify the header of the state that a session stands on. Raises as `read_state`."""
    return _document(store, address)[0]


def state_bytes(store: IcechunkStore, address: str) -> int:
    """Bytes of the chunks and the document. Raises as `read_state`."""
    layouts = [one.layout for one in _document(store, address)[1].values()]
    return sync(store.getsize(ROOT)) + sum(layout.chunk_bytes * layout.chunks for layout in layouts)


def _document(store: IcechunkStore, address: str) -> tuple[Header, dict[str, Stored]]:
    data = _get(store, ROOT, DOCUMENT_LIMIT_BYTES)
    if data is None:
        raise corrupt(address, f"there is no {ROOT} that could be that of a state")
    return read_document(parse_json(data.tobytes(), address), address)


def _standing(store: IcechunkStore, address: str) -> dict[str, Stored]:
    """What there is to build on; nothing where there is no state."""
    try:
        return _document(store, address)[1]
    except (StateCorrupt, StateMismatch):
        return {}


def _arrays(names: Iterable[str]) -> set[str]:
    """Where the arrays of tensors are."""
    return {path_of(name) for name in names}


def _groups(names: Iterable[str]) -> set[str]:
    """Where the groups are that hold the arrays of tensors."""
    parts = [path_of(name).split("/") for name in names]
    return {"/".join(one[:end]) for one in parts for end in range(1, len(one))}


def _put(store: IcechunkStore, key: str, data: memoryview) -> None:
    sync(store.set(key, cpu.Buffer.from_bytes(bytes(data))))


def _get(store: IcechunkStore, key: str, limit: int) -> NDArray[np.uint8] | None:
    """The value of a key, writable; None if it is not there or has more than `limit` bytes."""
    data = sync(store.get(key, default_buffer_prototype()))
    if data is None or len(data) > limit:
        return None
    return np.frombuffer(data.to_bytes(), np.uint8).copy()
