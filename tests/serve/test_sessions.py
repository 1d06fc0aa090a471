"""Sessions that a client feeds over a socket: what they know, how they go on, and what they
refuse.
"""

import io
import json
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from http.client import HTTPConnection
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from starlette.exceptions import HTTPException

import protokv
from protokv.ingestion import Every, IngestOptions
from protokv.memories import DurableConfig
from protokv.serve import FedSessionLimits, FedSessions, StateFolder
from protokv.serve.sessions import decode_uploaded_frame, parse_session_request
from protokv.state.reader import StateReader
from protokv.stream.session import Session
from protokv.video import open_source
from tests.conftest import random_frames
from tests.mock_backbone import MockBackbone
from tests.serve.conftest import server
from tests.serve.test_serve import ask as ask_client
from tests.serve.test_serve import client
from tests.stream.test_still import note_sizes

CONFIG = DurableConfig(budget=40)
FRAMES = random_frames(0, 80, 10, 15)


def encode(frame: Any, form: str = "WEBP", **how: Any) -> bytes:
    file = io.BytesIO()
    Image.fromarray(frame).save(file, form, **how)
    return file.getvalue()


FILES = [encode(frame, lossless=True) for frame in FRAMES]


def calls(address: str, **headers: str) -> Any:
    def call(path: str = "", body: Any = b"", method: str = "POST") -> tuple[int, Any]:
        data = body if isinstance(body, bytes) else json.dumps(body)
        with closing(HTTPConnection(address, timeout=30)) as connection:
            connection.request(method, f"/v1/streaming/sessions{path}", data, headers)
            reply = connection.getresponse()
            return reply.status, json.loads(reply.read())

    return call


def ask(address: str, name: str) -> Any:
    with client(address) as one:
        answer = ask_client(one, name)
    return answer.choices[0].message.content, answer.stream_time_s


def test_a_session_answers_between_frames_and_goes_on_after_a_restart_as_if_there_was_none(
    tmp_path: Path,
) -> None:
    feed = (IngestOptions(config=CONFIG, every=Every(seconds=5.0), keep=3), None)
    expected = Session.start(MockBackbone(), CONFIG)
    opened = {"session_id": "porch", "model": "mock", "fps": 2.0, "stream_time_s": 0.0}
    for first in (0, 40):
        with server(tmp_path, feed=feed) as address:
            call = calls(address)
            if first:  # from its state, as nobody feeds it
                assert ask(address, "porch")[1] == 20.0
            assert call(body={"name": "porch"}) == (201, opened | {"stream_time_s": first / 2})
            for i in range(first, first + 40):
                status, reply = call(f"/porch/frame?time_s={i / 2}", FILES[i])
                assert (status, reply["watched"]) == (200, expected.push(FRAMES[i], i / 2))
                assert (reply["steps"], reply["stream_time_s"]) == (expected.clock.steps, i / 2)
                if i % 8 == 1:
                    own = expected.ask("what is it")
                    assert ask(address, "porch") == (own.text, own.stream_time_s)
            if first:
                closed = {"session_id": "porch", "frames": 40, "closed": True}
                assert call("/porch", method="DELETE") == (200, closed)
                assert ask(address, "porch")[0] == expected.ask("what is it").text
    reader = StateReader.open(tmp_path / "porch.safetensors")
    saved = protokv.load(reader.path, MockBackbone())
    torch.testing.assert_close(saved.tensors(), expected.tensors(), rtol=0, atol=0)
    assert (saved.clock, reader.header.complete) == (expected.clock, True)
    assert len(reader.commits_s) == 3
    assert reader.wall_clocks[0].gaps[0].why == "nobody watched"


def test_frames_that_wait_share_a_forward_and_a_refused_one_leaves_the_others_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(MockBackbone, "frames_per_step", 1)
    backbone = MockBackbone()
    alone = [Session.start(backbone, CONFIG) for _ in range(4)]
    add = FedSessions.add

    def hold(fed: FedSessions, *given: Any) -> Any:
        """Let the model go when frames of all wait for it."""
        reply = add(fed, *given)
        if len(fed._due) == 1:
            fed._states.lock.acquire()
        if len(fed._due) == len(alone):
            fed._states.lock.release()
        return reply

    monkeypatch.setattr(FedSessions, "add", hold)
    feed = (IngestOptions(config=CONFIG), None)
    with server(tmp_path, backbone, feed) as address, ThreadPoolExecutor(4) as clients:
        call = calls(address)
        for n in range(4):
            call(body={"name": str(n)})
        forwards = note_sizes(backbone, "forward", monkeypatch)
        for i in range(9):
            # The last time of one runs back.
            times_s = [i % 8, i, i, i]
            paths = [f"/{n}/frame?time_s={time_s}" for n, time_s in enumerate(times_s)]
            sent = clients.map(call, paths, FILES[i:])
            assert [status for status, _ in sent] == [400 if i == 8 else 200, 200, 200, 200]
        assert len(forwards) == 9
        for n in range(4):
            call(f"/{n}", method="DELETE")
    for n, session in enumerate(alone):
        for i in range(9 if n else 8):
            session.push(FRAMES[i + n], float(i))
        saved = protokv.load(tmp_path / f"{n}.safetensors", backbone)
        torch.testing.assert_close(saved.tensors(), session.tensors(), rtol=0, atol=0)


def test_a_session_that_nobody_feeds_is_put_away_and_can_be_opened_again(tmp_path: Path) -> None:
    with server(
        tmp_path, feed=(IngestOptions(config=CONFIG), FedSessionLimits(idle_s=0.5))
    ) as address:
        call = calls(address)
        until_s = time.monotonic() + 30
        call(body={"name": "porch"})
        for i in (0, 1):
            assert call(f"/porch/frame?time_s={i / 2}", FILES[i])[0] == 200
        while StateReader.open(tmp_path / "porch.safetensors").header.clock.steps == 0:
            assert time.monotonic() < until_s
            time.sleep(0.05)
        status, reply = call("/porch/frame", FILES[2])
        assert (status, "goes on" in reply["error"]["message"]) == (404, True)
        assert call(body={"name": "porch"})[1]["stream_time_s"] == 1.0
        # A frame without a time is of now.
        assert call("/porch/frame", encode(FRAMES[2], "JPEG"))[1]["stream_time_s"] >= 1.0


def test_there_are_so_many_sessions_and_each_takes_one_frame_at_a_time(tmp_path: Path) -> None:
    sessions = FedSessions(
        StateFolder(tmp_path, MockBackbone()),
        IngestOptions(config=CONFIG),
        FedSessionLimits(most=1),
    )
    one = sessions.find(sessions.open(parse_session_request(b""))["session_id"])
    with pytest.raises(HTTPException, match="503"):
        sessions.open(parse_session_request(b""))
    with one.admit(), pytest.raises(HTTPException, match="409"), one.admit():
        pass


@pytest.fixture(scope="module")
def strict(made: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A server with small limits and a token, and two sessions."""
    folder = tmp_path_factory.mktemp("strict")
    (folder / "door.safetensors").write_bytes((made / "door.safetensors").read_bytes())
    (folder / "odd.safetensors").symlink_to("elsewhere")
    feed = (IngestOptions(config=CONFIG), FedSessionLimits(frame_bytes=2000, frame_pixels=10 * 15))
    with server(folder, feed=feed, token="right") as address:
        assert [
            calls(address, Authorization="Bearer right")(body={"name": one})[0] for one in "ab"
        ] == [201, 201]
        yield address


FRAME = "/a/frame"
REFUSED = [
    ("", b"\xff{", 400, "takes name"),
    ("", {"name": "../door"}, 400, "name"),
    ("", {"name": "a.b"}, 400, "name"),
    ("", {"question": "what"}, 400, "is asked at"),
    ("", {"fps": 0}, 400, "fps"),
    ("", {"system_prompt": "be brief"}, 400, "system prompt"),
    ("", {"name": "a"}, 409, "fed already"),
    ("", {"name": "door"}, 409, "not of a session"),
    ("", {"name": "odd"}, 409, "no state"),
    (FRAME, FILES[0][:-9], 400, "no whole JPEG"),
    (FRAME, b"GIF89a", 400, "no whole JPEG"),
    (FRAME, bytes(2001), 413, "2,000 bytes"),
    (FRAME, encode(FRAMES[:2].reshape(-1, 15, 3)), 413, "150 pixels"),
    (f"{FRAME}?time_s=now", FILES[0], 400, "seconds"),
    (f"{FRAME}?time_s=nan", FILES[0], 400, "comes after"),
    (f"{FRAME}?time_s=-1", FILES[0], 400, "comes after"),
    (f"{FRAME}?time_s=1.8e9", FILES[0], 400, "beginning"),
    ("/nobody/frame", FILES[0], 404, "goes on"),
]


@pytest.mark.parametrize(("path", "body", "status", "why"), REFUSED)
def test_what_cannot_be_is_refused_in_a_line(
    strict: str, path: str, body: Any, status: int, why: str
) -> None:
    found, reply = calls(strict, Authorization="Bearer right")(path, body)
    assert (found, why in reply["error"]["message"]) == (status, True), reply
    assert calls(strict)(path, body)[0] == 401


UPLOADS = [(form, "RGB", tag) for form in ("PNG", "WEBP", "JPEG") for tag in range(1, 9)]
UPLOADS += [("PNG", mode, 6) for mode in ("I;16", "L", "1", "P", "LA", "RGBA")]
UPLOADS += [("JPEG", mode, 3) for mode in ("L", "CMYK")]


@pytest.mark.parametrize(("form", "mode", "tag"), UPLOADS)
def test_an_uploaded_picture_is_seen_as_ingest_sees_the_same_file(
    form: str, mode: str, tag: int, tmp_path: Path
) -> None:
    rows = np.add.outer(np.arange(48), np.arange(64)) * 2
    if mode == "I;16":
        picture = Image.fromarray((rows * 257).astype(np.uint16))
    else:
        picture = Image.fromarray(rows.astype(np.uint8)).convert(mode)
    exif = Image.Exif()
    exif[0x112] = tag
    path = tmp_path / f"x.{form.lower()}"
    picture.save(path, form, exif=exif, quality=95)
    with open_source(path) as source:
        watched = next(source.frames()).image
    sent = decode_uploaded_frame(path.read_bytes(), 64 * 48)
    assert sent.shape == watched.shape
    assert np.abs(sent.astype(int) - watched).max() <= 3
