"""A family that is in no table: the logits of transformers' own forward, and refusals that say what
to do.
"""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from transformers import (
    AutoImageProcessor,
    CLIPVisionConfig,
    LlamaConfig,
    LlavaConfig,
    LlavaForConditionalGeneration,
)

import protokv
from protokv.errors import ModelError
from protokv.memories import MemoryConfig
from protokv.stream.session import Session
from tests.backbones.tiny import (
    LLAVA_SPECIAL,
    LLAVA_TEMPLATE,
    STATISTICS,
    TOWER,
    text_settings,
    write_tokenizer,
)
from tests.conftest import random_frames


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_llava(tmp_path_factory.mktemp("llava"))


def write_llava(made: Path) -> Path:
    known = write_tokenizer(made, LLAVA_SPECIAL, LLAVA_TEMPLATE.replace("video", "image"))
    vision = CLIPVisionConfig(**TOWER, image_size=56, patch_size=14, projection_dim=16)
    text = LlamaConfig(**text_settings() | {"eos_token_id": known["<|im_end|>"]})
    torch.manual_seed(0)
    model = LlavaForConditionalGeneration(
        LlavaConfig(vision_config=vision, text_config=text, image_token_id=known["<image>"])
    )
    model.save_pretrained(made)
    square = {"size": {"shortest_edge": 56}, "crop_size": {"height": 56, "width": 56}}
    settings = {"image_processor_type": "CLIPImageProcessor"} | square | STATISTICS
    (made / "preprocessor_config.json").write_text(json.dumps(settings))
    return made


@torch.inference_mode()
def test_an_untested_family_gives_the_logits_of_transformers(folder: Path) -> None:
    backbone = protokv.load_backbone(str(folder))
    assert backbone.notice == "not tested with llava"
    session = Session.start(backbone, MemoryConfig.of("full"))
    frames = np.concatenate([random_frames(seed, 1) for seed in range(4)])
    for frame in frames:
        session.watch(frame[None])
    model = LlavaForConditionalGeneration.from_pretrained(folder).eval()
    pixels = AutoImageProcessor.from_pretrained(folder, backend="pil")(
        [*map(Image.fromarray, frames)]
    )["pixel_values"]
    image = model.config.image_token_id
    question = "what is the star ?"
    after = backbone.suffix_ids(question)
    ids = torch.tensor([[*backbone.prefix_ids, *[image] * (4 * 16), *after]])
    expected = model(
        input_ids=ids, pixel_values=torch.stack([*map(torch.as_tensor, pixels)])
    ).logits[0, -len(after) :]
    torch.testing.assert_close(session.prefill(question), expected, atol=2e-5, rtol=1e-4)


def test_a_template_that_shows_no_picture_is_refused(folder: Path, tmp_path: Path) -> None:
    shutil.copytree(folder, tmp_path / "odd")
    config = json.loads((folder / "config.json").read_text()) | {"image_token_id": 9}
    (tmp_path / "odd" / "config.json").write_text(json.dumps(config))
    with pytest.raises(ModelError, match="the chat template shows no "):
        protokv.load_backbone(str(tmp_path / "odd"))
