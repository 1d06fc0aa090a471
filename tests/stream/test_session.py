"""A session equals the plain model while nothing has been evicted, and asking leaves no trace."""

import math
from dataclasses import replace
from functools import cache
from pathlib import Path
from unittest.mock import DEFAULT, Mock

import pytest
import torch
from transformers import GenerationConfig

from protokv.backbones.loading import read_generation_config
from protokv.core.backbone import Backbone
from protokv.core.build import build_memory, make_memory_shape
from protokv.core.decoding import Decoding
from protokv.core.rotary import rerotate
from protokv.core.step import make_cell_centres
from protokv.errors import ConfigError, ModelError, OutOfMemory, PositionWarning
from protokv.memories import MEMORIES, DurableConfig, MemoryConfig, PaperConfig
from protokv.stream.session import Session
from protokv.texts import Keywords
from tests.backbones.upstream import Upstream
from tests.conftest import continued, random_frames, watched
from tests.core.streams import copy_of, same
from tests.mock_backbone import MockBackbone
from tests.tolerance import check_logits

QUESTION = "what is the first star ?"
# DyCoke drops tokens before the model reads them, and last-frames encodes every step by itself.
EXACT_AT_FIRST = sorted(set(MEMORIES) - {"dycoke", "last-frames"})


@pytest.fixture(scope="module")
def upstream(tiny_folder: Path) -> Upstream:
    return Upstream("qwen2_5_vl", tiny_folder)


@cache
def plain_logits(upstream: Upstream, n_steps: int, question: str = QUESTION) -> torch.Tensor:
    """transformers' own model over the same frames, with its own embeddings and positions:
    `[suffix, vocabulary]`.
    """
    inputs = upstream.inputs([random_frames(i) for i in range(n_steps)], question, step_seconds=1.0)
    return upstream.logits(inputs, len(upstream.chat(question)[1]))


@pytest.mark.parametrize(
    ("kind", "positions"), [*((kind, "stream") for kind in EXACT_AT_FIRST), ("paper", "compact")]
)
@pytest.mark.parametrize("n_steps", [1, 11])
def test_before_evictions_logits_are_plain(
    tiny: Backbone, upstream: Upstream, kind: str, positions: str, n_steps: int
) -> None:
    # No step is larger, so that the near window has its quarter.
    config = MemoryConfig.of(kind, budget=400).for_step(400)
    session = watched(tiny, config.with_fields({"positions": positions}), range(n_steps))
    expected = plain_logits(upstream, n_steps)
    check_logits(session, session.prefill(QUESTION), expected)


@pytest.mark.parametrize("kind", sorted(MEMORIES))
def test_asking_changes_nothing(tiny: Backbone, kind: str) -> None:
    session = watched(tiny, MemoryConfig.of(kind, budget=40), range(9))
    before = copy_of(session)
    clock = session.clock
    logits = session.prefill(QUESTION)
    for _ in range(2):
        session.ask(QUESTION, Decoding(max_new_tokens=5, temperature=1.0))
    assert session.clock == clock
    assert torch.equal(session.prefill(QUESTION), logits)
    assert same(before, session.tensors())


def test_what_a_model_was_published_with_is_read_and_what_makes_no_sense_is_named() -> None:
    drawn = GenerationConfig(
        do_sample=True, temperature=0.7, top_p=0.8, top_k=20, repetition_penalty=1.05
    )
    assert read_generation_config(drawn) == Decoding(64, 0.7, 0.8, 20, 1.05)
    assert read_generation_config(GenerationConfig(temperature=0.7, top_k=20)) == Decoding()
    assert read_generation_config(
        GenerationConfig(do_sample=True, max_new_tokens=10**6)
    ) == Decoding(16_384, 1.0)
    drawn.top_p = "most"
    with pytest.raises(ModelError, match=r"generation_config\.json makes no sense"):
        read_generation_config(drawn)


def test_a_conversation_is_read_as_far_as_there_is_room_for_its_newest_turns(
    tiny: Backbone,
) -> None:
    session = watched(tiny, PaperConfig(budget=400), range(2))
    turns = [("what ?", "red " * 700), *[("who ?", "star " * 500)] * 7, ("where ?", "first")]
    answer = session.ask(QUESTION, Decoding(1), turns=turns)
    assert 0 < answer.turns < len(turns)
    ids = [len(tiny.suffix_ids(QUESTION, turns[-n:])) for n in (answer.turns, answer.turns + 1)]
    assert ids[0] <= 4096 < ids[1]
    told = session.ask(QUESTION, Decoding(4), system="the star is red")
    same = session.ask(f"the star is red\n\n{QUESTION}", Decoding(4))
    assert told.mean_logprob == same.mean_logprob


def test_a_choice_is_the_likeliest_of_some_texts_by_their_first_tokens(tiny: Backbone) -> None:
    session = watched(tiny, PaperConfig(budget=400), range(3))
    how: Keywords = {"turns": [("who ?", "star")], "evidence": True}
    choices = ("red star", "blue", "two")
    answer = session.choose(QUESTION, choices, **how)
    logits = session.read_question(tiny.suffix_ids(QUESTION, how["turns"])).logits[-1]
    firsts = [tiny.encode(one)[0] for one in choices]
    expected = logits[firsts].softmax(0)
    assert answer.probabilities == pytest.approx(
        dict(zip(choices, expected.tolist(), strict=True)), rel=1e-5
    )
    assert (answer.text, answer.tokens) == (choices[int(expected.argmax())], 0)
    best = float(logits.log_softmax(0)[firsts].max())
    assert answer.mean_logprob == pytest.approx(best, rel=1e-5)
    assert answer.evidence == session.ask(QUESTION, **how).evidence


def test_a_choice_counts_in_any_spelling_and_choices_that_begin_alike_are_refused() -> None:
    class Spelling(MockBackbone):
        def encode(self, text: str) -> list[int]:
            # The space is a token of its own in front of "no".
            return {"yes": [0], "Yes": [1], " yes": [2], " Yes": [3], "no": [4], "No": [5]}.get(
                text
            ) or [7, 4]

        def decode(self, ids: list[int]) -> str:
            return "" if ids == [7] else "word"

    assert Spelling().choice_ids(["yes", " no "]) == [[0, 1, 2, 3], [4, 5]]
    for choices, said in (
        ("red ring,Red star", "red ring and Red star begin alike"),
        ("red, ", "a choice is empty"),
    ):
        with pytest.raises(ConfigError, match=said):
            MockBackbone().choice_ids(choices.split(","))


@pytest.mark.parametrize("kind", ["paper", "durable", "sliding-window"])
def test_compact_positions_stay_within_the_budget_for_ever(
    tiny: Backbone, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = MemoryConfig.of(kind, budget=72, positions="compact")
    session = Session.start(tiny, config)
    forward = Mock(wraps=tiny.forward)
    monkeypatch.setattr(tiny, "forward", forward)
    for step in range(40):
        session.watch(random_frames(step), time_s=100.0 * step)
    assert session.prefill(QUESTION).isfinite().all()
    # Positions follow stream time, two a second, behind the prefix.
    assert session.clock.next_position == len(tiny.prefix_ids) + 2 * 3900 + 1
    assert session.clock.stream_time_s == 3901
    # Distances inside the window are those of the stream; what is older takes one position a time
    # at the most.
    window = 2 * 100 * (config.near_tokens // 6)
    text = len(tiny.prefix_ids) + len(tiny.suffix_ids(QUESTION))
    highest = max(int(call.args[1].max()) for call in forward.call_args_list)
    assert highest < window + config.prototypes + text + 10


@pytest.mark.parametrize("far_out", [9_000, 2**32])
def test_compact_answers_do_not_depend_on_how_long_the_stream_has_been(
    tiny: Backbone, far_out: int
) -> None:
    session = watched(
        tiny, MemoryConfig.of("sliding-window", budget=400, positions="compact"), range(6)
    )
    expected = session.prefill(QUESTION)
    tensors = copy_of(session)
    here = tensors["near.positions"]
    there = here.clone()
    there[:, 0] += far_out
    tensors["near.keys"] = rerotate(tensors["near.keys"], here, there, tiny.precise_rotary)
    tensors["near.positions"] = there
    clock = replace(session.clock, next_position=session.clock.next_position + far_out)
    later = continued(session, tensors=tensors, clock=clock)
    check_logits(session, later.prefill(QUESTION), expected)
    plain = MemoryConfig.of("sliding-window", budget=400).to_dict()
    stream = continued(later, memory=plain)
    # At stream positions the text moves away from rows and columns, which stay: M-RoPE is not the
    # same any more.
    assert (stream.prefill(QUESTION) - expected).abs().max() > 0.1


def test_leaving_the_trained_positions_is_told_once_in_numbers(
    tiny: Backbone, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tiny, "max_position", 50)
    with pytest.warns(
        PositionWarning, match=r"position 5\d, and the model was trained on 50.*compact"
    ) as told:
        watched(tiny, DurableConfig(budget=48), range(40))
    assert len(told) == 1
    watched(tiny, MemoryConfig.of("durable", budget=16, positions="compact"), range(40))


def test_a_question_is_bounded_before_anything_is_done_for_it(tiny: Backbone) -> None:
    session = Session.start(tiny, DurableConfig(budget=16))
    for question, said in (("what " * 5000, "tokens"), ("x" * 10**7, "10,000,000 characters")):
        with pytest.raises(ConfigError, match=said):
            session.ask(question)


def test_a_memory_too_large_is_refused_before_it_is_allocated(
    tiny: Backbone, monkeypatch: pytest.MonkeyPatch
) -> None:
    there = Mock(return_value=10 * 2**20)
    monkeypatch.setattr("protokv.core.build.measure_device_memory", there)
    said = r"budget: 16000000 tokens of this model take .* GiB, and the device has 0\.0"
    with pytest.raises(OutOfMemory, match=said):
        Session.start(tiny, DurableConfig(budget=16_000_000))
    session = Session.start(tiny, MemoryConfig.of("sliding-window", budget=16))
    with pytest.raises(OutOfMemory, match="budget: 16000000 tokens"):
        continued(session, memory=session.config.to_dict() | {"budget": 16_000_000})
    # What is held beside what is saved counts too, and so does a copy of that.
    configs = (MemoryConfig.of(name, budget=2000) for name in MEMORIES)
    for config in (one for one in configs if one.memory.bounded):
        shape = make_memory_shape(tiny, config, 3)
        memory = config.memory(config, shape, tiny.rotary)
        there.return_value = memory.bytes_held + (memory.most_bytes or 0)
        build_memory(config, shape, tiny.rotary)
        there.return_value -= 1
        with pytest.raises(OutOfMemory):
            build_memory(config, shape, tiny.rotary)


def test_a_first_step_without_room_leaves_a_session_as_it_was(
    tiny: Backbone, monkeypatch: pytest.MonkeyPatch
) -> None:
    session = Session.start(tiny, DurableConfig(budget=40))
    before = session.prefill(QUESTION)
    with monkeypatch.context() as patch:
        build = Mock(wraps=build_memory, side_effect=[OutOfMemory("no room"), DEFAULT])
        patch.setattr("protokv.stream.stream.build_memory", build)
        with pytest.raises(OutOfMemory, match="no room"):
            session.watch(random_frames(0))
    assert session.intact
    assert torch.equal(session.prefill(QUESTION), before)
    session.watch(random_frames(0))
    assert same(session.tensors(), watched(tiny, DurableConfig(budget=40), range(1)).tensors())


def test_cell_centres_do_not_depend_on_resolution() -> None:
    assert make_cell_centres((2, 2)).tolist() == [
        [0.25, 0.25],
        [0.75, 0.25],
        [0.25, 0.75],
        [0.75, 0.75],
    ]
    assert make_cell_centres((4, 4)).mean(0).tolist() == [0.5, 0.5]


class Stuck(MockBackbone):
    said = 3.0

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        return super().logits(hidden * 0 + self.said)


@pytest.mark.parametrize(
    ("decoding", "said", "reason", "tokens"),
    [
        (Decoding(max_new_tokens=500), 3.0, "repetition", 32),
        (Decoding(max_new_tokens=20), 3.0, "length", 20),
        (Decoding(max_new_tokens=60, temperature=0.001), 3.0, "length", 60),
        # The end of an answer.
        (Decoding(), 1.75, "stop", 0),
    ],
)
def test_an_answer_says_why_it_ends_and_is_cut_where_it_repeats_itself_unless_it_is_drawn(
    decoding: Decoding, said: float, reason: str, tokens: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Stuck, "said", said)
    answer = watched(Stuck(), DurableConfig(budget=40), range(2)).ask(QUESTION, decoding)
    assert (answer.finish_reason, answer.tokens, len(answer.text.split())) == (
        reason,
        tokens,
        tokens,
    )
    # Of all tokens, the one that ends the answer too: one logit is 1, and seven are 0.
    assert answer.mean_logprob == pytest.approx(1 - math.log(math.e + 7))


def test_words_need_a_transcript_and_change_nothing_without_one(tiny: Backbone) -> None:
    session = watched(tiny, DurableConfig(budget=40, words=True), range(2))
    before = copy_of(session)
    with pytest.raises(ConfigError, match="transcript"):
        session.watch(random_frames(2), words=["two three"])
    assert session.intact
    assert session.clock.steps == 2
    assert same(before, session.tensors())


def test_the_near_window_of_durable_holds_one_step_of_the_size_of_the_first(tiny: Backbone) -> None:
    for given in (0, 18):
        session = watched(tiny, DurableConfig(budget=400, step_tokens=given), range(5))
        tokens = given or session.clock.tokens_seen // 5
        assert session.config == DurableConfig(budget=400, step_tokens=tokens)
        assert session.memory.report()["near_tokens_in_use"] == tokens
