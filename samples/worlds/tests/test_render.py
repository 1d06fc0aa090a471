"""A rendered file is the world: frame count, time stamps, pictures."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import av
import numpy as np
import pytest
from PIL import Image

from samples.render import main, render
from samples.worlds.pictures import SHAPES
from samples.worlds.world import World, WorldConfig


@pytest.fixture(scope="module")
def rendered(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, ...]:
    world = World(WorldConfig(seed=7, length_s=7, events_per_minute=35.0))
    path = tmp_path_factory.mktemp("render") / "video.mp4"
    n = render(world, path)
    with av.open(str(path)) as container:
        stream = container.streams.video[0]
        codec = (stream.codec_context.name, stream.pix_fmt)
        frames = [(f.time, f.to_ndarray(format="rgb24")) for f in container.decode(stream)]
    return world, n, frames, codec, path


def test_the_file_has_every_frame_at_its_time(rendered: tuple[Any, ...]) -> None:
    _, n, frames, codec, path = rendered
    assert codec == ("h264", "yuv420p")
    assert len(frames) == n == 56
    assert [time for time, _ in frames] == pytest.approx([i / 8 for i in range(56)])
    assert path.stat().st_size < 60_000


def test_decoded_frames_after_area_resize_are_close_to_the_training_frames(
    rendered: tuple[Any, ...],
) -> None:
    world, _, frames, _, _ = rendered
    assert any(world.visible(time) for time, _ in frames)
    for time, picture in frames[::4]:
        small = np.asarray(Image.fromarray(picture).resize((84, 84), Image.Resampling.BOX), float)
        assert np.abs(small - world.frame(time).astype(float)).mean() < 4


def test_the_command_writes_a_video_and_its_questions(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    video = tmp_path / "v.mp4"
    asked = tmp_path / "q.jsonl"
    line = (
        f"--seed 5 --seconds 20 --rate 10 --evidence 2 --evidence-seconds 9 --side 84 -o {video} "
        f"--questions {asked}"
    )
    assert main(line.split()) == 0
    assert "160 frames" in capsys.readouterr().err
    made = [json.loads(row) for row in asked.read_text().splitlines()]
    assert {"question", "answer", "type", "evidence_s", "ask_s", "lasts"} == set(made[0])
    first = World(WorldConfig(5, 20, 10.0, evidence_events=2, evidence_s=9)).events_until(20)[0]
    assert SHAPES[first.shape] in {q["answer"] for q in made if q["type"] == "first"}
