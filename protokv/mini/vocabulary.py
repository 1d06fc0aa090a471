"""The words of the embedded model: text to token ids and back, without torch or a tokenizer library.

Text is lowercased and split into words and single punctuation marks; white space only separates. The shipped
`tokenizer.json` follows the same rule, and a test compares the two.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from functools import lru_cache
from typing import Final

from protokv.mini.palette import COLOUR_NAMES, PLACES, SHAPES
from protokv.mini.phrases import ANSWERS, TEMPLATES

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

_PIECE = re.compile(r"<\|\w+\|>|[^\W_]+|[^\w\s]|_")


def split(text: str) -> list[str]:
    """Lowercased words, single punctuation marks and special tokens of `text`, in order."""
    return _PIECE.findall(text.lower())


@lru_cache(maxsize=1)
def words() -> tuple[str, ...]:
    """The whole vocabulary in id order: special tokens, then every word that a template or an answer uses."""
    fill = {"shape": "", "other": "", "colour": "", "place": ""}
    found: set[str] = {"user", "assistant", "system", "!", ":", ";", "'"}
    for phrasings in TEMPLATES.values():
        for template in phrasings:
            found.update(split(template.format(**fill)))
    names: Iterable[str] = (*SHAPES, *COLOUR_NAMES, *PLACES, *(a for group in ANSWERS.values() for a in group))
    for name in names:
        found.update(split(name))
    return (*SPECIAL, *sorted(found))


@lru_cache(maxsize=1)
def token_ids() -> dict[str, int]:
    """Word -> token id."""
    return {word: i for i, word in enumerate(words())}


def encode(text: str) -> list[int]:
    """Token ids of `text`; a word outside the vocabulary becomes `<unk>`."""
    table = token_ids()
    return [table.get(piece, table["<unk>"]) for piece in split(text)]
