"""Each family as a tiny random model in a folder, for the files of tests that go through all of
them.
"""

from pathlib import Path

import pytest

from tests.backbones.tiny import BUILDERS
from tests.conftest import widen

# One position a token with sliding layers, three, and layers that carry a state.
QUICK_FAMILIES = ("gemma4", "qwen2_5_vl", "qwen3_5")


@pytest.fixture(scope="module", params=widen(BUILDERS, QUICK_FAMILIES))
def family(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture(scope="module")
def folder(family: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return BUILDERS[family](tmp_path_factory.mktemp(family))
