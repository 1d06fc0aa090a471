"""The published prompt of the RVS judge, and how its reply is read.

Source: Video-ChatGPT's prompt as Flash-VStream and ReKV use it (github.com/Becomebright/ReKV at 63793f7,
`video_qa/eval/eval_open_ended.py`): temperature 0, at most 300 tokens, a Python dictionary with `pred` ("yes" or "no")
and `score`, which is cut to a whole number from 0 to 5. Accuracy is the share of "yes".
"""

from __future__ import annotations

import ast
import hashlib
import json
from typing import Final

from protokv.replay.judges.base import Case, Verdict

MAX_TOKENS: Final = 300

SYSTEM: Final = (
    "You are an intelligent chatbot designed for evaluating the correctness of generative outputs for "
    "question-answer pairs. Your task is to compare the predicted answer with the correct answer and determine if they "
    "match meaningfully. Here's how you can accomplish the task:------##INSTRUCTIONS: "
    "- Focus on the meaningful match between the predicted answer and the correct answer.\n"
    "- Consider synonyms or paraphrases as valid matches.\n"
    "- Evaluate the correctness of the prediction compared to the answer."
)

USER: Final = (
    "Please evaluate the following video-based question-answer pair:\n\n"
    "Question: {question}\nCorrect Answer: {expected}\nPredicted Answer: {prediction}\n\n"
    "Provide your evaluation only as a yes/no and score where the score is an integer value between 0 and 5, with 5 "
    "indicating the highest meaningful match. Please generate the response in the form of a Python dictionary string "
    "with keys 'pred' and 'score', where value of 'pred' is  a string of 'yes' or 'no' and value of 'score' is in "
    "INTEGER, not STRING.DO NOT PROVIDE ANY OTHER OUTPUT TEXT OR EXPLANATION. Only provide the Python dictionary "
    "string. For example, your response should look like this: {{'pred': 'yes', 'score': 4.8}}."
)

PROMPT_HASH: Final = hashlib.sha256(f"{SYSTEM}\0{USER}".encode()).hexdigest()[:12]


def write_user(case: Case) -> str:
    """The user's turn about one case."""
    return USER.format(question=case.question, expected=case.expected, prediction=case.prediction)


def read_reply(text: str) -> Verdict:
    """The verdict in a reply: a Python or JSON dictionary, alone or between other words.

    Raises:
        ValueError: there is none, or it lacks something, or says something else than yes or no and 0 to 5.
    """
    start, end = text.find("{"), text.rfind("}")
    if start < 0 or end < start:
        raise ValueError(f"no dictionary in {text[:80]!r}")
    literal = text[start : end + 1]
    try:
        found = ast.literal_eval(literal)
    except (ValueError, SyntaxError, RecursionError, MemoryError):
        try:
            found = json.loads(literal)
        except ValueError as error:
            raise ValueError(f"no dictionary in {text[:80]!r}") from error
    if not isinstance(found, dict):
        raise ValueError(f"no dictionary in {text[:80]!r}")
    said, score = str(found.get("pred", "")).strip().casefold().rstrip("."), found.get("score", "")
    try:
        points = float(int(float(score)))
    except (TypeError, ValueError, OverflowError) as error:
        raise ValueError(f"score is {score!r}") from error
    if said not in ("yes", "no") or not 0 <= points <= 5:
        raise ValueError(f"pred is {said[:20]!r}, score {points:g}")
    return Verdict(said == "yes", points)
