"""What is said in a stream of text: lines that enter as words of a step, and what is asked about
them.

Lines are quotes and facts in turn. A quote is the beginning of a paragraph, and its second half is
asked for. A fact is a sentence such as "The owner of the garage is Martha."; asked is its name,
which the model gives by going on.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from random import Random
from typing import Final

from samples.worlds.llama import Llama

QUOTE: Final = 12
"""Tokens of a quote."""
FACT: Final = "The {} of the {} is"
ABOUT: Final = {
    "owner": "garage",
    "captain": "ship",
    "teacher": "class",
    "mayor": "town",
    "author": "book",
    "doctor": "village",
    "winner": "race",
    "king": "island",
    "cook": "hotel",
    "driver": "bus",
    "painter": "picture",
    "singer": "band",
    "guard": "museum",
    "judge": "contest",
    "pilot": "plane",
    "leader": "group",
    "founder": "company",
    "keeper": "lighthouse",
    "coach": "team",
    "editor": "paper",
}
NAMES: Final = (
    "Martha",
    "Peter",
    "Alice",
    "Tom",
    "Mary",
    "Paul",
    "Anna",
    "Jack",
    "Emma",
    "Oliver",
    "Grace",
    "Henry",
    "Lucy",
    "Frank",
    "Rose",
    "Simon",
    "Clara",
    "Max",
    "Laura",
    "George",
)
"""Each is one token of SmolLM2 behind a space."""


@dataclass(frozen=True, slots=True)
class Said:
    """What is said, as text and as token ids.

    Attributes:
        lines: step -> what is said in it.
        quotes: step and tokens of each quote.
        facts: tokens of the beginning of each fact, and its name, a token.
    """

    lines: dict[int, str] = field(default_factory=dict)
    quotes: list[tuple[int, list[int]]] = field(default_factory=list)
    facts: list[tuple[list[int], int]] = field(default_factory=list)


def draw_said(backbone: Llama, draw: Random, texts: Iterator[list[int]], steps: range) -> Said:
    """Draw a line for each of some steps; quotes are of `texts`. When every fact is said, the
    others are quotes.
    """
    said = Said()
    facts = zip(
        draw.sample(list(ABOUT.items()), len(ABOUT)), draw.sample(NAMES, len(NAMES)), strict=True
    )
    for turn, step in enumerate(steps):
        about, name = next(facts, (None, "")) if turn % 2 else (None, "")
        if about:
            begin = FACT.format(*about)
            line = f"{begin} {name}."
            ids = backbone.words_ids(begin)
            said.facts.append((ids, backbone.words_ids(line)[len(ids)]))
        else:
            line = backbone.decode(next(texts)[:QUOTE])
            said.quotes.append((step, backbone.words_ids(line)))
        said.lines[step] = line
    return said
