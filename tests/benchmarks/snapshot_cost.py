"""Compare saving and loading a state with a plain write of the same bytes and the safetensors library.

`python -m tests.benchmarks.snapshot_cost` measures a state of 600 MB and writes `results/snapshot-cpu.*`. Both sides
end with the bytes on the disk. Tensors that the library maps are copied, because every byte is going to be read.
"""

from __future__ import annotations

import os
import shutil
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from protokv.state.digest import tensor_bytes
from protokv.state.reader import load_state
from protokv.state.writer import save_state
from tests.benchmarks.results import paired, write_table
from tests.state.conftest import make

NOTE = (
    "A state of a 7B model at a budget of 24k. Measured in turn, by the clock, after one round that does not count. "
    "`ms`: save with digests and sync, load with verification. `other_ms`: one plain write of the same bytes and sync, "
    "`load_file` of the safetensors library with every tensor copied. `ratio`: median of the ratios. In the rows "
    "`save, unchanged`, the state that stands there is saved again."
)


def tensors_of(near: int, prototypes: int) -> dict[str, torch.Tensor]:
    """Return tensors of a memory of a 7B model (L, H, D) with this many near tokens and prototypes."""
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
            file.write(tensor_bytes(tensor).data)
        file.flush()
        os.fsync(file.fileno())


def library_load(path: Path) -> object:
    return [tensor.clone() for tensor in load_file(path).values()]


def clear(*paths: Path) -> None:
    """Remove files and folders, and wait for the disk: the next write does not pay for the removal."""
    for path in paths:
        if path.is_dir():
            shutil.rmtree(path)
        else:
            path.unlink(missing_ok=True)
    os.sync()


def measured(tensors: dict[str, torch.Tensor], folder: Path, rounds: int) -> list[dict[str, Any]]:
    """Return a row for each form and direction."""
    state, rows = make(tensors=tensors), []
    plain, library = folder / "plain", folder / "library.safetensors"
    save_file(tensors, library)
    write, read = partial(plain_write, tensors, plain), partial(library_load, library)
    for suffix in (".safetensors", ".zarr", ".pt"):
        path = folder / f"a{suffix}"
        save, load = partial(save_state, state, path), partial(load_state, path)
        cases = [
            ("save", save, write, partial(clear, path, plain)),
            ("save, unchanged", save, write, partial(clear, plain)),
            ("load", load, read, os.sync),
        ]
        for what, ours, other, before in cases:
            save()
            rows.append({"what": what, "form": suffix} | paired(ours, other, rounds, before=before))
        clear(path)
    return rows


if __name__ == "__main__":
    large = tensors_of(9400, 350)
    size = sum(tensor.nbytes for tensor in large.values())
    with TemporaryDirectory() as name:
        write_table("snapshot", "cpu", measured(large, Path(name), 4), f"{size / 1e6:.0f} MB. {NOTE}")
