"""Frames pushed one by one are the steps of the same frames watched, in whatever form they come."""

from typing import Any

import pytest
import torch
from PIL import Image

from protokv.errors import ConfigError
from protokv.memories import DurableConfig
from protokv.stream.session import Session
from tests.conftest import continued, random_frames
from tests.mock_backbone import MockBackbone

FRAMES = random_frames(0, 12, 40, 60)


def start() -> Session:
    return Session.start(MockBackbone(), DurableConfig(budget=40), fps=2.0)


def assert_watched(session: Session, *steps: tuple[list[int], float]) -> None:
    """The session is where another one is that watched these frames from these times on."""
    expected = start()
    for chosen, time_s in steps:
        expected.watch(FRAMES[chosen], time_s)
    assert session.clock == expected.clock
    torch.testing.assert_close(session.tensors(), expected.tensors(), rtol=0, atol=0)


@pytest.mark.parametrize("form", ["rgb", "bgr", "RGB", "RGBA"])
def test_the_first_frame_of_each_interval_is_sampled_and_pairs_are_watched(form: str) -> None:
    session = start()
    done = []
    for i, frame in enumerate(FRAMES[:10]):  # 4 a second, of which 2 are sampled
        image = (
            Image.fromarray(frame).convert(form)
            if form.isupper()
            else frame
            if form == "rgb"
            else frame[..., ::-1]
        )
        done.append(session.push(image, i / 4, bgr=form == "bgr"))
    assert [i for i, watched in enumerate(done) if watched] == [2, 6]
    assert_watched(session, ([0, 2], 0.0), ([4, 6], 1.0))


def test_a_silence_ends_the_step_that_has_begun_and_a_resumed_stream_goes_on() -> None:
    session = start()
    assert [session.push(FRAMES[i], time_s) for i, time_s in enumerate((0.0, 9.2, 9.9))] == [
        False,
        True,
        True,
    ]
    assert_watched(session, ([0, 0], 0.0), ([1, 2], 9.0))
    again = continued(session)
    with pytest.raises(ConfigError, match="9 s comes after one at 10 s"):
        again.push(FRAMES[3], 9.0)
    assert [again.push(FRAMES[i], time_s) for i, time_s in ((3, 10.0), (4, 10.5))] == [False, True]
    assert_watched(again, ([0, 0], 0.0), ([1, 2], 9.0), ([3, 4], 10.0))


BAD = [
    (FRAMES[:2], 1.0, "one picture"),
    (FRAMES[0] / 255, 1.0, "uint8"),
    ("frame.jpg", 1.0, "one picture"),
    (FRAMES[0][:8], 1.0, "one size"),
    (FRAMES[0], 0.2, "comes after"),
    (FRAMES[0], float("nan"), "comes after"),
]


@pytest.mark.parametrize(("frame", "time_s", "why"), BAD)
def test_a_frame_that_cannot_follow_is_refused_and_changes_nothing(
    frame: Any, time_s: float, why: str
) -> None:
    session = start()
    images = FRAMES[:2].tolist()
    session.push(FRAMES[0], 0.5)
    with pytest.raises(ConfigError, match=why):
        session.push(frame, time_s)
    with pytest.raises(ConfigError, match=r"an array \[2, height, width, 3\], not a list"):
        session.watch(images)
    assert session.push(FRAMES[1], 1.0)
    assert_watched(session, ([0, 1], 0.5))
