"""A state in zarr v3, in a folder or an object store, of which a save writes what has changed.

Pieces of tensors are written first, under addresses that nothing names; then the root document, which names them, is
put in place in one act: that is the commit. What the commit before this one named stays until the next, so a reader
that has read the old document finds its pieces; one that is slower than that starts again with the new document. What
a killed save left behind is removed by the next, and so would be what another writer has not yet committed: one writer
at a time, which `lock` sees to in file systems. Where the values are kept is for `places`, how they look for
`zarr_layout`.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Set
from functools import partial
from pathlib import Path

from protokv.errors import StateCorrupt, StateError
from protokv.snapshot.atomic import DISK, FileSystem, refused
from protokv.snapshot.document import corrupt, not_found, unreadable
from protokv.snapshot.forms import StatePath, is_url
from protokv.snapshot.places import Place, place_of
from protokv.snapshot.schema import Header, State
from protokv.snapshot.side_by_side import in_order
from protokv.snapshot.zarr_layout import (
    DOCUMENT_LIMIT_BYTES,
    GROUP,
    GROUP_BYTES,
    ROOT,
    Stored,
    join,
    piece_of,
    pieces,
    read_root,
    root_bytes,
)

# A writer that commits faster than this many reads would have to write gigabytes a second.
_ATTEMPTS = 20


def save(state: State, path: StatePath, *, fs: FileSystem = DISK, place: Place | None = None) -> None:
    """Write what has changed; `path` holds the old or the new state whole at any time.

    Raises:
        StateError: It cannot be written, or something else is there; the old one is still there.
    """
    try:
        place = place or place_of(path, remote=is_url(path), fs=fs)
        before = {one: (key, size) for stored in _standing(place, path).values() for one, key, size in stored.chunks()}
        there = place.sizes()
        durable = {digest for digest, (key, size) in before.items() if there.get(key) == size}
        # A header that cannot be written is told before anything is.
        root_bytes(state, {})
        digests: dict[str, list[str]] = {name: [] for name in state.tensors}
        try:
            for _ in in_order(_puts(place, state, durable, digests), place.writers):
                pass
            if place.read(GROUP, len(GROUP_BYTES)) is None:
                place.commit(GROUP, GROUP_BYTES)
            place.settle()
        finally:
            place.close()
        place.commit(ROOT, root_bytes(state, digests))
    except OSError as error:
        raise refused(path, error) from error
    written = {digest for several in digests.values() for digest in several}
    try:
        for stale in {piece_of(key) for key in there} - {None} - written - set(before):
            place.discard(str(stale))
    except OSError:
        # The new state is in place; the next save removes what is left.
        return


def _puts(
    place: Place, state: State, durable: Set[str], digests: Mapping[str, list[str]]
) -> Iterator[Callable[[], None]]:
    """The calls that put the pieces which are not there yet; notes all in `digests`, by tensor."""
    for piece in pieces(state.tensors):
        digests[piece.tensor].append(piece.digest)
        if piece.digest not in durable:
            yield partial(place.put, piece.digest, piece.values)


def load(path: StatePath, *, verify: bool = True, place: Place | None = None) -> State:
    """Read a state, tensors on the CPU. Without `verify` the digests of the pieces are not checked.

    Raises:
        StateNotFound: Nothing is there.
        StateMismatch: The format is newer than this version reads.
        StateCorrupt: The state is damaged or hostile; the tensor or field is named where it can be.
        StateError: It cannot be read.
    """
    try:
        place = place or _place_to_read(path)
        document = _document(place, path)
        for _ in range(_ATTEMPTS):
            try:
                header, stored = read_root(document, path)
                sizes = place.sizes()
                tensors = join(stored, place.read, sizes, path, verify=verify, at_once=place.readers)
                return State.of(header, tensors)
            except StateCorrupt:
                again = _document(place, path)
                if again == document:
                    raise
                document = again
    except OSError as error:
        raise unreadable(path, error) from error
    raise StateError(f"cannot read the state {path}: it is rewritten all the time", hint="try again")


def read_header(path: StatePath) -> Header:
    """Read and verify the header alone. Raises as `load` does."""
    try:
        return read_root(_document(_place_to_read(path), path), path)[0]
    except OSError as error:
        raise unreadable(path, error) from error


def check_target(path: StatePath) -> None:
    """Whether a state could be written there.

    Raises:
        StateError: A folder is missing or may not be written to, the store cannot be reached, or something else is
            there.
    """
    try:
        if not is_url(path):
            target, folder = Path(path), Path(path).parent
            if not folder.is_dir():
                raise StateError(f"cannot write the state {path}: there is no folder {folder}", hint="Make it first.")
            if target.exists() and not target.is_dir():
                raise StateError(f"cannot write the state {path}: it is a file", hint="Choose another name.")
            if not os.access(target if target.exists() else folder, os.W_OK):
                raise StateError(f"cannot write the state {path}: it is read-only", hint="Choose another folder.")
        _standing(place_of(path, remote=is_url(path)), path)
    except OSError as error:
        raise refused(path, error) from error


def stored_bytes(path: StatePath) -> int:
    """Bytes of all files or objects, with what the commit before this one named.

    Raises:
        StateNotFound: Nothing is there.
    """
    try:
        place = _place_to_read(path)
        return len(_document(place, path)) + sum(place.sizes().values())
    except OSError as error:
        raise unreadable(path, error) from error


def _place_to_read(path: StatePath) -> Place:
    if not is_url(path) and Path(path).exists() and not Path(path).is_dir():
        raise corrupt(path, "expected a folder")
    return place_of(path, remote=is_url(path))


def _document(place: Place, path: StatePath) -> bytes:
    data = place.read(ROOT, DOCUMENT_LIMIT_BYTES)
    if data is None:
        if place.exists():
            raise corrupt(path, f"there is no {ROOT} that could be that of a state")
        raise not_found(path)
    return data.tobytes()


def _standing(place: Place, path: StatePath) -> dict[str, Stored]:
    """What the state that stands there names; StateError if something else is there."""
    data = place.read(ROOT, DOCUMENT_LIMIT_BYTES)
    if data is None and not place.exists():
        return {}
    try:
        return read_root(b"" if data is None else data.tobytes(), path)[1]
    except StateError as error:
        hint = "Remove it, or choose another name."
        raise StateError(f"cannot write the state {path}: what is there is no state of ours", hint=hint) from error
