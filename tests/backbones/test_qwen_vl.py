"""What only Qwen-VL has: positions by time and grid; and how a chat template is cut."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from tokenizers import AddedToken
from transformers import AutoTokenizer

from protokv.backbones import load_backbone
from protokv.backbones.chat import ChatPrompt
from protokv.backbones.qwen_vl import QwenVL
from protokv.core.backbone import Backbone
from protokv.core.session import Session
from protokv.core.step import StepTokens
from protokv.errors import ConfigError, ModelError
from protokv.memories import MemoryConfig
from protokv.words.transcript import Transcript
from tests.backbones.tiny import write_qwen2_vl
from tests.backbones.upstream import Upstream
from tests.conftest import random_frames


def test_words_behind_every_step_stand_where_transformers_puts_them(tiny: Backbone, tiny_folder: Path) -> None:
    upstream = Upstream("qwen2_5_vl", tiny_folder)
    session = Session.start(tiny, MemoryConfig.of("full", budget=64), attachments=[Transcript()])
    ids, found = list(tiny.prefix_ids), []
    for said in ("two three", "", "red"):
        step = tiny.add_words(session.embed(random_frames(0), float(session.clock.steps)), [said])
        batch = session.position_steps([step], [float(session.clock.steps)])
        found.append(batch.steps[0].positions)
        session.take([step], [float(session.clock.steps)])
        ids += [upstream.model.config.video_token_id] * (len(step) - step.words) + (
            tiny.words_ids(said) if said else []
        )
    video = torch.tensor([ids]) == upstream.model.config.video_token_id
    grid = torch.tensor([[1, 4, 6], [2, 4, 6]])
    theirs, _ = upstream.model.model.get_rope_index(torch.tensor([ids]), 2 * video.int(), video_grid_thw=grid)
    assert torch.cat(found).tolist() == theirs[:, 0, len(tiny.prefix_ids) :].T.tolist()


def grid_of(rows: int, columns: int) -> StepTokens:
    return StepTokens(torch.zeros(rows * columns, 1), (rows, columns))


def test_qwen2_vl_counts_steps_whatever_their_time(tmp_path: Path) -> None:
    backbone = load_backbone(str(write_qwen2_vl(tmp_path)), device="cpu", dtype="float32")
    positions = backbone.step_positions(grid_of(1, 2), origin=5, start=9, index=3, time_s=77.0).positions
    assert positions.tolist() == [[8, 5, 5], [8, 5, 6]]


def test_positions_equal_those_of_transformers_at_an_awkward_rate(tiny: Backbone, tiny_folder: Path) -> None:
    fps = 3.0
    upstream = Upstream("qwen2_5_vl", tiny_folder).model.model
    theirs = upstream.get_vision_position_ids(5, torch.tensor([7, 4, 6]), 1, 2, 2 * (2 / fps))
    ours = torch.cat(
        [tiny.step_positions(grid_of(2, 3), origin=5, start=5, index=i, time_s=i * 2 / fps).positions for i in range(7)]
    )
    assert ours.T.tolist() == theirs.tolist()


def test_a_control_token_without_a_role_in_the_tokenizer_is_refused_too(tiny_folder: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(tiny_folder)
    tokenizer.add_tokens([AddedToken("<clip>", special=True), AddedToken("blue-green", special=False)])
    assert "<clip>" not in tokenizer.all_special_tokens
    prompt = ChatPrompt(tokenizer, QwenVL.video_token)
    with pytest.raises(ConfigError, match="control token <clip>"):
        prompt.suffix_ids("what is <clip> ?")
    assert prompt.suffix_ids("what is blue-green ?")


@pytest.mark.parametrize(
    "template",
    [
        "{{ messages[0]['content'][1]['text'] }}<|video_pad|>",
        "{{ messages[0]['content'][1]['text'] }}",
        QwenVL.video_token,
    ],
    ids=["question before the video", "no video", "no question"],
)
def test_a_template_without_a_video_and_a_question_behind_it_is_refused(tiny_folder: Path, template: str) -> None:
    with pytest.raises(ModelError, match=r"shows no <\|video_pad\|> followed by the question"):
        ChatPrompt(AutoTokenizer.from_pretrained(tiny_folder), QwenVL.video_token, template)
