"""The words of the embedded model: text to token ids and back, without torch or a tokenizer library.

Text is lowercased and split into words and single punctuation marks; white space only separates. The shipped
`tokenizer.json` follows the same rule, and a test compares the two.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from functools import lru_cache
from itertools import chain
from typing import Final, Literal

from protokv.mini.phrases import ANSWERS, ORDER_ANSWERS, ORDER_TEMPLATES, TEMPLATES, TIME_ANSWERS, TIME_TEMPLATES
from protokv.mini.sprites import COLOUR_NAMES, PLACES, SHAPES

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
"""Rows of the embedding table: the size of the vocabulary and room to grow, a multiple of 16."""

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

Extent = Literal["content", "order", "time"]
"""How far a vocabulary reaches: to the words of `protokv/mini`, of order, or of what happened over time."""

_ORDER: Final = (ORDER_TEMPLATES, ORDER_ANSWERS)
_TIME: Final = (TIME_TEMPLATES, TIME_ANSWERS)

_PIECE = re.compile(r"<\|\w+\|>|[^\W_]+|[^\w\s]|_")


def split(text: str) -> list[str]:
    """Lowercased words, single punctuation marks and special tokens of `text`, in order."""
    return _PIECE.findall(text.lower())


def _words_of(templates: Iterable[str], answers: Iterable[str]) -> set[str]:
    fill = {"shape": "", "other": "", "colour": "", "place": ""}
    return {word for text in (*(t.format(**fill) for t in templates), *answers) for word in split(text)}


@lru_cache(maxsize=3)
def words(extent: Extent = "content") -> tuple[str, ...]:
    """The whole vocabulary in id order: special tokens, then every word that a template or an answer uses.

    Behind those of `protokv/mini` come the further words of questions about order, and behind these the ones of
    questions about what happened over time, so that the ids of the others stay.
    """
    names = (*SHAPES, *COLOUR_NAMES, *PLACES, *chain.from_iterable(ANSWERS.values()))
    found = _words_of(chain.from_iterable(TEMPLATES.values()), names)
    known = (*SPECIAL, *sorted(found | {"user", "assistant", "system", "!", ":", ";", "'"}))
    further = {"content": (), "order": (_ORDER,), "time": (_ORDER, _TIME)}[extent]
    for templates, answers in further:
        new = _words_of(chain.from_iterable(templates.values()), chain.from_iterable(answers.values()))
        known = (*known, *sorted(new.difference(known)))
    return known


@lru_cache(maxsize=3)
def token_ids(extent: Extent = "content") -> dict[str, int]:
    """Word -> token id."""
    return {word: i for i, word in enumerate(words(extent))}


def encode(text: str, extent: Extent = "content") -> list[int]:
    """Token ids of `text`; a word outside the vocabulary becomes `<unk>`."""
    table = token_ids(extent)
    return [table.get(piece, table["<unk>"]) for piece in split(text)]
