"""The shipped checkpoint is a real Qwen2.5-VL folder, and it answers held-out questions about all
that was seen.
"""

import json

import pytest
from transformers import AutoConfig, AutoTokenizer

from protokv.backbones import load_backbone
from protokv.core.backbone import Backbone
from protokv.memories import MemoryConfig
from protokv.mini.backbone import MiniBackbone
from protokv.stream.session import Session
from samples.questions import make_questions
from samples.training.evaluate import make_held_out_world
from samples.training.model import make_config
from samples.training.vocabulary import CHAT_TEMPLATE, token_ids


@pytest.fixture(scope="module")
def mini() -> Backbone:
    return load_backbone("protokv/mini", device="cpu")


def test_the_folder_belongs_to_this_vocabulary_and_shape():
    tokenizer = AutoTokenizer.from_pretrained(MiniBackbone.folder("protokv/mini"))
    config = AutoConfig.from_pretrained(MiniBackbone.folder("protokv/mini"))
    assert {w: i for w, i in tokenizer.get_vocab().items() if i < len(token_ids())} == token_ids()
    assert tokenizer.chat_template == CHAT_TEMPLATE
    assert config.text_config.to_dict() | {"dtype": None} == make_config().text_config.to_dict() | {
        "dtype": None
    }
    assert config.vision_config.tokens_per_second == 1
    assert (
        json.loads((MiniBackbone.folder("protokv/mini") / "config.json").read_text())["protokv_fps"]
        == 2.0
    )


@pytest.mark.parametrize(("load", "length"), [("few", 17), ("many", 33)])
def test_held_out_questions_are_answered(mini, load, length):
    right = 0
    asked = []
    for index in range(2):
        world = make_held_out_world(load, length, 5000 + index)
        session = Session.start(mini, MemoryConfig.of("full", budget=4096))
        for step in world.frames(0, length).reshape(-1, 2, 84, 84, 3):
            session.watch(step)
        for question in make_questions(world, length):
            asked.append(question.type)
            right += session.ask(question.question).text == question.answer
    assert len(asked) > 16
    assert right >= 0.85 * len(asked)
