"""Digests that show whether a tensor or a header is the one that was saved.

A tensor has an XXH3 digest of 128 bits, which is as fast as memory. It covers dtype, shape and bytes. The header has a
SHA-256. Both find accidents, but they are no signatures: anybody who can write a state can write matching digests.
XXH3: https://github.com/Cyan4973/xxHash/blob/dev/doc/xxhash_spec.md
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import torch
import xxhash
from numpy.typing import NDArray
from torch import Tensor

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

# More threads do not help: a few cores hash as fast as memory delivers.
_THREADS = 4


def tensor_bytes(tensor: Tensor) -> NDArray[np.uint8]:
    """Return the bytes of a contiguous CPU tensor of any dtype, `[nbytes]` uint8, sharing its memory."""
    return tensor.detach().reshape(-1).view(torch.uint8).numpy()


def digest_tensors(tensors: Mapping[str, Tensor]) -> dict[str, str]:
    """Return the digests of contiguous CPU tensors by name; computed a few at a time, as hashing releases the GIL."""

    def digest(tensor: Tensor) -> str:
        made: Any = xxhash.xxh3_128()
        made.update(memoryview(f"{NAMES[tensor.dtype]}{list(tensor.shape)}\n".encode()))
        made.update(tensor_bytes(tensor).data)
        return str(made.hexdigest())

    with ThreadPoolExecutor(_THREADS) as pool:
        return dict(zip(tensors, pool.map(digest, tensors.values()), strict=True))


def canonical_json(document: Mapping[str, Any]) -> str:
    """Return a document as JSON with sorted keys, no spaces, ASCII. Raise ValueError on NaN and infinities."""
    return json.dumps(document, sort_keys=True, separators=(",", ":"), ensure_ascii=True, allow_nan=False)


def digest_document(document: Mapping[str, Any]) -> str:
    """Return the SHA-256 of the canonical text of a document."""
    return hashlib.sha256(canonical_json(document).encode()).hexdigest()
