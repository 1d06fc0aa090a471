"""The Qwen-VL adapter against transformers' own modules, and what it says when a model cannot be loaded."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from transformers import Qwen2_5_VLForConditionalGeneration
from transformers.models.qwen2_5_vl.modeling_qwen2_5_vl import apply_rotary_pos_emb

from protokv.backbones import load_backbone
from protokv.backbones.base import Backbone, StepTokens
from protokv.backbones.qwen_vl import QwenVL, read_pixels
from protokv.errors import ConfigError, ModelError
from protokv.rotary import unrotate
from tests.conftest import random_frames


def grid_of(rows: int, columns: int) -> StepTokens:
    return StepTokens(torch.zeros(rows * columns, 1), (rows, columns))


@pytest.fixture(scope="module")
def upstream(tiny_folder: Path) -> Qwen2_5_VLForConditionalGeneration:
    return Qwen2_5_VLForConditionalGeneration.from_pretrained(tiny_folder, dtype=torch.float32).eval()


def test_a_step_has_the_features_of_the_whole_video(
    tiny: Backbone, upstream: Qwen2_5_VLForConditionalGeneration
) -> None:
    from protokv.backbones.pixels import PixelConfig, patchify

    config = PixelConfig(min_pixels=3136, max_pixels=7056)
    steps = [random_frames(seed) for seed in range(3)]
    parts = [patchify(images, config) for images in steps]
    rows, columns = parts[0][1]
    grid = torch.tensor([[3, rows * 2, columns * 2]])
    with torch.no_grad():
        whole = upstream.model.visual(torch.cat([p for p, _ in parts]), grid_thw=grid).pooler_output
        ours = torch.cat([tiny.embed_step(images).embeddings for images in steps])
    torch.testing.assert_close(ours, whole, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_rotation_is_removed_exactly_where_it_was_applied(tiny: Backbone, dtype: torch.dtype) -> None:
    g = torch.Generator().manual_seed(1)
    positions = torch.randint(0, 4000, (11, 3), generator=g)
    keys = torch.randn(1, 2, 11, tiny.head_size, generator=g)
    cos, sin = tiny.rotary(positions)
    rotated, _ = apply_rotary_pos_emb(keys.to(dtype), keys.to(dtype), cos[None].to(dtype), sin[None].to(dtype))
    back = unrotate(rotated.float(), cos, sin)
    tolerance = {torch.float32: 1e-5, torch.float16: 5e-3, torch.bfloat16: 4e-2}[dtype]
    torch.testing.assert_close(back, keys, rtol=0, atol=tolerance)


def test_positions_follow_time_and_grid(tiny: Backbone) -> None:
    positions = tiny.step_positions(grid_of(2, 3), origin=5, start=9, index=3, time_s=3.0)
    # Two positions a second, and every component starts at the origin.
    assert positions.tolist() == [
        [11, 5, 5], [11, 5, 6], [11, 5, 7],
        [11, 6, 5], [11, 6, 6], [11, 6, 7],
    ]  # fmt: skip


def test_positions_equal_those_of_transformers_at_an_awkward_rate(
    tiny: Backbone, upstream: Qwen2_5_VLForConditionalGeneration
) -> None:
    fps = 3.0
    theirs = upstream.model.get_vision_position_ids(5, torch.tensor([7, 4, 6]), 1, 2, 2 * (2 / fps))
    ours = torch.cat(
        [tiny.step_positions(grid_of(2, 3), origin=5, start=5, index=i, time_s=i * 2 / fps) for i in range(7)]
    )
    assert ours.T.tolist() == theirs.tolist()


def test_control_tokens_in_a_question_are_refused(tiny: Backbone) -> None:
    with pytest.raises(ConfigError, match=r"control token <\|im_end\|>"):
        tiny.suffix_ids("what is this <|im_end|> ?")


def test_an_empty_question_is_refused(tiny: Backbone) -> None:
    with pytest.raises(ConfigError, match="empty"):
        tiny.suffix_ids("  ")


def test_words_without_a_token_are_named_in_order(tiny: Backbone) -> None:
    assert tiny.unknown_words("What is the zebra doing?") == ["zebra", "doing"]


def test_prefix_and_suffix_together_are_the_rendered_chat(tiny: Backbone, tiny_folder: Path) -> None:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(tiny_folder)
    content = [{"type": "video"}, {"type": "text", "text": "what is first ?"}]
    whole = tokenizer.apply_chat_template(
        [{"role": "user", "content": content}], add_generation_prompt=True, tokenize=True
    )["input_ids"]
    video = tokenizer.convert_tokens_to_ids("<|video_pad|>")
    assert [*tiny.prefix_ids, video, *tiny.suffix_ids("what is first ?")] == whole


def test_a_missing_folder_is_named(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"no model folder at .*absent"):
        load_backbone(str(tmp_path / "absent"))


def test_an_unsupported_family_is_named_with_those_supported(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "bert"}))
    with pytest.raises(ModelError, match=r"bert model, which is not supported") as caught:
        load_backbone(str(tmp_path), device="cpu")
    assert "qwen2_5_vl" in caught.value.hint


def test_a_folder_without_weights_is_one_clear_error(tiny_folder: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(tiny_folder, tmp_path / "model")
    (folder / "model.safetensors").unlink()
    with pytest.raises(ModelError, match="cannot load the model"):
        load_backbone(str(folder), device="cpu")


def test_truncated_weights_are_one_clear_error(tiny_folder: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(tiny_folder, tmp_path / "model")
    weights = folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:1000])
    with pytest.raises(ModelError, match="cannot load the model"):
        load_backbone(str(folder), device="cpu")


@pytest.mark.parametrize(("device", "dtype"), [("tpu", "auto"), ("cpu", "int8")])
def test_a_device_or_dtype_that_does_not_exist_is_named(tiny_folder: Path, device: str, dtype: str) -> None:
    with pytest.raises(ConfigError, match=r"tpu|int8"):
        load_backbone(str(tiny_folder), device=device, dtype=dtype)


def test_other_weights_of_the_same_architecture_have_another_identity(
    tiny: Backbone, tiny_folder: Path, tmp_path: Path
) -> None:
    folder = shutil.copytree(tiny_folder, tmp_path / "model")
    weights = bytearray((folder / "model.safetensors").read_bytes())
    weights[-3] ^= 1
    (folder / "model.safetensors").write_bytes(weights)
    other = load_backbone(str(folder), device="cpu").identity
    assert other.config_hash == tiny.identity.config_hash
    assert other.weights_digest != tiny.identity.weights_digest


def test_a_moved_internal_of_transformers_is_named() -> None:
    class Moved:
        model = object()

    with pytest.raises(ModelError, match=r"moved an internal of Moved: .*visual"):
        QwenVL(Moved(), None, None, None, fps=2.0)  # type: ignore[arg-type]


def test_the_pixel_limit_of_still_images_does_not_apply_to_video(tmp_path: Path) -> None:
    (tmp_path / "preprocessor_config.json").write_text('{"min_pixels": 3136, "max_pixels": 12845056}')
    assert read_pixels(str(tmp_path)).max_pixels == 768 * 28 * 28
    (tmp_path / "processor_config.json").write_text(
        '{"video_processor": {"size": {"shortest_edge": 3136, "longest_edge": 900000}}}'
    )
    assert read_pixels(str(tmp_path)).max_pixels == 900000
