"""The chat template is cut where the video stands, and a question cannot end its turn."""

from __future__ import annotations

from pathlib import Path

import pytest
from tokenizers import AddedToken
from transformers import AutoTokenizer

from protokv.backbones.adapter import ChatPrompt
from protokv.errors import ConfigError, ModelError

VIDEO = "<|video_pad|>"


def test_a_control_token_without_a_role_in_the_tokenizer_is_refused_too(tiny_folder: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(tiny_folder)
    tokenizer.add_tokens([AddedToken("<clip>", special=True), AddedToken("blue-green", special=False)])
    assert "<clip>" not in tokenizer.all_special_tokens
    prompt = ChatPrompt(tokenizer, VIDEO)
    with pytest.raises(ConfigError, match="control token <clip>"):
        prompt.suffix_ids("what is <clip> ?")
    assert prompt.suffix_ids("what is blue-green ?")


@pytest.mark.parametrize(
    "template",
    ["{{ messages[0]['content'][1]['text'] }}<|video_pad|>", "{{ messages[0]['content'][1]['text'] }}", VIDEO],
    ids=["question before the video", "no video", "no question"],
)
def test_a_template_without_a_video_and_a_question_behind_it_is_refused(tiny_folder: Path, template: str) -> None:
    with pytest.raises(ModelError, match=r"shows no <\|video_pad\|> followed by the question"):
        ChatPrompt(AutoTokenizer.from_pretrained(tiny_folder), VIDEO, template)
