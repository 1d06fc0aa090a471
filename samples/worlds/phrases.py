"""The templates of every question type in English, and every answer it can have.

The first template of a type is the plainest and is used half of the time in training. A template
may hold {shape}, {colour}, {place}, {name} (of an owner) and {other} (a second shape). The
vocabulary is derived from these tables, so a new word means new weights. The weights of
`protokv/mini` know the words of `TYPES` only; questions of `ORDER_TYPES` (what came before what),
`TIME_TYPES` (what happened to one shape over time) and `SPEECH_TYPES` (what was said) are asked
only where they are named.
"""

from __future__ import annotations

from typing import Final

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
TEMPLATES.update(
    {
        # The same questions about two events that are neither the first nor the last of the stream.
        "middle_first": TEMPLATES["which_first"],
        "middle_last": TEMPLATES["which_last"],
        "middle_before": TEMPLATES["before"],
        "middle_after": TEMPLATES["after"],
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
        # Answered by words alone, and by words and pictures together.
        "owner": (
            "Who is the owner of the {shape}?",
            "Who owns the {shape}?",
        ),
        "owned": (
            "What belongs to {name}?",
            "Which object belongs to {name}?",
        ),
        "colour_of": (
            "What color was the object of {name}?",
            "What colour was the object of {name}?",
        ),
        "where_of": (
            "Where was the object of {name}?",
            "Where did the object of {name} appear?",
        ),
    }
)

_MIDDLE: Final = ("middle_first", "middle_last", "middle_before", "middle_after")
ORDER_TYPES: Final = ("before", "after", "third", "tenth", *_MIDDLE)
TIME_TYPES: Final = ("times", "where_first", "where_last")
SPEECH_TYPES: Final = ("owner", "owned", "colour_of", "where_of")
TYPES: Final = tuple(
    kind for kind in TEMPLATES if kind not in (*ORDER_TYPES, *TIME_TYPES, *SPEECH_TYPES)
)

GROUPS: Final = {
    **dict.fromkeys(("colour", "shape", "where", "at", "whether"), "content"),
    **dict.fromkeys(("first", "which_first", "which_last", "before", "after"), "order"),
    **dict.fromkeys(("middle_first", "middle_last", "middle_before", "middle_after"), "order"),
    "times": "counting",
    **dict.fromkeys(("where_first", "where_last"), "slow change"),
    **dict.fromkeys(("owner", "owned"), "words"),
    **dict.fromkeys(("colour_of", "where_of"), "words and pictures"),
}
"""Type -> group in tables, of the types whose answers last: those of "last" and "count" change with
new events.
"""
