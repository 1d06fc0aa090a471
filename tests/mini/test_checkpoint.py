"""The shipped checkpoint is a real Qwen2.5-VL folder, and it answers held-out questions about all
that was seen.
"""

import pytest
from transformers import AutoTokenizer

from protokv.backbones import load_backbone
from protokv.core.backbone import Backbone
from protokv.memories import MemoryConfig
from protokv.mini.backbone import MiniBackbone
from protokv.stream.session import Session
from samples.questions import ANSWERS, make_questions
from samples.worlds.held_out import make_held_out_world
from samples.worlds.phrases import ORDER_TYPES, SPEECH_TYPES, TEMPLATES, TIME_TYPES, TYPES


@pytest.fixture(scope="module")
def mini() -> Backbone:
    return load_backbone("protokv/mini", device="cpu")


@pytest.mark.parametrize(
    ("name", "types"),
    [
        ("protokv/mini", TYPES),
        ("protokv/mini-order", (*TYPES, *ORDER_TYPES, *TIME_TYPES)),
        ("protokv/mini-words", (*TYPES, *SPEECH_TYPES)),
    ],
)
def test_the_vocabulary_has_every_word_of_the_questions_and_answers(
    name: str, types: tuple[str, ...]
) -> None:
    tokenizer = AutoTokenizer.from_pretrained(MiniBackbone.folder(name))
    blank = {"shape": "star", "other": "ring", "colour": "red", "place": "top left"}
    for kind in types:
        questions = [text.format(**blank, name="Mara") for text in TEMPLATES[kind]]
        for text in (*questions, *ANSWERS[kind]):
            assert tokenizer.unk_token_id not in tokenizer(text).input_ids, text


@pytest.mark.parametrize(("load", "length"), [("few", 17), ("many", 33)])
def test_held_out_questions_are_answered(mini: Backbone, load: str, length: int) -> None:
    right = 0
    asked: list[str] = []
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
