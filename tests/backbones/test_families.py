"""What only one family has: its text around a step, its sizes and its settings of frames."""

import json
from pathlib import Path
from typing import Any

import pytest
from tokenizers import AddedToken
from transformers import AutoTokenizer
from transformers.models.smolvlm.image_processing_pil_smolvlm import SmolVLMImageProcessorPil

from protokv.backbones import load_backbone
from protokv.backbones.chat import PromptTemplate
from protokv.backbones.qwen_vl import QwenVL
from protokv.backbones.smolvlm import SmolVLM
from protokv.core.backbone import Backbone
from protokv.errors import ConfigError, ModelError
from protokv.memories import MemoryConfig
from protokv.stream.session import Session
from protokv.texts import JsonObject
from tests.backbones.test_conformance import QUESTION
from tests.backbones.tiny import BUILDERS, QWEN_TEMPLATE, write_json
from tests.conftest import random_frames


def load(folder: Path) -> Backbone:
    return load_backbone(str(folder), device="cpu", dtype="float32")


def prompt_of(folder: Path) -> tuple[list[int], list[int]]:
    backbone = load(folder)
    return backbone.prefix_ids, backbone.suffix_ids(QUESTION)


@pytest.mark.parametrize(
    ("family", "made", "side"),
    [
        # SmolVLM2 256M and 500M, and 2.2B.
        ("smolvlm", {"image_size": 512, "patch": 16, "scale": 4}, 8),
        ("smolvlm", {"image_size": 384, "patch": 14, "scale": 3}, 9),
        ("internvl", {"image_size": 448, "patch": 14}, 16),
        ("llava_onevision", {"image_size": 384}, 14),
    ],
)
def test_at_the_published_sizes_a_frame_has_the_published_tokens(
    tmp_path: Path, family: str, made: dict[str, int], side: int
) -> None:
    backbone = load(BUILDERS[family](tmp_path, **made))
    tokens = backbone.embed_step(random_frames(0, 1, 90, 160))
    shown = range(len(tokens))[tokens.visual or slice(None)]
    assert (tokens.grid, len(shown)) == ((side, side), side**2)
    assert backbone.settings["frame_tokens"] == side**2


@pytest.mark.parametrize(
    ("family", "time_s", "said"),
    [
        ("qwen3_vl", 0.25, "<0.2 seconds><|vision_start|>"),
        ("smolvlm", 0, "\nFrame from 00:00:<fake_token_around_image><global-img>"),
        ("smolvlm", 61.9, "\nFrame from 01:01:<fake_token_around_image><global-img>"),
        ("smolvlm", 6000, "\nFrame from 100:00:<fake_token_around_image><global-img>"),
        ("internvl", 0, "Frame1: <img>"),
        ("internvl", 0.5, "\nFrame1: <img>"),
        ("internvl", 9, "\nFrame10: <img>"),
        ("internvl", 3600, "\nFrame3601: <img>"),
        ("gemma4", 0, "00:00 <|image>"),
        ("gemma4", 6000.9, " 100:00 <|image>"),
    ],
)
def test_a_step_says_when_it_is(tmp_path: Path, family: str, time_s: float, said: str) -> None:
    backbone: Any = load(BUILDERS[family](tmp_path))
    assert backbone.frame_texts(time_s)[0] == said


def test_a_position_of_qwen3_vl_tells_the_step_that_stands_there(tmp_path: Path) -> None:
    session = Session.start(load(BUILDERS["qwen3_vl"](tmp_path)), MemoryConfig.of("full"))
    for index in range(4):
        step = session.embed(random_frames(index), session.clock.next_start_s)
        (placed,) = session.position_steps([step], [session.clock.next_start_s])
        session.take([step], [session.clock.next_start_s])
        times_s = session.backbone.stream_times(placed.positions, session.clock)
        assert (times_s / session.clock.step_seconds).floor().eq(index).all()


def test_a_control_token_without_a_role_in_the_tokenizer_is_refused_too(tiny_folder: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(tiny_folder)
    tokenizer.add_tokens(
        [AddedToken("<clip>", special=True), AddedToken("blue-green", special=False)]
    )
    assert "<clip>" not in tokenizer.all_special_tokens
    prompt = PromptTemplate(tokenizer, QwenVL.video_token)
    with pytest.raises(ConfigError, match="control token <clip>"):
        prompt.suffix_ids("what is <clip> ?")
    assert prompt.suffix_ids("what is blue-green ?")


ASKED = "{{ messages[0]['content'][1]['text'] }}"


@pytest.mark.parametrize("template", [f"{ASKED}<|video_pad|>", ASKED, "<|video_pad|>"])
def test_a_template_without_a_video_and_a_question_behind_it_is_refused(
    tiny_folder: Path, template: str
) -> None:
    with pytest.raises(ModelError, match=r"shows no <\|video_pad\|> followed by the question"):
        PromptTemplate(AutoTokenizer.from_pretrained(tiny_folder), QwenVL.video_token, template)


def test_the_processors_older_template_comes_before_that_of_a_text_only_tokenizer(
    tmp_path: Path,
) -> None:
    folder = BUILDERS["llava_onevision"](tmp_path)
    newer = prompt_of(folder)
    template = folder / "chat_template.jinja"
    write_json(folder, "chat_template", {"chat_template": template.read_text()})
    template.unlink()
    config = json.loads((folder / "tokenizer_config.json").read_text())
    write_json(folder, "tokenizer_config", config | {"chat_template": QWEN_TEMPLATE})
    assert prompt_of(folder) == newer


def test_the_config_of_llava_onevision_names_the_placeholder_of_its_template(
    tmp_path: Path,
) -> None:
    folder = BUILDERS["llava_onevision"](tmp_path)
    usual = prompt_of(folder)
    template = folder / "chat_template.jinja"
    template.write_text(template.read_text().replace("<video>", "<image>"))
    config = json.loads((folder / "config.json").read_text())
    write_json(folder, "config", config | {"video_token_index": config["image_token_index"]})
    assert prompt_of(folder) == usual


def test_frames_of_smolvlm_have_the_size_for_video_where_a_file_has_one() -> None:
    square = {"max_image_size": {"longest_edge": 512}}
    still = square | {"size": {"longest_edge": 2048}}
    sampling = still | {
        "video_sampling": {"fps": 1, "max_frames": 64, "video_size": {"longest_edge": 384}}
    }
    rows: list[tuple[JsonObject, bool, int]] = [
        (sampling, False, 384),
        (sampling, True, 384),
        (still, False, 512),
        (still, True, 2048),
        ({}, False, 364),
    ]
    for raw, of_video, size in rows:
        frames = SmolVLM.make_frames(raw, of_video)
        assert (frames.size["longest_edge"], frames.do_image_splitting) == (size, False)
        assert frames.resample == SmolVLMImageProcessorPil.resample
