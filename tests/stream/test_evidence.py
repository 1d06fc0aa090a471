"""Evidence equals attention written out, stands at the right times, and costs nothing unless it is
asked for.
"""

import math
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from protokv.backbones import load_backbone
from protokv.backbones.pixels import GridBackbone
from protokv.core.backbone import Backbone
from protokv.core.decoding import Decoding
from protokv.core.step import StreamClock
from protokv.memories import MEMORIES, DurableConfig, MemoryConfig
from protokv.stream.evidence import (
    LEAST_EVIDENCE_SHARE,
    LEAST_STEP_SHARE,
    Evidence,
    EvidenceSpan,
    find_evidence_spans,
)
from protokv.stream.session import Session
from protokv.texts import Keywords
from samples.seeds import DEMONSTRATION
from samples.worlds.streams import Worlds, WorldStream
from tests.conftest import watched
from tests.oracles import attention as plain

QUESTION = "what is the first star ?"


def literal(session: Session) -> dict[int, float]:
    """Return the share of each step, slot by slot, from the weights of one softmax over
    everything.
    """
    backbone = session.backbone
    reading = session.read_question(QUESTION, record=True)
    cache = reading.cache
    assert cache.queries is not None
    layers = backbone.reading_layers or range(backbone.layers)
    found: dict[int, float] = {}
    for layer in layers:
        query = cache.queries[layer]
        places = cache.context.positions_at(layer)
        assert places is not None
        segments = cache.context.at(layer, query)
        keys, _ = cache.memory_layers[layer].read()
        weights = plain.weights(query, segments, keys, backbone.head_size**-0.5)[:, -1]
        bias = torch.cat([segment.bias for segment in segments], 1)
        heads = len(weights)
        groups = heads // len(bias)
        for head in range(heads):
            for slot in range(len(backbone.prefix_ids), bias.shape[1]):
                log_n = float(bias[head // groups, slot])
                if log_n < 0:
                    continue
                # Two positions a second, a step a second.
                step = (int(places[head // groups, slot, 0]) - len(backbone.prefix_ids)) // 2
                share = float(weights[head, slot]) / math.exp(log_n) / heads / len(layers)
                found[step] = found.get(step, 0.0) + share
    return found


@pytest.mark.parametrize("kind", sorted(MEMORIES))
def test_moments_are_those_of_attention_written_out_and_change_no_answer(
    tiny: Backbone, kind: str
) -> None:
    session = watched(tiny, MemoryConfig.of(kind, budget=36), range(12))
    plainly, told = (
        session.ask(QUESTION, Decoding(max_new_tokens=3), evidence=flag) for flag in (False, True)
    )
    assert plainly.evidence is None
    assert told.evidence is not None
    for name in ("text", "mean_logprob", "context_tokens"):
        assert getattr(told, name) == getattr(plainly, name)
    expected = find_evidence_spans(literal(session), 1.0)
    assert expected
    found = told.evidence.spans
    assert [(m.start_s, m.end_s) for m in found] == [(m.start_s, m.end_s) for m in expected]
    assert [m.share for m in found] == pytest.approx([m.share for m in expected], rel=1e-3)


@pytest.mark.parametrize("changes", [{"positions": "compact"}, {"recent_frames": 4}])
def test_moments_end_with_the_stream_at_compact_positions_and_read_afresh(
    tiny: Backbone, changes: Keywords
) -> None:
    session = watched(tiny, DurableConfig(budget=36, **changes), range(12))
    evidence = session.ask(QUESTION, evidence=True).evidence
    assert evidence is not None
    assert 10 < max(m.end_s for m in evidence.spans) <= 12


def test_steps_that_follow_each_other_are_one_moment_and_few_are_named() -> None:
    shares = {
        3: 0.3,
        4: LEAST_STEP_SHARE,
        6: 0.1,
        5: 0.001,
        9: 0.2,
        12: 0.05,
        20: 0.04,
        30: LEAST_STEP_SHARE / 2,
    }
    share: Any = pytest.approx(0.4 + LEAST_STEP_SHARE + 0.001)
    assert find_evidence_spans(shares, 2.0) == (
        EvidenceSpan(6.0, 14.0, share),
        EvidenceSpan(18.0, 20.0, 0.2),
        EvidenceSpan(24.0, 26.0, 0.05),
    )
    assert find_evidence_spans({}, 1.0) == ()


def test_a_low_share_is_faint_only_for_models_with_reading_layers() -> None:
    strong = EvidenceSpan(0.0, 1.0, LEAST_EVIDENCE_SHARE)
    weak = EvidenceSpan(0.0, 1.0, LEAST_EVIDENCE_SHARE / 2)
    assert Evidence((strong,), True).faint is False
    assert Evidence((weak,), True).faint is True
    assert Evidence((), True).faint is True
    assert Evidence((weak,), False).faint is None


@pytest.mark.parametrize("per_second", [None, 2.0, 25.0])
@pytest.mark.parametrize("step_s", [0.1, 0.5, 0.7, 1.0, 4.0])
def test_a_position_tells_the_step_that_stands_there(
    per_second: float | None, step_s: float
) -> None:
    if per_second is not None and 1 / per_second > step_s:
        pytest.skip("several steps stand at one position")
    clock = StreamClock(100, 100 * step_s, 0, 100, 2 / step_s, 2)
    step: Any = SimpleNamespace(grid=(2, 3), words=0)
    model: Any = SimpleNamespace(
        _tokens_per_second=per_second, device=torch.device("cpu"), prefix_ids=[0] * 5
    )
    model.time_within = partial(GridBackbone.time_within, model)
    for index in range(100):
        placed = GridBackbone.step_positions(
            model, step, origin=5, start=5, index=index, time_s=index * step_s
        )
        times = GridBackbone.stream_times(model, placed.positions, clock)
        assert ((times / clock.step_seconds + 1e-6).floor() == index).all()


def test_positions_in_proportion_tell_the_step_where_all_are_of_one_size(tiny: Backbone) -> None:
    clock = StreamClock(40, 80.0, 280, 280, 1.0, 2)
    passed = torch.arange(280).double()
    times = Backbone.time_within(tiny, passed, torch.tensor(280.0), torch.tensor(80.0), clock)
    assert (times / 2).floor().long().tolist() == [token // 7 for token in range(280)]


def test_the_embedded_model_finds_a_colour_where_it_was_shown() -> None:
    backbone = load_backbone("protokv/mini", device="cpu")
    stream = WorldStream(
        DEMONSTRATION[3], Worlds(length_s=60, distractor_rate=12.0, before=20, per_type=3)
    )
    session = Session.start(backbone, DurableConfig(budget=90))
    for step in stream.steps(2.0, 2):
        session.watch(step.images, step.time_s)
    asked = [question for question in stream.questions if question.type == "colour"]
    assert len(asked) == 3
    for question in asked:
        answer = session.ask(question.text, evidence=True)
        assert answer.evidence is not None
        assert answer.text == question.answer
        best = answer.evidence.spans[0]
        assert best.start_s < question.reference_s <= best.end_s + 1
        assert not answer.evidence.faint
