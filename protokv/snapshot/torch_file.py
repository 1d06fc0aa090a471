"""A state as one `.pt` file: `{"protokv": document, "tensors": {name: tensor}}`, written by torch.save.

A file of torch.save is a zip file with a pickle in it, and a pickle is a program. It is read by
`torch.load(weights_only=True)` and nothing else, and even that only after the zip file and the pickle were read as
data: of the pickle's instructions only the few that build this one dictionary pass, every storage must be exactly as
large as it is said to be, and none may be read twice. What passes runs no code and takes no more memory than the file
has bytes.
"""

from __future__ import annotations

import math
import os
import pickle
import pickletools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, BinaryIO

import torch
from torch import Tensor

from protokv.errors import StateError
from protokv.snapshot.atomic import DISK, FileSystem, commit
from protokv.snapshot.digest import raw, tensor_digests
from protokv.snapshot.document import DTYPES, corrupt, dtype_name, opened, parsed, sealed, unsealed
from protokv.snapshot.forms import check_file_target as check_target
from protokv.snapshot.forms import file_bytes as stored_bytes
from protokv.snapshot.schema import Header, State, shown
from protokv.snapshot.stored_zip import Member, Sink, members, read_member

__all__ = ["check_target", "load", "read_header", "save", "stored_bytes"]

KEY = "protokv"
_ROOT = "archive/"
# A real one takes some 20 kB; what it becomes in memory may take sixty times its length.
_PICKLE_LIMIT_BYTES = 1 << 20

_STORAGES = {
    "torch DoubleStorage": "F64",
    "torch FloatStorage": "F32",
    "torch HalfStorage": "F16",
    "torch BFloat16Storage": "BF16",
    "torch LongStorage": "I64",
    "torch IntStorage": "I32",
    "torch ShortStorage": "I16",
    "torch CharStorage": "I8",
    "torch ByteStorage": "U8",
    "torch BoolStorage": "BOOL",
}
_REBUILD, _NO_HOOKS = "torch._utils _rebuild_tensor_v2", "collections OrderedDict"


def save(state: State, path: str | os.PathLike[str], *, fs: FileSystem = DISK) -> None:
    """Write a state; `path` holds the old or the new one whole at any time.

    Raises:
        StateError: It cannot be written; the old one is still there.
    """
    tensors = _apart(state.tensors)
    digests = tensor_digests((n, dtype_name(n, t.dtype), tuple(t.shape), raw(t)) for n, t in tensors.items())
    document = sealed(state, digests=digests)
    # Names stand in both; the rest of a tensor takes some 150 bytes.
    takes = 2 * len(document) + 400 * len(tensors)
    if takes > _PICKLE_LIMIT_BYTES:
        raise StateError(f"the header of the state takes {takes} bytes, at most {_PICKLE_LIMIT_BYTES} are allowed")
    content = {KEY: document, "tensors": tensors}

    def write(temporary: Any) -> int:
        with fs.create(temporary) as file:
            out = Sink(file, fs)
            try:
                torch.save(content, out)  # type: ignore[arg-type]
            except RuntimeError as error:
                # torch tells how it stumbled over the file's own error, not that one.
                raise out.failed or error from None
            fs.sync(file)
            return out.written

    commit(path, write, fs)


def load(path: str | os.PathLike[str], *, verify: bool = True) -> State:
    """Read a state, tensors on the CPU. Without `verify` the digests of the tensors are not checked.

    Raises:
        StateNotFound: Nothing is there.
        StateMismatch: The format is newer than this version reads.
        StateCorrupt: The file is damaged or hostile; the tensor or field is named where it can be.
    """
    with opened(path) as file:
        header, digests, stored = _read_head(file, path)
        file.seek(0)
        try:
            tensors = torch.load(file, map_location="cpu", weights_only=True, mmap=False)["tensors"]
        except (RuntimeError, pickle.UnpicklingError, ValueError, LookupError, OSError) as error:
            raise corrupt(path, f"torch cannot read it ({shown(error)})") from error
    for name, one in stored.items():
        tensor = tensors[name]
        whole = tensor.is_contiguous() and tensor.untyped_storage().nbytes() == tensor.nbytes
        if tensor.dtype != DTYPES[one.dtype] or tuple(tensor.shape) != one.shape or not whole:
            raise corrupt(path, f"tensor {shown(name)}: torch reads something else than what was saved")
    found = (
        tensor_digests((n, one.dtype, one.shape, raw(tensors[n])) for n, one in stored.items()) if verify else digests
    )
    for name, tensor in tensors.items():
        if found[name] != digests[name]:
            raise corrupt(path, f"tensor {shown(name)}: its bytes are not those that were saved")
        if tensor.dtype == torch.bool and tensor.numel() and int(raw(tensor).max()) > 1:
            raise corrupt(path, f"tensor {shown(name)}: a truth value is neither 0 nor 1")
    return State.of(header, tensors)


def read_header(path: str | os.PathLike[str]) -> Header:
    """Read and verify the header alone. Raises as `load` does."""
    with opened(path) as file:
        return _read_head(file, path)[0]


@dataclass(frozen=True, slots=True)
class _Global:
    """A name that the pickle refers to; never looked up."""

    name: str


@dataclass(frozen=True, slots=True)
class _Storage:
    """A storage that the pickle refers to: dtype name, key, elements."""

    dtype: str
    key: str
    elements: int


@dataclass(frozen=True, slots=True)
class _Stored:
    """A tensor that the pickle builds: all of one storage."""

    dtype: str
    key: str
    shape: tuple[int, ...]


def _apart(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Contiguous tensors, each with a storage of its own and of its size: torch.save writes whole storages, once."""
    apart: dict[str, Tensor] = {}
    taken: set[int] = set()
    for name, tensor in sorted(tensors.items()):
        one = tensor.detach().cpu().contiguous()
        storage = one.untyped_storage()
        if storage.nbytes() != one.nbytes or storage.data_ptr() in taken:
            one = one.clone(memory_format=torch.contiguous_format)
        taken |= {one.untyped_storage().data_ptr()} - {0}
        apart[name] = one
    return apart


def _read_head(file: BinaryIO, path: str | os.PathLike[str]) -> tuple[Header, Mapping[str, str], dict[str, _Stored]]:
    found = members(file, path)
    program = found.get(f"{_ROOT}data.pkl")
    if program is None or program.size > _PICKLE_LIMIT_BYTES:
        raise corrupt(path, "not a file that torch.save wrote, or not of a state")
    order = found.get(f"{_ROOT}byteorder")
    if order is None or order.size != 6 or read_member(file, order, path, "byteorder").tobytes() != b"little":
        raise corrupt(path, "byteorder: expected little")
    try:
        content = _run(read_member(file, program, path, "header").tobytes())
    except (ValueError, LookupError, TypeError) as error:
        raise corrupt(path, f"the pickle is not that of a state ({shown(error)})") from error
    if not isinstance(content, dict) or set(content) != {KEY, "tensors"} or not isinstance(content[KEY], str):
        raise corrupt(path, f"a file of torch.save but no state: it lacks the field {KEY}")
    header, document = unsealed(parsed(content[KEY].encode("utf-8", "surrogatepass"), path), {"digests"}, path)
    tensors, digests = content["tensors"], document["digests"]
    if not isinstance(tensors, dict) or not isinstance(digests, dict) or set(digests) != set(tensors):
        raise corrupt(path, "digests: expected one for every tensor and no other")
    _check_storages(tensors, found, path)
    return header, digests, tensors


def _check_storages(tensors: Mapping[str, Any], found: Mapping[str, Member], path: str | os.PathLike[str]) -> None:
    known = {f"{_ROOT}{name}" for name in ("data.pkl", "byteorder", "version", ".data/serialization_id")}
    known |= {f"{_ROOT}{name}" for name in (".format_version", ".storage_alignment")}
    for name, one in tensors.items():
        if not isinstance(one, _Stored):
            raise corrupt(path, f"tensor {shown(name)}: expected a tensor")
        member = f"{_ROOT}data/{one.key}"
        if member in known or member not in found:
            raise corrupt(path, f"tensor {shown(name)}: its bytes are missing, or belong to another one too")
        known.add(member)
        if math.prod(one.shape) * DTYPES[one.dtype].itemsize != found[member].size:
            raise corrupt(path, f"tensor {shown(name)}: its shape does not fit its {found[member].size} bytes")
    for member in found:
        if member not in known:
            raise corrupt(path, f"zip: the member {shown(member)} does not belong to a state")


def _run(program: bytes) -> Any:
    """What a pickle builds, with inert stand-ins for all that it refers to.

    Raises:
        ValueError, LookupError, TypeError: It does something that no pickle of a state does.
    """
    stack: list[Any] = []
    marks: list[int] = []
    memo: dict[int, Any] = {}

    def since_mark() -> list[Any]:
        begin = marks.pop()
        taken = stack[begin:]
        del stack[begin:]
        return taken

    def last(n: int) -> tuple[Any, ...]:
        if len(stack) - n < (marks[-1] if marks else 0):
            raise ValueError("the stack ends")
        taken = tuple(stack[len(stack) - n :])
        del stack[len(stack) - n :]
        return taken

    argument: Any
    for code, argument, _ in pickletools.genops(program):
        match code.name:
            case "PROTO":
                if argument != 2:
                    raise ValueError(f"protocol {argument}")
            case "EMPTY_DICT":
                stack.append({})
            case "EMPTY_TUPLE":
                stack.append(())
            case "NEWFALSE":
                stack.append(False)
            case "BINUNICODE" | "BININT" | "BININT1" | "BININT2" | "LONG1":
                stack.append(argument)
            case "BINPUT" | "LONG_BINPUT":
                # The memo of some readers is a list that grows to the highest number.
                if argument != len(memo):
                    raise ValueError("the memo is not filled in order")
                memo[argument] = stack[-1]
            case "BINGET" | "LONG_BINGET":
                stack.append(memo[argument])
            case "MARK":
                marks.append(len(stack))
            case "TUPLE":
                stack.append(tuple(since_mark()))
            case "TUPLE1" | "TUPLE2" | "TUPLE3":
                stack.append(last(int(code.name[-1])))
            case "GLOBAL":
                if argument not in _STORAGES and argument not in (_REBUILD, _NO_HOOKS):
                    raise ValueError(f"it refers to {argument}")
                stack.append(_Global(argument))
            case "BINPERSID":
                stack.append(_storage(*last(1)))
            case "REDUCE":
                stack.append(_called(*last(2)))
            case "SETITEM":
                pair = last(2)
                _fill(stack[-1], pair)
            case "SETITEMS":
                items = since_mark()
                _fill(stack[-1], items)
            case "STOP":
                break
            case other:
                raise ValueError(f"it uses {other}")
    (result,) = stack
    if marks:
        raise ValueError("a mark is left")
    return result


def _storage(reference: Any) -> _Storage:
    what, kind, key, place, elements = reference
    if what != "storage" or place != "cpu" or not isinstance(kind, _Global) or not _is_size(elements):
        raise ValueError("a storage is not described as one")
    if not (isinstance(key, str) and key.isascii() and key.isdigit() and len(key) < 10):
        raise ValueError("the name of a storage is not a number")
    return _Storage(_STORAGES[kind.name], key, elements)


def _called(what: Any, arguments: Any) -> Any:
    if what == _Global(_NO_HOOKS) and arguments == ():
        return None
    if what != _Global(_REBUILD):
        raise ValueError("it calls something else than the making of a tensor")
    storage, offset, shape, stride, grad, hooks = arguments
    if not isinstance(storage, _Storage) or offset != 0 or grad is not False or hooks is not None:
        raise ValueError("a tensor is not made as one")
    if not (isinstance(shape, tuple) and len(shape) <= 16 and all(_is_size(one) for one in shape)):
        raise ValueError("the shape of a tensor is not a list of sizes")
    if not (isinstance(stride, tuple) and len(stride) == len(shape) and all(_is_size(one) for one in stride)):
        raise ValueError("the strides of a tensor are not a list of sizes")
    step = 1
    for size, found in zip(reversed(shape), reversed(stride), strict=True):
        # Along an axis of one element any stride does.
        if size > 1 and found != step and storage.elements:
            raise ValueError("a tensor is not contiguous")
        step *= size
    if step != storage.elements:
        raise ValueError("a tensor is not all of its storage")
    return _Stored(storage.dtype, storage.key, shape)


def _is_size(value: object) -> bool:
    return type(value) is int and 0 <= value < 2**40


def _fill(target: Any, items: Sequence[Any]) -> None:
    keys = items[::2]
    if not isinstance(target, dict) or len(items) % 2 or not all(isinstance(key, str) for key in keys):
        raise TypeError("a dictionary is not one")
    if len({*keys, *target}) != len(keys) + len(target):
        raise ValueError("a name is given twice")
    target.update(zip(keys, items[1::2], strict=True))
