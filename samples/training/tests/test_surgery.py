"""New layers change nothing until they are trained, and attend to the right tokens from the
start.
"""

from __future__ import annotations

import pytest
import torch
from transformers import Qwen2_5_VLForConditionalGeneration

from protokv.mini.backbone import MiniBackbone
from samples.training.forward import compute_logits, make_rotary_tables, turn_pairs
from samples.training.gaze import read_gaze
from samples.training.model import make_config
from samples.training.surgery import (
    LOOK_BACK_LAYER,
    SECTIONS,
    insert_layers,
    look_back,
    tell_words_apart,
)
from samples.training.time_surgery import (
    GATHER_LAYER,
    ONSET_LAYER,
    look_for_events,
    look_for_predecessors,
    make_codes,
)
from samples.training.visual_tokens import N_PREFIX, VisualTokens, show_whole_steps
from samples.training.vocabulary import token_ids, words
from tests.tolerance import forward_terms, near


@pytest.fixture(scope="module")
def shipped():
    return Qwen2_5_VLForConditionalGeneration.from_pretrained(
        MiniBackbone.folder("protokv/mini"), dtype=torch.float32
    )


@pytest.fixture
def longer(shipped):
    model = insert_layers(shipped.state_dict(), 1)
    tell_words_apart(model.model.language_model.embed_tokens.weight, 1, "content", "order")
    look_back(model)
    return model


def test_a_longer_model_says_what_the_shipped_one_says_with_its_pairs_divided_anew(shipped, longer):
    generator = torch.Generator().manual_seed(0)
    features = 2.5 * torch.randn(2, 45, 128, generator=generator)
    tokens = show_whole_steps(
        features,
        torch.tensor([[0, 1, 2, 7, 11], [640, 641, 650, 651, 699]]),
        torch.tensor([12, 703]),
    )
    questions = torch.randint(0, len(words()), (2, 3, 9), generator=generator)
    everything = torch.ones_like(questions, dtype=torch.bool)
    rope = shipped.config.text_config.rope_parameters
    own = rope["mrope_section"]
    with torch.no_grad():
        rope["mrope_section"] = list(SECTIONS)
        before = compute_logits(shipped, tokens, questions, everything)
        rope["mrope_section"] = own
        after = compute_logits(longer, tokens, questions, everything)
    assert len(longer.model.language_model.layers) == 6
    known = slice(0, len(words()))
    expected = before[:, known]
    terms = forward_terms(6, 128, tokens.times.shape[1] + questions.shape[-1])
    torch.testing.assert_close(after[:, known], expected, **near(expected, terms))


def test_words_about_order_are_told_apart_and_others_stay(shipped, longer):
    old, new = (m.model.language_model.embed_tokens.weight.detach() for m in (shipped, longer))
    ids = token_ids("order")
    pair = [ids["before"], ids["after"]]
    alike, apart = (
        torch.nn.functional.cosine_similarity(*table[pair], dim=0) for table in (old, new)
    )
    assert alike > 0.99
    assert apart < 0.9
    assert torch.equal(old[: len(words())], new[: len(words())])
    assert (
        longer.lm_head.weight.data_ptr()
        == longer.model.language_model.embed_tokens.weight.data_ptr()
    )
    later = new.clone()
    tell_words_apart(later, 1, "order", "time")
    assert (later != new).any(1).nonzero().flatten().tolist() == [token_ids("time")["times"]]


def test_a_layer_that_looks_back_attends_three_and_four_tokens_before(longer):
    attention = longer.model.language_model.layers[LOOK_BACK_LAYER].self_attn
    place = torch.arange(50, 62).expand(3, 1, 12)
    turned = make_rotary_tables(longer, place)
    q, k = (
        turn_pairs(projection.bias.detach().view(1, 1, -1, 32), *turned)[0]
        for projection in (attention.q_proj, attention.k_proj)
    )
    for head, offset in enumerate((3, 3, 4, 4)):
        scores = q[-1, head] @ k[:, head // 2].T
        assert int(scores.argmax()) == 11 - offset
        assert scores.softmax(-1).max() > 0.6


def test_weights_of_another_model_are_refused(shipped):
    state = shipped.state_dict()
    del state["model.language_model.norm.weight"]
    with pytest.raises(ValueError, match="norm"):
        insert_layers(state, 1)


SINK = 0
WORD = 1
LIT = 2
CELL = 3
SHAPE = 16
FOLLOWED = 30


@pytest.fixture(scope="module")
def model():
    torch.manual_seed(0)
    return Qwen2_5_VLForConditionalGeneration(make_config(3, 128, SECTIONS))


def _pick(*columns):
    """Return a reading of some dimensions of a state, whose entries there are 8 or 0."""
    reading = torch.zeros(129, len(columns))
    reading[list(columns), range(len(columns))] = 1 / 8
    return reading


def _show(marked):
    """Return a state `[1, L, 128]` of root mean square 1, with 8 in the marked dimensions of each
    token.
    """
    state = torch.zeros(1, len(marked), 128)
    for i, dimensions in enumerate(marked):
        state[0, i, dimensions] = 8.0
        state[0, i, 127] = (128 - 64 * len(dimensions)) ** 0.5
    return state


@torch.no_grad()
def _gaze(model, layer, state, tokens, row):
    """Return the attention `[heads, nv]` of one token."""
    questions = torch.zeros(
        1, 1, state.shape[1] - N_PREFIX - tokens.times.shape[1], dtype=torch.long
    )
    return read_gaze(model, layer, state, tokens, questions, row).exp()[0]


def test_a_token_looks_at_the_same_cell_up_to_three_steps_before_and_else_at_the_sink(model):
    codes = make_codes(9)
    cells = torch.zeros(129, 8)
    # Each cell has its own dimension.
    cells[CELL : CELL + 9] = codes / 8
    attention = model.model.language_model.layers[ONSET_LAYER].self_attn
    look_for_predecessors(attention, 2e4, cells, _pick(LIT), _pick(SINK), 1)
    for earlier, found in (([20, 21], True), ([3, 19], True), ([3, 9], False), ([10, 16], False)):
        tokens = VisualTokens(
            torch.zeros(1, 3, 128),
            torch.tensor([[*earlier, 22]]),
            torch.tensor([[4, 4, 4]]),
            torch.tensor([23]),
        )
        state = _show([[SINK], [WORD], [WORD], *[[CELL + 4]] * 3])
        row = torch.tensor([0]), torch.tensor([N_PREFIX + 2])
        gaze = _gaze(model, ONSET_LAYER, state, tokens, row)
        before = gaze[:, N_PREFIX : N_PREFIX + 2].sum(-1)
        assert (before > 0.95).all() if found else (before < 0.05).all()


def test_a_shape_word_looks_evenly_at_the_events_of_its_shape_and_as_much_at_the_sink(model):
    attention = model.model.language_model.layers[GATHER_LAYER].self_attn
    shapes = _pick(*range(SHAPE, SHAPE + 8))
    look_for_events(attention, shapes, _pick(FOLLOWED), shapes, _pick(SINK), 1)
    tokens = VisualTokens(
        torch.zeros(1, 4, 128),
        torch.tensor([[1, 50, 90, 300]]),
        torch.tensor([[0, 4, 8, 2]]),
        torch.tensor([400]),
    )
    for n in range(1, 5):
        events = [[SHAPE + 3]] * n + [[SHAPE + 5]] * (4 - n)
        state = _show([[SINK], [WORD], [WORD], *events, [SHAPE + 3, FOLLOWED], [SHAPE + 3]])
        followed, not_followed = (
            _gaze(
                model,
                GATHER_LAYER,
                state,
                tokens,
                (torch.tensor([0]), torch.tensor([N_PREFIX + i])),
            )
            for i in (4, 5)
        )
        seen = followed[:, [0, *range(N_PREFIX, N_PREFIX + n)]]
        assert seen.sum(-1).min() > 0.98
        assert seen.min() > 0.6 / (n + 1)
        assert not_followed[:, 0].min() > 0.98
