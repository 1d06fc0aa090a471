"""The sealed document of a state: its header and what a form adds to it, as one JSON text that tells of any change.

Owns the strict JSON that all forms read (no name twice, no NaN, no deep nesting, digits in bounds), the digest over
the document, and the one way to say that a state is damaged. Knows nothing of where the text is kept.
"""

from __future__ import annotations

import errno
import json
import os
import stat
from collections.abc import Mapping, Set
from pathlib import Path
from typing import Any, BinaryIO, cast

import torch
from torch import Tensor

from protokv.errors import StateCorrupt, StateError, StateMismatch, StateNotFound
from protokv.snapshot.digest import canonical, document_digest
from protokv.snapshot.schema import Header, State, check_tensor_names
from protokv.snapshot.text import shown

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


def dtype_name(name: str, dtype: torch.dtype) -> str:
    """The name of a dtype; StateError naming the tensor if a state cannot hold it."""
    if dtype not in NAMES:
        raise StateError(f"tensor {name}: a state cannot hold {dtype}")
    return NAMES[dtype]


def is_shape(value: object) -> bool:
    """Whether a value out of a file is a list of at most 16 sizes."""
    return isinstance(value, list) and len(value) <= 16 and all(type(one) is int and 0 <= one < 2**40 for one in value)


def seal(state: State, **parts: Any) -> str:
    """The document of a state: its header, the parts that the form adds, and the digest of these.

    Raises:
        StateError: The header could not be read again, so it must not be written.
    """
    try:
        check_tensor_names(state.tensors)
        document: dict[str, Any] = {"header": state.to_json(), **parts}
        Header.from_json(json.loads(canonical(document["header"])))
        document["digest"] = document_digest(document)
        return canonical(document)
    except (TypeError, ValueError) as error:
        raise StateError(f"the header of the state is not plain JSON: {error}") from error
    except (StateCorrupt, StateMismatch) as error:
        raise StateError(f"the state cannot be written: {error.message}") from error


def unseal(document: dict[str, Any], parts: Set[str], path: str | os.PathLike[str]) -> tuple[Header, Mapping[str, Any]]:
    """The header and the parts of a document that was parsed.

    Raises:
        StateCorrupt: It is not the one that was sealed, or the header makes no sense; the field is named.
        StateMismatch: The format is newer than this version reads.
    """
    digest = document.pop("digest", None)
    try:
        intact = digest == document_digest(document)
    except (ValueError, RecursionError):
        intact = False
    if not intact:
        raise corrupt(path, "header: it is not the one that was saved")
    try:
        header = Header.from_json(document.get("header"))
    except (StateCorrupt, StateMismatch) as error:
        raise type(error)(f"{os.fspath(path)}: {error.message}", hint=error.hint or _NOT_A_STATE) from None
    if set(document) != {"header", *parts}:
        raise corrupt(path, f"header: expected the parts {', '.join(sorted(parts))} and no other")
    return header, document


def parse_json(data: bytes, path: str | os.PathLike[str]) -> dict[str, Any]:
    """The JSON object in these bytes. Raises StateCorrupt for anything else."""

    def once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        made = dict(pairs)
        if len(made) != len(pairs):
            raise ValueError("a name is given twice")
        return made

    def refuse(text: str) -> None:
        raise ValueError(f"{text} is not a number")

    try:
        found = json.loads(data.decode(), object_pairs_hook=once, parse_constant=refuse)
    except (ValueError, RecursionError) as error:
        raise corrupt(path, f"header: not the JSON that was saved ({shown(error)})") from error
    if not isinstance(found, dict):
        raise corrupt(path, "header: expected an object")
    return found


def check_names(names: Set[str], digests: object, path: str | os.PathLike[str]) -> Mapping[str, str]:
    """The digests of a document, one for each of these tensors, whose names are such as tensors can have.

    Raises:
        StateCorrupt: naming what is wrong.
    """
    if not isinstance(digests, dict) or set(digests) != names:
        raise corrupt(path, "digests: expected one for every tensor and no other")
    try:
        check_tensor_names(names)
    except StateCorrupt as error:
        raise corrupt(path, error.message) from None
    return digests


def as_tensors(
    found: Mapping[str, tuple[Tensor, str]], digests: Mapping[str, str] | None, path: str | os.PathLike[str]
) -> dict[str, Tensor]:
    """Tensors that were read with what their digests turned out to be, compared with those that were saved.

    Raises:
        StateCorrupt: A digest differs, or a truth value is neither 0 nor 1.
    """
    for name, (tensor, digest) in found.items():
        if digests is not None and digest != digests[name]:
            raise corrupt(path, f"tensor {shown(name)}: its bytes are not those that were saved")
        if tensor.dtype == torch.bool and tensor.numel() and int(tensor.view(torch.uint8).max()) > 1:
            raise corrupt(path, f"tensor {shown(name)}: a truth value is neither 0 nor 1")
    return {name: tensor for name, (tensor, _) in found.items()}


def open_state(path: str | os.PathLike[str]) -> BinaryIO:
    """A state file, open for reading.

    Raises:
        StateNotFound: Nothing is there.
        StateCorrupt: A folder, a pipe or a device is there.
        StateError: It cannot be read.
    """
    try:
        # Without waiting: a pipe would be waited for.
        flags = os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0) | getattr(os, "O_CLOEXEC", 0)
        if Path(path).is_dir():
            raise StateCorrupt(f"expected a state file, {os.fspath(path)} is a folder")
        file = os.fdopen(os.open(path, flags), "rb", buffering=0)
        if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
            file.close()
            raise StateCorrupt(f"expected a state file, {os.fspath(path)} is not a regular file")
        return cast(BinaryIO, file)
    except (FileNotFoundError, NotADirectoryError):
        raise not_found(path) from None
    except (OSError, ValueError) as error:
        raise unreadable(path, error) from error


def is_still(file: BinaryIO, path: str | os.PathLike[str]) -> bool:
    """Whether a path still names the file that was opened: a commit puts another one there."""
    try:
        return os.path.samestat(os.fstat(file.fileno()), Path(path).stat())
    except (OSError, ValueError):
        return False


def corrupt(path: str | os.PathLike[str], what: str) -> StateCorrupt:
    """The error of a damaged state."""
    return StateCorrupt(f"{os.fspath(path)}: {what}", hint=_NOT_A_STATE)


def not_found(path: str | os.PathLike[str]) -> StateNotFound:
    """The error of a state that is not there."""
    hint = "check the spelling; `protokv ingest VIDEO -o STATE` makes one"
    return StateNotFound(f"no state at {os.fspath(path)}", hint=hint)


def unreadable(path: str | os.PathLike[str], error: Exception) -> StateError:
    """The error of a state that the system does not let us read."""
    number = getattr(error, "errno", None)
    if number == errno.ELOOP:
        return corrupt(path, "a link that leads to itself")
    if number == errno.ENAMETOOLONG:
        return not_found(path)
    why = getattr(error, "strerror", None) or str(error)
    return StateError(f"cannot read the state {os.fspath(path)}: {why}")
