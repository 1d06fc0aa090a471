"""Clients that send half a request, nothing, garbage or everything at once: each is closed, and others are answered."""

from __future__ import annotations

import logging
import socket
import threading
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from protokv.ingestion import ingest
from protokv.memories import DurableConfig
from protokv.serve import Limits, States, connections
from tests.mock_backbone import MockBackbone
from tests.prepared import Prepared
from tests.serve.test_serve import raw, server

GET = b"GET /v1/models HTTP/1.1\r\nHost: localhost\r\n"
POST = b"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\n"
CHUNKED = POST + b"Transfer-Encoding: chunked\r\n\r\n"


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("states")
    list(ingest(Prepared(0, 6), folder / "door.safetensors", DurableConfig(budget=40), backbone=MockBackbone()))
    return folder


@pytest.fixture
def hasty(made: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> Iterator[str]:
    """The address of a server that waits for hardly anything; it must log nothing but closed connections."""
    monkeypatch.setattr(connections, "_INTERVAL_S", 0.02)
    with server(made, limits=Limits(head_s=0.1, body_s=0.1, read_s=0.1, parsing_s=0.05)) as address:
        yield address
        assert raw(address, "GET", "/v1/models")[0] == 200
    assert not [record for record in caplog.records if record.exc_info or record.levelno > logging.WARNING]


def connect(address: str) -> socket.socket:
    host, port = address.split(":")
    return socket.create_connection((host, int(port)), timeout=30)


def read_to_the_end(one: socket.socket) -> bytes:
    found = b""
    try:
        while part := one.recv(1 << 16):
            found += part
    except ConnectionResetError:
        pass
    return found


@pytest.mark.parametrize(
    ("sent", "status"),
    [
        (b"", b""),
        (GET, b""),
        (GET + b"X: " + b"a" * 9, b""),
        (GET + b"X: " + b"a" * 70_000, b"400"),
        (POST + b"Content-Length: 100\r\n\r\n{", b""),
        (POST + b"Content-Length: 99999999999\r\n\r\n" + b"a" * 9000, b"413"),
        (POST + b"Content-Length: " + b"9" * 500 + b"\r\n\r\n", b"400"),
        (CHUNKED + b"FFFFFFFFFF\r\n" + b" " * 9000, b""),
        (CHUNKED + b"1;" + b"a" * 70_000, b"400"),
        (CHUNKED + b"1\r\n \r\n" * 50_000, b""),
        (b"\x16\x03\x01 garbage\r\n\r\n" * 9, b"400"),
        (GET + b"\r\n" + GET + b"\r\n", b""),
        (GET + b"\r\n" + b"garbage" * 9000, b""),
        (b"GET /health HTTP/1.1\r\nHost: x\r\nContent-Length: 9\r\n\r\n1", b"200"),
        (GET + b"Host: localhost\r\n\r\n", b"400"),
    ],
)
def test_whatever_a_client_sends_its_connection_ends(hasty: str, sent: bytes, status: bytes) -> None:
    with closing(connect(hasty)) as one:
        try:
            one.sendall(sent)
        except (BrokenPipeError, ConnectionResetError):
            return
        found = read_to_the_end(one)
    assert found[9:12] in (status, b"")


def test_who_does_not_read_is_closed(hasty: str, monkeypatch: pytest.MonkeyPatch) -> None:
    # No buffer of the kernel holds such an answer.
    monkeypatch.setattr(States, "names", lambda _: {"a" * (1 << 24): Path()})
    closed, lose = threading.Event(), connections.Connection.connection_lost
    monkeypatch.setattr(connections.Connection, "connection_lost", lambda one, error: (lose(one, error), closed.set()))
    with closing(connect(hasty)) as one:
        one.sendall(GET + b"\r\n")
        assert closed.wait(30)


def test_half_sent_requests_make_room_for_those_that_come(made: Path, caplog: pytest.LogCaptureFixture) -> None:
    with server(made, limits=Limits(connections=4)) as address:
        idle = [connect(address) for _ in range(20)]
        for one in idle:
            one.sendall(GET)
        assert raw(address, "GET", "/v1/models")[0] == 200
        assert [read_to_the_end(one) for one in idle[:16]] == [b""] * 16
        for one in idle:
            one.close()
    assert "there were too many" in caplog.text


def test_the_number_of_connections_leaves_files_to_open(monkeypatch: pytest.MonkeyPatch) -> None:
    resource = pytest.importorskip("resource")
    for files, most in ((-1, 128), (1 << 20, 128), (256, 64), (3, 1)):
        monkeypatch.setattr(resource, "getrlimit", lambda _, files=files: (files, files))
        assert connections.most_connections(Limits()) == most
