"""Judges of open answers, and judging the rows of a file.

An answer is judged after the pass, from the texts in its row: no pass waits for a network, and a second judge needs no
second pass. A judged row is appended to the file, and the last one of equal rows counts. Equal answers are judged once.

The prompt is the one of Video-ChatGPT, as Flash-VStream and ReKV use it (github.com/Becomebright/ReKV at 63793f7,
`video_qa/eval/eval_open_ended.py`): temperature 0, at most 300 tokens, a Python dictionary with `pred` ("yes" or "no")
and `score`, cut to a whole number from 0 to 5. Accuracy is the share of "yes".
"""

from __future__ import annotations

import ast
import hashlib
import json
import os
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass, replace
from itertools import chain
from typing import Any, Final
from urllib.parse import urlsplit

from protokv.core.backbone import Backbone
from protokv.core.decoding import Decoding
from protokv.core.session import Session
from protokv.errors import ConfigError, JudgeError, use_one_of
from protokv.memories import SlidingWindowConfig
from protokv.replay.benchmarks import BENCHMARKS
from protokv.replay.rows import Row, RowFile


@dataclass(frozen=True, slots=True)
class Case:
    """An answer to judge."""

    question: str
    expected: str
    prediction: str


@dataclass(frozen=True, slots=True)
class Verdict:
    """Right or wrong, and points from 0 to 5 if the judge gives any."""

    correct: bool
    points: float | None = None


class Judge(ABC):
    """A reader of open answers.

    Attributes:
        label: its name with the digest of its prompt; stands in every row that it judged.
    """

    label: str

    @abstractmethod
    def read(self, cases: Iterable[Case]) -> Iterator[tuple[Case, Verdict | None]]:
        """Judge cases in any order; None: it gave no verdict.

        Raises:
            JudgeError: it cannot judge at all.
        """


def judge_rows(results: RowFile, keys: Sequence[str], judge: Judge) -> Iterator[Row | None]:
    """Judge the open answers in `results` with these keys that this judge has not judged yet.

    Every row is in the file before it is yielded.

    Yields:
        The judged row, or None without a verdict: the row keeps its old one.
    """
    rows = [results.rows[key] for key in keys if key in results.rows]
    said = {_case(row): Verdict(row.correct, row.points) for row in results.rows.values() if row.judge == judge.label}
    left: dict[Case, list[Row]] = {}
    for row in rows:
        if row.dataset in BENCHMARKS and BENCHMARKS[row.dataset].open_ended and row.judge != judge.label:
            left.setdefault(_case(row), []).append(row)
    known = [(case, said[case]) for case in left if case in said]
    for case, verdict in chain(known, judge.read([case for case in left if case not in said])):
        for row in left[case]:
            if verdict is None:
                yield None
                continue
            judged = replace(row, correct=verdict.correct, points=verdict.points, judge=judge.label)
            results.append(judged)
            yield judged


def _case(row: Row) -> Case:
    return Case(row.question, row.expected, row.prediction)


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
    """Write the user's turn about one case."""
    return USER.format(question=case.question, expected=case.expected, prediction=case.prediction)


def read_reply(text: str) -> Verdict:
    """Read the verdict from a reply: a Python or JSON dictionary, alone or between other words.

    Raises:
        ValueError: there is none, or it is not yes or no with 0 to 5 points.
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


class LocalJudge(Judge):
    """A model on this machine, asked without a video. Both parts of the prompt stand in the user's turn."""

    def __init__(self, backbone: Backbone) -> None:
        """Start the empty session that answers every case."""
        identity = backbone.identity
        self.label = f"{identity.name} (weights {identity.weights_digest[:12]}), prompt {PROMPT_HASH}"
        self._session = Session.start(backbone, SlidingWindowConfig(budget=1))

    def read(self, cases: Iterable[Case]) -> Iterator[tuple[Case, Verdict | None]]:
        """Ask one case after the other, greedily."""
        for case in cases:
            try:
                answer = self._session.ask(f"{SYSTEM}\n\n{write_user(case)}", Decoding(MAX_TOKENS))
                yield case, read_reply(answer.text)
            except (ConfigError, ValueError):
                # The prediction spells a control token, which no prompt may, or the reply is no verdict.
                yield case, None


REPLIES: Final = 3
"""Replies without a verdict before the case is given up."""

WORKERS: Final = 8
TIMEOUT_S: Final = 60.0
RETRIES: Final = 6
"""Requests at once, the time-out of a request, and its retries by the client."""


class EndpointJudge(Judge):
    """One model behind an OpenAI-compatible endpoint, asked with the `openai` client (the extra `judge`).

    Address and key come from OPENAI_BASE_URL and OPENAI_API_KEY; neither stands in a row or a message. The client
    repeats a request after a time-out, a rate limit (429) or a failure of the server, with growing pauses.
    """

    def __init__(self, model: str) -> None:
        """Make the client for a model at the endpoint; nothing is sent.

        Raises:
            ConfigError: the client is not installed, or there is no key.
        """
        try:
            import openai
        except ImportError as error:
            raise ConfigError("this judge needs the openai client", hint="pip install 'protokv[judge]'") from error
        if not os.environ.get("OPENAI_API_KEY"):
            raise ConfigError(
                "this judge needs a key", hint="set OPENAI_API_KEY, and OPENAI_BASE_URL for another endpoint"
            )
        self._errors: Any = openai
        self._refusals = (openai.AuthenticationError, openai.NotFoundError, openai.PermissionDeniedError)
        self._client = openai.OpenAI(timeout=TIMEOUT_S, max_retries=RETRIES)
        self._model = model
        address = urlsplit(str(self._client.base_url))
        self.label = f"{model} at {address.hostname}, prompt {PROMPT_HASH}"

    def read(self, cases: Iterable[Case]) -> Iterator[tuple[Case, Verdict | None]]:
        """Judge several cases at once."""
        pool = ThreadPoolExecutor(WORKERS)
        try:
            waiting = {pool.submit(self._ask, case): case for case in cases}
            for done in as_completed(waiting):
                yield waiting[done], done.result()
        finally:
            pool.shutdown(cancel_futures=True)

    def _ask(self, case: Case) -> Verdict | None:
        """Return a verdict; None if there is none after some tries."""
        messages: Any = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": write_user(case)}]
        for _ in range(REPLIES):
            try:
                completion = self._client.chat.completions.create(
                    model=self._model, messages=messages, max_tokens=MAX_TOKENS, temperature=0
                )
                return read_reply(completion.choices[0].message.content or "")
            except self._refusals as error:
                raise JudgeError(
                    f"the judge's endpoint refuses {self._model}: {type(error).__name__}",
                    hint="check OPENAI_API_KEY, OPENAI_BASE_URL and the model's name",
                ) from error
            except (self._errors.APITimeoutError, self._errors.APIStatusError):
                # The client has retried it already.
                return None
            except self._errors.APIConnectionError as error:
                raise JudgeError(
                    f"the judge's endpoint cannot be reached: {type(error).__name__}", hint="check OPENAI_BASE_URL"
                ) from error
            except (ValueError, TypeError, AttributeError, LookupError, self._errors.APIResponseValidationError):
                # The reply is no verdict, or no completion at all.
                continue
        return None


def select_judge(text: str, **placement: Any) -> Judge:
    """Make a judge from its name: `openai:MODEL`, or `local:MODEL`; `placement` goes to `load_backbone` for the latter.

    Raises:
        ConfigError: there is none of this name, or an extra or a key is missing.
        ModelError: a local model cannot be loaded.
    """
    kind, _, model = text.partition(":")
    if kind == "openai" and model:
        return EndpointJudge(model)
    if kind == "local" and model:
        from protokv.backbones import load_backbone

        return LocalJudge(load_backbone(model, **placement))
    raise ConfigError(f"there is no judge {text!r}", hint=use_one_of(text, ("openai:MODEL", "local:MODEL")))
