"""How each question type is phrased in English, and every answer it can have.

The first template of a type is the plainest and is used half of the time in training. A template may hold
{shape}, {colour}, {place}, and {other} (a second shape). The vocabulary is derived from this table, so a
new word means new weights. The questions about order in `ORDER_TEMPLATES`, and those about what happened over time in
`TIME_TEMPLATES`, have words that the weights of `protokv/mini` were not trained on; nothing asks them unless it names
them.
"""

from __future__ import annotations

from typing import Final

from protokv.mini.sprites import COLOUR_NAMES, NUMBERS, PARTS, PLACES, SHAPES, TENTHS

TEMPLATES: Final[dict[str, tuple[str, ...]]] = {
    "colour": (
        "What color was the {shape}?",
        "What colour was the {shape}?",
        "What was the color of the {shape}?",
        "Tell me the colour of the {shape}.",
        "Which colour did the {shape} have?",
    ),
    "shape": (
        "What shape was {colour}?",
        "Which object was {colour}?",
        "What was the shape of the {colour} object?",
        "What was the {colour} thing?",
    ),
    "where": (
        "Where was the {shape}?",
        "Where did the {shape} appear?",
        "What was the position of the {shape}?",
        "In which place was the {shape} seen?",
    ),
    "at": (
        "What appeared at the {place}?",
        "Which object was at the {place}?",
        "What was seen at the {place}?",
        "What shape was in the {place}?",
    ),
    "whether": (
        "Did a {shape} appear?",
        "Was there a {shape}?",
        "Was a {shape} seen?",
        "Has a {shape} appeared in the video?",
    ),
    "first": (
        "What shape appeared first?",
        "Which object came first?",
        "What was the first object?",
    ),
    "last": (
        "What was the last object?",
        "What shape appeared last?",
        "Which object came last?",
    ),
    "which_first": (
        "Which appeared first, the {shape} or the {other}?",
        "Which came first, the {shape} or the {other}?",
        "What was seen first, the {shape} or the {other}?",
    ),
    "which_last": (
        "Which came last, the {shape} or the {other}?",
        "Which appeared last, the {shape} or the {other}?",
        "What was seen last, the {shape} or the {other}?",
    ),
    "count": (
        "How many objects appeared?",
        "How many things were seen?",
        "How many shapes were there?",
    ),
    "now": (
        "What is visible now?",
        "What can you see now?",
        "Which object is there now?",
    ),
    "anything_now": (
        "Is anything visible now?",
        "Is there anything now?",
        "Can you see anything now?",
    ),
}

TYPES: Final = tuple(TEMPLATES)

ANSWERS: Final[dict[str, tuple[str, ...]]] = {
    "colour": COLOUR_NAMES,
    "shape": SHAPES,
    "where": PLACES,
    "at": SHAPES,
    "whether": ("yes", "no"),
    "first": SHAPES,
    "last": SHAPES,
    "which_first": SHAPES,
    "which_last": SHAPES,
    "count": NUMBERS[1:],
    "now": (*SHAPES, "nothing"),
    "anything_now": ("yes", "no"),
}
"""Type -> every answer it can have."""

CHANCE: Final[dict[str, float]] = {
    kind: 0.5 if kind.startswith("which") else 1 / len(answers) for kind, answers in ANSWERS.items()
}
"""Type -> accuracy of a uniform guess among its answers (of the two that are named, for which_first/_last)."""

ORDER_TEMPLATES: Final[dict[str, tuple[str, ...]]] = {
    "before": (
        "Did the {shape} appear before the {other}?",
        "Was the {shape} seen before the {other}?",
        "Did the {shape} come before the {other}?",
    ),
    "after": (
        "Did the {shape} appear after the {other}?",
        "Was the {shape} seen after the {other}?",
        "Did the {shape} come after the {other}?",
    ),
    "third": (
        "When did the {shape} appear?",
        "When was the {shape} seen?",
        "In which part of the video was the {shape}?",
    ),
    "tenth": (
        "In which tenth of the video was the {shape}?",
        "In which tenth of the video did the {shape} appear?",
        "Which tenth was the {shape} seen in?",
    ),
}
ORDER_TEMPLATES["middle_first"] = TEMPLATES["which_first"]
ORDER_TEMPLATES["middle_last"] = TEMPLATES["which_last"]
ORDER_TEMPLATES["middle_before"] = ORDER_TEMPLATES["before"]
ORDER_TEMPLATES["middle_after"] = ORDER_TEMPLATES["after"]

ORDER_TYPES: Final = tuple(ORDER_TEMPLATES)

ORDER_ANSWERS: Final[dict[str, tuple[str, ...]]] = {
    "before": ("yes", "no"),
    "after": ("yes", "no"),
    "third": PARTS,
    "tenth": TENTHS,
    "middle_first": SHAPES,
    "middle_last": SHAPES,
    "middle_before": ("yes", "no"),
    "middle_after": ("yes", "no"),
}
"""Type -> every answer it can have."""

ORDER_CHANCE: Final[dict[str, float]] = {
    kind: 0.5 if kind in ("middle_first", "middle_last") else 1 / len(answers)
    for kind, answers in ORDER_ANSWERS.items()
}
"""As CHANCE, of the questions about order."""

TIME_TEMPLATES: Final[dict[str, tuple[str, ...]]] = {
    "times": (
        "How many times did the {shape} appear?",
        "How many times was the {shape} seen?",
        "How many times did a {shape} appear?",
    ),
    "where_first": (
        "Where was the {shape} first?",
        "Where did the {shape} appear first?",
    ),
    "where_last": (
        "Where was the {shape} last?",
        "Where did the {shape} appear last?",
    ),
}

TIME_TYPES: Final = tuple(TIME_TEMPLATES)

TIME_ANSWERS: Final[dict[str, tuple[str, ...]]] = {
    "times": NUMBERS[1:],
    "where_first": PLACES,
    "where_last": PLACES,
}
"""Type -> every answer it can have."""

TIME_CHANCE: Final[dict[str, float]] = {kind: 1 / len(answers) for kind, answers in TIME_ANSWERS.items()}
"""As CHANCE, of the questions about what happened over time."""

EVERY_TEMPLATE: Final = TEMPLATES | ORDER_TEMPLATES | TIME_TEMPLATES
"""The templates of all types, those of `protokv/mini` first."""

EVERY_ANSWER: Final = ANSWERS | ORDER_ANSWERS | TIME_ANSWERS
EVERY_CHANCE: Final = CHANCE | ORDER_CHANCE | TIME_CHANCE
