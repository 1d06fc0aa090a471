"""An engine answers for what is watched here, over what the session has seen. That is written once,
under a name that nobody can list, and gone with the session.
"""

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from starlette.testclient import TestClient

import protokv
from protokv.core.backbone import Backbone
from protokv.errors import StateLocked, StateNotFound
from protokv.ingestion import IngestOptions
from protokv.memories import DurableConfig
from protokv.serve import FedSessionLimits, FedSessions, StateFolder, build_app
from protokv.serve.handed import HandedSessions
from protokv.serve.sessions import parse_session_request
from protokv.slots import SlotsFile, SlotsFolder
from protokv.stream.engine import Engine
from protokv.stream.session import Session
from protokv.stream.slots import make_slots
from protokv.texts import JsonObject
from protokv_cli.exits import ExitCode
from tests.cli.conftest import Program, write_video
from tests.conftest import random_frames, watched
from tests.engines.stand_in import StandIn
from tests.serve.test_conversations import picture
from tests.serve.test_sessions import encode

QUESTION = "who is the star ?"
CONFIG = DurableConfig(budget=41)
FILES = [encode(frame, lossless=True) for frame in random_frames(3, 12)]


def feed(engine: StandIn, folder: Path, backbone: Backbone, most: int = 4) -> FedSessions:
    """Return sessions whose engine finds the one that a file is of, by its bytes."""
    states = StateFolder(folder, backbone, engine=Engine(engine.url))
    fed = FedSessions(states, IngestOptions(config=CONFIG), FedSessionLimits(most))
    slots = SlotsFolder(str(folder))

    def find(name: str) -> tuple[str, Session] | None:
        try:
            file = slots.open(name, SlotsFile.verify)
        except StateNotFound:
            return None
        opened = [one for _, one in states._sessions.values()]
        live = [one.session for one in fed._conversations] + [*states.fed.values(), *opened]
        (session,) = (one for one in live if holds(file, one))
        return file.head.commit, session

    engine.find = find
    return fed


def holds(file: SlotsFile, session: Session) -> bool:
    """Return whether a file has what a question to a session reads."""
    return all(
        file.head.slots == tensor.shape[1] and torch.equal(file.read(layer, name), rows)
        for name, tensor in make_slots(session).items()
        for layer, rows in enumerate(tensor)
    )


def turn(i: int) -> JsonObject:
    return {"role": "user", "content": [{"type": "text", "text": QUESTION}, picture(FILES[i])]}


def list_files(folder: Path) -> list[Path]:
    return sorted(folder.rglob("*.kv.safetensors"))


def ask(client: TestClient, messages: Any, model: str, **more: Any) -> str:
    asked = {"model": model, "messages": messages, **more}
    reply = client.post("/v1/chat/completions", json=asked)
    assert reply.status_code == 200, reply.text
    said: str = reply.json()["choices"][0]["message"]["content"]
    return said


def test_a_conversation_with_pictures_is_answered_by_the_engine_as_by_its_session(
    engine: StandIn, tmp_path: Path, backbone: Backbone
) -> None:
    fed = feed(engine, tmp_path, backbone)
    name = Path(backbone.identity.name).name
    with TestClient(build_app(fed._states, fed=fed), base_url="http://localhost") as client:
        sent = []
        for i in range(4):
            sent.append(turn(i))
            said = ask(client, sent, name)
            (conversation,) = fed._conversations
            assert conversation.session.clock.steps == i + 1
            assert said == conversation.session.ask(QUESTION, turns=history(sent)).text
            # Asked again, nothing is new, and nothing is written.
            files = list_files(tmp_path)
            assert ask(client, sent, name) == said
            assert list_files(tmp_path) == files
            assert len(files) == 1
            sent.append({"role": "assistant", "content": said})
        assert len({one["kv_transfer_params"]["commit"] for one in engine.asked}) == 4
        for file in list_files(tmp_path):
            hidden = file.relative_to(tmp_path).as_posix().removesuffix(".kv.safetensors")
            assert hidden not in client.get("/v1/models").text
            assert client.get(f"/v1/models/{hidden}").status_code == 404
            assert client.get(f"/page/state?name={hidden}").status_code == 404
    # The end of the server removes them.
    assert list(tmp_path.iterdir()) == []


def history(sent: list[Any]) -> list[tuple[str, str]]:
    return [(QUESTION, said["content"]) for said in sent[1::2]]


def test_a_fed_session_is_answered_by_the_engine_while_it_is_fed_and_afterwards(
    engine: StandIn, tmp_path: Path, backbone: Backbone
) -> None:
    fed = feed(engine, tmp_path, backbone)
    said = [{"role": "user", "content": QUESTION}]
    with TestClient(build_app(fed._states, fed=fed), base_url="http://localhost") as client:
        fed.open(parse_session_request(b'{"name": "porch"}'))
        for i in range(3):
            found = ask(client, [turn(i)], "porch")
            live = fed._states.fed[tmp_path / "porch.safetensors"]
            assert live.clock.steps == i + 1
            assert found == ask(client, said, "porch") == live.ask(QUESTION).text
        del live
        fed.close("porch")
        assert list_files(tmp_path) == []
        assert ask(client, said, "porch") == found
        assert len(list_files(tmp_path)) == 1
    assert all(one["kv_transfer_params"]["state"].startswith(".asked/") for one in engine.asked)


def test_what_an_agent_watches_is_answered_by_the_engine_too(
    engine: StandIn, tmp_path: Path, backbone: Backbone
) -> None:
    pytest.importorskip("mcp.server.mcpserver")
    from mcp.client.client import Client

    from protokv.serve.tools import build_tool_server

    write_video(tmp_path / "clip.mp4", 4)
    states = StateFolder(tmp_path, backbone, engine=Engine(engine.url))
    slots = SlotsFolder(str(tmp_path))

    def find(name: str) -> tuple[str, Session]:
        saved = protokv.load(tmp_path / "clip.safetensors", backbone)
        file = slots.open(name, SlotsFile.verify)
        assert holds(file, saved)
        return file.head.commit, saved

    engine.find = find

    async def run() -> Any:
        watching = IngestOptions(config=CONFIG, backbone=backbone)
        async with Client(build_tool_server(states, watching)) as agent:
            await agent.call_tool("watch", {"video": "clip.mp4"})
            return await agent.call_tool("ask", {"state": "clip", "question": QUESTION})

    said = json.loads(asyncio.run(run()).content[0].text)
    own = protokv.load(tmp_path / "clip.safetensors", backbone)
    assert said["answer"] == own.ask(QUESTION).text
    assert said["evidence"] == "not told by this engine or cache"
    assert len(engine.asked) == 1


@pytest.mark.parametrize("folder", ["qwen2_5_vl"], indirect=True, scope="module")
class TestFiles:
    @pytest.fixture
    def handed(self, tmp_path: Path) -> HandedSessions:
        return HandedSessions(Engine("http://localhost"), tmp_path)

    def test_a_file_stays_for_a_question_while_its_session_goes_on(
        self, handed: HandedSessions, tmp_path: Path, backbone: Backbone
    ) -> None:
        session = watched(backbone, CONFIG, range(5))
        asked = handed.hand_over(session)
        before = {name: tensor.clone() for name, tensor in asked.tensors().items()}
        assert handed.hand_over(session) is asked
        session.watch(random_frames(7, backbone.frames_per_step))
        later = handed.hand_over(session)
        torch.testing.assert_close(asked.tensors(), before, rtol=0, atol=0)
        assert (asked.clock.steps, later.clock.steps, len(list_files(tmp_path))) == (5, 6, 2)
        del asked
        (left,) = list_files(tmp_path)
        assert left.name.startswith(later.asked["commit"])
        del session, later
        assert list_files(tmp_path) == []

    def test_what_a_killed_server_has_left_goes_and_two_servers_do_not_share_a_folder(
        self, tmp_path: Path, backbone: Backbone
    ) -> None:
        (tmp_path / ".asked").mkdir()
        (tmp_path / ".asked/left.kv.safetensors").touch()
        first = HandedSessions(Engine("http://localhost"), tmp_path)
        assert list_files(tmp_path) == []
        with pytest.raises(StateLocked):
            HandedSessions(Engine("http://localhost"), tmp_path)
        del first
        HandedSessions(Engine("http://localhost"), tmp_path)

    def test_an_engine_lets_go_of_files_that_are_gone(
        self, handed: HandedSessions, tmp_path: Path, backbone: Backbone
    ) -> None:
        slots = SlotsFolder(str(tmp_path))
        for seed in range(5):
            asked = handed.hand_over(watched(backbone, CONFIG, range(seed, seed + 2)))
            slots.open(asked.asked["state"])
            assert [*slots._open] == [asked.asked["state"]]


def test_serve_watches_with_its_own_model_where_an_engine_answers(
    tmp_path: Path, engine: StandIn
) -> None:
    held = HandedSessions(Engine(engine.url), tmp_path)
    asked = ("serve", tmp_path, "--engine", engine.url, "--sessions", "2")
    refused = Program(tmp_path, Path("protokv/mini"))(*asked)
    assert refused.code == ExitCode.LOCKED
    assert "another writer" in refused.err.splitlines()[0]
    del held
