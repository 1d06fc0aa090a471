"""Small data sets, written once, and the embedded model that answers them."""

from pathlib import Path

import pytest

from protokv.backbones import load_backbone
from protokv.core.backbone import Backbone
from tests.replay.benchmarks.miniature import VIDEOS, write_clips, write_dataset


@pytest.fixture(scope="session")
def data_root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with one for each data set."""
    clips = write_clips(tmp_path_factory.mktemp("clips"))
    root = tmp_path_factory.mktemp("data")
    for name in VIDEOS:
        write_dataset(name, root / name, clips)
    return root


@pytest.fixture(scope="session")
def embedded() -> Backbone:
    return load_backbone("protokv/mini", device="cpu")
