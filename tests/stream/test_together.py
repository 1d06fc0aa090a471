"""Questions that are answered together have the answers that they have one by one, in one forward
for each token.
"""

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from torch import Tensor

from protokv.backbones import load_backbone
from protokv.core.backbone import Backbone
from protokv.core.decoding import Decoding
from protokv.errors import ConfigError, QuestionError
from protokv.memories import MemoryConfig
from protokv.stream.answer import Answer
from protokv.stream.session import Session
from protokv.stream.together import AskedQuestion, answer_together, ask_together, stream_together
from protokv.texts import Keywords
from protokv.words.transcript import Transcript
from tests.backbones.tiny import BUILDERS, WORDS
from tests.conftest import random_frames, watched
from tests.stream.test_still import note_sizes
from tests.tolerance import near_logits

QUESTIONS = [" ".join(WORDS[first::7]) for first in range(2, 9)]
MEMORIES: list[tuple[str, Keywords, int]] = [
    ("durable", {"budget": 41, "positions": "stream"}, 9),
    ("durable", {"budget": 29, "positions": "compact"}, 13),
    ("sliding-window", {"budget": 23}, 7),
    ("full", {"budget": 10}, 5),
    ("rekv", {"budget": 31}, 9),
    # Its last steps are read again before each question, so none joins another.
    ("durable", {"budget": 24, "recent_frames": 4, "positions": "compact"}, 5),
]


@pytest.fixture(scope="module")
def sessions(tiny: Backbone) -> list[Session]:
    found = [
        watched(tiny, MemoryConfig.of(name, budget=17).with_fields(settings), range(steps))
        for name, settings, steps in MEMORIES
    ]
    config = MemoryConfig.of("durable", budget=35).with_words(True)
    spoken = Session.start(tiny, config, attachments=[Transcript()])
    for step in range(4):
        spoken.watch(random_frames(step), words=["the star is red"])
    return [*found, spoken]


def tell_apart(session: Any, ours: Answer, theirs: Answer) -> None:
    """Compare answers that have chances, up to where the order of sums may choose another token."""
    most = near_logits(session, torch.tensor([5.0]))["atol"]
    for name in ("context_tokens", "turns", "stream_time_s"):
        assert getattr(ours, name) == getattr(theirs, name)
    if ours.evidence is not None and theirs.evidence is not None:
        shares = [[span.share for span in one.spans] for one in (ours.evidence, theirs.evidence)]
        assert shares[0] == pytest.approx(shares[1], abs=1e-4)
    if theirs.probabilities is not None:
        assert ours.probabilities == pytest.approx(theirs.probabilities, abs=most)
        return
    assert ours.chances is not None
    assert theirs.chances is not None
    for mine, other in zip(ours.chances, theirs.chances, strict=False):
        assert mine[1].log_probability == pytest.approx(other[1].log_probability, abs=most)
        if mine[0].id != other[0].id:
            assert abs(mine[1].log_probability - mine[2].log_probability) < most
            return
    assert ours.text == theirs.text
    assert ours.finish_reason == theirs.finish_reason
    assert ours.mean_logprob == pytest.approx(theirs.mean_logprob, abs=most)


@st.composite
def asked(draw: st.DrawFn) -> tuple[int, str, Decoding, Keywords]:
    """Any of the sessions, a question of one to some thirty words, and a way to ask it."""
    words = draw(st.lists(st.sampled_from(WORDS), min_size=1, max_size=30))
    how = {
        "evidence": draw(st.booleans()),
        "turns": draw(st.sampled_from([(), [("what is red ?", "a ring")]])),
    }
    length = draw(st.sampled_from([1, 2, 5, 11]))
    ways: list[Keywords] = [
        {"choices": ("red", "blue", "ring")},
        {"max_new_tokens": length},
        {"max_new_tokens": 11, "stop": ("ring", "star")},
        {"max_new_tokens": length, "repetition_penalty": 1.7, "frequency_penalty": 0.4},
        {"max_new_tokens": length, "temperature": 0.9, "seed": draw(st.integers(0, 9))},
    ]
    decoding = Decoding(top_logprobs=2, **draw(st.sampled_from(ways)))
    return draw(st.integers(0, len(MEMORIES))), " ".join(words), decoding, how


SHORT = Decoding(max_new_tokens=1, top_logprobs=2)
JOINS_NONE: tuple[int, str, Decoding, Keywords] = (len(MEMORIES) - 1, "red", SHORT, {})


@given(
    given=st.lists(asked(), min_size=1, max_size=9),
    most=st.integers(1, 9),
)
# No question is lost behind those that join none.
@example(given=[JOINS_NONE, JOINS_NONE, JOINS_NONE, (0, "red", SHORT, {})], most=2)
def test_answers_together_are_those_one_by_one(
    sessions: list[Session], given: list[tuple[int, str, Decoding, Keywords]], most: int
) -> None:
    each = [
        AskedQuestion(sessions[place], text, decoding, how) for place, text, decoding, how in given
    ]
    waiting = iter(each)
    said = ""
    for item in stream_together(each, most):
        if isinstance(item, str):
            said += item
        else:
            one = next(waiting)
            assert said.strip() == item.text
            said = ""
            tell_apart(one.session, item, one.session.ask(one.question, one.decoding, **one.how))
    assert not [*waiting]


def test_a_token_of_all_is_one_forward_and_who_is_done_leaves(
    tiny: Backbone, sessions: list[Session], monkeypatch: pytest.MonkeyPatch
) -> None:
    lengths = [1, 3, 6, 2]
    each = [
        AskedQuestion(sessions[place % 3], QUESTIONS[place], Decoding(max_new_tokens=n))
        for place, n in enumerate(lengths)
    ]
    monkeypatch.setattr(tiny, "stop_ids", frozenset())
    sizes = note_sizes(tiny, "forward", monkeypatch)
    assert [one.tokens for one in ask_together(each)] == lengths
    # The last token of an answer is not forwarded.
    assert sizes[1:] == [sum(n > round for n in lengths) for round in range(1, max(lengths))]
    assert sizes[0] == sum(len(tiny.question_ids(one.question)[0]) for one in each)


def test_tokens_of_answered_questions_are_forgotten_when_others_join(
    tiny: Backbone, sessions: list[Session], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tiny, "stop_ids", frozenset())
    each = [
        AskedQuestion(sessions[place % 2], question, Decoding(max_new_tokens=2 + 5 * (place % 2)))
        for place, question in enumerate(QUESTIONS)
    ]
    widths = list[int]()
    layer = type(tiny.new_cache().memory_layers[0])
    append = layer.append

    def noted(self: Any, *given: Tensor) -> tuple[Tensor, Tensor]:
        found = append(self, *given)
        widths.append(found[0].shape[-2])
        return found

    monkeypatch.setattr(layer, "append", noted)
    assert len(list(ask_together(each, 2))) == len(each)
    longest = max(len(tiny.question_ids(one.question)[0]) for one in each) + 7
    assert max(widths) <= 2 * 2 * longest


def test_a_question_that_is_refused_or_given_up_leaves_the_others(
    sessions: list[Session],
) -> None:
    session = sessions[0]
    gone = threading.Event()
    short = Decoding(max_new_tokens=4)
    each = [
        AskedQuestion(session, " ", short),
        AskedQuestion(session, QUESTIONS[0], short),
        AskedQuestion(session, QUESTIONS[1], short, is_given_up=gone.is_set),
        AskedQuestion(session, QUESTIONS[2], Decoding(choices=("a", "a")), {}),
    ]
    waiting = [each]

    def join() -> Iterator[AskedQuestion]:
        if not waiting:
            gone.set()
        yield from waiting.pop() if waiting else ()

    found = {one: item for one, item in answer_together(join) if not isinstance(item, str)}
    assert {one: type(item) for one, item in found.items()} == {
        each[0]: QuestionError,
        each[1]: Answer,
        each[3]: ConfigError,
    }


@pytest.mark.parametrize("family", BUILDERS)
def test_every_family_answers_together_or_one_by_one_where_neighbours_mix(
    family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    backbone = load_backbone(str(BUILDERS[family](tmp_path)), device="cpu", dtype="float32")
    session = watched(backbone, MemoryConfig.of("durable", budget=48), range(3))
    decoding = Decoding(max_new_tokens=3, top_logprobs=2)
    expected = [session.ask(question, decoding) for question in QUESTIONS[:3]]
    sizes = note_sizes(backbone, "forward", monkeypatch)
    each = [AskedQuestion(session, question, decoding) for question in QUESTIONS[:3]]
    for answer, other in zip(ask_together(each), expected, strict=True):
        tell_apart(session, answer, other)
    joins = family not in ("qwen3_5", "qwen3_5_moe", "gemma4")
    assert session.joins == joins
    lengths = [len(backbone.question_ids(question)[0]) for question in QUESTIONS[:3]]
    assert sizes[0] == (sum(lengths) if joins else lengths[0])
