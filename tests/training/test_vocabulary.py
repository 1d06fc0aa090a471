"""The vocabulary covers every question and answer, and the two tokenizers are one."""

from __future__ import annotations

import itertools

import pytest

from protokv.backbones import load_backbone
from protokv.mini.phrases import ANSWERS, CHANCE, ORDER_TYPES, TEMPLATES, TIME_TYPES, TYPES
from protokv.mini.sprites import COLOUR_NAMES, PLACES, SHAPES
from samples.training.forward import QUESTION_TOKENS
from samples.training.tokenizer import build_tokenizer
from samples.training.vocabulary import PADDED_SIZE, encode, split, token_ids, words


def _texts(types=TYPES):
    """Every question and answer of some types."""
    for kind in types:
        for template in TEMPLATES[kind]:
            for shape, colour, place in itertools.zip_longest(SHAPES, COLOUR_NAMES, PLACES, fillvalue="left"):
                yield template.format(shape=shape, other="bar", colour=colour, place=place)
        yield from ANSWERS[kind]


def test_every_template_and_answer_is_in_the_vocabulary_with_and_without_punctuation():
    for text in _texts():
        assert token_ids()["<unk>"] not in encode(text)
        assert token_ids()["<unk>"] not in encode(text.rstrip("?.").upper())
    assert len(words()) == len(set(words())) <= PADDED_SIZE


@pytest.mark.parametrize(
    ("extent", "smaller", "types", "new"),
    [("order", "content", ORDER_TYPES, "before"), ("time", "order", TIME_TYPES, "times")],
)
def test_further_words_follow_the_others_and_are_unknown_unless_asked_for(extent, smaller, types, new):
    known = words(extent)
    assert known[: len(words(smaller))] == words(smaller)
    assert len(known) == len(set(known)) <= PADDED_SIZE
    assert new in known[len(words(smaller)) :]
    texts = list(_texts(types))
    assert not any(token_ids()["<unk>"] in encode(text, extent) for text in texts)
    framing = len(split("<|vision_end|> <|im_end|> <|im_start|> assistant"))
    assert max(len(split(text)) for text in texts) + framing + 1 <= QUESTION_TOKENS
    tokenizer = build_tokenizer(extent)
    assert [tokenizer(text)["input_ids"] for text in texts[::7]] == [encode(text, extent) for text in texts[::7]]


def test_ids_of_published_words_stay():
    assert (len(words()), len(words("order")), len(words("time"))) == (90, 105, 106)
    assert token_ids("time")["times"] == 105


def test_every_question_with_its_longest_answer_fits_in_its_block():
    longest = max(len(split(text)) for text in _texts())
    framing = len(split("<|vision_end|> <|im_end|> <|im_start|> assistant"))
    # The end of the answer is predicted, not read.
    assert longest + framing + max(len(split(p)) for p in PLACES) <= QUESTION_TOKENS


def test_unknown_words_are_named_once_in_order_and_nothing_known_is():
    embedded = load_backbone(device="cpu")
    asked = "Did the Pancake land where the star was, or did the pancake fly?"
    assert embedded.unknown_words(asked) == ["pancake", "land", "fly"]
    assert embedded.unknown_words("what colour was the star") == []


def test_the_tokenizer_file_splits_as_the_vocabulary_does():
    tokenizer = build_tokenizer()
    for text in [*itertools.islice(_texts(), 0, None, 7), "wHat's  the?!pancake\n(star)"]:
        assert tokenizer(text)["input_ids"] == encode(text)


def test_the_tokenizer_reads_the_chat_template_and_joins_words_by_spaces():
    tokenizer = build_tokenizer()
    chat = [{"role": "user", "content": [{"type": "video"}, {"type": "text", "text": "Where was the star?"}]}]
    text = tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
    expected = (
        "<|im_start|>user\n<|vision_start|><|video_pad|><|vision_end|>Where was the star?<|im_end|>\n"
        "<|im_start|>assistant\n"
    )
    assert text == expected
    assert tokenizer(text)["input_ids"] == encode(text)
    assert tokenizer.decode(encode("bottom left <|im_end|>"), skip_special_tokens=True) == "bottom left"


def test_every_type_has_answers_and_a_chance_level():
    assert set(TEMPLATES) == set(ANSWERS) == set(CHANCE) == {*TYPES, *ORDER_TYPES, *TIME_TYPES}
    assert len(TEMPLATES) == len(TYPES) + len(ORDER_TYPES) + len(TIME_TYPES)
    assert all(0.1 <= chance <= 0.5 for chance in CHANCE.values())
    assert token_ids()["<unk>"] == encode("pancake")[0]
