"""Layers that learn where events begin look where they should before they have learned anything."""

from __future__ import annotations

import pytest
import torch
from transformers import Qwen2_5_VLForConditionalGeneration

from protokv.mini.training.forward import make_rotary_tables, turn_pairs
from protokv.mini.training.gaze import read_gaze
from protokv.mini.training.model import make_config
from protokv.mini.training.surgery import SECTIONS
from protokv.mini.training.time_surgery import (
    GATHER_LAYER,
    LEAD,
    ONSET_LAYER,
    fit,
    look_at_lead,
    look_for_events,
    look_for_predecessors,
    make_codes,
)
from protokv.mini.training.visual_tokens import N_PREFIX, VisualTokens
from tests.tolerance import near

SINK, WORD, LIT, CELL, SHAPE, FOLLOWED = 0, 1, 2, 3, 16, 30


@pytest.fixture(scope="module")
def model():
    torch.manual_seed(0)
    return Qwen2_5_VLForConditionalGeneration(make_config(3, 128, SECTIONS))


def _pick(*columns):
    """A reading of some dimensions of a state whose entries there are 8 or 0."""
    reading = torch.zeros(129, len(columns))
    reading[list(columns), range(len(columns))] = 1 / 8
    return reading


def _show(marked):
    """A state `[1, L, 128]` of root mean square 1 with 8 where it is marked."""
    state = torch.zeros(1, len(marked), 128)
    for i, dimensions in enumerate(marked):
        state[0, i, dimensions] = 8.0
        state[0, i, 127] = (128 - 64 * len(dimensions)) ** 0.5
    return state


@torch.no_grad()
def _gaze(model, layer, state, tokens, row):
    """The attention `[heads, nv]` of one token."""
    questions = torch.zeros(1, 1, state.shape[1] - N_PREFIX - tokens.times.shape[1], dtype=torch.long)
    return read_gaze(model, layer, state, tokens, questions, row).exp()[0]


def test_a_code_is_read_and_cells_are_as_far_from_each_other_as_can_be():
    codes = make_codes(9)
    assert codes.shape == (9, 8)
    expected = torch.eye(9) * 9 / 8 - 1 / 8
    torch.testing.assert_close(codes @ codes.T, expected, **near(expected, 8 * 8 + 8))
    x = torch.randn(300, 12)
    y = x[:, :3] * 2 + 1
    read = torch.cat([x, torch.ones(300, 1)], 1) @ fit(x, y, 1e-4)
    torch.testing.assert_close(read, y, atol=1e-3, rtol=1e-3)


def test_a_token_looks_at_the_same_cell_up_to_three_steps_before_and_else_at_the_sink(model):
    codes = make_codes(9)
    cells = torch.zeros(129, 8)
    # The mark of a cell is a dimension of its own.
    cells[CELL : CELL + 9] = codes / 8
    attention = model.model.language_model.layers[ONSET_LAYER].self_attn
    look_for_predecessors(attention, 2e4, cells, _pick(LIT), _pick(SINK), 1)
    for earlier, found in (([20, 21], True), ([3, 19], True), ([3, 9], False), ([10, 16], False)):
        tokens = VisualTokens(
            torch.zeros(1, 3, 128), torch.tensor([[*earlier, 22]]), torch.tensor([[4, 4, 4]]), torch.tensor([23])
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
        torch.zeros(1, 4, 128), torch.tensor([[1, 50, 90, 300]]), torch.tensor([[0, 4, 8, 2]]), torch.tensor([400])
    )
    for n in range(1, 5):
        events = [[SHAPE + 3]] * n + [[SHAPE + 5]] * (4 - n)
        state = _show([[SINK], [WORD], [WORD], *events, [SHAPE + 3, FOLLOWED], [SHAPE + 3]])
        followed, not_followed = (
            _gaze(model, GATHER_LAYER, state, tokens, (torch.tensor([0]), torch.tensor([N_PREFIX + i]))) for i in (4, 5)
        )
        seen = followed[:, [0, *range(N_PREFIX, N_PREFIX + n)]]
        assert seen.sum(-1).min() > 0.98
        assert seen.min() > 0.6 / (n + 1)
        assert not_followed[:, 0].min() > 0.98


def test_one_group_of_heads_looks_at_the_word_that_leads_whatever_it_is(model):
    attention = model.model.language_model.layers[ONSET_LAYER].self_attn
    others = {name: tensor.clone() for name, tensor in attention.state_dict().items()}
    look_at_lead(attention, 2e4, 1, 1)
    state = torch.randn(1, 9, 128, generator=torch.Generator().manual_seed(0))
    D, turned = attention.head_dim, make_rotary_tables(model, torch.arange(70, 79).expand(3, 1, 9))
    with torch.no_grad():
        q, k = (
            turn_pairs(projection(state).unflatten(-1, (-1, D)), *turned)[0]
            for projection in (attention.q_proj, attention.k_proj)
        )
    for head in (2, 3):
        scores = q[-1, head] @ k[:, 1].T * D**-0.5
        assert int(scores.argmax()) == 8 - LEAD
        assert scores.softmax(-1).max() > 0.6
    for name, kept in (("q_proj", 2 * D), ("k_proj", D), ("v_proj", D)):
        for kind in ("weight", "bias"):
            own = attention.state_dict()[f"{name}.{kind}"]
            assert torch.equal(own[:kept], others[f"{name}.{kind}"][:kept])
