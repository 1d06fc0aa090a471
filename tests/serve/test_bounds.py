"""What a client costs that sends no whole request, takes no reply, or names what is not its own."""

import json
import logging
import socket
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace
from http.client import HTTPConnection
from pathlib import Path
from typing import Any

import pytest
from starlette.testclient import TestClient

from protokv.errors import StateNotFound
from protokv.serve import ServerLimits, StateFolder, build_app
from protokv.state.checkpoint import save_state
from protokv.state.reader import load_state
from protokv.stream.session import Session
from protokv_cli.output import Output
from protokv_cli.serve import ServerLog
from tests.mock_backbone import MockBackbone
from tests.serve.conftest import server

HURRIED = ServerLimits(request_s=0.2)
POST = b"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\n"
GET = b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n"
BEGINNINGS = {
    "silence": b"",
    "half a line": b"GET / HT",
    "half a head": b"GET / HTTP/1.1\r\nHost: localhost\r\nX-Long: ",
    "half a body": POST + b"Content-Length: 9\r\n\r\n{",
    "half a chunk": POST + b"Transfer-Encoding: chunked\r\n\r\n9\r\n{",
    "a request, then half of one": GET + b"GET / HT",
}


@contextmanager
def connect(address: str, first: bytes = b"") -> Iterator[socket.socket]:
    host, _, port = address.partition(":")
    with socket.create_connection((host, int(port)), 30) as made:
        made.sendall(first)
        yield made


def read_all(one: socket.socket) -> bytes:
    """Return what comes until the server closes."""
    found = b""
    try:
        while part := one.recv(1 << 16):
            found += part
    except ConnectionResetError:
        pass
    return found


def status(address: str, path: str = "/health") -> int:
    one = HTTPConnection(address, timeout=30)
    one.request("GET", path)
    try:
        return one.getresponse().status
    finally:
        one.close()


@pytest.mark.parametrize("first", BEGINNINGS.values(), ids=BEGINNINGS)
def test_a_request_that_does_not_come_whole_is_given_up(made: Path, first: bytes) -> None:
    with server(made, limits=HURRIED) as address, connect(address, first) as one:
        assert b"no such" not in read_all(one)


@pytest.mark.parametrize("first", [BEGINNINGS["silence"], BEGINNINGS["half a head"]])
def test_connections_that_ask_nothing_keep_nobody_out(made: Path, first: bytes) -> None:
    with server(made, limits=ServerLimits(connections=6)) as address, ExitStack() as held:
        silent = [held.enter_context(connect(address, first)) for _ in range(20)]
        assert {status(address) for _ in range(8)} == {200}
        assert read_all(silent[0]) == b""


def test_a_client_that_takes_no_reply_is_let_go(made: Path) -> None:
    with server(made, limits=HURRIED) as address, connect(address) as one:
        with suppress(ConnectionError):
            while True:
                one.sendall(b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n" * 100)
        assert status(address) == 200


def test_a_request_with_two_lengths_ends_its_connection(running: str) -> None:
    lengths = b"Content-Length: 4\r\nTransfer-Encoding: chunked\r\n\r\n"
    request = POST + lengths + b"0\r\n\r\n" + GET
    with connect(running, request) as one:
        found = read_all(one)
    assert found.startswith(b"HTTP/1.1 400")
    assert b"200 OK" not in found


@pytest.fixture(scope="module")
def running(made: Path) -> Iterator[str]:
    with server(made) as address:
        yield address


def test_messages_name_states_and_models_without_their_folders(folder: Path) -> None:
    path = folder / "door.safetensors"
    state = load_state(path)
    save_state(replace(state, backbone=replace(state.backbone, name="/home/me/models/own")), path)
    (folder / "garden.safetensors").write_bytes(b"no state")
    (folder / "monday" / "door.safetensors").write_bytes(b"")
    with TestClient(
        build_app(StateFolder(folder, MockBackbone())), base_url="http://localhost"
    ) as one:
        assert one.get("/page/state?name=door").json()["model"] == "own"
        for name in ("garden", "monday/door"):
            reply = one.get(f"/page/state?name={name}")
            assert reply.status_code == 409
            assert f"{name}.safetensors" in reply.text
            assert str(folder.parent) not in reply.text


def test_a_state_is_found_by_its_name_as_the_list_of_all_has_it(folder: Path) -> None:
    for name in ("door.pt", "two.one.safetensors", "\udcff.safetensors", ".hidden.safetensors"):
        save_state(load_state(folder / "garden.safetensors"), folder / "a.pt")
        (folder / "a.pt").rename(folder / name)
    states = StateFolder(folder, MockBackbone())
    listed = states.list_all()
    assert {"door.pt", "door", "two.one"} < listed.keys()
    assert {name: states.find(name) for name in listed} == listed
    others = ["", ".", "..", "/door", "monday/", "monday//door", "monday/../garden"]
    for name in [*others, ".hidden", "\0", "x" * 5000, str(folder / "garden")]:
        with pytest.raises(StateNotFound):
            states.find(name)


def set_budget(path: Path, budget: int) -> None:
    state = load_state(path)
    save_state(replace(state, memory={**state.memory, "budget": budget}), path)


@pytest.mark.parametrize("budget", [10**6, 10**7])
def test_a_state_of_too_great_a_budget_is_refused(
    folder: Path, budget: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    set_budget(folder / "door.safetensors", budget)
    monkeypatch.setattr("protokv.core.build.measure_device_memory", lambda _: 2**24)
    with TestClient(
        build_app(StateFolder(folder, MockBackbone())), base_url="http://localhost"
    ) as one:
        asked = {"model": "garden", "messages": [{"role": "user", "content": "what is it"}]}
        assert one.post("/v1/chat/completions", json=asked).status_code == 200
        refused = one.post("/v1/chat/completions", json=asked | {"model": "door"})
        assert refused.status_code == 409
        assert f"{budget} tokens of this model take" in refused.text


def test_sessions_that_stay_are_bounded_together(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = ["door", "garden", "monday/door"]
    for name in names:
        set_budget(folder / f"{name}.safetensors", 4000)
    one = StateFolder(folder, MockBackbone()).open_session(folder / "door.safetensors")
    most = 2.5 * one.state_bytes
    monkeypatch.setattr("protokv.serve.states.measure_device_memory", lambda _: 2 * most)
    states = StateFolder(folder, MockBackbone())
    for name in names * 2:
        states.open_session(states.find(name))
        held = [session.state_bytes for _, session in states._sessions.values()]
        assert sum(held) <= most
    assert len(held) > 1


def test_an_answer_that_never_ends_does_not_keep_the_server(
    made: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun = threading.Event()
    go = threading.Event()

    def loop(*_: Any, **__: Any) -> Any:
        begun.set()
        go.wait()
        yield "x"

    monkeypatch.setattr(Session, "begin_answer", loop)
    monkeypatch.setattr("protokv.serve.app._STOP_S", 0.1)
    body = {"model": "door", "messages": [{"role": "user", "content": "what is it"}]}
    head = b"Host: localhost\r\nContent-Length: %d\r\n\r\n" % len(json.dumps(body))
    request = b"POST /v1/chat/completions HTTP/1.1\r\n" + head + json.dumps(body).encode()
    with server(made) as address, connect(address, request):
        assert begun.wait(30)
        before = threading.active_count()
    # The thread of the server has ended, that of the answer has not.
    assert threading.active_count() < before
    assert not go.is_set()
    go.set()


def test_the_log_of_a_server_is_bounded_by_the_minute(capfd: pytest.CaptureFixture[str]) -> None:
    log = ServerLog(Output())
    for second in (0, 61):
        for i in range(500):
            record = logging.LogRecord("uvicorn", logging.WARNING, "", 0, f"no {i}", (), None)
            record.created = 600.0 + second
            log.emit(record)
    lines = capfd.readouterr().err.splitlines()
    assert len(lines) == 120
    assert sum("left out" in line for line in lines) == 2
