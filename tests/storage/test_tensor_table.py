"""The page that says what each tensor of a state is says it of all of them, as they are declared."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import protokv
from protokv import storage
from protokv.config import CONFIGS, DurableConfig
from protokv.core.memory import MemoryShape
from protokv.core.registry import MEMORIES
from protokv.core.session import Session
from protokv.storage.checkpoint import save
from tests.mock_backbone import MockBackbone

PAGE = Path(protokv.__file__).parent / "storage" / "README.md"
SHAPE = MemoryShape(2, 2, 8, 3, 4, torch.bfloat16, torch.device("cpu"))


def rows() -> dict[str, tuple[str, str, str]]:
    """Axes, dtype and meaning of every tensor of every memory, by its name."""
    found = {}
    configs = [*(config() for config in CONFIGS.values()), DurableConfig(center_bits=8)]
    for config in configs:
        for spec in MEMORIES[config.name].declare(config, SHAPE):
            dtype = "model's" if spec.dtype == SHAPE.dtype else str(spec.dtype).removeprefix("torch.")
            meaning = f"{spec.meaning} ({spec.unit})" if spec.unit and spec.unit not in spec.meaning else spec.meaning
            found[spec.name] = (", ".join(spec.dims), dtype, meaning)
    return dict(sorted(found.items()))


def table() -> str:
    return "\n".join(f"| `{name}` | {' | '.join(cells)} |" for name, cells in rows().items())


def test_every_tensor_is_on_the_page_as_it_is_declared() -> None:
    missing = [line for line in table().splitlines() if line not in PAGE.read_text(encoding="utf-8").splitlines()]
    assert not missing


def test_torch_alone_opens_a_state(tmp_path: Path) -> None:
    session = Session.start(MockBackbone(), DurableConfig(budget=24))
    save(session, tmp_path / "s.pt")
    state = torch.load(tmp_path / "s.pt", weights_only=True)
    assert set(state) == {"protokv", "tensors"}
    assert isinstance(state["protokv"], str)
    held = storage.load_state(tmp_path / "s.pt").tensors
    assert {name: tensor.tolist() for name, tensor in state["tensors"].items()} == {
        name: tensor.tolist() for name, tensor in held.items()
    }
    assert set(held) <= set(rows())


@pytest.mark.parametrize("said", ["weights_only=True", "safe_open", "open_group"])
def test_the_page_shows_how_to_open_each_form(said: str) -> None:
    assert said in PAGE.read_text(encoding="utf-8")
