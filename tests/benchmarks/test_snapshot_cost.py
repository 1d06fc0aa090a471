"""What a state costs to save and to load, beside plain safetensors of the same tensors.

`pytest tests/benchmarks/test_snapshot_cost.py --benchmark-enable --benchmark-group-by=param:tensors`, with `-m slow`
for the large state. Both sides end with the bytes on the disk: plain `save_file` is followed by a sync, and what plain
`load_file` maps is copied, since every byte is going to be read.
"""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from protokv.snapshot import FORMS, load, save

# Of a model of 7B parameters (L, H, D) with this many near tokens and prototypes.
SIZES = [
    pytest.param((80, 5), id="6MB"),
    pytest.param((9400, 350), id="600MB", marks=pytest.mark.slow),
]


def tensors_of(near: int, prototypes: int) -> dict[str, torch.Tensor]:
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


@pytest.fixture(scope="module", params=SIZES)
def tensors(request):
    # A normal test run calls everything once, at a size of its own.
    option = request.config.getoption
    measured = option("benchmark_enable") or not option("benchmark_disable")
    return tensors_of(*(request.param if measured else (2, 1)))


def rounds(tensors) -> int:
    return 3 if sum(t.nbytes for t in tensors.values()) > 1e8 else 20


def test_plain_save(benchmark, tensors, tmp_path):
    path = tmp_path / "plain.safetensors"

    def plain() -> None:
        save_file(tensors, path)
        with path.open("rb") as file:
            os.fsync(file.fileno())

    benchmark.pedantic(plain, rounds=rounds(tensors))


def test_plain_load(benchmark, tensors, tmp_path):
    save_file(tensors, tmp_path / "plain.safetensors")
    benchmark.pedantic(
        lambda: [t.clone() for t in load_file(tmp_path / "plain.safetensors").values()], rounds=rounds(tensors)
    )


@pytest.mark.parametrize("suffix", FORMS)
def test_save(benchmark, suffix, tensors, make_state, tmp_path):
    state, path = make_state(tensors=tensors), tmp_path / f"a{suffix}"
    benchmark.pedantic(save, args=(state, path), setup=lambda: removed(path), rounds=rounds(tensors))


def test_save_of_what_has_not_changed(benchmark, tensors, make_state, tmp_path):
    state, path = make_state(tensors=tensors), tmp_path / "a.zarr"
    save(state, path)
    benchmark.pedantic(save, args=(state, path), rounds=rounds(tensors))


@pytest.mark.parametrize("verify", [True, False], ids=["verified", "unverified"])
@pytest.mark.parametrize("suffix", FORMS)
def test_load(benchmark, suffix, verify, tensors, make_state, tmp_path):
    path = tmp_path / f"a{suffix}"
    save(make_state(tensors=tensors), path)
    benchmark.pedantic(load, args=(path,), kwargs={"verify": verify}, rounds=rounds(tensors))


def removed(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


@pytest.fixture
def make_state():
    from tests.snapshot.conftest import make

    return make
