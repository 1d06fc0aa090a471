"""Where a test of ingestion keeps its state."""

from pathlib import Path

import pytest


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "s.safetensors"
