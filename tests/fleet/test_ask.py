"""Questions to many states, and the answers with the greatest probability."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from protokv.core.backbone import Backbone
from protokv.core.decoding import Decoding
from protokv.core.session import Answer
from protokv.errors import StateCorrupt
from protokv.fleet import Job, Recipe, find_states
from protokv.fleet.states import Reply, ask_all, load_backbone_for, rank_replies
from protokv.state.checkpoint import load
from tests.fleet.conftest import CONFIG, InlinePool, outcomes
from tests.memories.conftest import watched
from tests.mock_backbone import MockBackbone
from tests.tolerance import near_logits

QUESTIONS = ["what is first ?", "red ring"]


def test_every_state_answers_as_it_does_alone(jobs: list[Job], recipe: Recipe) -> None:
    outcomes(jobs, InlinePool(recipe), recipe)
    states = find_states(recipe.place)
    assert [Path(state).stem for state in states] == ["a", "b", "c"]
    replies = list(ask_all(states, MockBackbone(), QUESTIONS, Decoding(8)))
    assert [(reply.state, reply.number) for reply in replies] == [(state, n) for state in states for n in (0, 1)]
    for reply in replies:
        alone = load(reply.state, MockBackbone()).ask(QUESTIONS[reply.number], Decoding(8))
        assert reply.answer is not None
        assert (reply.answer.text, reply.answer.mean_logprob) == (alone.text, alone.mean_logprob)


def test_a_broken_state_is_one_failed_reply_and_stops_nothing(jobs: list[Job], recipe: Recipe) -> None:
    outcomes(jobs[:1], InlinePool(recipe), recipe)
    bad = Path(recipe.place, "0.safetensors")
    bad.write_bytes(b"no state")
    replies = list(ask_all(find_states(recipe.place), MockBackbone(), QUESTIONS, Decoding(8)))
    assert [reply.failure and reply.failure.kind for reply in replies] == ["StateCorrupt", None, None]
    with pytest.raises(StateCorrupt):
        load_backbone_for([str(bad)], None, device="cpu", device_map=None)


def reply(logprob: float, number: int, state: str) -> Reply:
    return Reply(state, number, Answer("q", "a", 0.0, 0.0, 0.0, 0, 1, logprob))


def test_the_surest_come_first_and_of_equals_the_earlier() -> None:
    replies = [reply(-3.0, 0, "a"), reply(-0.5, 0, "b"), reply(-1.0, 1, "c"), reply(-0.5, 0, "d")]
    assert [(rank, one.state) for rank, one in rank_replies(replies, 2)] == [(1, "b"), (2, "d"), (1, "c")]


def test_an_answer_says_the_mean_log_probability_of_its_tokens(tiny: Backbone, monkeypatch: pytest.MonkeyPatch) -> None:
    session = watched(tiny, CONFIG, range(6))
    decoding = Decoding(max_new_tokens=5)
    # One forward takes the question and each token of the answer but the last.
    chosen: list[int] = []
    decode = tiny.decode

    def spy(ids: list[int]) -> str:
        chosen[:] = ids
        return decode(ids)

    monkeypatch.setattr(tiny, "decode", spy)
    answer = session.ask("what is first ?", decoding)
    ids = tiny.suffix_ids("what is first ?") + chosen
    with torch.inference_mode():
        context, tail = session.memory.recall(), tiny.new_local_kv(len(ids))
        positions = tiny.text_positions(session.clock.next_position, len(ids))
        logits = tiny.logits(tiny.forward(tiny.embed_text(ids), positions, context, tail))
    first = len(ids) - len(chosen) - 1
    said = logits[first:].log_softmax(-1)
    each = [float(said[i, token]) for i, token in enumerate(chosen)]
    if answer.tokens < 5:
        each.append(max(float(said[-1, token]) for token in tiny.stop_ids))
    # The session forwards one token at a time. The logarithm doubles the difference of the logits.
    allowed = 2 * near_logits(session, logits)["atol"]
    assert answer.mean_logprob == pytest.approx(sum(each) / len(each), rel=0, abs=allowed)


def test_how_sure_an_answer_is_does_not_depend_on_how_it_was_drawn(tiny: Backbone) -> None:
    """The probability is always that of temperature 1."""
    session = watched(tiny, CONFIG, range(6))
    greedy = session.ask("what is first ?", Decoding(4))
    drawn = session.ask("what is first ?", Decoding(4, temperature=1e-4, seed=3))
    assert drawn.text == greedy.text
    assert drawn.mean_logprob == greedy.mean_logprob
