"""`protokv.Cache.watch`: its steps are the prompt of transformers' processors, cut."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForImageTextToText, AutoTokenizer

import protokv
from protokv.errors import ConfigError
from tests.backbones.tiny import BUILDERS
from tests.backbones.upstream import Upstream
from tests.conftest import random_frames

FRAMES = {"qwen2_vl": 2, "qwen2_5_vl": 2, "qwen3_vl": 2, "qwen3_5": 2}
FAMILIES = [*FRAMES, "smolvlm", "internvl", "gemma4"]
QUESTION = "who is the star ?"
STEPS = 3


def open_model(family: str, folder: Path) -> tuple[Any, Any, Path]:
    path = BUILDERS[family](folder)
    model = AutoModelForImageTextToText.from_pretrained(path, dtype=torch.float32).eval()
    tokenizer = AutoTokenizer.from_pretrained(path)
    return model, tokenizer, path


def make_video(frames_per_step: int) -> np.ndarray:
    return random_frames(7, STEPS * frames_per_step)


@pytest.mark.parametrize("family", FAMILIES)
@torch.no_grad()
def test_steps_of_frames_are_the_prompt_of_the_processor(family: str, tmp_path: Path) -> None:
    model, tokenizer, path = open_model(family, tmp_path)
    n = FRAMES.get(family, 1)
    frames = make_video(n)
    cache = protokv.Cache(model, 4000)
    times = [i / cache.stream.clock.fps for i in range(len(frames))]
    ids = []
    for inputs in cache.watch(tokenizer, frames, times):
        ids.append(inputs["input_ids"])
        model(**inputs)
    question = cache.question(QUESTION)
    ids.append(question["input_ids"])
    own = model(**question).logits[0, -1]
    upstream = Upstream(family, path)
    video = list(frames.reshape(STEPS, n, *frames.shape[1:]))
    card = upstream.inputs(video, QUESTION, n / cache.stream.clock.fps)
    assert torch.cat(ids, 1).tolist() == card["input_ids"].tolist()
    expected = upstream.model(**card).logits[0, -1]
    torch.testing.assert_close(own, expected, atol=5e-4, rtol=5e-4)
    assert cache.steps == STEPS
    cache.save(tmp_path / "seen.safetensors")
    again = protokv.Cache.load(tmp_path / "seen.safetensors", model, tokenizer)
    assert torch.equal(model(**again.question(QUESTION)).logits[0, -1], own)


def test_a_family_that_is_told_no_times_is_refused(tmp_path: Path) -> None:
    model, tokenizer, _ = open_model("llava_onevision", tmp_path)
    cache = protokv.Cache(model, 4000)
    with pytest.raises(ConfigError, match="the times of steps"):
        cache.watch(tokenizer, [], [])
    with pytest.raises(ConfigError, match="has not watched"):
        cache.question(QUESTION)


@torch.no_grad()
def test_what_a_loop_forgets_is_refused(tmp_path: Path) -> None:
    model, tokenizer, _ = open_model("smolvlm", tmp_path)
    frames = make_video(1)
    with pytest.raises(ConfigError, match="not forwarded"):
        list(protokv.Cache(model, 4000).watch(tokenizer, frames, range(len(frames))))
    cache = protokv.Cache(model, 4000)
    steps = cache.watch(tokenizer, frames, [0.0])
    for _ in range(2):  # the prompt, and the one frame that has a time
        model(**next(steps))
    with pytest.raises(ConfigError, match="as many times"):
        next(steps)
    cache = protokv.Cache(model, 4000)
    model(**cache.step({"input_ids": torch.full((1, 9), 9)}))
    cache.commit()
    with pytest.raises(ConfigError, match="did not begin"):
        list(cache.watch(tokenizer, frames, range(len(frames))))
