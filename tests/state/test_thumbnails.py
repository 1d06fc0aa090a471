"""Thumbnails: a bounded number of small pictures that depend on the steps alone."""

import io
import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

import protokv
from protokv.errors import StateCorrupt
from protokv.ingestion import ingest_events
from protokv.memories import DurableConfig
from protokv.state.checkpoint import save_state
from protokv.state.describe import describe_state
from protokv.state.reader import load_state
from protokv.state.thumbnails import (
    MOST_THUMBNAIL_BYTES,
    THUMBNAIL_SIDE,
    Thumbnails,
    encode_thumbnail,
    make_thumbnail,
)
from tests.mock_backbone import MockBackbone
from tests.prepared import Prepared

CONFIG = DurableConfig(budget=40)


def watch(found: Thumbnails, first: int, last: int) -> Thumbnails:
    for step in range(first, last):
        found.add(step, float(step), np.full((8, 12, 3), step % 256, np.uint8))
    return found


@given(
    steps=st.integers(1, 120),
    cuts=st.sets(st.integers(1, 119), max_size=4),
    most=st.integers(1, 20),
)
def test_every_2_to_the_kth_step_is_kept_and_the_last_one_also_by_a_resumed_stream(
    steps: int, cuts: set[int], most: int
) -> None:
    whole = watch(Thumbnails(most), 0, steps)
    kept = [one.step for one in whole.all()]
    stride = next(2**k for k in range(10) if math.ceil(steps / 2**k) <= most)
    assert kept == sorted({*range(0, steps, stride), steps - 1})
    assert len(kept) <= most + 1
    found = Thumbnails(most)
    first = 0
    for end in sorted({*(cut for cut in cuts if cut < steps), steps}):
        read = Thumbnails.read(watch(found, first, end).live_tensors())
        assert read is not None
        found = read
        first = end
        read.most = most
    resumed = found.live_tensors()
    assert all(torch.equal(resumed[name], tensor) for name, tensor in whole.live_tensors().items())


@pytest.mark.parametrize("size", [(1, 1), (1, 5000), (160, 160), (1080, 1920), (3, 161)])
def test_a_picture_is_small_whatever_is_in_it(size: tuple[int, int]) -> None:
    noise = np.random.default_rng(0).integers(0, 256, (*size, 3), dtype=np.uint8)
    small = make_thumbnail(noise)
    assert min(THUMBNAIL_SIDE, max(size)) / 2 <= max(small.shape[:2]) <= THUMBNAIL_SIDE
    data = encode_thumbnail(small)
    assert len(data) <= MOST_THUMBNAIL_BYTES
    with Image.open(io.BytesIO(data)) as image:
        assert image.format == "JPEG"


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("states") / "a.safetensors"
    list(ingest_events(Prepared(0, 80), path, CONFIG, backbone=MockBackbone()))
    return path


def test_a_state_tells_its_pictures_and_those_of_another_shape_are_refused_in_one_line(
    saved: Path, tmp_path: Path
) -> None:
    times_s = describe_state(saved)["thumbnails"]["times_s"]
    assert (times_s[0], times_s[-1]) == (0.0, 39.0)
    assert 9 <= len(times_s) <= 17
    tensors = load_state(saved).tensors
    path = tmp_path / "hostile.safetensors"
    jpeg = tensors["thumbnails.jpeg"]
    step = tensors["thumbnails.step"]
    for wrong in ({"thumbnails.jpeg": jpeg.to(torch.int16)}, {"thumbnails.step": step[1:]}):
        save_state(replace(load_state(saved), tensors={**tensors, **wrong}), path)
        for read in (lambda: describe_state(path), lambda: protokv.load(path, MockBackbone())):
            with pytest.raises(StateCorrupt, match=r"^[^\n]*thumbnails\.[^\n]*$"):
                read()


def test_without_them_a_state_has_none(saved: Path, tmp_path: Path) -> None:
    path = tmp_path / "none.safetensors"
    list(ingest_events(Prepared(0, 80), path, CONFIG, backbone=MockBackbone(), thumbnails=0))
    assert describe_state(path)["thumbnails"] is None
    found = load_state(path).tensors
    whole = load_state(saved).tensors
    assert found.keys() == {name for name in whole if not name.startswith("thumbnails.")}
    assert all(torch.equal(whole[name], tensor) for name, tensor in found.items())
