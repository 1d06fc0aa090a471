"""`query --frames` and `--clip`: what the video shows at the times that an answer stood on."""

from __future__ import annotations

import shutil
from fractions import Fraction
from pathlib import Path

import av
import numpy as np
import pytest
from PIL import Image

from protokv.core.evidence import AttentionEvidence
from protokv.core.parts import Evidence, Moment
from protokv_cli.exits import Exit
from tests.cli.conftest import Program, write_video

MOMENTS = (Moment(6.0, 8.0, 0.5), Moment(1.0, 2.0, 0.2))
QUESTION = "what is first ?"


@pytest.fixture
def program(protokv: Program, mocked: None, video: Path, monkeypatch: pytest.MonkeyPatch) -> Program:
    """The program beside `clip.mp4` and its state; every answer stands on `MOMENTS`."""
    monkeypatch.setattr(AttentionEvidence, "find", lambda *_: Evidence(MOMENTS, True))
    monkeypatch.setattr(AttentionEvidence, "record", lambda _, context: context)
    shutil.copy(video, protokv.folder)
    assert protokv("ingest", "clip.mp4", "--budget", "24", "--json").code == 0
    return protokv


def colours(path: Path) -> np.ndarray:
    """The mean colours of the blocks of a picture that `write_video` drew."""
    image = np.asarray(Image.open(path), dtype=float)
    return image.reshape(4, 16, 6, 16, 3).mean((1, 3))


def drawn(second: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng([seed, second]).integers(0, 256, (4, 6, 3), dtype=np.uint8).astype(float)


def test_the_frames_are_those_of_the_steps_that_the_answer_stood_on(program: Program) -> None:
    (row,) = program("query", "clip.safetensors", QUESTION, "--frames", "seen", "--json").rows()
    assert row["frames"] == [f"seen/00-00-0{second}.000.png" for second in (1, 6, 7)]
    assert [moment["start_s"] for moment in row["evidence"]] == [6.0, 1.0]
    for second in (1, 6, 7):
        found = colours(program.folder / f"seen/00-00-0{second}.000.png")
        assert abs(found - drawn(second)).mean() < 12
        assert abs(found - drawn(second + 1)).mean() > 40


def test_a_clip_shows_the_seconds_around_the_strongest_moment(program: Program) -> None:
    result = program("query", "clip.safetensors", QUESTION, "--clip", "out.mp4", "--json")
    assert result.rows()[0]["clip"] == "out.mp4"
    assert "out.mp4 shows 0:04 to 0:10 (libx264, without sound)" in result.err
    with av.open("out.mp4") as clip:
        frames = list(clip.decode(video=0))
    assert [frame.time for frame in frames] == [pytest.approx(i / 8, abs=1e-3) for i in range(48)]
    Image.fromarray(frames[0].to_ndarray(format="rgb24")).save("first.png")
    assert abs(colours(Path("first.png")) - drawn(4)).mean() < 12
    assert sorted(path.name for path in program.folder.iterdir() if "out" in path.name) == ["out.mp4"]


def test_a_clip_has_the_sound_of_its_seconds(program: Program) -> None:
    with av.open("loud.mp4", "w") as container:
        video, sound = container.add_stream("libx264", rate=8), container.add_stream("aac", rate=48_000)
        video.width, video.height, video.pix_fmt = 96, 64, "yuv420p"
        for i in range(96):
            blank = av.VideoFrame.from_ndarray(np.full((64, 96, 3), 2 * i, np.uint8), format="rgb24")
            container.mux(video.encode(blank))
        # Silence until the sixth second.
        tone = np.sin(np.arange(12 * 48_000) / 20).astype(np.float32) * (np.arange(12 * 48_000) >= 6 * 48_000)
        for i in range(0, len(tone), 1024):
            frame = av.AudioFrame.from_ndarray(tone[None, i : i + 1024], format="fltp", layout="mono")
            frame.sample_rate, frame.pts, frame.time_base = 48_000, i, Fraction(1, 48_000)
            container.mux(sound.encode(frame))
        container.mux([*video.encode(), *sound.encode()])
    assert program("ingest", "loud.mp4", "--budget", "24", "--json").code == 0
    result = program("query", "loud.safetensors", QUESTION, "--clip", "out.mp4")
    assert "(libx264, with its sound)" in result.err
    with av.open("out.mp4") as clip:
        frames = [(frame.time, abs(frame.to_ndarray()).max()) for frame in clip.decode(audio=0)]
    # The clip begins at 4 s.
    assert max(level for time_s, level in frames if time_s < 1.9) < 0.01
    assert min(level for time_s, level in frames if 2.1 < time_s < 5.9) > 0.5


def test_a_part_of_a_video_is_shown_where_it_is_in_the_whole(program: Program) -> None:
    part = ("--start", "3s", "--duration", "9s", "-o", "part.safetensors")
    assert program("ingest", "clip.mp4", "--budget", "24", "--json", *part).code == 0
    program("query", "part.safetensors", QUESTION, "--frames", "seen")
    assert abs(colours(Path("seen/00-00-01.000.png")) - drawn(4)).mean() < 12


def test_the_second_of_two_videos_is_shown_where_it_stands_in_the_stream(program: Program) -> None:
    write_video(program.folder / "two.mp4", 4, seed=5)
    write_video(program.folder / "one.mp4", 6, seed=4)
    for name in ("one.mp4", "two.mp4"):
        assert program("ingest", name, "--budget", "24", "--json", "-o", "both.safetensors", "--append").code == 0
    program("query", "both.safetensors", QUESTION, "--frames", "seen")
    assert abs(colours(Path("seen/00-00-01.000.png")) - drawn(1, seed=4)).mean() < 12
    assert abs(colours(Path("seen/00-00-07.000.png")) - drawn(1, seed=5)).mean() < 12


def test_a_video_is_found_where_it_is_named_and_refused_once_it_is_gone_or_changed(program: Program) -> None:
    ask = ("query", "clip.safetensors", QUESTION, "--frames", "seen")
    (program.folder / "videos").mkdir()
    shutil.move("clip.mp4", "videos/renamed.mp4")
    gone = program(*ask)
    assert gone.code == Exit.NOT_FOUND
    assert "Error: the video clip.mp4 of this state is not at hand" in gone.err
    assert "Hint: name the file, or the folder it is in, with --video" in gone.err
    assert gone.out == ""
    assert program(*ask, "--video", "videos/renamed.mp4").code == 0
    shutil.move("videos/renamed.mp4", "videos/clip.mp4")
    assert program(*ask, "--video", "videos").code == 0
    write_video(program.folder / "clip.mp4", 12, seed=1)
    changed = program(*ask)
    assert changed.code == Exit.MISMATCH
    assert "clip.mp4 is not the video that this state watched, or has changed since" in changed.err


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--clip", "out.mkv"), "a clip is an .mp4"),
        (("--clip", "clip.mp4"), "clip.mp4 is what is read"),
        (("--video", "."), "--video is where --frames and --clip look"),
        (("second question", "--clip", "out.mp4"), "--clip is of one answer"),
        (("--frames", "seen", "--watch", "1s"), "leave out --frames"),
    ],
)
def test_a_contradiction_is_refused_before_the_model_is_loaded(
    program: Program, options: tuple[str, ...], message: str
) -> None:
    result = program("query", "clip.safetensors", QUESTION, *options)
    assert result.code == Exit.USAGE
    assert message in result.err
