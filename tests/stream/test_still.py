"""A picture that stays goes through the vision tower once, and the stream is the same."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from protokv.backbones import load_backbone
from protokv.core.backbone import Backbone
from protokv.memories import DurableConfig
from protokv.stream.session import Session
from tests.backbones.tiny import BUILDERS
from tests.conftest import continued, random_frames

# Which picture each step shows; chunks of one step, and of four.
SHOWN = (0, 1, 1, 1, 1, 2, 1, 1, 3, 3, 3, 3)


def note_sizes(backbone: Backbone, method: str, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Return a list that grows by the length of what each call of a method is given first."""
    sizes = list[int]()
    call = getattr(backbone, method)

    def noted(first: Any, *rest: Any, **named: Any) -> Any:
        sizes.append(len(first))
        return call(first, *rest, **named)

    monkeypatch.setattr(backbone, method, noted)
    return sizes


def watch(session: Session, chunk: int, shown: Sequence[int], first: int = 0) -> None:
    frames = session.clock.frames_per_step
    for start in range(0, len(shown), chunk):
        some = shown[start : start + chunk]
        steps = [session.backbone.prepare(random_frames(picture, frames)) for picture in some]
        at = first + start
        session.watch_prepared(steps, [float(at + i) for i in range(len(some))])


@pytest.mark.parametrize(("chunk", "expected"), [(1, [1] * 5), (4, [4, 4, 1])])
@pytest.mark.parametrize("family", ["qwen2_5_vl", "qwen3_vl", "llava_onevision"])
def test_a_picture_that_stays_is_seen_once(
    family: str,
    chunk: int,
    expected: list[int],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    backbone = load_backbone(str(BUILDERS[family](tmp_path)), device="cpu", dtype="float32")
    config = DurableConfig(budget=40)
    session = Session.start(backbone, config)
    watch(session, chunk, SHOWN[:8])
    resumed = continued(session)
    runs = note_sizes(backbone, "embed_steps", monkeypatch)
    watch(session, chunk, SHOWN[8:], 8)
    assert sum(runs) == 1
    monkeypatch.undo()
    # A stream that is continued has not seen the picture, and goes on to the same bytes.
    watch(resumed, chunk, SHOWN[8:], 8)
    torch.testing.assert_close(resumed.tensors(), session.tensors(), rtol=0, atol=0)
    runs = note_sizes(backbone, "embed_steps", monkeypatch)
    watch(Session.start(backbone, config), chunk, SHOWN)
    assert runs == expected


def test_a_picture_seen_again_has_the_texts_of_its_own_time(tmp_path: Path) -> None:
    backbone = load_backbone(str(BUILDERS["qwen3_vl"](tmp_path)), device="cpu", dtype="float32")
    step = backbone.prepare(random_frames(0, backbone.frames_per_step))
    early, late = (backbone.embed_steps([step], [time_s])[0] for time_s in (1.0, 47.5))
    again = backbone.retime(early, 47.5)
    assert torch.equal(again.embeddings, late.embeddings)
    assert again.visual == late.visual
    assert not torch.equal(early.embeddings, late.embeddings)
