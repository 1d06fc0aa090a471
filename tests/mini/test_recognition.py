"""Pictures of the procedural world are told from all others, however they were stored."""

from __future__ import annotations

from collections.abc import Iterator
from io import BytesIO

import av
import numpy as np
import pytest
from PIL import Image, ImageDraw

from protokv.mini.looked import LONELY, Look, Looked, is_looked_at
from protokv.mini.recognition import look_at
from protokv.mini.world import World, WorldConfig

Picture = np.ndarray

WORLDS = {
    "plain": WorldConfig(seed=4_900_001),
    "natural backdrop": WorldConfig(seed=4_900_002, backdrop="natural"),
    "look-alikes": WorldConfig(seed=4_900_003, evidence_events=4, distractor_similarity=0.5, events_per_minute=20),
    "one scene, all moving": WorldConfig(seed=4_900_004, cut_s=None, moving=1.0),
    "minutes": WorldConfig(seed=4_900_005, length_s=180, counted=3, counted_in=(0, 2), crossing_s=(10, 110)),
}


def resized(picture: Picture, width: int, height: int) -> Picture:
    return np.asarray(Image.fromarray(picture).resize((width, height), Image.Resampling.BICUBIC))


def between_bars(picture: Picture, level: int) -> Picture:
    whole = np.full((picture.shape[0], picture.shape[1] * 16 // 9, 3), level, np.uint8)
    left = (whole.shape[1] - picture.shape[1]) // 2
    whole[:, left : left + picture.shape[1]] = picture
    return whole


CHANGES = {
    "stretched": lambda picture: resized(picture, 640, 360),
    "small": lambda picture: resized(picture, 96, 96),
    "cropped": lambda picture: picture[34:-34, 34:-34],
    "gray bars": lambda picture: between_bars(picture, 128),
    "black bars": lambda picture: between_bars(picture, 0),
}


def pictures(config: WorldConfig, side: int = 336) -> Iterator[Picture]:
    world = World(config)
    return (world.frame(time_s, side) for time_s in range(0, 60, 4))


def looks_of(config: WorldConfig, side: int) -> set[tuple[bool, Look]]:
    world = World(config)
    return {(bool(world.visible(t)), look_at(world.frame(t, side))) for t in range(0, 60, 4)}


@pytest.mark.parametrize("side", [84, 112, 336])
@pytest.mark.parametrize("kind", WORLDS)
def test_a_world_of_any_kind_and_size_shows_shapes_where_it_has_them_and_is_never_another_picture(
    kind: str, side: int
) -> None:
    assert looks_of(WORLDS[kind], side) <= {(True, "shapes"), (False, "empty")}


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("kind", ["plain", "natural backdrop"])
def test_a_world_that_was_rescaled_cropped_or_put_between_bars_is_one_still(kind: str, change: str) -> None:
    looked = Looked()
    for picture in pictures(WORLDS[kind]):
        looked = looked.add(look_at(CHANGES[change](picture)))
    assert looked.is_world
    assert not looked.other


@pytest.mark.parametrize(
    ("codec", "form", "options"),
    [("libx264", "mpegts", {"crf": "40", "preset": "ultrafast"}), ("mjpeg", "avi", {"qscale": "12"})],
)
def test_a_world_is_one_after_a_codec_that_loses_much(codec: str, form: str, options: dict[str, str]) -> None:
    file, looked = BytesIO(), Looked()
    with av.open(file, "w", format=form) as output:
        stream = output.add_stream(codec, rate=1, options=options)
        stream.width = stream.height = 168
        stream.pix_fmt = "yuvj420p" if codec == "mjpeg" else "yuv420p"
        for picture in pictures(WORLDS["natural backdrop"], 168):
            output.mux(stream.encode(av.VideoFrame.from_ndarray(picture, format="rgb24")))
        output.mux(stream.encode())
    file.seek(0)
    with av.open(file) as source:
        for frame in source.decode(video=0):
            looked = looked.add(look_at(frame.to_ndarray(format="rgb24")))
    assert looked.is_world
    assert not looked.other


def page(paper: int, ink: int) -> Picture:
    image = Image.new("RGB", (480, 360), (paper,) * 3)
    draw = ImageDraw.Draw(image)
    for row in range(24):
        draw.text((10, 15 * row), f"{row}: the quick brown fox jumps over the lazy dog, and on it goes", (ink,) * 3)
    return np.asarray(image)


def slide() -> Picture:
    image = Image.new("RGB", (480, 270), (40, 50, 80))
    draw = ImageDraw.Draw(image)
    for i, colour in enumerate(("red", "yellow", "cyan", "orange")):
        draw.rectangle((30 + 110 * i, 120 - 20 * i, 120 + 110 * i, 240), fill=colour)
    return np.asarray(image)


OTHERS = {
    "noise": lambda: np.random.default_rng(0).integers(0, 256, (120, 160, 3), dtype=np.uint8),
    "black": lambda: np.zeros((120, 160, 3), np.uint8),
    "white": lambda: np.full((120, 160, 3), 255, np.uint8),
    "a white page": lambda: page(255, 0),
    "a terminal": lambda: page(20, 220),
    "a slide": slide,
}


@pytest.mark.parametrize("name", OTHERS)
def test_noise_screens_and_blank_pictures_are_others(name: str) -> None:
    assert look_at(OTHERS[name]()) == "other"


@pytest.mark.parametrize("generator", ["testsrc", "testsrc2", "mandelbrot", "smptebars", "allrgb=rate=1"])
def test_test_pictures_are_others(generator: str) -> None:
    with av.open(generator, format="lavfi") as source:
        frame = next(source.decode(video=0))
        assert look_at(frame.to_ndarray(format="rgb24")) == "other"


def test_a_frame_of_a_few_pixels_is_looked_at_without_an_error() -> None:
    for shape in ((1, 1, 3), (3, 400, 3), (400, 2, 3)):
        assert look_at(np.zeros(shape, np.uint8)) == "other"


@pytest.mark.parametrize(
    ("shapes", "empty", "other", "is_world"),
    [
        (0, 0, 0, None),
        (0, 5, 0, None),
        (0, 0, 1, False),
        (1, 9, 0, True),
        (3, 50, 2, True),
        (0, LONELY, 0, False),
        (1, LONELY, 0, True),
        (5, 0, 9, False),
        (9, 0, 5, True),
    ],
)
def test_what_most_pictures_were_decides(shapes: int, empty: int, other: int, is_world: bool | None) -> None:
    assert Looked(shapes, empty, other).is_world is is_world


def test_a_record_of_counts_is_read_and_anything_else_is_unknown() -> None:
    assert Looked.of({"shapes": 1, "empty": 2, "other": 3}) == Looked(1, 2, 3)
    for record in (None, [], {}, {"shapes": 1, "empty": 2}, {"shapes": -1, "empty": 0, "other": 0}):
        assert Looked.of(record) is None
    assert Looked.of({"shapes": 1, "empty": 2, "other": True}) is None


def test_every_step_is_looked_at_first_and_few_later() -> None:
    assert all(map(is_looked_at, range(LONELY)))
    assert sum(map(is_looked_at, range(LONELY, LONELY + 800))) == 100
