"""Judges of open answers, and judging the rows of a file.

An answer is judged after the pass, from the texts in its row, so that a second judge needs no
second pass. A judged row is appended to the file, and the last one of equal rows counts. Equal
answers are judged once.

The prompt is the one of Video-ChatGPT, as Flash-VStream and ReKV use it
(github.com/Becomebright/ReKV at 63793f7, `video_qa/eval/eval_open_ended.py`): temperature 0, at
most 300 tokens, a Python dictionary with `pred` ("yes" or "no") and `score`, cut to a whole number
from 0 to 5. Accuracy is the share of "yes".
"""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Collection, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any, NamedTuple

from protokv.errors import ConfigError, JudgeError
from protokv.replay.benchmarks import BENCHMARKS
from protokv.replay.rows import AnswerRow, AnswerRowFile


class JudgeCase(NamedTuple):
    """An answer to judge."""

    question: str
    expected: str
    prediction: str


class JudgeVerdict(NamedTuple):
    """Right or wrong, and points from 0 to 5."""

    correct: bool
    points: float


JUDGE_SYSTEM = (
    "You are an intelligent chatbot designed for evaluating the correctness of generative outputs "
    "for "
    "question-answer pairs. Your task is to compare the predicted answer with the correct answer "
    "and determine if they "
    "match meaningfully. Here's how you can accomplish the task:------##INSTRUCTIONS: "
    "- Focus on the meaningful match between the predicted answer and the correct answer.\n"
    "- Consider synonyms or paraphrases as valid matches.\n"
    "- Evaluate the correctness of the prediction compared to the answer."
)

_JUDGE_USER = (
    "Please evaluate the following video-based question-answer pair:\n\n"
    "Question: {question}\nCorrect Answer: {expected}\nPredicted Answer: {prediction}\n\n"
    "Provide your evaluation only as a yes/no and score where the score is an integer value "
    "between 0 and 5, with 5 "
    "indicating the highest meaningful match. Please generate the response in the form of a Python "
    "dictionary string "
    "with keys 'pred' and 'score', where value of 'pred' is  a string of 'yes' or 'no' and value "
    "of 'score' is in "
    "INTEGER, not STRING.DO NOT PROVIDE ANY OTHER OUTPUT TEXT OR EXPLANATION. Only provide the "
    "Python dictionary "
    "string. For example, your response should look like this: {{'pred': 'yes', 'score': 4.8}}."
)

JUDGE_HASH = hashlib.sha256(f"{JUDGE_SYSTEM}\0{_JUDGE_USER}".encode()).hexdigest()[:12]


# The fields of a dictionary, alone or between other words
_PRED = re.compile(r"""["']pred["']\s*:\s*["']\s*(yes|no)\b""", re.IGNORECASE)
_SCORE = re.compile(r"""["']score["']\s*:\s*["']?([0-5])(\.\d+)?\b""")


def read_verdict(text: str) -> JudgeVerdict:
    """Read the verdict from a reply. ValueError: there is none, or it is not yes or no with 0 to 5
    points.
    """
    pred = _PRED.search(text)
    score = _SCORE.search(text)
    if pred is None or score is None:
        raise ValueError(f"no verdict in {text[:80]!r}")
    return JudgeVerdict(pred[1].lower() == "yes", float(score[1]))


class Judge:
    """A model behind an OpenAI-compatible endpoint, hosted or of one's own, asked with `openai`
    (the extra `judge`).

    Address and key come from OPENAI_BASE_URL and OPENAI_API_KEY; neither stands in a row or a
    message. The client repeats a request after a time-out, a rate limit (429) or a failure of the
    server, with growing pauses. `label`, its name with the digest of its prompt, stands in every
    row that it judged.
    """

    def __init__(self, model: str) -> None:
        """Make the client; nothing is sent. ConfigError: it is not installed, or there is no
        key.
        """
        try:
            import openai
        except ImportError as error:
            raise ConfigError(
                "this judge needs the openai client", hint="pip install openai"
            ) from error
        if not os.environ.get("OPENAI_API_KEY"):
            raise ConfigError(
                "this judge needs a key", hint="set OPENAI_API_KEY, and OPENAI_BASE_URL if need be"
            )
        self._client = openai.OpenAI(timeout=60.0, max_retries=6)
        self._model = model
        self.label = f"{model} at {self._client.base_url.host}, prompt {JUDGE_HASH}"

    def read(self, cases: Collection[JudgeCase]) -> Iterator[tuple[JudgeCase, JudgeVerdict | None]]:
        """Judge cases, several at once; None: there is no verdict. JudgeError: it cannot judge."""
        with ThreadPoolExecutor(8) as pool:
            yield from zip(cases, pool.map(self._ask, cases), strict=True)

    def _ask(self, case: JudgeCase) -> JudgeVerdict | None:
        """Return a verdict; None if there is none after some tries."""
        import openai

        text = _JUDGE_USER.format(**case._asdict())
        messages: Any = [
            {"role": "system", "content": JUDGE_SYSTEM},
            {"role": "user", "content": text},
        ]
        for _ in range(3):
            try:
                completion = self._client.chat.completions.create(
                    model=self._model, messages=messages, max_tokens=300, temperature=0
                )
                return read_verdict(completion.choices[0].message.content or "")
            except (openai.APITimeoutError, openai.RateLimitError, openai.InternalServerError):
                return None  # the client has retried it already
            except (openai.APIStatusError, openai.APIConnectionError) as error:
                why = f"the judge's endpoint refuses {self._model}, or cannot be reached"
                raise JudgeError(
                    f"{why}: {type(error).__name__}",
                    hint="check OPENAI_API_KEY, OPENAI_BASE_URL and the model's name",
                ) from error
            except Exception:
                continue  # the reply is no verdict, or no completion at all
        return None


def judge_rows(
    results: AnswerRowFile, keys: Sequence[str], judge: Judge
) -> Iterator[AnswerRow | None]:
    """Judge the open answers in `results` with these keys that this judge has not judged yet.

    Yields each judged row once it is in the file, or None without a verdict: the row keeps its old
    one.
    """
    left: dict[JudgeCase, list[AnswerRow]] = {}
    for row in (results.rows[key] for key in keys):
        if (
            row.dataset in BENCHMARKS
            and BENCHMARKS[row.dataset].open_ended
            and row.judge != judge.label
        ):
            left.setdefault(JudgeCase(row.question, row.expected, row.prediction), []).append(row)
    for case, verdict in judge.read(left):
        for row in left[case]:
            if verdict is not None:
                row = replace(
                    row, correct=verdict.correct, points=verdict.points, judge=judge.label
                )
                results.append(row)
            yield row if verdict else None
