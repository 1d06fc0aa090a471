"""Each family as a tiny random model in a folder, for the files of tests that go through all of
them.
"""

from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest

from tests.backbones.tiny import (
    BUILDERS,
    write_gemma4,
    write_internvl,
    write_llava_onevision,
    write_qwen2_5_vl,
)
from tests.conftest import widen

# The models of all tests by name, which begins with that of the family.
MADE: dict[str, Callable[[Path], Path]] = {
    **BUILDERS,
    # One full layer, and two with a window that is shorter than a step and the question.
    "qwen2_5_vl of sliding layers": partial(
        write_qwen2_5_vl,
        use_sliding_window=True,
        sliding_window=5,
        layer_types=["sliding_attention", "full_attention", "sliding_attention"],
    ),
    "gemma4 of short windows": partial(write_gemma4, window=9),
    "gemma4 that is large": partial(write_gemma4, window=40, large=True),
    "internvl on Qwen3": partial(write_internvl, language="qwen3"),
    "llava_onevision of three layers": partial(write_llava_onevision, feature_layer=[0, -2, -1]),
    "llava_onevision of CLIP": partial(
        write_llava_onevision, tower="clip_vision_model", select="default", feature_layer=-2
    ),
}
# One position a token with sliding layers, three, and layers that carry a state.
QUICK = ("gemma4 of short windows", "qwen2_5_vl", "qwen3_5")


@pytest.fixture(scope="module", params=widen(MADE, QUICK))
def made(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture(scope="module")
def family(made: str) -> str:
    return made.split()[0]


@pytest.fixture(scope="module")
def folder(made: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return MADE[made](tmp_path_factory.mktemp("model"))
