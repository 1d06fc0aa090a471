"""Tiny random models with heads that kernels of vLLM take, and states of them."""

import json
import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from safetensors.torch import load_file, save_file

from protokv.backbones import load_backbone
from protokv.core.backbone import Backbone
from protokv.memories import MemoryConfig
from protokv.state.reader import load_state
from protokv.stream.session import Session
from protokv.stream.slots import export_slots
from protokv.texts import JsonObject
from tests.backbones import tiny
from tests.conftest import random_frames

HEAD_SIZE = 32
FAMILIES = ("qwen2_5_vl", "qwen3_vl", "llava_onevision")
# vLLM makes a processor of pictures, too, although no question has any.
PICTURES: dict[str, JsonObject] = {
    "qwen3_vl": {
        "image_processor_type": "Qwen2VLImageProcessor",
        "size": tiny.QWEN3_SIZE,
        "patch_size": tiny.PATCH,
        "temporal_patch_size": 2,
        "merge_size": 2,
    },
    "llava_onevision": {
        "image_processor_type": "LlavaOnevisionImageProcessor",
        "size": {"height": 72, "width": 72},
        "image_grid_pinpoints": [[72, 72]],
    },
    "internvl": {
        "image_processor_type": "GotOcr2ImageProcessor",
        "size": {"height": 16, "width": 16},
        "crop_to_patches": True,
        "max_patches": 2,
    },
}
# Its processor asks the tokenizer for these by name.
NAMED_TOKENS = {
    "start_image_token": "<img>",
    "end_image_token": "</img>",
    "context_image_token": "<IMG_CONTEXT>",
    "video_token": "<video>",
    "turn_token": "<|im_start|>",
}


def write_model(family: str, folder: Path, dtype: str = "float32") -> Path:
    """Write a model whose attention is far from uniform, and whose logits are of usual size. Its
    weights are numbers of the dtype.
    """
    settings = tiny.text_settings

    def wide_settings(*given: int, **rope: Any) -> JsonObject:
        if "mrope_section" in rope:
            rope["mrope_section"] = [8, 4, 4]
        return settings(*given, **rope)

    folder.mkdir(parents=True, exist_ok=True)
    with (
        patch.object(tiny, "HEAD_SIZE", HEAD_SIZE),
        patch.object(tiny, "text_settings", wide_settings),
    ):
        tiny.BUILDERS[family](folder)
    if family in PICTURES:
        tiny.write_json(folder, "preprocessor_config", PICTURES[family])
    if family == "internvl":
        tokens = json.loads((folder / "tokenizer_config.json").read_text())
        tiny.write_json(folder, "tokenizer_config", tokens | {"extra_special_tokens": NAMED_TOKENS})
    weights = folder / "model.safetensors"
    tensors = {name: one * 0.6 if one.ndim > 1 else one for name, one in load_file(weights).items()}
    rounded = {name: one.to(getattr(torch, dtype)).float() for name, one in tensors.items()}
    save_file(rounded, weights, {"format": "pt"})
    return folder


def make_questions(count: int, seed: int = 0) -> list[str]:
    """Return different questions of the words that tiny models know."""
    draw = random.Random(seed)
    words = [word for word in tiny.WORDS if word.isalpha()]
    found = dict.fromkeys(
        " ".join(draw.choices(words, k=draw.randint(2, 9))) + " ?" for _ in range(3 * count)
    )
    return list(found)[:count]


def watch_state(backbone: Backbone, seed: int, memory: str = "durable") -> Session:
    """Return a session that has merged much of what it watched."""
    session = Session.start(backbone, MemoryConfig.of(memory, budget=96 + 8 * (seed % 10)))
    for step in range(24 + seed % 7):
        session.watch(random_frames(100 * seed + step, backbone.frames_per_step))
    return session


def write_states(
    backbone: Backbone, folder: Path, count: int, watch: Callable[[Any, int], Session] = watch_state
) -> dict[str, Session]:
    """Write states and their slots to `folder/states`; return their sessions by name."""
    (folder / "states").mkdir(parents=True, exist_ok=True)
    found = {}
    for number in range(count):
        found[f"s{number}"] = watch(backbone, number)
        write_state(found[f"s{number}"], folder, f"s{number}")
    return found


def write_state(session: Session, folder: Path, name: str) -> None:
    path = folder / "states" / f"{name}.safetensors"
    session.save(path)
    export_slots(path, path.with_suffix(".kv.safetensors"), backbone=session.backbone)


def load_model(folder: Path, dtype: str = "float32") -> Backbone:
    torch.set_num_threads(1)
    return load_backbone(str(folder), device="cpu", dtype=dtype)


def open_in_float32(state: Path, backbone: Backbone) -> Session:
    """Return the session of a state of another dtype, by its model in float32."""
    found = load_state(state)
    exact = {
        name: one.float() if one.dtype == torch.bfloat16 else one
        for name, one in found.tensors.items()
    }
    return Session.restore(replace(found, backbone=backbone.identity, tensors=exact), backbone)


PLACES = ("street", "harbour", "kitchen", "garden", "station", "market", "school", "garage")
COLOURS = ("red", "blue", "green", "yellow", "white", "black", "grey", "brown")
THINGS = ("box", "bag", "letter", "bicycle", "lamp", "ladder", "umbrella", "bottle")


def load_smollm2(folder: Path, dtype: str = "float32") -> Any:
    """Load a language model with learned weights, which reads text in place of frames."""
    from samples.worlds.llama import load_llama

    torch.set_num_threads(1)
    return load_llama(str(folder), device="cpu", dtype=dtype)


def read_text(backbone: Any, seed: int, budget: int | None = None, steps: int = 12) -> Session:
    """Return a session that has read a log, and has merged much of it."""
    draw = random.Random(seed)
    budget = budget or 128 + 8 * (seed % 10)
    session = Session.start(backbone, MemoryConfig.of("durable", budget=budget))
    for step in range(steps):
        lines = [
            f"A man in a {draw.choice(COLOURS)} coat leaves a {draw.choice(COLOURS)} "
            f"{draw.choice(THINGS)} in the {draw.choice(PLACES)}."
            for _ in range(3)
        ]
        session.take([backbone.embed_chunk(backbone.tokenize(" ".join(lines)))], [float(step)])
    return session


def ask_in_words() -> list[str]:
    """Return questions about such a log."""
    asked = [f"What colour was the {thing}?" for thing in THINGS[:5]]
    return asked + [f"What was left in the {place}?" for place in PLACES[:5]]
