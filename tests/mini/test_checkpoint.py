"""The shipped checkpoint is a real Qwen2.5-VL folder and answers held-out questions in transformers' own forward."""

from __future__ import annotations

import json

import av
import numpy as np
import pytest
import torch
from PIL import Image
from transformers import AutoTokenizer, Qwen2_5_VLForConditionalGeneration

from protokv.mini import weights_folder
from protokv.mini.questions import make_questions
from protokv.mini.world import World, WorldConfig
from samples.render import render
from samples.training.evaluate import make_held_out_world
from samples.training.forward import to_patches
from samples.training.model import TOKENS, make_config
from samples.training.visual_tokens import N_PREFIX, make_positions, show_whole_steps
from samples.training.vocabulary import CHAT_TEMPLATE, token_ids


@pytest.fixture(scope="module")
def model():
    return Qwen2_5_VLForConditionalGeneration.from_pretrained(weights_folder(), dtype=torch.float32).eval()


@pytest.fixture(scope="module")
def tokenizer():
    return AutoTokenizer.from_pretrained(weights_folder())


@torch.no_grad()
def _answer(model, tokenizer, frames: np.ndarray, question: str) -> str:
    """Greedy answer about frames `[2K, 84, 84, 3]`, by transformers' forward with explicit positions."""
    K = len(frames) // 2
    chat = [{"role": "user", "content": [{"type": "video"}, {"type": "text", "text": question}]}]
    text = tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
    ids = tokenizer(text)["input_ids"]
    at = ids.index(model.config.video_token_id)
    assert at == N_PREFIX
    ids = ids[:at] + [model.config.video_token_id] * (K * TOKENS) + ids[at + 1 :]
    patches = to_patches(torch.from_numpy(frames.copy()).view(K, 2, 84, 84, 3))
    start = len(ids)
    video = show_whole_steps(torch.empty(1, K * TOKENS, 0), torch.arange(K)[None], torch.tensor([K]))
    while len(ids) < start + 4:
        n_text = len(ids) - N_PREFIX - K * TOKENS
        place = make_positions(video, 1, n_text)
        logits = model(
            input_ids=torch.tensor([ids]),
            pixel_values_videos=patches,
            video_grid_thw=torch.tensor([[K, 6, 6]]),
            position_ids=place,
            use_cache=False,
        ).logits
        following = int(logits[0, -1].argmax())
        if following == token_ids()["<|im_end|>"]:
            break
        ids.append(following)
    return tokenizer.decode(ids[start:], skip_special_tokens=True)


def test_the_folder_is_small_complete_and_holds_no_pickle():
    files = {f.name: f.stat().st_size for f in weights_folder().iterdir()}
    assert set(files) == {
        "chat_template.jinja",
        "config.json",
        "generation_config.json",
        "identity.json",
        "model.safetensors",
        "preprocessor_config.json",
        "tokenizer.json",
        "tokenizer_config.json",
    }
    assert sum(files.values()) < 10_000_000


def test_the_folder_belongs_to_this_vocabulary_and_shape(model, tokenizer):
    assert {w: i for w, i in tokenizer.get_vocab().items() if i < len(token_ids())} == token_ids()
    assert tokenizer.chat_template == CHAT_TEMPLATE
    assert model.config.text_config.to_dict() | {"dtype": None} == make_config().text_config.to_dict() | {
        "dtype": None,
    }
    assert model.config.vision_config.tokens_per_second == 1
    assert json.loads((weights_folder() / "config.json").read_text())["protokv_fps"] == 2.0


@pytest.mark.parametrize(("load", "length"), [("few", 17), ("many", 33)])
def test_held_out_questions_are_answered_through_transformers_own_forward(model, tokenizer, load, length):
    right, asked = 0, []
    for index in range(3):
        world = make_held_out_world(load, length, 5000 + index)
        frames = world.frames(0, length)
        for question in make_questions(world, length):
            asked.append(question.type)
            right += _answer(model, tokenizer, frames, question.question) == question.answer
    assert len(asked) > 25
    assert right >= 0.85 * len(asked)


def test_a_file_that_went_through_compression_reads_like_the_frames_themselves(model, tokenizer, tmp_path):
    world = World(WorldConfig(seed=424_242, length_s=15, events_per_minute=12.0))
    render(world, tmp_path / "video.mp4")
    with av.open(str(tmp_path / "video.mp4")) as container:
        pictures = [f.to_ndarray(format="rgb24") for f in container.decode(video=0)][::4]
    small = np.stack([np.asarray(Image.fromarray(p).resize((84, 84), Image.Resampling.BOX)) for p in pictures])
    assert len(small) == 30
    asked = make_questions(world, 15)
    answers = [_answer(model, tokenizer, small, q.question) for q in asked]
    own = [_answer(model, tokenizer, world.frames(0, 15), q.question) for q in asked]
    assert sum(a == b for a, b in zip(answers, own, strict=True)) >= len(asked) - 1
