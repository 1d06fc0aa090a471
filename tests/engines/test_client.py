"""Questions whose tokens come from an engine have the answers of the session; what the engine
refuses is said in one line.
"""

import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from starlette.testclient import TestClient

from protokv.backbones import load_backbone
from protokv.core.backbone import Backbone
from protokv.core.decoding import Decoding
from protokv.errors import ConfigError, EngineError
from protokv.memories import MemoryConfig
from protokv.serve import StateFolder, build_app
from protokv.state.reader import StateReader
from protokv.stream.engine import Engine, EngineSession
from protokv.stream.session import Session
from protokv.stream.slots import digest_commit, find_lead
from protokv.texts import Keywords
from protokv_cli.exits import ExitCode
from tests.cli.conftest import Program
from tests.conftest import watched
from tests.engines.stand_in import StandIn, refuse

QUESTION = "who is the star ?"


@pytest.fixture(scope="module")
def session(backbone: Backbone) -> Session:
    return watched(backbone, MemoryConfig.of("durable", budget=41), range(9))


@pytest.fixture
def state(session: Session, tmp_path: Path, engine: StandIn) -> Path:
    """A state that the engine has under its name."""
    path = tmp_path / "states/talk.safetensors"
    path.parent.mkdir()
    session.save(path)
    engine.states["talk"] = digest_commit(StateReader.open(path).state), session
    return path


@pytest.fixture
def states(state: Path, engine: StandIn, folder: Path) -> StateFolder:
    bare = load_backbone(str(folder), device="meta", dtype="float32")
    return StateFolder(state.parent, bare, engine=Engine(engine.url))


@pytest.fixture
def asked(state: Path, engine: StandIn, folder: Path) -> EngineSession:
    return EngineSession.open(StateReader.open(state), Engine(engine.url), "talk", str(folder))


@pytest.mark.parametrize(
    "decoding",
    [
        None,
        Decoding(max_new_tokens=9, top_logprobs=3),
        Decoding(max_new_tokens=40, stop=("ring", "star")),
        Decoding(choices=("red", "blue", "ring")),
    ],
)
def test_answers_are_those_of_the_session(
    asked: EngineSession, session: Session, decoding: Decoding | None
) -> None:
    how: Keywords = {"turns": [("what is red ?", "a ring")], "system": "the star is blue"}
    expected = session.ask(QUESTION, decoding, **how)
    found = asked.ask(QUESTION, decoding, **how)
    for name in ("text", "tokens", "finish_reason", "turns", "stream_time_s"):
        assert getattr(found, name) == getattr(expected, name)
    assert found.context_tokens == expected.context_tokens + len(find_lead(session))
    assert found.mean_logprob == pytest.approx(expected.mean_logprob, abs=1e-4)
    assert found.ttft_ms <= found.total_ms
    if expected.chances is not None:
        assert found.chances is not None
        for ours, theirs in zip(expected.chances, found.chances, strict=True):
            assert [one.id for one in theirs] == [one.id for one in ours]
            near = pytest.approx([one.log_probability for one in ours], abs=1e-4)
            assert [one.log_probability for one in theirs] == near
    if expected.probabilities is not None:
        assert found.probabilities == pytest.approx(expected.probabilities, abs=1e-4)


def test_no_weights_are_loaded_and_ids_of_the_vocabulary_are_sent_with_the_key(
    asked: EngineSession, engine: StandIn, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PROTOKV_ENGINE_KEY", "secret")
    asked.ask(QUESTION)
    assert engine.keys == ["Bearer secret"]
    assert asked.backbone.embed_token(torch.tensor([0])).is_meta
    (body,) = engine.asked
    assert min(body["prompt"]) >= 0
    assert body["kv_transfer_params"]["state"] == "talk"


def test_evidence_is_refused_before_the_engine_is_asked(
    asked: EngineSession, engine: StandIn
) -> None:
    with pytest.raises(ConfigError, match="does not tell what its answers stand on"):
        asked.ask(QUESTION, evidence=True)
    assert not engine.asked


@pytest.mark.parametrize(
    ("reply", "why"),
    [
        ((400, refuse("state talk: \x1b[31mno\nsuch")), r"refuses: state talk: \\x1b\[31mno such"),
        ((401, b""), "HTTP status 401"),
        ((307, b""), "HTTP status 307"),
        ((302, b""), "HTTP status 302"),
        ((500, b"<html>"), "HTTP status 500"),
        ((200, b"data: {broken\n\n"), "does not answer"),
        ((200, b'data: {"error": {"message": "it failed"}}\n\n'), "refuses: it failed"),
        ((200, b"data: [DONE]\n\n"), "broke an answer off"),
    ],
)
def test_what_an_engine_refuses_is_one_line(
    asked: EngineSession, engine: StandIn, reply: tuple[int, bytes], why: str
) -> None:
    for decoding in (None, Decoding(choices=("red", "blue"))):
        engine.replies.append(reply)
        with pytest.raises(EngineError, match=why) as refused:
            asked.ask(QUESTION, decoding)
        assert len(refused.value.message.splitlines()) == 1
    assert asked.ask(QUESTION).text


def test_another_commit_is_not_taken_for_the_one_that_was_opened(
    asked: EngineSession, engine: StandIn, backbone: Backbone, state: Path, folder: Path
) -> None:
    longer = watched(backbone, MemoryConfig.of("durable", budget=41), range(10))
    longer.save(state)
    engine.states["talk"] = digest_commit(StateReader.open(state).state), longer
    with pytest.raises(EngineError, match="another commit"):
        asked.ask(QUESTION)
    again = EngineSession.open(StateReader.open(state), asked.engine, "talk", str(folder))
    assert again.ask(QUESTION).text == longer.ask(QUESTION).text


def test_an_engine_that_is_not_there_is_named(asked: EngineSession) -> None:
    asked.engine = Engine("http://127.0.0.1:9/v1")
    with pytest.raises(EngineError, match=r"the engine at http://127.0.0.1:9 does not answer"):
        asked.ask(QUESTION)
    with pytest.raises(ConfigError, match="no address"):
        Engine("localhost:8000")


@pytest.mark.parametrize("folder", ["qwen2_5_vl"], indirect=True)
class TestCommands:
    @pytest.fixture
    def protokv(self, tmp_path: Path, folder: Path) -> Program:
        return Program(tmp_path, folder)

    def test_query_answers_by_the_engine(
        self, protokv: Program, state: Path, session: Session, engine: StandIn
    ) -> None:
        expected = session.ask(QUESTION).text
        assert protokv("query", state, QUESTION, "--engine", engine.url).out.strip() == expected
        refused = protokv("query", state, QUESTION, "--engine", engine.url, "--evidence")
        assert (refused.code, refused.out) == (ExitCode.USAGE, "")
        engine.states.clear()
        refused = protokv("query", state, QUESTION, "--engine", engine.url)
        assert (refused.code, refused.out) == (ExitCode.FAILURE, "")
        first, second = refused.err.splitlines()
        assert first.startswith("Error: the engine at ")
        assert "protokv inspect STATE -o" in second

    def test_serve_has_many_questions_on_their_way_to_the_engine(
        self, states: StateFolder, session: Session, engine: StandIn
    ) -> None:
        body = {"model": "talk", "messages": [{"role": "user", "content": QUESTION}]}
        # None is answered before all of them have come.
        engine.together.__init__(4)  # type: ignore[misc]
        with (
            TestClient(build_app(states), base_url="http://localhost") as client,
            ThreadPoolExecutor(4) as pool,
        ):
            replies = list(
                pool.map(lambda _: client.post("/v1/chat/completions", json=body), range(4))
            )
        expected = session.ask(QUESTION).text
        for reply in replies:
            assert json.loads(reply.content)["choices"][0]["message"]["content"] == expected

    def test_serve_lets_the_engine_choose_among_the_answers_of_a_schema(
        self, states: StateFolder, session: Session, engine: StandIn
    ) -> None:
        enum = {"enum": [{"seen": "red"}, {"seen": "blue"}]}
        form = {"type": "json_schema", "json_schema": {"name": "seen", "schema": enum}}
        body = {"model": "talk", "messages": [{"role": "user", "content": QUESTION}]}
        with TestClient(build_app(states), base_url="http://localhost") as client:
            reply = client.post("/v1/chat/completions", json=body | {"response_format": form})
            free = {"type": "json_object"}
            held = client.post("/v1/chat/completions", json=body | {"response_format": free})
        expected = session.choose(QUESTION, ["red", "blue"])
        found = reply.json()["choices"][0]["message"]["content"]
        assert json.loads(found) == {"seen": expected.text}
        assert held.status_code == 400
        assert "held to no schema" in held.text
