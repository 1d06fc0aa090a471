"""The vocabulary of the embedded model: text to token ids, without torch or a tokenizer library.

Text is lowercased and split into words and single punctuation marks; white space only separates.
The shipped `tokenizer.json` follows the same rule, and a test compares the two.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from functools import lru_cache
from typing import Final, Literal

from samples.questions import ANSWERS
from samples.worlds.phrases import ORDER_TYPES, SPEECH_TYPES, TEMPLATES, TIME_TYPES, TYPES
from samples.worlds.pictures import COLOUR_NAMES, PLACES, SHAPES
from samples.worlds.speech import OWNS, SMALL_TALK

SPECIAL: Final = (
    "<|endoftext|>",
    "<|im_start|>",
    "<|im_end|>",
    "<|vision_start|>",
    "<|vision_end|>",
    "<|vision_pad|>",
    "<|image_pad|>",
    "<|video_pad|>",
    "<unk>",
)

PADDED_SIZE: Final = 128
"""Rows of the embedding table: the vocabulary and room to grow, a multiple of 16."""

CHAT_TEMPLATE: Final = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\\n' }}"
    "{% if m['content'] is string %}{{ m['content'] }}"
    "{% else %}{% for c in m['content'] %}"
    "{% if c['type'] == 'video' %}{{ '<|vision_start|><|video_pad|><|vision_end|>' }}"
    "{% elif c['type'] == 'image' %}{{ '<|vision_start|><|image_pad|><|vision_end|>' }}"
    "{% elif 'text' in c %}{{ c['text'] }}{% endif %}"
    "{% endfor %}{% endif %}{{ '<|im_end|>\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)

Extent = Literal["content", "order", "time", "words"]
"""The questions that a vocabulary covers: those of `protokv/mini`; also about order; and time; and
what is said.
"""

_PIECE = re.compile(r"<\|\w+\|>|[^\W_]+|[^\w\s]|_")


def split(text: str) -> list[str]:
    """Return the lowercased words, single punctuation marks and special tokens of `text`, in
    order.
    """
    return _PIECE.findall(text.lower())


@lru_cache(maxsize=4)
def words(extent: Extent = "content") -> tuple[str, ...]:
    """Return the vocabulary in id order: special tokens, then every word that a template or an
    answer uses.

    The further words of questions about order follow those of `protokv/mini`, then come the further
    words of questions about time, then those of captions and of questions about them, so that ids
    stay the same.
    """
    known = (
        *SPECIAL,
        *sorted(_words_of(TYPES) | {"user", "assistant", "system", "!", ":", ";", "'"}),
    )
    further = (ORDER_TYPES, TIME_TYPES, SPEECH_TYPES)
    for types in further[: ("content", "order", "time", "words").index(extent)]:
        known = (*known, *sorted(_words_of(types).difference(known)))
    return known


def _words_of(types: Iterable[str]) -> set[str]:
    """Return every word of the templates and answers of some types, and the names of all shapes,
    colours, places.
    """
    blank = {"shape": "", "other": "", "colour": "", "place": "", "name": ""}
    texts = [*SHAPES, *COLOUR_NAMES, *PLACES]
    for kind in types:
        texts += [template.format(**blank) for template in TEMPLATES[kind]]
        texts += ANSWERS[kind]
    if set(SPEECH_TYPES).issubset(types):
        texts += [line.format(**blank) for line in (*OWNS, *SMALL_TALK)]
    return {word for text in texts for word in split(text)}


@lru_cache(maxsize=4)
def token_ids(extent: Extent = "content") -> dict[str, int]:
    """Return word -> token id."""
    return {word: i for i, word in enumerate(words(extent))}


def encode(text: str, extent: Extent = "content") -> list[int]:
    """Return the token ids of `text`; a word outside the vocabulary becomes `<unk>`."""
    table = token_ids(extent)
    return [table.get(piece, table["<unk>"]) for piece in split(text)]
