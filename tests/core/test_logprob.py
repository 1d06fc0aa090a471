"""How sure a model is of an answer."""

from __future__ import annotations

import pytest
import torch

from protokv.core.backbone import Backbone
from protokv.core.decoding import Decoding
from protokv.memories import DurableConfig
from tests.memories.conftest import watched
from tests.tolerance import near_logits

CONFIG = DurableConfig(budget=40)


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
        positions = tiny.text_positions(session.clock.next_position, len(ids))
        logits = tiny.logits(tiny.forward(tiny.embed_text(ids), positions, session.cache.fork(session.memory.recall())))
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
