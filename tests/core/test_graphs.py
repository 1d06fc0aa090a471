"""Graphs, recorded on a CPU and replayed on the same memory, give what the same calls give without
them.
"""

from itertools import zip_longest
from pathlib import Path
from typing import Any

import pytest
import torch

from protokv.backbones import load_backbone
from protokv.core.backbone import Backbone
from protokv.core.decoding import Decoding
from protokv.device import arrays, runs
from protokv.device.runs import Runs
from protokv.memories import MemoryConfig
from protokv.memories.durable import rule
from protokv.stream.answer import Answer
from protokv.stream.session import Session
from tests.backbones.tiny import BUILDERS
from tests.conftest import random_frames, slow, wide
from tests.counting import record

QUESTIONS = (
    "what is red ?",
    "what is the first star after the red one ? " * 4,
    "what is the first star ?",
)


@pytest.fixture
def recorded(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """Let a CPU capture. Only a CPU reads in numpy, and works through a bank in parts."""
    monkeypatch.setattr(arrays, "is_readable_by_numpy", lambda numbers: False)
    monkeypatch.setattr(rule, "_AT_ONCE", {})
    monkeypatch.setattr(runs, "_can_capture", lambda device: True)
    monkeypatch.setattr(runs, "_make_pool", lambda: 0)
    monkeypatch.setattr(runs, "_make_stream", lambda device: None)
    monkeypatch.setattr(runs, "_capture", record)
    return monkeypatch


def refuse(*_: Any) -> Any:
    raise RuntimeError("it branches")


def watch(
    backbone: Backbone, config: MemoryConfig, steps: int
) -> tuple[Session, list[Answer], set[str]]:
    """Return a stream that is asked in between and goes on from its tensors, its answers, and how
    parts were run.
    """
    backbone.runs = Runs(backbone.device)
    session = Session.start(backbone, config)
    said = list[Answer]()
    for step in range(steps):
        session.watch(random_frames(step % 7, backbone.frames_per_step))
        if step % 6 == 5:
            said += [
                session.ask(one, Decoding(9, temperature=float(n)))
                for n, one in enumerate(QUESTIONS)
            ]
        if step == steps // 2:
            tensors = {name: one.clone() for name, one in session.tensors().items()}
            session = Session.resume(backbone, session.config, session.clock, tensors)
    used = backbone.runs, session.runs, session._reader.runs, session.memory.runs
    return session, said, {how for one in used if one is not None for how in one.how.values()}


@pytest.mark.parametrize("steps", [24, *slow(200)])
@pytest.mark.parametrize(
    ("family", "kind", "positions"),
    [
        *wide(
            *(
                (None, kind, "stream")
                for kind in ("sliding-window", "infinipot-v", "hermes", "last-frames")
            )
        ),
        *((None, kind, "stream") for kind in ("durable", "paper")),
        (None, "durable", "compact"),
        ("qwen3_5", "durable", "stream"),
        *wide(("qwen3_vl", "durable", "stream"), ("gemma4", "durable", "stream")),
    ],
)
def test_a_stream_by_graphs_gives_the_bytes_of_one_without(
    family: str | None,
    kind: str,
    positions: Any,
    steps: int,
    tiny: Backbone,
    recorded: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    config = MemoryConfig.of(kind, budget=48, positions=positions)
    backbone = (
        load_backbone(str(BUILDERS[family](tmp_path)), device="cpu", dtype="float32")
        if family
        else tiny
    )
    session, said, how = watch(backbone, config, steps)
    # The paper's rule asks the device.
    update = {"the memory shows other buffers each time"} if kind == "paper" else set()
    assert how == {"graph"} | update
    recorded.setattr(runs, "_capture", refuse)
    eager, expected, how = watch(backbone, config, steps)
    assert how == {"not captured: it branches"} | update
    tensors = eager.tensors()
    assert [
        name for name, one in session.tensors().items() if not torch.equal(one, tensors[name])
    ] == []
    # A question is filled up to a length, so its products are of other sizes.
    assert [one.text for one in said] == [one.text for one in expected]
    assert [one.mean_logprob for one in said] == pytest.approx(
        [one.mean_logprob for one in expected], abs=1e-4
    )


def test_a_second_answer_leaves_the_first_alone(
    tiny: Backbone, recorded: pytest.MonkeyPatch
) -> None:
    session = Session.start(tiny, MemoryConfig.of("durable", budget=48))
    for step in range(12):
        session.watch(random_frames(step, tiny.frames_per_step))
    alone = [session.ask(one, Decoding(9, temperature=0)).text for one in QUESTIONS[:2]]
    asked = [session.stream(one, Decoding(9, temperature=0)) for one in QUESTIONS[:2]]
    said = zip(*zip_longest(*asked, fillvalue=""), strict=True)
    assert ["".join(pieces).strip() for pieces in said] == alone


def test_shapes_that_come_once_are_not_captured(recorded: pytest.MonkeyPatch) -> None:
    some = Runs(torch.device("cpu"))
    captured = []
    recorded.setattr(runs, "_capture", lambda call, *_: captured.append(call) or record(call))
    for often in (1, 3):
        for size in range(1, 10):
            for _ in range(often):
                assert some.run(
                    "double", "", lambda x: 2 * x, torch.ones(size + often)
                ).tolist() == [2] * (size + often)
        assert len(captured) == (runs.MOST_GRAPHS if often > 1 else 0)
    assert some.how == {"double": "it has too many shapes"}
