"""Graphs, recorded on a CPU and replayed on the same memory, give what the same calls give without
them.
"""

from collections.abc import Sequence
from itertools import zip_longest
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch

from protokv.backbones import load_backbone
from protokv.core.backbone import Backbone
from protokv.core.decoding import Decoding
from protokv.device import arrays, runs
from protokv.device.runs import Runs
from protokv.memories import MemoryConfig
from protokv.memories.durable import repeats, rule
from protokv.stream.answer import Answer
from protokv.stream.seeing import StepsToWatch, watch_together
from protokv.stream.session import Session
from protokv.stream.together import AskedQuestion, ask_together
from tests.backbones.tiny import BUILDERS
from tests.conftest import continued, random_frames, slow, wide
from tests.counting import RecordedCapture
from tests.memories.rules import SnapKVConfig

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
    monkeypatch.setattr(runs, "Capture", RecordedCapture)
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
            session = continued(session)
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
    if family is None:
        # What stays in view enters the bank of `durable` once.
        recorded.setattr(repeats, "DEEP_MODEL_LAYERS", 1)
    config = MemoryConfig.of(kind, budget=48, positions=positions)
    backbone = (
        load_backbone(str(BUILDERS[family](tmp_path)), device="cpu", dtype="float32")
        if family
        else tiny
    )
    session, said, how = watch(backbone, config, steps)
    # The paper's rule asks the device.
    update = {"it has other sizes or other buffers each time"} if kind == "paper" else set()
    assert how == {"graph"} | update
    recorded.setattr(runs, "Capture", refuse)
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

    def capture(*given: Any) -> RecordedCapture:
        captured.append(given)
        return RecordedCapture(*given)

    recorded.setattr(runs, "Capture", capture)
    for often in (1, 3):
        for size in range(1, 10):
            for _ in range(often):
                assert some.run(
                    "double", "", lambda x: 2 * x, torch.ones(size + often)
                ).tolist() == [2] * (size + often)
        assert len(captured) == (runs.MOST_GRAPHS if often > 1 else 0)
    assert some.how == {"double": "it has too many shapes"}


def test_what_is_outside_of_a_capture_is_called_anew(recorded: pytest.MonkeyPatch) -> None:
    some = Runs(torch.device("cpu"))

    def call(x: torch.Tensor) -> torch.Tensor:
        first = some.leave(x + 1, 10)
        return some.leave(2 * first, 100) + first

    for factor in range(1, 5):
        result = some.run(
            "twice",
            "",
            call,
            torch.full((3,), float(factor)),
            outside=lambda query, added, factor=factor: factor * query + added,
        )
        first = factor * (factor + 1) + 10
        assert result.tolist() == [factor * 2 * first + 100 + first] * 3
    assert some.how == {"twice": "graph"}


KINDS = ["durable", "infinipot-v", "paper", "durable"]


def watch_in_turns(
    backbone: Backbone, configs: Sequence[MemoryConfig], rounds: int
) -> tuple[list[Session], list[str]]:
    """Return streams of which others are due each time, and answers that were asked together."""
    backbone.runs = Runs(backbone.device)
    sessions = [Session.start(backbone, config) for config in configs]
    said = list[str]()
    random = Random(7)
    for index in range(rounds):
        some = random.sample(sessions, random.choice([1, 2, 3, 4, 4, 5]))
        frames = [random_frames(index + 9 * n, backbone.frames_per_step) for n in range(len(some))]
        due = [
            StepsToWatch(one, [backbone.prepare(own)], [one.clock.next_start_s])
            for one, own in zip(some, frames, strict=True)
        ]
        watch_together(due)
        assert not any(one.error for one in due)
        if index % 4 == 3:
            asked = [
                AskedQuestion(one, QUESTIONS[n % 3], Decoding(9, temperature=0))
                for n, one in enumerate(some)
            ]
            said += [answer.text for answer in ask_together(asked)]
    return sessions, said


@pytest.mark.parametrize("family", [None, "qwen3_vl", *wide("llava_onevision", "internvl")])
def test_streams_and_questions_by_graphs_give_the_bytes_of_those_without(
    family: str | None, tiny: Backbone, recorded: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    backbone = tiny
    if family is not None:
        folder = str(BUILDERS[family](tmp_path))
        backbone = load_backbone(folder, device="cpu", dtype="float32")
    # One of them reads the queries of a step, too.
    configs = [*(MemoryConfig.of(kind, budget=44) for kind in KINDS), SnapKVConfig(budget=52)]
    sessions, said = watch_in_turns(backbone, configs, 24)
    assert backbone.runs is not None
    how = backbone.runs.how
    assert how.items() >= {("steps together", "graph"), ("tokens together", "graph")}
    recorded.setattr(runs, "Capture", refuse)
    others, expected = watch_in_turns(backbone, configs, 24)
    assert backbone.runs.how["steps together"] == "not captured: it branches"
    assert said == expected
    for one, other in zip(sessions, others, strict=True):
        assert one.clock == other.clock
        torch.testing.assert_close(one.tensors(), other.tensors(), rtol=0, atol=0)
