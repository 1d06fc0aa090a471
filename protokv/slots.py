"""A state as plain tensors, for engines of others: the file, and what its head says.

The tensors are `keys` and `values` `[L, N, H, D]`, `bias` `[L, N, H]` float32, added to the logits,
and `positions` `[L, N, H, P]` int64, where the slots stood in the stream. Keys are turned so that a
question stands at the position N, in all components, and slots count as the positions before it.
`protokv.stream.slots` makes them. This file needs torch and safetensors alone, so that it works in
the environment of an engine.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, fields
from itertools import cycle, islice
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from protokv.errors import StateCorrupt, StateMismatch, StateNotFound, escape_text

SLOTS_SUFFIX = ".kv.safetensors"

_MOST_FILES = 256  # of a folder that stay open
_KEY = "protokv_slots"  # of the head, in the metadata of the file
_VERSION = 1
_NAMES = ("keys", "values", "bias", "positions")


@dataclass(frozen=True, slots=True)
class SlotsHead:
    """What a file of slots says of itself, and all that an engine must check."""

    slots: int  # N
    commit: str  # tells commits of states apart: the digest of the document of the state
    model: str  # name of the model that made the state
    family: str  # `model_type` of its config
    dtype: str
    weights_digest: str  # as in the header of a state
    biased: bool  # whether a slot has another bias than 0
    free: bool  # whether a head has fewer slots than N
    ids: list[int]  # of the prompt before the video, which penalties of repetition count
    digest: str = ""  # SHA-256 of the bytes of the tensors, in the order of their names
    version: int = _VERSION

    def fill_slots(self) -> Iterator[int]:
        """Yield an id for each slot, such as penalties of repetition count: the prompt before the
        video is among the slots.
        """
        return islice(cycle(self.ids or [0]), self.slots)


def write_slots(
    path: str | os.PathLike[str], head: SlotsHead, tensors: Mapping[str, Tensor]
) -> int:
    """Write the file so that the path holds the old or the new one whole; return its bytes.
    OSError.
    """
    named = asdict(head) | {"digest": _digest(tensors)}
    made = Path(f"{os.fspath(path)}.partial")
    save_file(dict(tensors), made, metadata={_KEY: json.dumps(named)})
    made.replace(path)
    return Path(path).stat().st_size


class SlotsFile:
    """A file of slots whose head was checked. Rows of its tensors are read when they are asked
    for.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        """Open a file. StateNotFound: it is not there. StateCorrupt: it is none, or cut off."""
        self.path = Path(path)
        try:
            opened: Any = safe_open(self.path, framework="pt")
            document = json.loads((opened.metadata() or {})[_KEY])
            self.head = SlotsHead(**{one.name: document[one.name] for one in fields(SlotsHead)})
            self._slices = {name: opened.get_slice(name) for name in _NAMES}
            self.layers, _, self.kv_heads, self.head_size = self._slices["keys"].get_shape()
            self._file = opened
        except FileNotFoundError:
            raise StateNotFound(f"there is no file {self.path}") from None
        except (OSError, SafetensorError, KeyError, TypeError, ValueError) as error:
            raise StateCorrupt(
                f"{self.path} has no slots of a state ({escape_text(error)})",
                hint="write it again: protokv inspect STATE -o NAME" + SLOTS_SUFFIX,
            ) from None
        if self.head.version != _VERSION:
            raise StateCorrupt(f"{self.path} is of version {self.head.version}, this reads 1")

    def read(self, layer: int, name: str, start: int = 0, end: int | None = None) -> Tensor:
        """Return the slots from `start` to `end` of a tensor of one layer."""
        found: Tensor = self._slices[name][layer, start : self.head.slots if end is None else end]
        return found

    def check_model(self, weights_digest: str, shape: tuple[int, int, int]) -> None:
        """Refuse another model than that of the state, by the digest of its weights (empty: it is
        not known), and its layers, heads of keys and size of a head. StateMismatch.
        """
        known = (weights_digest, self.head.weights_digest)
        alike = shape == (self.layers, self.kv_heads, self.head_size)
        if not alike or (all(known) and known[0] != known[1]):
            raise StateMismatch(f"it is of another model, {escape_text(self.head.model)}")

    def verify(self) -> None:
        """Read every byte. StateCorrupt: they are not those that were written."""
        if _digest({name: self._file.get_tensor(name) for name in _NAMES}) != self.head.digest:
            raise StateCorrupt(
                f"{self.path}: its bytes are not those that were written",
                hint="write it again: protokv inspect STATE -o NAME" + SLOTS_SUFFIX,
            )


class SlotsFolder:
    """The files of a folder by name; one stays open until another one has its name."""

    def __init__(self, folder: str) -> None:
        """StateNotFound: there is no such folder."""
        self._root = Path(folder).resolve()
        self._open = dict[str, tuple[tuple[int, int, int], SlotsFile]]()
        if not (folder and self._root.is_dir()):
            raise StateNotFound(f"there is no folder of states at {folder!r}")

    def open(self, name: object, check: Callable[[SlotsFile], None] | None = None) -> SlotsFile:
        """Return the file of a state, which `check` has seen. StateError, and as `check`."""
        path = self._root / f"{name}{SLOTS_SUFFIX}"
        status = None
        with suppress(OSError, ValueError):
            if path.resolve().is_relative_to(self._root) and path.is_file():
                status = path.stat()
        if status is None or not isinstance(name, str):
            raise StateNotFound(f"there is no state {escape_text(name)} in its folder")
        version = (status.st_ino, status.st_mtime_ns, status.st_size)
        if name not in self._open or self._open[name][0] != version:
            found = SlotsFile(path)
            if check is not None:
                check(found)
            # A file that is gone takes its place on the disk while it is open.
            there = [one for one, (_, known) in self._open.items() if known.path.exists()]
            self._open = {one: self._open[one] for one in there[1 - _MOST_FILES :]}
            self._open[name] = version, found
        return self._open[name][1]


def _digest(tensors: Mapping[str, Tensor]) -> str:
    digest = hashlib.sha256()
    for _, tensor in sorted(tensors.items()):
        digest.update(tensor.contiguous().view(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()
