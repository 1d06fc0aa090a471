"""Attention of single rows equals its literal form, and its losses ask for what is wanted."""

from __future__ import annotations

import math

import torch

from protokv.mini.training.gaze import measure_gaze, measure_miss, read_gaze
from protokv.mini.training.model import make_model
from protokv.mini.training.visual_tokens import N_PREFIX, VisualTokens, make_positions
from tests.tolerance import near


def test_the_gaze_of_a_row_is_attention_turned_pair_by_pair():
    torch.manual_seed(0)
    model = make_model(4, layers=2)
    tokens = VisualTokens(
        torch.randn(2, 5, 128),
        torch.tensor([[0, 1, 1, 7, 9], [3, 4, 5, 6, 6]]),
        torch.tensor([[0, 8, 1, 2, 5], [4, 4, 7, 3, 0]]),
        torch.tensor([10, 8]),
        present=torch.tensor([[True] * 5, [True] * 4 + [False]]),
        seen=torch.tensor([[True, False, True, True, True]] * 2),
        bias=torch.rand(2, 5),
    )
    questions, nv = torch.randint(1, 20, (2, 2, 3)), N_PREFIX + 5
    state = torch.randn(2, nv + 6, 128)
    rows = torch.tensor([0, 1, 1]), nv + torch.tensor([1, 0, 5])
    gaze = read_gaze(model, 1, state, tokens, questions, rows)
    assert gaze.shape == (3, 4, nv)

    layer = model.model.language_model.layers[1]
    rope = model.config.text_config.rope_parameters
    component = [i for i, n in enumerate(rope["mrope_section"]) for _ in range(n)]
    places = make_positions(tokens, 2, 3)

    def turned(projection, video, position):
        x = projection(layer.input_layernorm(state[video, position])).view(-1, 32)
        pairs = torch.complex(x[:, :16], x[:, 16:])
        angles = torch.stack(
            [places[component[i], video, position] * rope["rope_theta"] ** (-i / 16) for i in range(16)]
        )
        return pairs * torch.polar(torch.ones(16), angles)

    for own, (video, position) in zip(gaze, zip(*(r.tolist() for r in rows), strict=True), strict=True):
        q = turned(layer.self_attn.q_proj, video, position)
        scores = torch.full((4, nv), -torch.inf)
        for key in range(nv):
            i = key - N_PREFIX
            if i >= 0 and not (tokens.present[video, i] and tokens.seen[video, i]):
                continue
            k = turned(layer.self_attn.k_proj, video, key)
            for head in range(4):
                scores[head, key] = (q[head] * k[head // 2].conj()).sum().real / 32**0.5
            scores[:, key] += tokens.bias[video, i] if i >= 0 else 0
        # A norm, a projection, a turn, the product over a head and a softmax.
        torch.testing.assert_close(own.exp(), scores.softmax(-1), **near(scores.softmax(-1), 2 * 128 + 6 + 32 + nv))


def test_a_gaze_is_lost_unless_it_rests_evenly_and_misses_what_it_does_not_see():
    wanted = torch.tensor([[1.0, 0.0, 1.0, 0.0]])
    even = torch.tensor([[[0.5, 0.0, 0.5, 0.0]] * 2]).log()
    uneven = torch.tensor([[[0.9, 0.0, 0.1, 0.0]] * 2]).log()
    spread = torch.tensor([[[0.25] * 4, [0.5, 0.0, 0.25, 0.25]]]).log()
    torch.testing.assert_close(measure_gaze(even, wanted), torch.tensor(0.0), atol=1e-6, rtol=0)
    torch.testing.assert_close(measure_gaze(uneven, wanted), torch.tensor(-0.5 * math.log(0.9 * 0.1) - math.log(2)))
    torch.testing.assert_close(measure_miss(uneven, wanted), torch.tensor(0.0), atol=1e-6, rtol=0)
    torch.testing.assert_close(measure_miss(spread, wanted), torch.tensor(-math.log((0.5 + 0.75) / 2)))
