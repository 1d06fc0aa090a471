"""Requests drawn by a seed, against a live server: each is answered or closed, none is a fault of the server.

`PROTOKV_FUZZ_REQUESTS` is how many the slow test draws.
"""

from __future__ import annotations

import json
import logging
import os
import random
import socket
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest

from protokv.ingestion import ingest
from protokv.memories import DurableConfig
from protokv.serve import Limits, connections
from tests.mock_backbone import MockBackbone
from tests.prepared import Prepared
from tests.serve.test_serve import raw, server

REQUESTS = int(os.environ.get("PROTOKV_FUZZ_REQUESTS", "5000"))
CHAT, RESPONSES = "/v1/chat/completions", "/v1/responses"
PATHS = (
    CHAT,
    RESPONSES,
    "/v1/models",
    "/v1/models/door",
    "/page/state?name=",
    "/page/videos?name=door",
    "/page/video?",
)
NAMES = ("model", "messages", "input", "stream", "max_tokens", "temperature", "seed", "tools", "n", "text", "role", "é")
TEXTS = (
    "door",
    "user",
    "what is it",
    "",
    "\0",
    "\ud800",
    "\udc00\ud800",
    "../door",
    "a" * 70_000,
    "\u202e\x1b[2J",
    "é😀",
)
NUMBERS = (0, -1, 1, 10**400, 1e308, -0.0, float("nan"), float("inf"), 2**63, True, None)


def draw_value(r: random.Random, depth: int = 0) -> Any:
    kind = r.randrange(8 if depth < 4 else 4)
    if kind < 2:
        return r.choice(TEXTS)
    if kind < 4:
        return r.choice(NUMBERS)
    if kind < 6:
        return [draw_value(r, depth + 1) for _ in range(r.randrange(4))]
    return {r.choice((*NAMES, *TEXTS)): draw_value(r, depth + 1) for _ in range(r.randrange(5))}


def draw_body(r: random.Random) -> bytes:
    """Return a good body with something of it replaced, or worse."""
    text = r.choice((r.choice(TEXTS), draw_value(r)))
    good: dict[str, Any] = {
        "model": r.choice(("door", "door", r.choice(TEXTS))),
        "messages": [{"role": "user", "content": text}],
        "input": text,
        "max_tokens": 1,
        "max_output_tokens": 1,
    }
    for _ in range(r.randrange(3)):
        good[r.choice(NAMES)] = draw_value(r)
    body = json.dumps(good, ensure_ascii=r.random() < 0.5).encode("utf-8", "surrogatepass")
    match r.randrange(8):
        case 0:
            body = body[: r.randrange(len(body))]
        case 1:
            at = r.randrange(len(body))
            body = body[:at] + r.randbytes(r.randrange(1, 9)) + body[at + 1 :]
        case 2:
            body = body[:-1] + b', "model": "door"}'
        case 3:
            body = r.choice((b"[" * 100_000, b'{"a":' * 50_000, b"9" * 5000, b"\xef\xbb\xbf" + body, b"nul", b""))
    return body


def draw_request(r: random.Random) -> bytes:
    """Return the bytes of a request: mostly HTTP."""
    if r.random() < 0.05:
        return r.randbytes(r.randrange(1, 3000)) + b"\r\n\r\n"
    body, wild = draw_body(r), r.random() < 0.3
    path = r.choice((CHAT, CHAT, RESPONSES, *PATHS))
    if wild:
        path += r.choice(
            ("%ff", "%00", "/..", "/%2e%2e/", "&source=9" + "9" * r.randrange(30), "&ticket=9-%ff", "?", "#")
        )
    hosts = ("localhost", "[::1]:80", "evil.example", "a:99999", "", "\xe9")
    lengths = (len(body), 0, 1, -1, 10**30, "x", len(body) + 9)
    headers = [
        ("Host", r.choice(hosts) if wild else "localhost"),
        ("Content-Length", str(r.choice(lengths) if wild else len(body))),
        ("Connection", "close"),
    ]
    for _ in range(r.randrange(3) if wild else 0):
        names = ("Origin", "Range", "Expect", "Authorization", "Upgrade", "Host", "X", "Transfer-Encoding", "Cookie")
        values = ("null", "chunked", "bytes=0-0,5-", "bytes=-", "100-continue", "websocket", "\x00", "a" * 20_000)
        headers.append((r.choice(names), r.choice(values)))
    r.shuffle(headers)
    usual = "GET" if path in PATHS[2:] else "POST"
    method = r.choice((usual, usual, "GET", "HEAD", "PUT", "OPTIONS", "get", "\x01")) if wild else usual
    version = r.choice(("HTTP/1.1", "HTTP/1.0", "HTTP/2.0", "HTTP/9")) if wild else "HTTP/1.1"
    head = "".join((f"{method} {path} {version}\r\n", *(f"{name}: {value}\r\n" for name, value in headers), "\r\n"))
    return head.encode("latin-1") + body


def answer_to(address: str, request: bytes) -> bytes:
    """Return all that the server sends."""
    host, port = address.split(":")
    found = b""
    with socket.create_connection((host, int(port)), timeout=60) as one:
        try:
            one.sendall(request)
            while part := one.recv(1 << 16):
                found += part
        except (ConnectionResetError, BrokenPipeError):
            pass
    return found


@pytest.fixture(scope="module")
def address(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    folder = tmp_path_factory.mktemp("states")
    list(ingest(Prepared(0, 6), folder / "door.safetensors", DurableConfig(budget=40), backbone=MockBackbone()))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(connections, "_INTERVAL_S", 0.02)
        with server(folder, videos=(folder,), limits=Limits(head_s=0.05, body_s=0.05)) as address:
            yield address


def check(address: str, seeds: range, log: pytest.LogCaptureFixture) -> Counter[int]:
    """Send the request of each seed; return how often each status came, 0 for none."""
    statuses = Counter[int]()
    for seed in seeds:
        found = answer_to(address, draw_request(random.Random(seed)))
        head, _, body = found.partition(b"\r\n\r\n")
        status = int(head[9:12] or 0)
        statuses[status] += 1
        assert status < 500, f"seed {seed}: {found[:500]!r}"
        assert len(found) < 1 << 16, f"seed {seed}"
        if status >= 400 and b"application/json" in head and body:
            error = json.loads(body)["error"]
            assert error["type"] == "invalid_request_error", f"seed {seed}"
            assert len(error["message"]) < 1000, f"seed {seed}"
    assert raw(address, "GET", "/v1/models")[0] == 200
    assert not [record for record in log.records if record.exc_info]
    return statuses


def test_a_drawn_request_is_answered_or_closed(address: str, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING)
    assert {200, 400, 404} <= set(check(address, range(120), caplog))


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_many_drawn_requests_are_answered_or_closed(address: str, caplog: pytest.LogCaptureFixture) -> None:
    statuses = check(address, range(1000, 1000 + REQUESTS), caplog)
    print(dict(sorted(statuses.items())))
    assert sum(statuses.values()) == REQUESTS
