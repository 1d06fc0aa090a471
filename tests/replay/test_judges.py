"""Judges: verdicts are read, others refused, a misbehaving endpoint is given up, and equal answers are judged once."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from protokv.errors import ConfigError, JudgeError
from protokv.replay.judges import (
    PROMPT_HASH,
    SYSTEM,
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


class Endpoint(ThreadingHTTPServer):
    """A server on loopback that gives its replies one after another, and the last one for ever."""

    daemon_threads = True

    def __init__(self, replies: list[Any]) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.replies, self.seen = replies, list[dict[str, Any]]()
        self.lock, self.release = threading.Lock(), threading.Event()


class Handler(BaseHTTPRequestHandler):
    server: Endpoint

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        with self.server.lock:
            reply = self.server.replies[min(len(self.server.seen), len(self.server.replies) - 1)]
            self.server.seen.append(body | {"key": self.headers["Authorization"]})
        if reply == "hang":
            # Longer than the client waits, and no longer than the test.
            self.server.release.wait(5)
            return
        status, text = reply if isinstance(reply, tuple) else (200, complete(reply))
        self.send_response(status)
        self.send_header("retry-after-ms", "1")
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(text.encode())))
        self.end_headers()
        self.wfile.write(text.encode())

    def log_message(self, format: str, *args: object) -> None:
        pass


def complete(text: str) -> str:
    choice = {"index": 0, "finish_reason": "stop", "message": {"role": "assistant", "content": text}}
    return json.dumps({"id": "1", "object": "chat.completion", "created": 1, "model": "m", "choices": [choice]})


@pytest.fixture
def serve(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    running: list[Endpoint] = []

    def start(*replies: Any) -> Endpoint:
        server = Endpoint(list(replies))
        threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()
        monkeypatch.setenv("OPENAI_BASE_URL", f"http://127.0.0.1:{server.server_port}/v1")
        monkeypatch.setenv("OPENAI_API_KEY", "a-secret-key")
        running.append(server)
        return server

    yield start
    for server in running:
        server.release.set()
        server.shutdown()
        server.server_close()


def ask(case: Case) -> Verdict | None:
    pytest.importorskip("openai")
    return dict(Judge("gpt-3.5-turbo-0125").read([case]))[case]


@pytest.mark.parametrize(
    ("text", "verdict"),
    [
        (GOOD, Verdict(True, 4.0)),
        ('{"pred": "no", "score": 0}', Verdict(False, 0.0)),
        ("Sure! {'pred': 'Yes.', 'score': '4.8'} I hope this helps", Verdict(True, 4.0)),
        ('```python\n{"pred": "no", "score": 2.0, "why": null}\n```', Verdict(False, 2.0)),
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


def test_the_published_prompt_is_sent_with_its_settings_and_the_key(serve: Any) -> None:
    server = serve(GOOD)
    assert ask(CASE) == Verdict(True, 4.0)
    (sent,) = server.seen
    assert (sent["model"], sent["temperature"], sent["max_tokens"]) == ("gpt-3.5-turbo-0125", 0, 300)
    assert sent["messages"][0] == {"role": "system", "content": SYSTEM}
    for part in ("Question: What is it?", "Correct Answer: a ring", "Predicted Answer: the ring", "'score': 4.8}"):
        assert part in sent["messages"][1]["content"]
    assert sent["key"] == "Bearer a-secret-key"


def test_failures_and_time_outs_are_tried_again_and_given_up_in_the_end(
    serve: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    server = serve((429, "{}"), (500, "no"), (503, ""), GOOD)
    assert ask(CASE) == Verdict(True, 4.0)
    assert len(server.seen) == 4
    monkeypatch.setattr("protokv.replay.judges.TIMEOUT_S", 0.3)
    for replies, retries, verdict in ((["hang", GOOD], 1, Verdict(True, 4.0)), (["hang"], 0, None)):
        serve(*replies)
        monkeypatch.setattr("protokv.replay.judges.RETRIES", retries)
        assert ask(CASE) == verdict


@pytest.mark.parametrize(
    "bad",
    ["nonsense", "{'pred': 'perhaps', 'score': 1}", (200, "this is no JSON"), (200, '{"choices": []}'), (200, "[]")],
    ids=["no dictionary", "wrong dictionary", "no JSON", "no choice", "no object"],
)  # fmt: skip
def test_a_reply_that_is_no_verdict_is_asked_for_again_and_then_given_up(serve: Any, bad: Any) -> None:
    server = serve(bad, GOOD)
    assert ask(CASE) == Verdict(True, 4.0)
    assert len(server.seen) == 2
    server = serve(bad)
    assert ask(CASE) is None
    assert len(server.seen) == 3


def test_a_refused_key_and_an_absent_endpoint_are_named_without_the_key(
    serve: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    serve((401, '{"error": {"message": "bad key a-secret-key"}}'))
    with pytest.raises(JudgeError) as refused:
        ask(CASE)
    assert "secret" not in refused.value.message + refused.value.hint
    assert "OPENAI_API_KEY" in refused.value.hint
    monkeypatch.setenv("OPENAI_BASE_URL", "http://127.0.0.1:9/v1")
    monkeypatch.setattr("protokv.replay.judges.RETRIES", 0)
    with pytest.raises(JudgeError, match="cannot be reached"):
        ask(CASE)


def test_a_judge_without_a_key_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)
    with pytest.raises(ConfigError, match="needs a key"):
        ask(CASE)


def test_rows_say_who_judged_them_and_equal_answers_are_judged_once(serve: Any, tmp_path: Path) -> None:
    server = serve(GOOD)
    pytest.importorskip("openai")
    results, judge = RowFile(tmp_path / "r.jsonl"), Judge("gpt-3.5-turbo-0125")
    for i, prediction in enumerate(("a ring", "a disk", "a ring")):
        row = replace(ROW, dataset="rvs-ego", question_id=str(i), prediction=prediction, correct=False, judge="offline")
        results.append(row)
    first, *others = list(results.rows)
    assert [len(list(judge_rows(results, keys, judge))) for keys in ([first], others, others)] == [1, 2, 0]
    assert len(server.seen) == 2
    again = RowFile(tmp_path / "r.jsonl")
    assert {(row.judge, row.correct, row.points) for row in again.rows.values()} == {(judge.label, True, 4.0)}
    assert judge.label == f"gpt-3.5-turbo-0125 at 127.0.0.1, prompt {PROMPT_HASH}"
