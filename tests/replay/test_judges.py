"""Judges: verdicts are read, others refused, and equal answers are judged once."""

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import openai
import pytest

from protokv.errors import ConfigError, JudgeError
from protokv.replay.judges import (
    JUDGE_HASH,
    JUDGE_SYSTEM,
    Judge,
    JudgeCase,
    JudgeVerdict,
    judge_rows,
    read_verdict,
)
from protokv.replay.rows import AnswerRowFile
from protokv.texts import JsonObject
from tests.replay.rows import ROW

GOOD = "{'pred': 'yes', 'score': 4}"
CASE = JudgeCase("What is it?", "a ring", "the ring")


class Client:
    """Stands for the client of `openai`: gives its replies one after another, and the last one for
    ever.
    """

    def __init__(self, *replies: Any) -> None:
        self.replies = replies
        self.sent = list[dict[str, Any]]()
        self.chat = SimpleNamespace(completions=self)

    def create(self, **sent: Any) -> Any:
        reply = self.replies[min(len(self.sent), len(self.replies) - 1)]
        self.sent.append(sent)
        if isinstance(reply, Exception):
            raise reply
        message = SimpleNamespace(message=SimpleNamespace(content=reply))
        return SimpleNamespace(choices=[message] if isinstance(reply, str) else reply)


@pytest.fixture
def judge(monkeypatch: pytest.MonkeyPatch) -> Judge:
    monkeypatch.setenv("OPENAI_BASE_URL", "http://127.0.0.1:9/v1")
    monkeypatch.setenv("OPENAI_API_KEY", "a-secret-key")
    return Judge("gpt-3.5-turbo-0125")


def ask(judge: Judge, *replies: Any) -> tuple[JudgeVerdict | None, list[JsonObject]]:
    judge._client = client = Client(*replies)
    return dict(judge.read([CASE]))[CASE], client.sent


def test_a_reply_is_read_as_the_published_code_reads_it() -> None:
    said = "Sure! {'pred': 'Yes.', 'score': '4.8'} I hope this helps"
    assert read_verdict(said) == JudgeVerdict(True, 4.0)
    assert read_verdict('```python\n{"pred": "no", "score": 2.0}\n```') == JudgeVerdict(False, 2.0)


@pytest.mark.parametrize(
    "text",
    [
        "yes",
        "{'pred': 'yes'}",
        "{'score': 3}",
        "{'pred': 'maybe', 'score': 3}",
        "{'pred': 'yes', 'score': 9}",
        "{'pred': 'yes', 'score': 1e999}",
        "{__import__('os').system('true'): 1}",
        "{" * 400,
    ],
)
def test_a_reply_without_a_verdict_is_refused_and_no_code_in_it_is_run(text: str) -> None:
    with pytest.raises(ValueError, match="no verdict"):
        read_verdict(text)


REQUEST: Any = SimpleNamespace()
TIMEOUT = openai.APITimeoutError(REQUEST)


# The client has retried a time-out already.
@pytest.mark.parametrize(
    ("replies", "right", "asked"),
    [
        (("nonsense", GOOD), True, 2),
        (("{'pred': 'perhaps'}",), False, 3),
        (([], None, GOOD), True, 3),
        ((TIMEOUT,), False, 1),
    ],
    ids=str,
)
def test_a_reply_without_a_verdict_is_asked_for_again(
    judge: Judge, replies: Any, right: bool, asked: int
) -> None:
    found, sent = ask(judge, *replies)
    assert (found, len(sent)) == (JudgeVerdict(True, 4.0) if right else None, asked)


def test_a_key_that_is_refused_or_missing_is_named_without_it(
    judge: Judge, monkeypatch: pytest.MonkeyPatch
) -> None:
    response: Any = SimpleNamespace(request=REQUEST, status_code=401, headers={})
    refusal = openai.AuthenticationError("a-secret-key", response=response, body=None)
    for error in (refusal, openai.APIConnectionError(request=REQUEST)):
        with pytest.raises(JudgeError, match="or cannot be reached") as refused:
            ask(judge, error)
        assert "secret" not in refused.value.message + refused.value.hint
    monkeypatch.delenv("OPENAI_API_KEY")
    with pytest.raises(ConfigError, match="needs a key"):
        Judge("gpt")


def test_rows_say_who_judged_them_and_equal_answers_are_judged_once(
    judge: Judge, tmp_path: Path
) -> None:
    judge._client = client = Client(GOOD)
    results = AnswerRowFile(tmp_path / "r.jsonl")
    row = replace(ROW, dataset="rvs-ego", correct=False, judge="offline")
    for i, prediction in enumerate(("a ring", "a disk", "a ring")):
        results.append(replace(row, question_id=str(i), prediction=prediction))
    assert [len(list(judge_rows(results, list(results.rows), judge))) for _ in range(2)] == [3, 0]
    assert len(client.sent) == 2
    sent = client.sent[0]
    system, user = (message["content"] for message in sent.pop("messages"))
    assert sent == {"model": "gpt-3.5-turbo-0125", "temperature": 0, "max_tokens": 300}
    assert system == JUDGE_SYSTEM
    assert "Question: What?\nCorrect Answer: red\nPredicted Answer: a ring\n" in user
    again = AnswerRowFile(tmp_path / "r.jsonl")
    assert {(row.judge, row.correct, row.points) for row in again.rows.values()} == {
        (judge.label, True, 4.0)
    }
    assert judge.label == f"gpt-3.5-turbo-0125 at 127.0.0.1, prompt {JUDGE_HASH}"
