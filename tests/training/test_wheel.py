"""Training stays out of the wheel, and nothing that is in the wheel misses it."""

from __future__ import annotations

import ast
from pathlib import Path
from zipfile import ZipFile

import pytest
from hatchling.builders.wheel import WheelBuilder

ROOT = Path(__file__).parents[3]
TRAINING = "samples.training"


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> ZipFile:
    (path,) = WheelBuilder(str(ROOT)).build(directory=str(tmp_path_factory.mktemp("wheel")), versions=["standard"])
    return ZipFile(path)


def imported(source: str) -> set[str]:
    """Every module that a source file imports, wherever the import stands."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
    return found


def test_the_wheel_holds_the_world_and_the_weights_but_not_the_training(wheel: ZipFile) -> None:
    names = set(wheel.namelist())
    assert {"protokv/mini/world.py", "protokv/mini/weights/model.safetensors", "protokv/py.typed"} <= names
    assert not [name for name in names if "training" in name]


def test_nothing_in_the_wheel_imports_the_training(wheel: ZipFile) -> None:
    sources = [name for name in wheel.namelist() if name.endswith(".py")]
    assert len(sources) > 50
    guilty = {name for name in sources for module in imported(wheel.read(name).decode()) if TRAINING in module}
    assert not guilty
    # The same look at training itself finds what it is looking for.
    assert any(TRAINING in module for module in imported((ROOT / "samples/training/train.py").read_text()))
