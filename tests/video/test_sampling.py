"""Sampling by timestamps, and steps that do not depend on where reading began."""

from collections.abc import Iterable, Sequence
from itertools import zip_longest

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from protokv.errors import ConfigError
from protokv.video import Frame, group_frames, sample_frames
from protokv.video.sampling import SAMPLING_SLACK_S, SampledFrame
from protokv.video.source import drop_frames_before


def frames_at(times: Sequence[float], durations: Iterable[float | None] = ()) -> list[Frame]:
    """Frames whose number is their only pixel."""
    return [
        Frame(t, np.full((1, 1, 3), i, np.uint8), d)
        for i, (t, d) in enumerate(zip_longest(times, durations))
    ]


def numbers(samples: Iterable[SampledFrame]) -> list[int]:
    return [int(s.image[0, 0, 0]) for s in samples]


@pytest.mark.parametrize("fps", [0.0, -1.0, float("nan"), float("inf")])
def test_a_rate_that_is_not_a_positive_number_is_refused(fps: float) -> None:
    with pytest.raises(ConfigError, match="fps"):
        list(sample_frames(frames_at([0.0]), fps))


gaps = st.lists(st.floats(0.002, 1.7), min_size=1, max_size=60)


@given(
    first_s=st.sampled_from([0.0, 1.2]),
    gaps=gaps | st.just([]),
    stays_s=st.none() | st.floats(0.04, 3.0),
    fps=st.sampled_from([0.5, 1.0, 2.0, 3.0, 7.0, 23.976]),
)
def test_each_sample_is_the_latest_frame_not_after_its_time_or_the_first(
    first_s: float, gaps: list[float], stays_s: float | None, fps: float
) -> None:
    times = np.cumsum([first_s, *gaps]).tolist()
    got = list(sample_frames(frames_at(times, [*([None] * len(gaps)), stays_s]), fps))
    assert [s.time_s for s in got] == [k / fps for k in range(len(got))]
    for one, number in zip(got, numbers(got), strict=True):
        shown = (i for i, t in enumerate(times) if t <= one.time_s + SAMPLING_SLACK_S)
        assert number == max(shown, default=0)
    end = times[-1] + (stays_s or min([1 / fps, *gaps[-1:]]))
    assert len(got) / fps + SAMPLING_SLACK_S >= end > (len(got) - 1) / fps


@given(
    gaps=gaps,
    fps=st.sampled_from([1.0, 2.0, 3.0, 29.97]),
    group=st.integers(1, 3),
    part=st.floats(0, 1),
)
def test_steps_are_full_and_those_of_a_resumed_run_are_those_of_an_uninterrupted_one(
    gaps: list[float], fps: float, group: int, part: float
) -> None:
    frames = frames_at(np.cumsum([0.0, *gaps]).tolist(), [*gaps, 0.04])
    whole = list(group_frames(sample_frames(frames, fps), group))
    shown = numbers(sample_frames(frames, fps))
    # A short last step repeats its last frame.
    shown += shown[-1:] * (-len(shown) % group)
    assert np.concatenate([s.images for s in whole])[:, 0, 0, 0].tolist() == shown
    first = int(part * (len(whole) - 1))
    start_s = first * group / fps
    rest = list(
        group_frames(sample_frames(drop_frames_before(frames, start_s), fps, start_s), group)
    )
    assert [(s.time_s, s.images.tolist()) for s in rest] == [
        (s.time_s, s.images.tolist()) for s in whole[first:]
    ]
