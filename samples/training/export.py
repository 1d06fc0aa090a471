"""Writes the checkpoint folder in the layout of a published Qwen2.5-VL: bfloat16 safetensors and its small files.

Files are written beside the folder and moved in one by one, weights last, in case the folder is in use.
"""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, GenerationConfig, Qwen2_5_VLForConditionalGeneration

from protokv.backbones.embedded import IDENTITY
from protokv.backbones.files import hash_config
from samples.training.model import IMAGE_MEAN, IMAGE_STD, MERGE, PATCH, SIDE
from samples.training.tokenizer import build_tokenizer
from samples.training.vocabulary import Extent, token_ids

WEIGHTS = "model.safetensors"


def make_preprocessor_config() -> dict[str, Any]:
    """The image processor's settings: every frame is resized to the area of one training frame."""
    return {
        "min_pixels": SIDE * SIDE,
        "max_pixels": SIDE * SIDE,
        "patch_size": PATCH,
        "temporal_patch_size": 2,
        "merge_size": MERGE,
        "image_mean": list(IMAGE_MEAN),
        "image_std": list(IMAGE_STD),
        "image_processor_type": "Qwen2VLImageProcessor",
        "processor_class": "Qwen2_5_VLProcessor",
        "resample": 3,
        "do_resize": True,
        "do_rescale": True,
        "rescale_factor": 1 / 255,
        "do_normalize": True,
        "do_convert_rgb": True,
    }


def export(model: Qwen2_5_VLForConditionalGeneration, folder: Path, extent: Extent = "content") -> None:
    """Write `model` (any float dtype) and its tokenizer, `extent` as of words, as a bfloat16 checkpoint folder."""
    ids = token_ids()
    model = model.to(torch.bfloat16)
    model.config.dtype = torch.bfloat16
    model.generation_config = GenerationConfig(
        bos_token_id=ids["<|im_start|>"],
        eos_token_id=ids["<|im_end|>"],
        pad_token_id=ids["<|endoftext|>"],
        do_sample=False,
    )
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent, prefix=f".{folder.name}-") as made:
        fresh = Path(made)
        model.save_pretrained(fresh)
        build_tokenizer(extent).save_pretrained(fresh)
        text = json.dumps(make_preprocessor_config(), indent=2) + "\n"
        (fresh / "preprocessor_config.json").write_text(text, encoding="utf-8")
        # What transformers makes of the config, so that the model is told from others without transformers.
        identity = {"config_hash": hash_config(AutoConfig.from_pretrained(fresh).to_dict())}
        (fresh / IDENTITY).write_text(json.dumps(identity, indent=2) + "\n", encoding="utf-8")
        for file in sorted(fresh.iterdir(), key=lambda f: f.name == WEIGHTS):
            file.chmod(0o644)
            file.replace(folder / file.name)
