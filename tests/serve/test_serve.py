"""States behind the web interface: OpenAI's own client asks a real server on loopback; what is wrong gets one line."""

from __future__ import annotations

import http.client
import json
import shutil
import threading
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

import openai
import pytest
import uvicorn

from protokv.core.parts import Evidence, EvidenceSpan, Utterance
from protokv.core.session import Answer, Session
from protokv.ingestion import ingest
from protokv.memories import DurableConfig
from protokv.serve import ServerLimits, States, build_app, configure
from tests.mock_backbone import MockBackbone
from tests.prepared import Prepared

CONFIG = DurableConfig(budget=40)
QUESTION = "what is it"


@contextmanager
def server(folder: Path, backbone: MockBackbone | None = None, **options: Any) -> Iterator[str]:
    """The address of a server; it is gone afterwards."""
    app = build_app(States(folder, backbone or MockBackbone(), most=2), **options)
    running = uvicorn.Server(configure(app, "127.0.0.1", 0))
    ready = threading.Event()
    startup = running.startup

    async def start(*a: Any, **k: Any) -> None:
        await startup(*a, **k)
        ready.set()

    running.startup = start  # type: ignore[method-assign]
    thread = threading.Thread(target=running.run, daemon=True)
    thread.start()
    assert ready.wait(30)
    try:
        yield f"127.0.0.1:{running.servers[0].sockets[0].getsockname()[1]}"
    finally:
        running.should_exit = True
        thread.join(30)


def client(address: str, token: str = "none") -> openai.OpenAI:
    return openai.OpenAI(base_url=f"http://{address}/v1", api_key=token, max_retries=0, timeout=30)


def watch(path: Path, seed: int, n_frames: int) -> None:
    list(ingest(Prepared(seed, n_frames), path, CONFIG, backbone=MockBackbone(), overwrite=True))


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("states")
    for i, name in enumerate(("door", "garden", "monday/door")):
        (folder / name).parent.mkdir(exist_ok=True)
        watch(folder / f"{name}.safetensors", i, 6)
    return folder


@pytest.fixture(scope="module")
def running(made: Path) -> Iterator[str]:
    """The address of a server that no test changes."""
    with server(made) as address:
        yield address


@pytest.fixture
def folder(made: Path, tmp_path: Path) -> Path:
    return shutil.copytree(made, tmp_path / "states")


def ask(one: openai.OpenAI, model: str = "door", **options: Any) -> Any:
    return one.chat.completions.create(model=model, messages=[{"role": "user", "content": QUESTION}], **options)


def test_the_official_client_lists_states_and_asks_them_at_once_and_in_pieces(folder: Path) -> None:
    import protokv

    with server(folder) as address, client(address) as one:
        assert [model.id for model in one.models.list()] == ["door", "garden", "monday/door"]
        for name in ("door", "garden", "monday/door"):
            expected = protokv.load(folder / f"{name}.safetensors", MockBackbone()).ask(QUESTION)
            answer = ask(one, name)
            assert answer.choices[0].message.content == expected.text
            assert answer.usage.completion_tokens == expected.tokens
            assert answer.stream_time_s == expected.stream_time_s
            chunks = list(ask(one, name, stream=True, stream_options={"include_usage": True}))
            text = "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)
            assert text.strip() == expected.text
            assert chunks[0].choices[0].delta.role == "assistant"
            assert chunks[-2].choices[0].finish_reason in ("stop", "length")
            assert chunks[-1].usage.completion_tokens == expected.tokens
        # Beyond the limit it is the limit.
        assert ask(one, max_tokens=10**9).choices[0].message.content.strip() == expected.text
        short = ask(one, max_tokens=1)
        assert (short.choices[0].finish_reason, short.ended, short.usage.completion_tokens) == ("length", "length", 1)


@pytest.mark.parametrize("streamed", [False, True], ids=["whole", "in pieces"])
def test_stops_penalties_and_chances_of_tokens_are_those_of_the_engine(running: str, streamed: bool) -> None:
    def read(**options: Any) -> tuple[str, Any]:
        """The text of an answer, and its last choice."""
        if not streamed:
            (choice,) = ask(one, **options).choices
            return choice.message.content.strip(), choice
        choices = [chunk.choices[0] for chunk in ask(one, stream=True, **options)]
        return "".join(choice.delta.content or "" for choice in choices).strip(), choices[-1]

    with client(running) as one:
        whole, last = read()
        first, second, *_ = whole.split()
        assert last.logprobs is None
        text, last = read(stop=["never", second[1:]])
        assert (text, last.finish_reason) == (f"{first} {second[0]}", "stop")
        assert read(presence_penalty=2.0, frequency_penalty=2.0)[0] != whole
        _, last = read(logprobs=True, top_logprobs=2)
        assert "".join(one.token for one in last.logprobs.content).strip() == whole
        for token in last.logprobs.content:
            assert token.logprob == token.top_logprobs[0].logprob >= token.top_logprobs[1].logprob
            assert bytes(token.bytes).decode() == token.token


def test_a_new_commit_answers_the_next_question_and_asking_changes_no_state(folder: Path) -> None:
    path = folder / "door.safetensors"
    with server(folder) as address, client(address) as one:
        before = path.read_bytes()
        assert ask(one).stream_time_s == 3.0
        assert path.read_bytes() == before
        watch(path, 7, 20)
        assert ask(one).stream_time_s == 10.0
        path.unlink()
        with pytest.raises(openai.NotFoundError, match="door"):
            ask(one)


def test_all_of_a_conversation_counts_and_text_may_come_in_parts(made: Path) -> None:
    class Hearing(MockBackbone):
        heard: Any = None

        def suffix_ids(self, question: str, turns: Any = ()) -> list[int]:
            self.heard = (question, list(turns))
            return super().suffix_ids(question)

    backbone = Hearing()
    expected = (f"be brief\n\n{QUESTION}", [("something else\n\nthen", "a red"), ("and blue", "")])
    messages: Any = [
        {"role": "assistant", "content": "how can I help?"},
        {"role": "system", "content": "be brief"},
        {"role": "user", "content": "something else"},
        {"role": "user", "content": "then"},
        {"role": "assistant", "content": [{"type": "text", "text": "a red"}]},
        {"role": "user", "content": "and blue"},
        {"role": "assistant", "content": None},
        {"role": "user", "content": [{"type": "text", "text": QUESTION}]},
    ]
    with server(made, backbone) as address, client(address) as one:
        answer: Any = one.chat.completions.create(model="door", messages=messages)
        assert (backbone.heard, answer.turns) == (expected, 2)


@pytest.mark.parametrize(
    ("change", "error", "text"),
    [
        ({"model": "nobody"}, openai.NotFoundError, "nobody"),
        ({"model": "../door"}, openai.NotFoundError, "no state"),
        ({"messages": []}, openai.BadRequestError, "role user"),
        ({"messages": [{"role": "user", "content": " "}]}, openai.BadRequestError, "empty"),
        ({"messages": [*[{"role": "user", "content": "a"}] * 2, {"role": "tool"}]}, openai.BadRequestError, "a role"),
        ({"messages": [{"role": "user"}, {"role": "assistant"}]}, openai.BadRequestError, "last one"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, openai.BadRequestError, "pictures"),
        ({"temperature": 9.0}, openai.BadRequestError, "temperature"),
        ({"max_tokens": 0}, openai.BadRequestError, "max_tokens"),
        ({"n": 2}, openai.BadRequestError, "another seed"),
        ({"stop": ["a", 3]}, openai.BadRequestError, "at most 4 texts"),
        ({"top_logprobs": 3}, openai.BadRequestError, "needs logprobs"),
        ({"presence_penalty": 9.0}, openai.BadRequestError, "presence_penalty: expected a number from -2 to 2"),
        ({"logit_bias": {"3": 1}}, openai.BadRequestError, "supported are temperature"),
        ({"tools": [{"type": "function", "function": {"name": "f"}}]}, openai.BadRequestError, "tools"),
    ],
)
def test_a_bad_request_is_refused_in_a_line(change: Any, error: Any, text: str, running: str) -> None:
    asked: Any = {"model": "door", "messages": [{"role": "user", "content": QUESTION}], **change}
    with client(running) as one, pytest.raises(error, match=text) as caught:
        one.chat.completions.create(**asked)
    assert "\n" not in caught.value.body["message"]


def raw(address: str, method: str, path: str, body: bytes = b"", **headers: str) -> tuple[int, Any]:
    with closing(http.client.HTTPConnection(address, timeout=30)) as connection:
        connection.request(method, path, body, headers)
        response = connection.getresponse()
        return response.status, json.loads(response.read() or b"null")


def test_malformed_and_oversized_requests_are_refused(made: Path) -> None:
    with server(made, limits=ServerLimits(body_bytes=1000)) as address:
        assert raw(address, "GET", "/health") == (200, {"status": "ok"})
        for body in (b"", b"{", b"[]", b"[" * 900, b"\xff\xfe", b'{"model": 3, "messages": []}'):
            status, said = raw(address, "POST", "/v1/chat/completions", body)
            assert status == 400, body
            assert said["error"]["type"] == "invalid_request_error"
        assert raw(address, "POST", "/v1/chat/completions", b" " * 1001)[0] == 413
        assert raw(address, "GET", "/v1/chat/completions")[0] == 405
        assert raw(address, "GET", "/etc/passwd")[0] == 404


def test_a_damaged_state_is_an_error_of_its_own_and_the_others_answer(folder: Path) -> None:
    (folder / "garden.safetensors").write_bytes(b"no state")
    with server(folder) as address, client(address) as one:
        with pytest.raises(openai.ConflictError, match="garden"):
            ask(one, "garden")
        assert ask(one, "door").choices


@pytest.fixture
def held(monkeypatch: pytest.MonkeyPatch) -> tuple[threading.Event, threading.Event]:
    """Hold every answer: it sets the first event when it begins, and goes on once the second is set."""
    begun, go, stream = threading.Event(), threading.Event(), Session.stream

    def slow(self: Session, *arguments: Any, **options: Any) -> Any:
        begun.set()
        assert go.wait(30)
        return (yield from stream(self, *arguments, **options))

    monkeypatch.setattr(Session, "stream", slow)
    return begun, go


def test_more_questions_than_may_wait_are_sent_away(made: Path, held: tuple[threading.Event, threading.Event]) -> None:
    (begun, go), answers = held, list[Any]()
    with server(made, limits=ServerLimits(waiting=1)) as address, client(address) as one, client(address) as other:
        thread = threading.Thread(target=lambda: answers.append(ask(one)), daemon=True)
        thread.start()
        assert begun.wait(30)
        with pytest.raises(openai.InternalServerError, match="too many questions"):
            ask(other)
        go.set()
        thread.join(30)
        assert ask(other).choices
    assert len(answers) == 1


def test_an_answer_that_takes_too_long_is_given_up(made: Path, held: tuple[threading.Event, threading.Event]) -> None:
    with server(made, limits=ServerLimits(answer_s=0.05)) as address, client(address) as one:
        with pytest.raises(openai.InternalServerError, match=r"no answer in 0\.05 s"):
            ask(one)
        held[1].set()


def test_an_answer_has_its_evidence_if_that_is_asked_for(running: str, monkeypatch: pytest.MonkeyPatch) -> None:
    span = EvidenceSpan(1.0, 2.0, 0.5, (Utterance(1.0, 2.0, "look"),))

    def stream(_: Session, question: str, __: Any, *, evidence: bool, **___: Any) -> Any:
        yield "a star"
        return Answer(question, "a star", 3.0, 1.0, 2.0, 20, 2, -0.1, Evidence((span,), True) if evidence else None)

    monkeypatch.setattr(Session, "stream", stream)
    with client(running) as one:
        assert not hasattr(ask(one), "evidence")
        answer = ask(one, extra_body={"evidence": True})
        assert (answer.evidence, answer.faint) == ([json.loads(json.dumps(asdict(span)))], False)
        *_, last = ask(one, stream=True, extra_body={"evidence": True})
        assert last.evidence == answer.evidence
