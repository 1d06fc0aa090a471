"""The sealed document of a state: its header and what a form adds to it, as one JSON text that tells of any change.

Owns the digest over the document, what a tensor in a state can be, and the one way to say that a state is damaged.
Knows nothing of where the text is kept.
"""

from __future__ import annotations

import errno
import json
import math
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch

from protokv.errors import StateCorrupt, StateError, StateMismatch, StateNotFound, shown
from protokv.machine import memory_bytes
from protokv.snapshot.digest import canonical, document_digest
from protokv.snapshot.schema import Header, State, check_tensor_names

# Under which the document stands in whatever a form writes.
KEY = "protokv"

# What a state can hold, by the names that safetensors gives them.
DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
NAMES = {dtype: name for name, dtype in DTYPES.items()}

_NOT_A_STATE = "the file is damaged, or is not a state of protokv"

Found = Mapping[str, tuple[tuple[int, ...], torch.dtype]]
"""Shape and dtype of the tensors that a state says it holds, by name."""

Admit = Callable[[Header, Found], None]
"""Asked before memory is taken for the tensors of a state; StateCorrupt if such a state cannot be."""


def dtype_name(name: str, dtype: torch.dtype) -> str:
    """The name of a dtype; StateError naming the tensor if a state cannot hold it."""
    if dtype not in NAMES:
        raise StateError(f"tensor {name}: a state cannot hold {dtype}")
    return NAMES[dtype]


def seal(state: State, limit: int, digests: Mapping[str, str]) -> str:
    """The document of a state: its header, the digests of all else, and the digest of these.

    Raises:
        StateError: The header could not be read again, or takes more than `limit` bytes, so it must not be written.
    """
    try:
        check_tensor_names(state.tensors)
        document: dict[str, Any] = {"header": state.to_json(), "digests": digests}
        Header.from_json(json.loads(canonical(document["header"])))
        text = canonical({**document, "digest": document_digest(document)})
    except (TypeError, ValueError) as error:
        raise StateError(f"the header of the state is not plain JSON: {error}") from error
    except (StateCorrupt, StateMismatch) as error:
        raise StateError(f"the state cannot be written: {error.message}") from error
    if len(text) > limit:
        raise StateError(f"the header of the state takes {len(text)} bytes, at most {limit} are allowed")
    return text


def unseal(document: dict[str, Any]) -> tuple[Header, dict[str, str]]:
    """The header, and the digests of all else.

    Raises:
        StateCorrupt: It is not the one that was sealed, or makes no sense; the field is named.
        StateMismatch: The format is newer than this version reads.
    """
    digest = document.pop("digest", None)
    try:
        intact = digest == document_digest(document)
    except (ValueError, RecursionError):
        intact = False
    if not intact:
        raise StateCorrupt("header: it is not the one that was saved")
    header = Header.from_json(document.get("header"))
    if set(document) != {"header", "digests"} or not isinstance(document["digests"], dict):
        raise StateCorrupt("header: expected digests, an object, and no other part")
    return header, document["digests"]


def parse_json(data: bytes | str) -> dict[str, Any]:
    """The JSON object in this text, StateCorrupt for anything else. A digest tells whether it is what was saved."""
    try:
        found = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise StateCorrupt(f"header: not the JSON that was saved ({shown(error)})") from error
    if not isinstance(found, dict):
        raise StateCorrupt("header: expected an object")
    return found


@contextmanager
def reading(path: str | os.PathLike[str]) -> Iterator[None]:
    """Says in one line, with the path, what is wrong with a state, and what the system does not let us read.

    Raises:
        StateNotFound: Nothing is there.
        StateError: It cannot be read.
    """
    where = os.fspath(path)
    try:
        yield
    except (StateCorrupt, StateMismatch) as error:
        if error.message.startswith(where):
            raise
        raise type(error)(f"{where}: {error.message}", hint=error.hint or _NOT_A_STATE) from error
    except (OSError, ValueError) as error:
        number = getattr(error, "errno", None)
        if number == errno.ELOOP:
            raise StateCorrupt(f"{where}: a link that leads to itself", hint=_NOT_A_STATE) from error
        if number in (errno.ENOENT, errno.ENOTDIR, errno.ENAMETOOLONG):
            raise not_found(path) from None
        why = getattr(error, "strerror", None) or str(error)
        raise StateError(f"cannot read the state {where}: {why}") from error


def admitted(header: Header, found: Found, admit: Admit | None) -> None:
    """Refuse what this machine has no memory for, and what `admit` refuses, before memory is taken for it.

    Files may have holes: what a state says it holds need not have been received.

    Raises:
        StateError: there is less memory than that.
        StateCorrupt: as `admit`.
    """
    if admit is not None:
        admit(header, found)
    takes = sum(math.prod(shape) * dtype.itemsize for shape, dtype in found.values())
    there = memory_bytes()
    if there is not None and takes > there:
        raise StateError(f"the state holds {takes} bytes of tensors, this machine has {there} bytes of memory")


def not_found(path: str | os.PathLike[str]) -> StateNotFound:
    """The error of a state that is not there."""
    hint = "check the spelling; `protokv ingest VIDEO -o STATE` makes one"
    return StateNotFound(f"no state at {os.fspath(path)}", hint=hint)
