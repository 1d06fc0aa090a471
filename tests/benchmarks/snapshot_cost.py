"""Compare saving and loading a state with a plain write of the same bytes and the safetensors library.

`python -m tests.benchmarks.snapshot_cost` measures a state of 600 MB and writes `results/snapshot-cpu.*`. Both sides
end with the bytes on the disk. What the library maps is copied, because every byte is going to be read.
"""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from protokv.core.digest import raw
from protokv.storage.api import load_state, save_state
from tests.benchmarks.results import write_table
from tests.storage.conftest import make

NOTE = (
    "A state of a 7B model at a budget of 24k. Measured in turn, by the clock, after one round that does not count. "
    "`ms`: save with digests and sync, load with verification. `other_ms`: one plain write of the same bytes and sync, "
    "`load_file` of the safetensors library with every tensor copied. `ratio`: median of the ratios. In the rows "
    "unchanged, the state that stands there is saved again."
)


def tensors_of(near: int, prototypes: int) -> dict[str, torch.Tensor]:
    """Of a model of 7B parameters (L, H, D) with this many near tokens and prototypes."""
    L, H, D = 28, 4, 128
    generator = torch.Generator().manual_seed(0)

    def noise(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator)

    return {
        "near.keys": noise(L, H, near, D).bfloat16(),
        "near.values": noise(L, H, near, D).bfloat16(),
        "near.positions": torch.arange(near * 3).reshape(near, 3),
        "bank.key_center": noise(L, H, prototypes, D),
        "bank.value_center": noise(L, H, prototypes, D),
        "bank.mass": noise(L, H, prototypes).abs(),
        "residual.key_counts": torch.randint(0, 9, (L, H, prototypes, 8, 16), generator=generator, dtype=torch.int32),
    }


def plain_write(tensors: dict[str, torch.Tensor], path: Path) -> None:
    with path.open("wb") as file:
        for tensor in tensors.values():
            file.write(raw(tensor).data)
        file.flush()
        os.fsync(file.fileno())


def library_load(path: Path) -> object:
    return [tensor.clone() for tensor in load_file(path).values()]


def removed(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def in_turn(
    ours: Callable[[], object], other: Callable[[], object], rounds: int, before: Callable[[], object] = lambda: None
) -> dict[str, Any]:
    """Milliseconds of both by the clock, since what is waited for is the disk, and their ratio."""

    def milliseconds(call: Callable[[], object]) -> float:
        before()
        # What was removed is not paid for by what is written next.
        os.sync()
        start = time.perf_counter()
        call()
        return 1000 * (time.perf_counter() - start)

    pairs = []
    for n in range(rounds + 1):
        # Each goes first in turn.
        b = milliseconds(other) if n % 2 else 0.0
        a = milliseconds(ours)
        pairs.append((a, b or milliseconds(other)))
    del pairs[0]
    return {
        "ms": round(median(a for a, _ in pairs)),
        "other_ms": round(median(b for _, b in pairs)),
        "ratio": round(median(a / b for a, b in pairs), 2),
        "ratios": " ".join(f"{a / b:.2f}" for a, b in pairs),
    }


def measured(tensors: dict[str, torch.Tensor], folder: Path, rounds: int) -> list[dict[str, Any]]:
    """A row for each form and direction."""
    state, rows = make(tensors=tensors), []
    plain, library = folder / "plain", folder / "library.safetensors"
    save_file(tensors, library)
    written = partial(plain_write, tensors, plain)
    for suffix in (".safetensors", ".zarr", ".pt"):
        path = folder / f"a{suffix}"

        def clear(path: Path = path) -> None:
            removed(path)
            removed(plain)

        rows.append(
            {"what": "save", "form": suffix} | in_turn(partial(save_state, state, path), written, rounds, clear)
        )
        save_state(state, path)
        again = in_turn(partial(save_state, state, path), written, rounds, partial(removed, plain))
        rows.append({"what": "save, unchanged", "form": suffix} | again)
        rows.append(
            {"what": "load", "form": suffix}
            | in_turn(partial(load_state, path), partial(library_load, library), rounds)
        )
        removed(path)
    return rows


if __name__ == "__main__":
    large = tensors_of(9400, 350)
    size = sum(tensor.nbytes for tensor in large.values())
    with TemporaryDirectory() as name:
        write_table("snapshot", "cpu", measured(large, Path(name), 4), f"{size / 1e6:.0f} MB. {NOTE}")
