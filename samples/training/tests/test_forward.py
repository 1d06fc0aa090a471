"""The fast forward pass of training equals that of transformers in float32: masks, gaps, positions,
questions.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from samples.training.forward import (
    QUESTION_TOKENS,
    compute_logits,
    encode_steps,
    read_questions,
    to_patches,
)
from samples.training.model import TOKENS, make_model
from samples.training.visual_tokens import HIDDEN, N_PREFIX, PREFIX, show_whole_steps
from samples.training.vocabulary import PADDED_SIZE
from tests.tolerance import forward_terms, near


def _model():
    """Return a small model with weights large enough to show a wrong mask or position."""
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
    frames = torch.randint(
        0, 256, (5, 2, 84, 84, 3), dtype=torch.uint8, generator=torch.Generator().manual_seed(0)
    )
    with torch.no_grad():
        fast = encode_steps(model.model.visual, to_patches(frames))
        whole = model.model.visual(
            to_patches(frames), grid_thw=torch.tensor([[5, 6, 6]])
        ).pooler_output
    whole = whole.view(5, TOKENS, -1)
    torch.testing.assert_close(fast, whole, **near(whole, forward_terms(2, 128, TOKENS)))


def _whole(generator, **masks):
    features = torch.randn(2, 5 * TOKENS, 128, generator=generator)
    times = torch.tensor([[0, 1, 2, 7, 11], [640, 641, 650, 651, 699]])
    return show_whole_steps(features, times, torch.tensor([12, 703]), **masks)


def _pick(tokens, index, present=None, bias=None):
    """Keep the tokens `index` `[B, n]` of each video."""
    rows = torch.arange(len(index))[:, None]
    return replace(
        tokens,
        features=tokens.features[rows, index],
        times=tokens.times[rows, index],
        cells=tokens.cells[rows, index],
        far=None if tokens.far is None else tokens.far[rows, index],
        seen=None if tokens.seen is None else tokens.seen[rows, index],
        present=present,
        bias=bias,
    )


def _near(logits):
    """Return the tolerance for the logits of questions about all steps."""
    return near(logits, forward_terms(2, 128, N_PREFIX + 5 * TOKENS + QUESTION_TOKENS))


def _answers(model, tokens, questions):
    with torch.no_grad():
        return compute_logits(
            model, tokens, questions, torch.ones_like(questions, dtype=torch.bool)
        )


def _answers_of_transformers(model, tokens, questions):
    """Answer each question by itself over the present tokens, with positions and scores written out
    one by one.
    """
    language = model.model.language_model
    rows = []
    for b in range(len(questions)):
        there = (
            range(tokens.times.shape[1])
            if tokens.present is None
            else tokens.present[b].nonzero()[:, 0].tolist()
        )
        place = [(i, i, i) for i in range(N_PREFIX)]
        for i in there:
            cell = int(tokens.cells[b, i])
            place.append(
                (N_PREFIX + int(tokens.times[b, i]), N_PREFIX + cell // 3, N_PREFIX + cell % 3)
            )
        nv = len(place)
        start = N_PREFIX + max(3, int(tokens.end[b]))
        R = questions.shape[-1]
        place += [(start + i,) * 3 for i in range(R)]
        mask = torch.full((nv + R, nv + R), HIDDEN)
        for row in range(nv + R):
            for column in range(row + 1):
                score = 0.0
                if N_PREFIX <= column < nv:
                    key = there[column - N_PREFIX]
                    score = 0.0 if tokens.bias is None else float(tokens.bias[b, key])
                    if N_PREFIX <= row < nv and tokens.window is not None:
                        age = int(tokens.times[b, there[row - N_PREFIX]] - tokens.times[b, key])
                        if age >= tokens.window and not (
                            tokens.far is not None and tokens.far[b, key]
                        ):
                            score = HIDDEN
                    if row >= nv and tokens.seen is not None and not tokens.seen[b, key]:
                        score = HIDDEN
                mask[row, column] = score
        for question in questions[b]:
            x = [language.embed_tokens(torch.tensor(PREFIX)), tokens.features[b, list(there)]]
            x = torch.cat([*x, language.embed_tokens(question)])[None]
            hidden = language(
                inputs_embeds=x,
                position_ids=torch.tensor(place).T[:, None],
                attention_mask={"full_attention": mask[None, None]},
                use_cache=False,
            ).last_hidden_state
            rows.append(model.lm_head(hidden[0, nv:]))
    return torch.cat(rows)


@pytest.mark.parametrize("window", [None, 3])
@pytest.mark.parametrize("hidden_tokens", [False, True])
@pytest.mark.parametrize("sparse", [False, True])
def test_language_forward_equals_transformers_with_gaps_shifts_masks_and_tokens_left_out(
    window, hidden_tokens, sparse
):
    model = _model()
    model.set_attn_implementation("eager")
    generator = torch.Generator().manual_seed(1)
    whole = _whole(generator)
    size = whole.times.shape
    far = torch.rand(size, generator=generator) < 0.3 if hidden_tokens and window else None
    seen = torch.rand(size, generator=generator) < 0.5 if hidden_tokens else None
    tokens = replace(whole, window=window, far=far, seen=seen)
    if sparse:
        index = torch.stack(
            [torch.randperm(size[1], generator=generator)[:19].sort().values for _ in range(2)]
        )
        present = torch.arange(19) < torch.tensor([[19], [13]])
        bias = (
            3
            * torch.rand(2, 19, generator=generator)
            * (torch.rand(2, 19, generator=generator) < 0.5)
        )
        tokens = _pick(tokens, index, present, bias)
    questions = torch.randint(
        0, PADDED_SIZE, (2, 3, 7 if sparse else QUESTION_TOKENS), generator=generator
    )
    with torch.no_grad():
        own = _answers_of_transformers(model, tokens, questions)
    assert own.abs().max() > 1
    torch.testing.assert_close(_answers(model, tokens, questions), own, **_near(own))


def test_states_behind_a_layer_are_those_of_a_model_that_ends_there():
    model = _model()
    generator = torch.Generator().manual_seed(5)
    tokens = _whole(generator)
    questions = torch.randint(0, PADDED_SIZE, (2, 2, 7), generator=generator)
    with torch.no_grad():
        everything = torch.ones_like(questions, dtype=torch.bool)
        _, tapped = read_questions(model, tokens, questions, everything, taps=(0, 1))
        logits, short = read_questions(model, tokens, questions, everything, taps=(1,), depth=1)
        behind = model.lm_head(model.model.language_model.norm(tapped[1][:, -14:]))
    assert torch.equal(tapped[0][:, N_PREFIX : N_PREFIX + 45], tokens.features)
    assert torch.equal(tapped[1], short[1])
    torch.testing.assert_close(logits.view(2, 14, -1), behind, **near(behind, 2 * 128))
