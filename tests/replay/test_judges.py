"""Judges: verdicts are read, others refused, and equal answers are judged once."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from protokv.errors import ConfigError, JudgeError
from protokv.replay.judges import (
    JUDGE_SYSTEM,
    PROMPT_HASH,
    Case,
    Judge,
    Verdict,
    judge_rows,
    read_reply,
)
from protokv.replay.rows import RowFile
from tests.replay.rows import ROW

GOOD = "{'pred': 'yes', 'score': 4}"
CASE = Case("What is it?", "a ring", "the ring")


class Client:
    """Stands for the client of `openai`: gives its replies one after another, and the last one for ever."""

    def __init__(self, *replies: Any) -> None:
        self.replies, self.sent = replies, list[dict[str, Any]]()
        self.chat = SimpleNamespace(completions=self)

    def create(self, **sent: Any) -> Any:
        reply = self.replies[min(len(self.sent), len(self.replies) - 1)]
        self.sent.append(sent)
        if isinstance(reply, Exception):
            raise reply
        choices = [SimpleNamespace(message=SimpleNamespace(content=reply))] if isinstance(reply, str) else reply
        return SimpleNamespace(choices=choices)


@pytest.fixture
def judge(monkeypatch: pytest.MonkeyPatch) -> Judge:
    pytest.importorskip("openai")
    monkeypatch.setenv("OPENAI_BASE_URL", "http://127.0.0.1:9/v1")
    monkeypatch.setenv("OPENAI_API_KEY", "a-secret-key")
    return Judge("gpt-3.5-turbo-0125")


def ask(judge: Judge, *replies: Any) -> tuple[Verdict | None, list[dict[str, Any]]]:
    judge._client = client = Client(*replies)
    return dict(judge.read([CASE]))[CASE], client.sent


@pytest.mark.parametrize(
    ("text", "verdict"),
    [
        (GOOD, Verdict(True, 4.0)),
        ("Sure! {'pred': 'Yes.', 'score': '4.8'} I hope this helps", Verdict(True, 4.0)),
        ('```python\n{"pred": "no", "score": 2.0}\n```', Verdict(False, 2.0)),
    ],
)
def test_a_reply_is_read_as_the_published_code_reads_it(text: str, verdict: Verdict) -> None:
    assert read_reply(text) == verdict


@pytest.mark.parametrize(
    "text",
    ["", "yes", "{", "}{", "{'pred': 'yes'}", "{'score': 3}", "{'pred': 'maybe', 'score': 3}",
     "{'pred': 'yes', 'score': 9}", "{'pred': 'yes', 'score': 'high'}", "{'pred': 'yes', 'score': 1e999}",
     "{'yes', 4}", "{__import__('os').system('true'): 1}", "{" * 400],
)  # fmt: skip
def test_a_reply_without_a_verdict_is_refused_and_no_code_in_it_is_run(text: str) -> None:
    with pytest.raises(ValueError):  # noqa: PT011
        read_reply(text)


def test_the_published_prompt_is_sent_with_its_settings(judge: Judge) -> None:
    verdict, (sent,) = ask(judge, GOOD)
    assert verdict == Verdict(True, 4.0)
    assert (sent["model"], sent["temperature"], sent["max_tokens"]) == ("gpt-3.5-turbo-0125", 0, 300)
    assert sent["messages"][0] == {"role": "system", "content": JUDGE_SYSTEM}
    for part in ("Question: What is it?", "Correct Answer: a ring", "Predicted Answer: the ring", "'score': 4.8}"):
        assert part in sent["messages"][1]["content"]


@pytest.mark.parametrize("bad", ["nonsense", "{'pred': 'perhaps', 'score': 1}", [], None], ids=str)
def test_a_reply_that_is_no_verdict_is_asked_for_again_and_then_given_up(judge: Judge, bad: Any) -> None:
    verdict, sent = ask(judge, bad, GOOD)
    assert (verdict, len(sent)) == (Verdict(True, 4.0), 2)
    verdict, sent = ask(judge, bad)
    assert (verdict, len(sent)) == (None, 3)


def test_what_the_client_gives_up_is_no_verdict_and_a_refused_key_is_named_without_it(judge: Judge) -> None:
    import openai

    request: Any = SimpleNamespace()
    assert ask(judge, openai.APITimeoutError(request))[0] is None
    response: Any = SimpleNamespace(request=request, status_code=401, headers={})
    refusal = openai.AuthenticationError("a-secret-key", response=response, body=None)
    for error in (refusal, openai.APIConnectionError(request=request)):
        with pytest.raises(JudgeError, match="or cannot be reached") as refused:
            ask(judge, error)
        assert "secret" not in refused.value.message + refused.value.hint


def test_a_judge_without_a_key_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("openai")
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)
    with pytest.raises(ConfigError, match="needs a key"):
        Judge("gpt")


def test_rows_say_who_judged_them_and_equal_answers_are_judged_once(judge: Judge, tmp_path: Path) -> None:
    judge._client = client = Client(GOOD)
    results = RowFile(tmp_path / "r.jsonl")
    for i, prediction in enumerate(("a ring", "a disk", "a ring")):
        row = replace(ROW, dataset="rvs-ego", question_id=str(i), prediction=prediction, correct=False, judge="offline")
        results.append(row)
    assert [len(list(judge_rows(results, list(results.rows), judge))) for _ in range(2)] == [3, 0]
    assert len(client.sent) == 2
    again = RowFile(tmp_path / "r.jsonl")
    assert {(row.judge, row.correct, row.points) for row in again.rows.values()} == {(judge.label, True, 4.0)}
    assert judge.label == f"gpt-3.5-turbo-0125 at 127.0.0.1, prompt {PROMPT_HASH}"
