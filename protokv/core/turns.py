"""What is asked: a question, after a system prompt and the earlier turns of a conversation, as tokens.

A conversation is a longer text after the video, so asking changes nothing and a state knows no conversation. A state
that was watched has its prompt in front of the video; a system prompt that comes later stands in front of the question.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from itertools import accumulate

from protokv.core.backbone import Backbone, Turn
from protokv.errors import QuestionError
from protokv.texts import MOST_QUESTION_CHARACTERS, admit_question

# A question of this length takes seconds on a CPU, and its keys and values little memory.
MOST_QUESTION_TOKENS = 4096


def read_ids(
    backbone: Backbone, question: str, turns: Sequence[Turn] = (), system: str | None = None
) -> tuple[list[int], int]:
    """Return the tokens after the video, and how many of the turns are in them: the newest that have room.

    A model that does not converse reads the question alone.

    Raises:
        QuestionError: the question is empty or takes more than `MOST_QUESTION_TOKENS`, or a text contains control
            tokens.
    """
    text = admit_question(question)
    if not backbone.converses:
        turns, system = (), None
    if system is not None:
        text = f"{admit_question(system, 'the system prompt').strip()}\n\n{text.strip()}"
    # Only so many characters can have room, so a long conversation costs little.
    characters = accumulate(len(asked) + len(answered) for asked, answered in reversed(turns))
    turns = turns[len(turns) - bisect_right(list(characters), MOST_QUESTION_CHARACTERS) :]
    for asked, answered in turns:
        admit_question(asked, "an earlier question")
        # A model may answer with nothing.
        admit_question(answered.strip() or "-", "an earlier answer")

    def with_last(count: int) -> list[int]:
        return backbone.suffix_ids(text, turns[len(turns) - count :])

    kept = bisect_right(range(len(turns) + 1), MOST_QUESTION_TOKENS, key=lambda count: len(with_last(count))) - 1
    ids = with_last(max(0, kept))
    if kept < 0:
        size = f"{len(ids):,} tokens; the most is {MOST_QUESTION_TOKENS:,}"
        raise QuestionError(f"the question has {size}", hint="ask something shorter")
    return ids, kept
