"""Codes of a vision tower: they become visual tokens of LLaVA-OneVision, and questions about a
video stay apart.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import torch
from transformers import LlavaOnevisionForConditionalGeneration

from samples.training.sight_language import QUESTIONS, draw_codes, make_batch
from samples.training.sight_tower import CODES, Tower, draw_frames, make_config, to_codes
from tests.tolerance import tolerance


def test_codes_times_the_codebook_are_the_tokens_of_transformers_own_model() -> None:
    torch.manual_seed(0)
    text = {
        "model_type": "llama",
        "hidden_size": 576,
        "num_hidden_layers": 1,
        "intermediate_size": 8,
        "vocab_size": 32,
    }
    model = LlavaOnevisionForConditionalGeneration(
        make_config(text, image_token_index=5, video_token_index=5)
    )
    tower = Tower()
    codebook = torch.randn(CODES, 576)
    reading = torch.randn(CODES, 576) / 24
    frames, labels = draw_frames(np.random.default_rng(0), 3)
    inner = model.model
    projector = model.model.multi_modal_projector
    with torch.no_grad():
        inner.vision_tower.load_state_dict(tower.vision.state_dict())
        projector.linear_1.load_state_dict(tower.projector.linear_1.state_dict())
        projector.linear_2.weight.copy_(codebook.T @ reading)
        projector.linear_2.bias.zero_()
        pixels = frames.permute(0, 3, 1, 2)[None].float() / 127.5 - 1
        seen = inner.get_video_features(pixels).pooler_output[0, :-1].view(3, 9, 576)
        expected = tower(frames) @ reading.T @ codebook
    assert (seen - expected).abs().max() <= tolerance(
        torch.float32, 2000, float(expected.abs().max())
    )
    assert torch.equal(to_codes(labels)[..., -1] == 1, labels[..., 0] == 0)


def test_a_question_sees_the_video_and_itself_alone() -> None:
    words: dict[str, int] = {}
    encode = lambda text: [words.setdefault(word, len(words) + 3) for word in text.split()]  # noqa: E731
    reader = cast(Any, SimpleNamespace(encode=encode))
    batch = make_batch(np.random.default_rng(1), reader, 3, 5, 40, draw_codes)
    m = batch.labels.shape[1]
    starts = batch.newline[:, 1:]
    assert starts.sum().item() == 3 * QUESTIONS == batch.asked.sum().item()
    number = starts.cumsum(1)
    seen = batch.mask[:, -m:, -m:] > -torch.inf
    apart = number[:, :, None] != number[:, None, :]
    real = batch.real[:, :, None] & batch.real[:, None, :]
    assert not (seen & apart & real).any()
    assert (batch.mask[:, -m:, 0][batch.real] == 0).all()
