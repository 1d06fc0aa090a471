"""A part of a source gives the frames of that part, with times of its own."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from protokv.errors import ConfigError
from protokv.video import open_source, read_steps
from protokv.video.part import Part
from tests.cli.conftest import write_video
from tests.video.doubles import INFO


@pytest.fixture(scope="module")
def clip(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_video(tmp_path_factory.mktemp("part") / "clip.mp4", 12)


@pytest.mark.parametrize(("start_s", "duration_s"), [(0.0, None), (4.0, 3.0), (4.0, None), (11.0, 9.0), (0.0, 5.0)])
@pytest.mark.parametrize("first", [0, 1])
def test_its_steps_are_those_of_the_whole(clip: Path, start_s: float, duration_s: float | None, first: int) -> None:
    with open_source(clip) as whole:
        steps = list(read_steps(whole, 2.0, 2))
        end = len(steps) if duration_s is None else round(start_s + duration_s)
        wanted = steps[round(start_s) : end][first:]
    with Part(open_source(clip), start_s, duration_s) as part:
        found = list(read_steps(part, 2.0, 2, first))
        assert part.info.duration_s == min(12.0 - start_s, duration_s or 99.0)
    assert [one.time_s for one in found] == [one.time_s - start_s for one in wanted]
    assert all(np.array_equal(a.images, b.images) for a, b in zip(found, wanted, strict=True))


def test_a_part_that_begins_between_samples_is_sampled_from_its_beginning(clip: Path) -> None:
    # Pictures change every whole second: 0.75 s on, the second sample of the part shows the next one.
    with Part(open_source(clip), 0.75, 1.0) as part, open_source(clip) as whole:
        (step,) = read_steps(part, 2.0, 2)
        first, second = list(read_steps(whole, 2.0, 2))[:2]
    assert np.abs(step.images[0].astype(int) - first.images[0]).mean() < 3
    assert np.abs(step.images[1].astype(int) - first.images[1]).mean() > 20
    assert np.abs(step.images[1].astype(int) - second.images[0]).mean() < 3


def test_parts_are_other_sources(clip: Path) -> None:
    with open_source(clip) as whole:
        prints = {whole.info.fingerprint, *(Part(whole, *of).info.fingerprint for of in ((0, 4), (4, 4), (4, None)))}
    assert len(prints) == 4


def test_an_impossible_part_is_refused(clip: Path) -> None:
    with open_source(clip) as whole:
        for start_s, duration_s in ((12.0, None), (99.0, 1.0), (0.0, 0.0)):
            with pytest.raises(ConfigError):
                Part(whole, start_s, duration_s)

    class Pipe:
        info = replace(INFO, seekable=False)

    with pytest.raises(ConfigError, match="cannot be read in parts"):
        Part(Pipe(), 1.0)  # type: ignore[arg-type]
