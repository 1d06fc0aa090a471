"""Tiny random models with heads that kernels of vLLM take, and states of them."""

import random
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from safetensors.torch import load_file, save_file

from protokv.backbones import load_backbone
from protokv.core.backbone import Backbone
from protokv.memories import DurableConfig
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
}


def write_model(family: str, folder: Path) -> Path:
    """Write a model whose attention is far from uniform, and whose logits are of usual size."""
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
    weights = folder / "model.safetensors"
    tensors = {name: one * 0.6 if one.ndim > 1 else one for name, one in load_file(weights).items()}
    save_file(tensors, weights, {"format": "pt"})
    return folder


def make_questions(count: int, seed: int = 0) -> list[str]:
    """Return different questions of the words that tiny models know."""
    draw = random.Random(seed)
    words = [word for word in tiny.WORDS if word.isalpha()]
    found = dict.fromkeys(
        " ".join(draw.choices(words, k=draw.randint(2, 9))) + " ?" for _ in range(3 * count)
    )
    return list(found)[:count]


def watch_state(backbone: Backbone, seed: int) -> Session:
    """Return a session that has merged much of what it watched."""
    session = Session.start(backbone, DurableConfig(budget=96 + 8 * (seed % 10)))
    for step in range(24 + seed % 7):
        session.watch(random_frames(100 * seed + step, backbone.frames_per_step))
    return session


def write_states(backbone: Backbone, folder: Path, count: int) -> dict[str, Session]:
    """Write states and their slots to `folder/states`; return their sessions by name."""
    (folder / "states").mkdir(parents=True, exist_ok=True)
    found = {}
    for number in range(count):
        found[f"s{number}"] = watch_state(backbone, number)
        write_state(found[f"s{number}"], folder, f"s{number}")
    return found


def write_state(session: Session, folder: Path, name: str) -> None:
    path = folder / "states" / f"{name}.safetensors"
    session.save(path)
    export_slots(path, path.with_suffix(".kv.safetensors"), backbone=session.backbone)


def load_model(folder: Path) -> Backbone:
    torch.set_num_threads(1)
    return load_backbone(str(folder), device="cpu", dtype="float32")
