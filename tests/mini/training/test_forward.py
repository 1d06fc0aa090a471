"""The fast training forward is transformers' own forward, in float32: masks, gaps, shifted positions, questions."""

from __future__ import annotations

import pytest
import torch

from protokv.mini.training.forward import (
    HIDDEN,
    N_PREFIX,
    PREFIX,
    QUESTION_TOKENS,
    compute_logits,
    encode_steps,
    make_masks,
    make_positions,
    to_patches,
)
from protokv.mini.training.model import TOKENS, make_model
from protokv.mini.vocabulary import PADDED_SIZE


def _model():
    """A small model whose weights are large enough that a wrong mask or position shows."""
    model = make_model(5, layers=2).eval()
    generator = torch.Generator().manual_seed(3)
    for parameter in model.parameters():
        if parameter.ndim > 1:
            parameter.data.mul_(3)
        else:
            parameter.data.add_(0.3 * torch.randn(parameter.shape, generator=generator))
    return model


def test_vision_of_several_steps_equals_transformers_tower():
    model = _model()
    frames = torch.randint(0, 256, (5, 2, 84, 84, 3), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        fast = encode_steps(model.model.visual, to_patches(frames))
        whole = model.model.visual(to_patches(frames), grid_thw=torch.tensor([[5, 6, 6]])).pooler_output
    torch.testing.assert_close(fast, whole.view(5, TOKENS, -1), atol=2e-5, rtol=1e-5)


@pytest.mark.parametrize("window", [None, 3])
@pytest.mark.parametrize("hidden_tokens", [False, True])
def test_language_forward_equals_transformers_with_gaps_shifts_and_masks(window, hidden_tokens):
    model = _model()
    model.set_attn_implementation("eager")
    B, K, Q, R = 2, 5, 3, QUESTION_TOKENS
    generator = torch.Generator().manual_seed(1)
    features = torch.randn(B, K * TOKENS, 128, generator=generator)
    questions = torch.randint(0, PADDED_SIZE, (B, Q, R), generator=generator)
    times = torch.tensor([[0, 1, 2, 7, 11], [640, 641, 650, 651, 699]])
    end = torch.tensor([12, 703])
    far = torch.rand(B, K * TOKENS, generator=generator) < 0.3 if hidden_tokens and window else None
    seen = torch.rand(B, K * TOKENS, generator=generator) < 0.5 if hidden_tokens else None
    everything = torch.ones(B, Q, R, dtype=torch.bool)
    nv = N_PREFIX + K * TOKENS
    embed = model.model.language_model.embed_tokens
    with torch.no_grad():
        fast = compute_logits(model, features, questions, times, end, everything, window=window, far=far, seen=seen)
        video_bias, question_bias = make_masks(times, window, far, seen, torch.float32)
        L = nv + Q * R
        mask = torch.full((B, 1, L, L), HIDDEN)
        mask[:, 0, :nv, :nv] = video_bias
        mask[:, 0, nv:, :nv] = question_bias
        causal = torch.zeros(R, R).masked_fill_(~torch.ones(R, R, dtype=torch.bool).tril(), HIDDEN)
        for start in range(nv, L, R):
            mask[:, 0, start : start + R, start : start + R] = causal
        prefix = embed(torch.tensor(PREFIX)).expand(B, -1, -1)
        x = torch.cat([prefix, features, embed(questions.view(B, Q * R))], 1)
        hidden = model.model.language_model(
            inputs_embeds=x,
            position_ids=make_positions(times, end, Q),
            attention_mask={"full_attention": mask},
            use_cache=False,
        ).last_hidden_state
        own = model.lm_head(hidden[:, nv:]).view(B * Q * R, -1)
    assert own.abs().max() > 1
    torch.testing.assert_close(fast, own, atol=2e-4, rtol=1e-4)


def test_question_blocks_do_not_see_each_other():
    model = _model()
    generator = torch.Generator().manual_seed(2)
    features = torch.randn(1, 3 * TOKENS, 128, generator=generator)
    questions = torch.randint(0, PADDED_SIZE, (1, 2, QUESTION_TOKENS), generator=generator)
    times, end = torch.tensor([[0, 1, 2]]), torch.tensor([3])
    both = torch.ones(1, 2, QUESTION_TOKENS, dtype=torch.bool)
    with torch.no_grad():
        together = compute_logits(model, features, questions, times, end, both)[QUESTION_TOKENS:]
        alone = compute_logits(model, features, questions[:, 1:], times, end, both[:, 1:])
    torch.testing.assert_close(together, alone, atol=1e-5, rtol=1e-5)
