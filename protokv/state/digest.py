"""Digests that show whether a tensor or a header is the one that was saved.

A tensor has an XXH3 digest of 128 bits, which is as fast as memory. It covers dtype, shape and bytes. The header has a
SHA-256. Both find accidents, but they are no signatures: anybody who can write a state can write matching digests.
XXH3: https://github.com/Cyan4973/xxHash/blob/dev/doc/xxhash_spec.md
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

import numpy as np
import torch
import xxhash
from numpy.typing import NDArray
from torch import Tensor

from protokv.errors import StateError

T = TypeVar("T")

# The dtypes that a state can hold, by their names in safetensors.
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

# Bytes that are copied and hashed at a time: they stay in the cache in between.
_PIECE_BYTES = 1 << 20

# More threads do not help: a few cores hash as fast as memory delivers.
_THREADS = min(4, len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1)


def tensor_bytes(tensor: Tensor) -> NDArray[np.uint8]:
    """Return the bytes of a contiguous CPU tensor of any dtype, `[nbytes]` uint8, sharing its memory."""
    return tensor.detach().reshape(-1).view(torch.uint8).numpy()


def check_dtypes(tensors: Mapping[str, Tensor]) -> None:
    """Raise StateError, naming the tensor, if a state cannot hold its dtype."""
    for name, tensor in tensors.items():
        if tensor.dtype not in NAMES:
            raise StateError(f"tensor {name}: a state cannot hold {tensor.dtype}")


def digest_tensors(tensors: Mapping[str, Tensor]) -> dict[str, str]:
    """Return the digests of contiguous CPU tensors by name; computed a few at a time."""

    def digest(tensor: Tensor) -> str:
        digest = _begin_digest(tensor)
        digest.update(tensor_bytes(tensor).data)
        return str(digest.hexdigest())

    return _map_tensors(tensors, digest)


def copy_and_digest(tensors: Mapping[str, Tensor]) -> dict[str, tuple[Tensor, str]]:
    """Return copies of contiguous CPU tensors with their digests; made a few at a time.

    A digest is that of the copy, even if the source is a mapped file that changes meanwhile.
    """

    def copy(tensor: Tensor) -> tuple[Tensor, str]:
        made, digest = torch.empty_like(tensor), _begin_digest(tensor)
        source, target = tensor_bytes(tensor), tensor_bytes(made)
        for begin in range(0, len(source), _PIECE_BYTES):
            piece = target[begin : begin + _PIECE_BYTES]
            piece[:] = source[begin : begin + _PIECE_BYTES]
            digest.update(piece.data)
        return made, digest.hexdigest()

    return _map_tensors(tensors, copy)


def canonical_json(document: Mapping[str, Any]) -> str:
    """Return a document as JSON with sorted keys, no spaces, ASCII. Raise ValueError on NaN and infinities."""
    return json.dumps(document, sort_keys=True, separators=(",", ":"), ensure_ascii=True, allow_nan=False)


def digest_document(document: Mapping[str, Any]) -> str:
    """Return the SHA-256 of the canonical text of a document."""
    return hashlib.sha256(canonical_json(document).encode()).hexdigest()


def _begin_digest(tensor: Tensor) -> Any:
    """Return a digest that has taken the dtype and the shape of a tensor."""
    digest: Any = xxhash.xxh3_128()
    digest.update(memoryview(f"{NAMES[tensor.dtype]}{list(tensor.shape)}\n".encode()))
    return digest


def _map_tensors(tensors: Mapping[str, Tensor], call: Callable[[Tensor], T]) -> dict[str, T]:
    """Return the result of `call` for each tensor; large ones in threads, as hashing and copying release the GIL."""
    if _THREADS == 1 or sum(tensor.nbytes for tensor in tensors.values()) < 4 * _PIECE_BYTES:
        return {name: call(tensor) for name, tensor in tensors.items()}
    with ThreadPoolExecutor(_THREADS) as pool:
        return dict(zip(tensors, pool.map(call, tensors.values()), strict=True))
