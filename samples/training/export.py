"""Write a checkpoint folder in the layout of a published Qwen2.5-VL: bfloat16 safetensors and small
files.

The folder may be in use. So files are written beside it and moved into it one by one, the weights
last.
"""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, GenerationConfig, Qwen2_5_VLForConditionalGeneration

from protokv.backbones.files import hash_config
from protokv.mini.backbone import IDENTITY_FILE
from samples.training.model import IMAGE_MEAN, IMAGE_STD, MERGE, PATCH, SIDE
from samples.training.tokenizer import build_tokenizer
from samples.training.vocabulary import Extent, token_ids

WEIGHTS = "model.safetensors"


def make_preprocessor_config() -> dict[str, Any]:
    """Return the settings of the image processor, which resizes every frame to the area of one
    training frame.
    """
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


def export(
    model: Qwen2_5_VLForConditionalGeneration, folder: Path, extent: Extent = "content"
) -> None:
    """Write `model` (any float dtype) in bfloat16 and the tokenizer of vocabulary `extent` to a
    checkpoint folder.
    """
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
        # The hash of the config as transformers reads it, so that the model is recognised without
        # transformers.
        identity = {"config_hash": hash_config(AutoConfig.from_pretrained(fresh).to_dict())}
        (fresh / IDENTITY_FILE).write_text(json.dumps(identity, indent=2) + "\n", encoding="utf-8")
        for file in sorted(fresh.iterdir(), key=lambda f: f.name == WEIGHTS):
            file.chmod(0o644)
            file.replace(folder / file.name)
