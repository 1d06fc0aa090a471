"""The models that the engine's tests go through, and an engine that stands in for a real one."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.backbones.tiny import BUILDERS
from tests.engines.stand_in import StandIn, stand_in


@pytest.fixture(scope="module", params=["qwen2_5_vl", "llava_onevision"])
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return BUILDERS[request.param](tmp_path_factory.mktemp(request.param))


@pytest.fixture
def engine() -> Iterator[StandIn]:
    with stand_in() as found:
        yield found
