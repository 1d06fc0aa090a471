"""States behind the web interface: OpenAI's own client asks a real server on loopback, and who may
ask at all.
"""

import json
import os
import shutil
import threading
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import openai
import pytest
from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.testclient import TestClient

import protokv
from protokv.core.parts import Utterance
from protokv.errors import ConfigError
from protokv.ingestion import Every, ingest_events
from protokv.memories import DurableConfig
from protokv.serve import ServerLimits, StateFolder, build_app
from protokv.serve.access import AccessCheck
from protokv.serve.chat import parse_chat_request
from protokv.state.checkpoint import save_state
from protokv.state.commit import lock
from protokv.state.reader import load_state
from protokv.state.sources import WallClockLog
from protokv.stream.answer import Answer
from protokv.stream.evidence import Evidence, EvidenceSpan
from protokv.stream.session import Session
from protokv.texts import JsonObject, Keywords
from tests.mock_backbone import MockBackbone
from tests.prepared import Prepared
from tests.serve.conftest import server, watch

QUESTION = "what is it"


def client(address: str, token: str = "none") -> openai.OpenAI:
    return openai.OpenAI(base_url=f"http://{address}/v1", api_key=token, max_retries=0, timeout=30)


@pytest.fixture(scope="module")
def running(made: Path) -> Iterator[str]:
    """The address of a server that no test changes."""
    with server(made) as address:
        yield address


def ask(one: openai.OpenAI, model: str = "door", **options: Any) -> Any:
    return one.chat.completions.create(
        model=model, messages=[{"role": "user", "content": QUESTION}], **options
    )


def test_the_official_client_lists_states_and_asks_them_at_once_and_in_pieces(folder: Path) -> None:
    with server(folder) as address, client(address) as one:
        assert [model.id for model in one.models.list()] == ["door", "garden", "monday/door"]
        for name in ("door", "garden", "monday/door"):
            expected = protokv.load(folder / f"{name}.safetensors", MockBackbone()).ask(QUESTION)
            answer = ask(one, name)
            assert (answer.choices[0].message.content, answer.stream_time_s) == (
                expected.text,
                expected.stream_time_s,
            )
            assert answer.usage.completion_tokens == expected.tokens
            *chunks, last = ask(one, name, stream=True, stream_options={"include_usage": True})
            assert (
                "".join(chunk.choices[0].delta.content or "" for chunk in chunks).strip()
                == expected.text
            )
            assert chunks[0].choices[0].delta.role == "assistant"
            assert chunks[-1].choices[0].finish_reason in ("stop", "length")
            assert last.usage.completion_tokens == expected.tokens
        # Beyond the limit it is the limit.
        assert ask(one, max_tokens=10**9).choices[0].message.content.strip() == expected.text
        short = ask(one, max_tokens=1)
        assert (short.choices[0].finish_reason, short.ended, short.usage.completion_tokens) == (
            "length",
            "length",
            1,
        )


SCHEMA = {"enum": [{"seen": "red"}, {"seen": "green"}]}
FORM = {"type": "json_schema", "json_schema": {"name": "seen", "schema": SCHEMA}}


@pytest.mark.parametrize(
    ("asked", "answers"),
    [
        ({"choices": ["red", "green"]}, ["red", "green"]),
        ({"response_format": FORM}, [*map(json.dumps, SCHEMA["enum"])]),
    ],
)
def test_an_answer_may_be_one_of_some_choices(
    running: str, made: Path, asked: JsonObject, answers: list[str]
) -> None:
    session = protokv.load(made / "door.safetensors", MockBackbone())
    chances = (session.choose(QUESTION, ["red", "green"]).probabilities or {}).values()
    expected = dict(zip(answers, chances, strict=True))
    with client(running) as one:
        whole = ask(one, extra_body=asked)
        pieces = list(ask(one, extra_body=asked, stream=True))
    text = whole.choices[0].message.content
    assert "".join(c.choices[0].delta.content or "" for c in pieces) == text
    assert whole.probabilities == pieces[-1].probabilities == expected
    assert expected[text] == max(chances)


def test_stops_penalties_and_chances_of_tokens_are_those_of_the_engine(running: str) -> None:
    def read(**options: Any) -> tuple[str, Any]:
        """The text of an answer in pieces, and its last choice."""
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
        # A damaged state is an error of its own, and the others answer.
        path.write_bytes(b"no state")
        with pytest.raises(openai.ConflictError, match="door"):
            ask(one)
        assert ask(one, "garden").choices


def test_all_of_a_conversation_counts_and_text_may_come_in_parts() -> None:
    said = [
        ("assistant", "how can I help?"),
        ("system", "be brief"),
        ("user", "something else"),
        ("user", "then"),
        ("assistant", [{"type": "text", "text": "a red"}]),
        ("user", "and blue"),
        ("assistant", None),
        ("user", [{"type": "text", "text": QUESTION}]),
    ]
    messages = [{"role": role, "content": content} for role, content in said]
    body = json.dumps({"model": "door", "messages": messages}).encode()
    asked = parse_chat_request(body, MockBackbone().decoding)
    assert (asked.system, asked.text) == ("be brief", QUESTION)
    assert asked.turns == [("something else\n\nthen", "a red"), ("and blue", "")]


@pytest.fixture(scope="module")
def kept(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A state with commits at 1, 2 and 3 seconds."""
    folder = tmp_path_factory.mktemp("kept")
    options: Keywords = {"backbone": MockBackbone(), "every": Every(n_steps=1), "keep": 9}
    config = DurableConfig(budget=40)
    list(ingest_events(Prepared(3, 6), folder / "door.safetensors", config, **options))
    return folder


def test_a_kept_commit_answers_over_http_as_of_its_time(kept: Path) -> None:
    with server(kept) as address, client(address) as one:
        for at, stands_at in (("2s", 2.0), (2.5, 2.0), ("-1.5", 1.0), ("0:01", 1.0), (None, 3.0)):
            answer = ask(one, extra_body={"at": at})
            assert answer.stream_time_s == stands_at
            session = protokv.load(kept / "door.safetensors", MockBackbone(), at_s=stands_at)
            assert answer.choices[0].message.content == session.ask(QUESTION).text
        with pytest.raises(openai.NotFoundError, match="no commit at or before"):
            ask(one, extra_body={"at": 0.5})
        # What clients send that changes no answer is taken.
        ask(one, user="me", metadata={"a": "b"}, store=False, extra_body={"top_k": None})


def test_a_camera_is_live_while_somebody_writes_its_state(kept: Path) -> None:
    state = load_state(kept / "door.safetensors")
    live = {"kind": "rtsp", "live": asdict(WallClockLog(anchors=[(0.0, 1e9)]))}
    save_state(replace(state, source=live, complete=False), kept / "cam.safetensors")
    with TestClient(build_app(StateFolder(kept, MockBackbone())), "http://localhost") as one:
        # A writer that was killed leaves the file of its lock.
        (kept / ".cam.safetensors.lock").touch()
        for held in (False, True, False):
            with lock(kept / "cam.safetensors") if held else nullcontext():
                facts = one.get("/page/state?name=cam").json()
            assert facts["live"]["writing"] is held
        assert one.get("/page/state?name=door").json()["commits_s"] == [1.0, 2.0, 3.0]


@pytest.mark.parametrize(
    ("named", "source", "said"),
    [
        ("protokv/mini", {"drawn": False, "kind": "file"}, True),
        ("protokv/mini", {"kind": "pushed"}, True),
        ("protokv/mini", {"drawn": True, "kind": "file"}, False),
        ("mock", {"drawn": False, "kind": "file"}, False),
    ],
)
def test_an_answer_about_a_video_that_an_embedded_model_cannot_read_says_so(
    kept: Path, named: str, source: JsonObject, said: bool
) -> None:
    state = load_state(kept / "door.safetensors")
    identity = replace(state.backbone, name=named)
    save_state(replace(state, source=source, backbone=identity), kept / "other.safetensors")
    with server(kept) as address, client(address) as one:
        found = ask(one, "other").model_extra.get("notice", "")
        *_, last = ask(one, "other", stream=True)
    assert bool(found) is bool(last.model_extra.get("notice")) is said
    assert ("drawn shapes only" in found) is said


@pytest.mark.usefixtures("with_evidence")
def test_answers_about_a_part_have_the_times_of_the_video_beside_those_of_the_stream(
    kept: Path,
) -> None:
    state = load_state(kept / "door.safetensors")
    said = {"question": "a", "answer": "b", "stream_time_s": 1.0, "mean_logprob": -0.1}
    source = {"name": "talk.mp4 from 300 s", "fingerprint": "ab@300.000000+", "answers": [said]}
    save_state(replace(state, source=source), kept / "part.safetensors")
    with server(kept) as address, client(address) as one:
        more: Keywords = {"extra_body": {"evidence": True}}
        (span, *_) = ask(one, "part", **more).evidence
        assert (span["video"], span["video_end_s"]) == ("talk.mp4", span["end_s"] + 300)
        assert "video" not in ask(one, "door", **more).evidence[0]
    with TestClient(build_app(StateFolder(kept, MockBackbone())), "http://localhost") as page:
        (answer, *_) = page.get("/page/state?name=part").json()["answers"]
        assert (answer["video"], answer["video_time_s"]) == ("talk.mp4", 301.0)


# A line has what a request asks, and a part of what is said to that.
LINES = (Path(__file__).parent / "refused.jsonl").read_text(encoding="utf-8").splitlines()


@pytest.mark.parametrize("line", LINES)
def test_a_bad_request_is_refused_in_a_line(line: str, running: str) -> None:
    row = json.loads(line)
    change = row["asked"]
    asked: Any = {"model": "door", "messages": [{"role": "user", "content": QUESTION}], **change}
    refused = pytest.raises(openai.APIStatusError, match=row["refused"])
    with client(running) as one, refused as caught:
        one.chat.completions.create(**asked)
    assert caught.value.status_code == (404 if "model" in change else 400)
    assert "\n" not in caught.value.body["message"]


def browse(folder: Path, host: str = "localhost", **options: Any) -> TestClient:
    return TestClient(
        build_app(StateFolder(folder, MockBackbone()), **options), base_url=f"http://{host}"
    )


def test_malformed_and_oversized_requests_are_refused(made: Path) -> None:
    chat = "/v1/chat/completions"
    with browse(made, limits=ServerLimits(body_bytes=1000)) as one:
        for body in (b"", b"{", b"[]", b"[" * 900, b"\xff\xfe", b'{"model": 3, "messages": []}'):
            refused = one.post(chat, content=body)
            assert (refused.status_code, refused.json()["error"]["type"]) == (
                400,
                "invalid_request_error",
            ), body
        assert one.post(chat, content=b" " * 1001).status_code == 413
        assert one.get(chat).status_code == 405
        assert one.get("/etc/passwd").status_code == 404


def test_questions_beyond_the_limits_are_sent_away(
    made: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun = threading.Event()
    go = threading.Event()
    begin = Session.begin_answer
    answers = list[Any]()

    def slow(self: Session, *arguments: Any, **options: Any) -> Any:
        begun.set()
        assert go.wait(30)
        return (yield from begin(self, *arguments, **options))

    monkeypatch.setattr(Session, "begin_answer", slow)
    with (
        server(made, limits=ServerLimits(waiting=1)) as address,
        client(address) as one,
        client(address) as other,
    ):
        thread = threading.Thread(target=lambda: answers.append(ask(one)), daemon=True)
        thread.start()
        assert begun.wait(30)
        with pytest.raises(openai.InternalServerError, match="too many questions"):
            ask(other)
        go.set()
        thread.join(30)
        assert ask(other).choices
    assert len(answers) == 1
    go.clear()
    with server(made, limits=ServerLimits(answer_s=0.05)) as address, client(address) as one:
        with pytest.raises(openai.InternalServerError, match=r"no answer in 0\.05 s"):
            ask(one)
        go.set()


SPAN = EvidenceSpan(1.0, 2.0, 0.5, (Utterance(1.0, 2.0, "look"),))


@pytest.fixture
def with_evidence(monkeypatch: pytest.MonkeyPatch) -> None:
    def stream(_: Session, question: str, __: Any, *, evidence: bool, **___: Any) -> Any:
        yield "a star"
        stood = Evidence((SPAN,), True) if evidence else None
        return Answer(question, "a star", 3.0, 1.0, 2.0, 20, 2, -0.1, stood)

    monkeypatch.setattr(Session, "begin_answer", stream)


@pytest.mark.usefixtures("with_evidence")
def test_an_answer_has_its_evidence_if_that_is_asked_for(running: str) -> None:
    with client(running) as one:
        assert not hasattr(ask(one), "evidence")
        answer = ask(one, extra_body={"evidence": True})
        assert (answer.evidence, answer.faint) == ([json.loads(json.dumps(asdict(SPAN)))], False)
        *_, last = ask(one, stream=True, extra_body={"evidence": True})
        assert last.evidence == answer.evidence


def test_a_state_is_shown_with_its_facts_and_pictures_to_who_has_the_token(made: Path) -> None:
    private = ("/page/state?name=garden", "/v1/models")
    with browse(made, host="anywhere.example", token="right") as one:
        assert one.get("/health").json() == {"status": "ok"}
        assert {one.get(path).status_code for path in private} == {401}
        assert "garden" not in (page := one.get("/")).text
        one.headers["Authorization"] = "Bearer right"
        found = one.get(private[0]).json()
        assert one.get(private[1]).status_code == 200
    assert (found["duration_s"], found["complete"], found["live"]) == (3.0, True, None)
    assert [(one["stream_time_s"], one["question"]) for one in found["answers"]] == [
        (2.0, QUESTION)
    ]
    assert [picture["time_s"] for picture in found["thumbnails"]] == [0, 1, 2]
    assert all(
        picture["src"].startswith("data:image/jpeg;base64,/9j/") for picture in found["thumbnails"]
    )
    # The page loads nothing from elsewhere, and inserts text as text.
    assert "default-src 'none'" in page.headers["content-security-policy"]
    assert "unsafe" not in page.headers["content-security-policy"]
    for bad in (
        "http:",
        "https:",
        "innerHTML",
        "outerHTML",
        "insertAdjacentHTML",
        "document.write",
        "eval(",
    ):
        assert bad not in page.text


HERE = ("localhost", "LOCALHOST:1", "127.0.0.1:8000", "[::1]", "[::1]:8000")
# What a browser sends for the page of another site, and what one parser of addresses or another
# takes for our name.
ELSEWHERE = [
    "evil.example",
    "localhost.",
    "127.1",
    "0.0.0.0",
    "[::ffff:127.0.0.1]",
    "::1",
    "evil.example:99999",
    "evil@localhost",
    "localhost@evil.example",
    "localhost/.evil",
    "localhost,evil",
    "%6cocalhost",
    "none",
    "",
    " ",
    "localhost evil",
    "localhost\\.evil",
    "localhost\tevil",
    "\xe9vil.example",
]
SITES = [
    {"origin": o}
    for o in (
        "null",
        "http://evil.example",
        "http://localhost:3000",
        "https://localhost",
        "file://",
    )
]
SITES += [{"sec-fetch-site": "cross-site"}, {"sec-fetch-site": "same-site"}]
OWN: tuple[dict[str, str], ...] = (
    {},
    {"sec-fetch-site": "same-origin"},
    {"sec-fetch-site": "none"},
)
REFUSED = (
    [{"host": host} for host in ELSEWHERE]
    + [{"host": "localhost", **site} for site in SITES]
    + [{}]
)


def test_without_a_token_only_names_of_this_machine_and_pages_of_this_server_are_answered() -> None:
    access = AccessCheck(None)
    for host in HERE:
        for site in (*OWN, {"origin": f"http://{host}"}):
            access.check(Headers({"host": host, **site}))
    for headers in REFUSED:
        with pytest.raises(HTTPException, match="403"):
            access.check(Headers(headers))


def test_a_token_counts_only_as_bearer_and_only_once() -> None:
    access = AccessCheck("right")
    for given in ("Bearer right", "bearer right", "BEARER  right "):
        access.check(Headers({"authorization": given}))
    wrong = (
        "right",
        "Basic right",
        "Bearer",
        "Bearer \xe9",
        "Bearer Bearer right",
        "Bearer righ",
        "",
    )
    twice = Headers(raw=[(b"authorization", b"Bearer right")] * 2)
    for headers in (twice, Headers({}), *(Headers({"authorization": given}) for given in wrong)):
        with pytest.raises(HTTPException, match="401"):
            access.check(headers)
    for token in ("", "two words", "t\xf6ken", "\udcff"):
        with pytest.raises(ConfigError, match="visible ASCII"):
            AccessCheck(token)


def test_no_link_and_no_pipe_leads_out_of_the_folder(folder: Path, tmp_path: Path) -> None:
    state = folder / "door.safetensors"
    elsewhere = shutil.copytree(folder, tmp_path / "elsewhere")
    links: dict[str, str | Path] = {
        "inner": state,
        "outer": elsewhere / state.name,
        "loop": "loop.safetensors",
    }
    for name, target in links.items():
        (folder / f"{name}.safetensors").symlink_to(target)
    for name in ("linked", "linked.zarr"):
        (folder / name).symlink_to(elsewhere, target_is_directory=True)
    os.mkfifo(folder / "pipe.safetensors")
    shutil.copy(state, folder / "\udcff.safetensors")
    with browse(folder) as one:
        names = {model["id"] for model in one.get("/v1/models").json()["data"]}
        assert names == {"door", "garden", "monday/door", "inner"}
        assert one.get("/v1/models/monday/door").json()["id"] == "monday/door"
        assert one.get("/v1/models/tuesday").status_code == 404
        assert one.get("/page/state?name=inner").status_code == 200
