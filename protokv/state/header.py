"""A state: its `StateHeader`, its tensors, and the sealed document that goes with them into every
form.

The header says which model made the state, how its memory is configured, where the stream stands
and what was watched. `seal_header` makes one JSON document of the header, a digest of every tensor
and of itself; `unseal_header` refuses a document that was changed. Digests find accidents and are
no signatures: anybody who can write a state can write matching ones. A tensor has an XXH3 of 128
bits (https://github.com/Cyan4973/xxHash/blob/dev/doc/xxhash_spec.md) over dtype, shape and bytes,
which is as fast as memory; the document has a SHA-256. Knows no models.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, fields
from typing import Annotated, Any

import msgspec
import numpy as np
import torch
import xxhash
from numpy.typing import NDArray
from torch import Tensor

from protokv.core.backbone import BackboneIdentity
from protokv.core.step import StreamClock
from protokv.core.tensors import Tensors, TensorSpec
from protokv.errors import StateCorrupt, StateError, StateMismatch, escape_text
from protokv.texts import JsonObject
from protokv.version import __version__

FORMAT_VERSION = 1

HEADER_KEY = "protokv"  # the name of the document in every form

# bytes of a document, which takes 20 kB; readers of some forms look no further
MOST_HEADER_BYTES = 1 << 20

DTYPE_NAMES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.bool: "BOOL",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
}
"""The dtypes that a state can hold, with their names in safetensors."""

# Names joined by dots, such as `bank.key_center`. Forms with groups make a group of each but the
# last.
_TENSOR_NAME = re.compile(r"[A-Za-z0-9_-]{1,64}(\.[A-Za-z0-9_-]{1,64}){0,7}")

_THREADS = 4  # a few cores hash as fast as memory delivers


@dataclass(frozen=True, kw_only=True)
class StateHeader:
    """All of a state except its tensors. `memory`, `source` and `settings` are plain JSON
    objects.
    """

    backbone: BackboneIdentity
    memory: Mapping[str, Any]  # MemoryConfig.to_dict()
    clock: StreamClock
    source: Mapping[str, Any] | None = None  # the fields of `SourceInfo`
    settings: Mapping[str, Any] = field(default_factory=dict)
    complete: bool = False  # the source was read to its end
    format_version: Annotated[int, msgspec.Meta(ge=1)] = FORMAT_VERSION
    created_by: str = f"protokv {__version__}"

    def to_json(self) -> JsonObject:
        """Return the fields as plain values."""
        found: JsonObject = msgspec.to_builtins(
            {f.name: getattr(self, f.name) for f in fields(StateHeader)}
        )
        if self.backbone.revision is None:
            # Only hub models have one.
            del found["backbone"]["revision"]
        return found

    @classmethod
    def from_json(cls, data: object) -> StateHeader:
        """Return the header of plain values. StateCorrupt, naming it, if a field is missing or not
        as annotated.

        StateMismatch if the format is newer than this version reads.
        """
        version = data.get("format_version") if isinstance(data, dict) else None
        if type(version) is int and version > FORMAT_VERSION:
            raise StateMismatch(
                f"format_version: this version reads {FORMAT_VERSION}, the state has "
                f"{escape_text(version)}",
                hint="upgrade protokv",
            )
        try:
            return msgspec.convert(data, StateHeader)
        except msgspec.ValidationError as error:
            what, _, where = str(error).partition(" - at `$.")
            raise StateCorrupt(f"{where.rstrip('`') or 'header'}: {escape_text(what)}") from None


@dataclass(frozen=True, kw_only=True)
class State(StateHeader):
    """A header and its tensors."""

    tensors: Tensors  # tensors by name, on any device; after loading on the CPU
    # axes, meaning and unit, for forms that can hold them; not read back
    specs: Iterable[TensorSpec] = ()


def view_tensor_bytes(tensor: Tensor) -> NDArray[np.uint8]:
    """Return the bytes of a contiguous CPU tensor of any dtype, `[nbytes]` uint8, sharing its
    memory.
    """
    return tensor.detach().reshape(-1).view(torch.uint8).numpy()


def digest_tensors(tensors: Tensors) -> dict[str, str]:
    """Return the digests of contiguous CPU tensors by name; computed a few at a time, as hashing
    releases the GIL.
    """

    def digest(tensor: Tensor) -> str:
        made: Any = xxhash.xxh3_128()
        made.update(memoryview(f"{DTYPE_NAMES[tensor.dtype]}{list(tensor.shape)}\n".encode()))
        made.update(view_tensor_bytes(tensor).data)
        return str(made.hexdigest())

    with ThreadPoolExecutor(_THREADS) as pool:
        return dict(zip(tensors, pool.map(digest, tensors.values()), strict=True))


def make_canonical_json(document: Mapping[str, Any]) -> str:
    """Return a document as JSON with sorted keys, no spaces, ASCII. Raise ValueError on NaN and
    infinities.
    """
    return json.dumps(
        document, sort_keys=True, separators=(",", ":"), ensure_ascii=True, allow_nan=False
    )


def digest_document(document: Mapping[str, Any]) -> str:
    """Return the SHA-256 of the canonical text of a document."""
    return hashlib.sha256(make_canonical_json(document).encode()).hexdigest()


def _check_names(names: Iterable[str]) -> None:
    if wrong := [name for name in names if not _TENSOR_NAME.fullmatch(name)]:
        raise StateCorrupt(
            f"tensor {escape_text(wrong[0])}: not a name that a tensor can have here"
        )


def seal_header(state: State) -> str:
    """Return the document of a state, whose tensors are contiguous and on the CPU. StateError: it
    could not be read.
    """
    for name, tensor in state.tensors.items():
        if tensor.dtype not in DTYPE_NAMES:
            raise StateError(f"tensor {name}: a state cannot hold {tensor.dtype}")
    try:
        _check_names(state.tensors)
        document: JsonObject = {
            "header": state.to_json(),
            "digests": digest_tensors(state.tensors),
        }
        text = make_canonical_json({**document, "digest": digest_document(document)})
        StateHeader.from_json(document["header"])
    except (TypeError, ValueError) as error:
        raise StateError(f"the header of the state is not plain JSON: {error}") from error
    except (StateCorrupt, StateMismatch) as error:
        raise StateError(f"the state cannot be written: {error.message}") from error
    if len(text) > MOST_HEADER_BYTES:
        raise StateError(
            f"the header of the state takes {len(text)} bytes, at most {MOST_HEADER_BYTES} are "
            "allowed"
        )
    return text


def unseal_header(text: object) -> tuple[StateHeader, dict[str, str]]:
    """Return the header and the digests of a document. StateCorrupt if changed, and as
    `StateHeader.from_json`.
    """
    if isinstance(text, str) and len(text) > MOST_HEADER_BYTES:
        raise StateCorrupt(f"header: {len(text)} bytes are too many")
    try:
        document = json.loads(text)  # type: ignore[arg-type]
        digest = document.pop("digest")
        digests = document["digests"]
        intact = digest == digest_document(document) and isinstance(digests, dict)
        # Half of a character cannot be printed. Names of files may have bytes that are no text.
        json.dumps(document, ensure_ascii=False).encode(errors="surrogateescape")
    except (TypeError, ValueError, LookupError, AttributeError, RecursionError) as error:
        raise StateCorrupt(
            f"header: there is no state of protokv in it ({escape_text(error)})"
        ) from error
    if not intact:
        raise StateCorrupt("header: it is not the one that was saved")
    _check_names(digests)
    return StateHeader.from_json(document.get("header")), digests
