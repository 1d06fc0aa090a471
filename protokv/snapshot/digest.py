"""Digests that tell whether a tensor or a header is what was saved: SHA-256, hexadecimal.

A tensor's digest covers its dtype and shape besides its bytes, so that bytes cannot be read as something else.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping
from functools import partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from protokv.snapshot.side_by_side import in_order


def raw(tensor: Tensor) -> NDArray[np.uint8]:
    """The bytes of a contiguous CPU tensor of any dtype, `[nbytes]` uint8, sharing its memory."""
    return tensor.detach().reshape(-1).view(torch.uint8).numpy()


def tensor_digest(dtype: str, shape: tuple[int, ...], data: NDArray[np.uint8]) -> str:
    """Digest of a tensor given by the name of its dtype, its shape and its bytes."""
    digest = hashlib.sha256(f"{dtype}{list(shape)}\n".encode())
    digest.update(data.data)
    return digest.hexdigest()


def tensor_digests(tensors: Iterable[tuple[str, str, tuple[int, ...], NDArray[np.uint8]]]) -> dict[str, str]:
    """Digests of tensors given as name, dtype, shape and bytes; a few at a time, as they come."""

    def of(name: str, dtype: str, shape: tuple[int, ...], data: NDArray[np.uint8]) -> tuple[str, str]:
        return name, tensor_digest(dtype, shape, data)

    return dict(in_order(partial(of, *tensor) for tensor in tensors))


def canonical(document: Mapping[str, Any]) -> str:
    """The one JSON text of a document: sorted keys, no spaces, ASCII. ValueError on NaN and infinities."""
    return json.dumps(document, sort_keys=True, separators=(",", ":"), ensure_ascii=True, allow_nan=False)


def document_digest(document: Mapping[str, Any]) -> str:
    """Digest of a document, by its canonical text."""
    return hashlib.sha256(canonical(document).encode()).hexdigest()
