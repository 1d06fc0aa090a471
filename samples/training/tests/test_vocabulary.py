"""The vocabulary covers every question and answer, and the two tokenizers are one."""

from __future__ import annotations

import itertools

import pytest

from samples.questions import ANSWERS, CHANCE
from samples.training.forward import QUESTION_TOKENS
from samples.training.tokenizer import build_tokenizer
from samples.training.vocabulary import PADDED_SIZE, encode, split, token_ids, words
from samples.worlds.phrases import ORDER_TYPES, SPEECH_TYPES, TEMPLATES, TIME_TYPES, TYPES
from samples.worlds.pictures import COLOUR_NAMES, PLACES, SHAPES
from samples.worlds.speech import NAMES


def _texts(types):
    """Yield every question and answer of some types."""
    for kind in types:
        for template in TEMPLATES[kind]:
            for shape, colour, place, name in itertools.zip_longest(
                SHAPES, COLOUR_NAMES, PLACES, NAMES, fillvalue="left"
            ):
                yield template.format(
                    shape=shape, other="bar", colour=colour, place=place, name=name
                )
        yield from ANSWERS[kind]


@pytest.mark.parametrize(
    ("extent", "types"),
    [("content", TYPES), ("order", ORDER_TYPES), ("time", TIME_TYPES), ("words", SPEECH_TYPES)],
    ids=str,
)
def test_every_question_and_answer_is_encoded_within_its_block_and_both_tokenizers_agree(
    extent, types
):
    texts = list(_texts(types))
    for text in texts:
        assert token_ids()["<unk>"] not in encode(text, extent)
        assert token_ids()["<unk>"] not in encode(text.rstrip("?.").upper(), extent)
    framing = len(split("<|vision_end|> <|im_end|> <|im_start|> assistant"))
    # The end of the answer is predicted, not read.
    answer = max(len(split(text)) for kind in types for text in ANSWERS[kind])
    assert max(len(split(text)) for text in texts) + framing + answer <= QUESTION_TOKENS
    tokenizer = build_tokenizer(extent)
    for text in [*texts[::7], "wHat's  the?!pancake\n(star)"]:
        assert tokenizer(text)["input_ids"] == encode(text, extent)


def test_published_words_keep_their_ids_and_further_words_follow():
    content, order, time, spoken = (
        words(extent) for extent in ("content", "order", "time", "words")
    )
    assert (len(content), len(order), len(time)) == (90, 105, 106)
    assert order[:90] == content
    assert time[:105] == order
    assert spoken[:106] == time
    assert len(set(spoken)) == len(spoken) <= PADDED_SIZE
    assert token_ids("time")["times"] == 105
    assert encode("pancake") == [token_ids()["<unk>"]]


def test_the_tokenizer_reads_the_chat_template_and_joins_words_by_spaces():
    tokenizer = build_tokenizer()
    chat = [
        {
            "role": "user",
            "content": [{"type": "video"}, {"type": "text", "text": "Where was the star?"}],
        }
    ]
    text = tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
    expected = (
        "<|im_start|>user\n<|vision_start|><|video_pad|><|vision_end|>Where was the "
        "star?<|im_end|>\n"
        "<|im_start|>assistant\n"
    )
    assert text == expected
    assert tokenizer(text)["input_ids"] == encode(text)
    assert (
        tokenizer.decode(encode("bottom left <|im_end|>"), skip_special_tokens=True)
        == "bottom left"
    )


def test_every_type_has_answers_and_a_chance_level():
    assert (
        set(TEMPLATES)
        == set(ANSWERS)
        == set(CHANCE)
        == {*TYPES, *ORDER_TYPES, *TIME_TYPES, *SPEECH_TYPES}
    )
    assert all(0.1 <= chance <= 0.5 for chance in CHANCE.values())
