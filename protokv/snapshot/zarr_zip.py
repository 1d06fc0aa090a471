"""A state as one `.zarr.zip` file: the zarr hierarchy of `zarr_layout` in a zip file, for handing on.

A zip file cannot be changed in place safely, so it is written whole, and put in place as the other files are. Members
are stored uncompressed, which is what zarr's own zip store reads and what lets every size be checked before it is
believed.
"""

from __future__ import annotations

import os
import threading
import zipfile
from pathlib import Path
from typing import BinaryIO

import numpy as np
from numpy.typing import NDArray

from protokv.snapshot.atomic import DISK, FileSystem, commit
from protokv.snapshot.document import corrupt, opened
from protokv.snapshot.forms import check_file_target as check_target
from protokv.snapshot.forms import file_bytes as stored_bytes
from protokv.snapshot.schema import Header, State, shown
from protokv.snapshot.stored_zip import Member, Sink, members, read_member
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

__all__ = ["check_target", "load", "read_header", "save", "stored_bytes"]


def save(state: State, path: str | os.PathLike[str], *, fs: FileSystem = DISK) -> None:
    """Write a state; `path` holds the old or the new one whole at any time.

    Raises:
        StateError: It cannot be written; the old one is still there.
    """

    def write(temporary: Path) -> int:
        with fs.create(temporary) as file:
            sink = Sink(file, fs)
            with zipfile.ZipFile(sink, "w", zipfile.ZIP_STORED) as archive:

                def put(key: str, value: bytes | memoryview) -> None:
                    # No time of day: the same state gives the same bytes.
                    info = zipfile.ZipInfo(key)
                    info.file_size = len(value)
                    with archive.open(info, "w") as member:
                        member.write(value)

                digests: dict[str, list[str]] = {name: [] for name in state.tensors}
                for piece in pieces(state.tensors):
                    digests[piece.tensor].append(piece.digest)
                    for key, value in piece.values.items():
                        put(key, value)
                put(GROUP, GROUP_BYTES)
                put(ROOT, root_bytes(state, digests))
            fs.sync(file)
            return sink.written

    commit(path, write, fs)


def load(path: str | os.PathLike[str], *, verify: bool = True) -> State:
    """Read a state, tensors on the CPU. Without `verify` the digests of the pieces are not checked.

    Raises:
        StateNotFound: Nothing is there.
        StateMismatch: The format is newer than this version reads.
        StateCorrupt: The file is damaged or hostile; the tensor or field is named where it can be.
    """
    with opened(path) as file:
        header, tensors, found = _read_head(file, path)
        one_at_a_time = threading.Lock()

        def read(key: str, size: int) -> NDArray[np.uint8]:
            with one_at_a_time:
                # Its digest says more than its CRC.
                return read_member(file, found[key], path, key, crc=False)

        sizes = {key: member.size for key, member in found.items()}
        return State.of(header, join(tensors, read, sizes, path, verify=verify))


def read_header(path: str | os.PathLike[str]) -> Header:
    """Read and verify the header alone. Raises as `load` does."""
    with opened(path) as file:
        return _read_head(file, path)[0]


def _read_head(file: BinaryIO, path: str | os.PathLike[str]) -> tuple[Header, dict[str, Stored], dict[str, Member]]:
    found = members(file, path)
    root = found.get(ROOT)
    if root is None or root.size > DOCUMENT_LIMIT_BYTES:
        raise corrupt(path, f"zip: there is no {ROOT} that could be that of a state")
    header, tensors = read_root(read_member(file, root, path, "header").tobytes(), path)
    known = {digest for stored in tensors.values() for digest in stored.digests}
    for name in found:
        if name not in (ROOT, GROUP) and piece_of(name) not in known:
            raise corrupt(path, f"zip: the member {shown(name)} does not belong to a state")
    return header, tensors, found
