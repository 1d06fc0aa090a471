"""The page of tensors agrees with their declarations; `python -m tests.storage.test_tensor_table` writes it."""

from __future__ import annotations

from pathlib import Path

import torch

import protokv
from protokv.config import CONFIGS, DurableConfig
from protokv.core.tensors import MemoryShape
from protokv.extras.thumbnails import Thumbnails
from protokv.memories import MEMORIES

PAGE = Path(protokv.__file__).parent / "storage" / "README.md"
SHAPE = MemoryShape(2, 2, 8, 3, 4, torch.bfloat16, torch.device("cpu"))


def rows() -> dict[str, tuple[str, str, str]]:
    """Return axes, dtype and meaning of every tensor of every memory by name."""
    found = {}
    configs = [*(config() for config in CONFIGS.values()), DurableConfig(center_bits=8)]
    for config in configs:
        for spec in (*MEMORIES[config.name].declare(config, SHAPE), *Thumbnails.declare()):
            dtype = "model's" if spec.dtype == SHAPE.dtype else str(spec.dtype).removeprefix("torch.")
            meaning = f"{spec.meaning} ({spec.unit})" if spec.unit and spec.unit not in spec.meaning else spec.meaning
            found[spec.name] = (", ".join(spec.dims), dtype, meaning)
    return dict(sorted(found.items()))


def table() -> str:
    return "\n".join(f"| `{name}` | {' | '.join(cells)} |" for name, cells in rows().items())


def test_the_page_has_the_declaration_of_every_tensor() -> None:
    missing = [line for line in table().splitlines() if line not in PAGE.read_text(encoding="utf-8").splitlines()]
    assert not missing


if __name__ == "__main__":
    page, head = PAGE.read_text(encoding="utf-8"), "|---|---|---|---|\n"
    PAGE.write_text(page[: page.index(head)] + head + table() + "\n", encoding="utf-8")
