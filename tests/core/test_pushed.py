"""Frames pushed one by one are the steps of the same frames watched, in whatever form they come."""

from typing import Any

import pytest
import torch
from PIL import Image

from protokv.core.session import Session
from protokv.errors import ConfigError
from protokv.memories import DurableConfig
from tests.conftest import random_frames
from tests.mock_backbone import MockBackbone

FRAMES = random_frames(0, 12, 40, 60)
FORMS = {
    "rgb": lambda frame: (frame, {}),
    "bgr": lambda frame: (frame[..., ::-1], {"bgr": True}),
    "pil": lambda frame: (Image.fromarray(frame), {}),
    "pil with alpha": lambda frame: (Image.fromarray(frame).convert("RGBA"), {}),
}


def start() -> Session:
    return Session.start(MockBackbone(), DurableConfig(budget=40), fps=2.0)


def watched(*steps: tuple[list[int], float]) -> Session:
    session = start()
    for chosen, time_s in steps:
        session.watch(FRAMES[chosen], time_s)
    return session


def assert_same(one: Session, other: Session) -> None:
    assert one.clock == other.clock
    torch.testing.assert_close(one.tensors(), other.tensors(), rtol=0, atol=0)


@pytest.mark.parametrize("form", FORMS)
def test_the_first_frame_of_each_interval_is_sampled_and_pairs_are_watched(form: str) -> None:
    session, done = start(), []
    for i, frame in enumerate(FRAMES[:10]):  # 4 a second, of which 2 are sampled
        image, how = FORMS[form](frame)
        done.append(session.push(image, i / 4, **how))
    assert [i for i, watched in enumerate(done) if watched] == [2, 6]
    assert_same(session, watched(([0, 2], 0.0), ([4, 6], 1.0)))


def test_a_silence_ends_the_step_that_has_begun_and_a_resumed_stream_goes_on() -> None:
    session = start()
    assert [session.push(FRAMES[i], time_s) for i, time_s in enumerate((0.0, 9.2, 9.9))] == [False, True, True]
    expected = watched(([0, 0], 0.0), ([1, 2], 9.0))
    assert_same(session, expected)
    again = Session.resume(session.backbone, session.config, session.clock, session.tensors())
    with pytest.raises(ConfigError, match="9 s comes after one at 10 s"):
        again.push(FRAMES[3], 9.0)
    assert [again.push(FRAMES[i], time_s) for i, time_s in ((3, 10.0), (4, 10.5))] == [False, True]
    expected.watch(FRAMES[3:5], 10.0)
    assert_same(again, expected)


@pytest.mark.parametrize(
    ("frame", "time_s", "why"),
    [
        (FRAMES[:2], 1.0, "one picture"), (FRAMES[0] / 255, 1.0, "uint8"), ("frame.jpg", 1.0, "one picture"),
        (FRAMES[0][:8], 1.0, "one size"), (FRAMES[0], 0.2, "comes after"), (FRAMES[0], float("nan"), "comes after"),
    ],
)  # fmt: skip
def test_a_frame_that_cannot_follow_is_refused_and_changes_nothing(frame: Any, time_s: float, why: str) -> None:
    session = start()
    session.push(FRAMES[0], 0.5)
    with pytest.raises(ConfigError, match=why):
        session.push(frame, time_s)
    assert session.push(FRAMES[1], 1.0)
    assert_same(session, watched(([0, 1], 0.5)))


def test_watch_says_what_it_takes_if_it_gets_a_list() -> None:
    images: Any = list(FRAMES[:2])
    with pytest.raises(ConfigError, match=r"an array \[2, height, width, 3\], not a list"):
        start().watch(images)
