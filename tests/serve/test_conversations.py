"""Conversations with pictures: each goes on with a session of its own, whatever a client has
dropped of it, and costs no more than a session does.
"""

import base64
import json
import struct
import zlib
from collections.abc import Sequence
from functools import reduce
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from starlette.exceptions import HTTPException
from starlette.testclient import TestClient

import protokv
from protokv.errors import ConfigError
from protokv.ingestion import IngestOptions
from protokv.serve import FedSessionLimits, FedSessions, ServerLimits, StateFolder, build_app
from protokv.serve.chat import parse_chat_request
from protokv.serve.conversations import ChatMessage
from protokv.serve.schemas import read_response_format
from protokv.serve.sessions import parse_session_request
from protokv.stream.session import Session
from protokv.texts import JsonObject
from tests.conftest import random_frames
from tests.mock_backbone import MockBackbone
from tests.serve.conftest import server
from tests.serve.test_bounds import POST, connect, read_all
from tests.serve.test_serve import client
from tests.serve.test_sessions import CONFIG, calls, encode

FRAMES = random_frames(3, 60, 10, 15)
FILES = [encode(frame, lossless=True) for frame in FRAMES]
QUESTION = "what is it"
SAID = [{"role": "user", "content": QUESTION}]


def picture(file: bytes, form: str = "webp") -> JsonObject:
    url = f"data:image/{form};base64,{base64.b64encode(file).decode()}"
    return {"type": "image_url", "image_url": {"url": url, "detail": "low"}}


def turn(i: int, said: str = QUESTION) -> JsonObject:
    return {"role": "user", "content": [{"type": "text", "text": said}, picture(FILES[i])]}


def feed(folder: Path, most: int = 3, **limits: Any) -> FedSessions:
    states = StateFolder(folder, MockBackbone())
    return FedSessions(states, IngestOptions(config=CONFIG), FedSessionLimits(most, **limits))


def read(messages: Sequence[Any]) -> Sequence[ChatMessage]:
    body = json.dumps({"model": "mock", "messages": messages}).encode()
    return parse_chat_request(body, MockBackbone().decoding).messages


def converse(fed: FedSessions, messages: Sequence[Any], key: bytes = b"") -> Session:
    return fed.converse(key, read(messages), lambda: False)


def watch(indices: Sequence[int]) -> Session:
    """A session to which pictures are pushed, each twice, as a step has two."""
    session = Session.start(MockBackbone(), CONFIG)
    for i, frame in enumerate(indices):
        for half_s in (0.0, 0.5):
            session.push(FRAMES[frame], i + half_s)
    return session


def check_same(found: Session, expected: Session) -> None:
    assert found.clock == expected.clock
    torch.testing.assert_close(found.tensors(), expected.tensors(), rtol=0, atol=0)
    choices = ["red", "green"]
    assert found.choose(QUESTION, choices).probabilities == (
        expected.choose(QUESTION, choices).probabilities
    )


@pytest.fixture(autouse=True)
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The time at which pictures arrive; it stands until a test moves it."""
    now_s = [50.0]
    monkeypatch.setattr("protokv.serve.conversations.monotonic", lambda: now_s[0])
    return now_s


@pytest.mark.parametrize("most", [99, 7, 6, 5])
def test_a_conversation_that_grows_is_a_session_to_which_its_new_pictures_are_pushed(
    tmp_path: Path, most: int
) -> None:
    fed = feed(tmp_path)
    sent: list[Any] = []
    for i in range(12):
        sent = [*sent, turn(i, f"frame {i}")][-most:]
        check_same(converse(fed, sent), watch(range(i + 1)))
        # Asked again, it knows all of it, and nothing is fed twice.
        check_same(converse(fed, sent), watch(range(i + 1)))
        sent.append({"role": "assistant", "content": f"nothing {i}"})
    assert len(fed._conversations) == 1


def test_a_picture_stands_at_its_time_of_arrival(tmp_path: Path, clock: list[float]) -> None:
    fed = feed(tmp_path)
    ends = []
    for i in range(3):
        ends.append(converse(fed, [turn(k) for k in range(i + 1)]).clock.stream_time_s)
        clock[0] += 30.0
    assert ends == [1.0, 31.0, 61.0]


def test_two_clients_share_a_beginning_and_no_session(tmp_path: Path) -> None:
    fed = feed(tmp_path)
    start = [turn(0), {"role": "assistant", "content": "a door"}]
    ours = converse(fed, [*start, turn(1)])
    theirs = converse(fed, [*start, turn(2)])
    assert ours is not theirs
    check_same(theirs, watch([0, 2]))
    check_same(converse(fed, [*start, turn(1), turn(3)]), watch([0, 1, 3]))
    check_same(converse(fed, [*start, turn(2)]), watch([0, 2]))
    # The same words of another client are another conversation.
    assert converse(fed, [*start, turn(2)], b"another key") not in (ours, theirs)


def test_nobody_goes_on_with_one_of_two_that_end_alike_or_by_a_single_picture(
    tmp_path: Path,
) -> None:
    fed = feed(tmp_path, most=9)
    first, second = ([turn(i), turn(5), turn(6)] for i in (0, 1))
    one = converse(fed, first)
    check_same(converse(fed, [turn(6), turn(7)]), watch([6, 7]))
    assert converse(fed, first) is one
    converse(fed, second)
    check_same(converse(fed, [turn(5), turn(6), turn(8)]), watch([5, 6, 8]))
    check_same(converse(fed, [*first, turn(8)]), watch([0, 5, 6, 8]))


def test_a_conversation_that_is_gone_is_made_anew_from_what_is_sent(
    tmp_path: Path,
) -> None:
    fed = feed(tmp_path, most=2, idle_s=0.0)
    sent = [turn(i) for i in range(4)]
    first = converse(fed, sent)
    fed.put_away()
    assert not fed._conversations
    again = converse(fed, sent[1:])
    assert again is not first
    check_same(again, watch([1, 2, 3]))
    # One that goes on stays, whatever single requests come.
    again = converse(fed, [*sent[1:], turn(4)])
    for i in range(10, 20):
        converse(fed, [turn(i)])
    check_same(converse(fed, [*sent[1:], turn(4), turn(5)]), watch([1, 2, 3, 4, 5]))
    # Named sessions come first, and take the last place, too.
    for left in (1, 0):
        fed.open(parse_session_request(b""))
        assert len(fed._conversations) == left
    with pytest.raises(HTTPException, match="503"):
        converse(fed, sent)


def test_a_picture_that_cannot_be_read_leaves_a_conversation_as_it_was(tmp_path: Path) -> None:
    fed = feed(tmp_path)
    sent = [turn(0)]
    converse(fed, sent)
    bad = {"role": "user", "content": [turn(1)["content"][1], picture(FILES[2][:-9])]}
    with pytest.raises(ConfigError, match="no whole JPEG"):
        converse(fed, [*sent, bad])
    with pytest.raises(HTTPException, match="left"):
        fed.converse(b"", read([*sent, turn(1)]), lambda: True)
    check_same(converse(fed, [*sent, turn(3)]), watch([0, 3]))


def test_a_client_gets_answers_about_its_pictures_whole_and_in_pieces(tmp_path: Path) -> None:
    with (
        server(tmp_path, feed=(IngestOptions(config=CONFIG), None)) as address,
        client(address) as one,
    ):
        assert [model.id for model in one.models.list()] == ["mock"]
        sent: list[Any] = [{"role": "system", "content": "be brief"}]
        for i in range(5):
            sent.append(turn(i))
            expected = watch(range(i + 1)).ask(QUESTION, system="be brief")
            whole: Any = one.chat.completions.create(
                model="mock", messages=sent, tools=None, logprobs=True
            )
            (choice,) = whole.choices
            assert choice.message.content == expected.text
            assert len(choice.logprobs.content) == expected.tokens == whole.usage.completion_tokens
            pieces: Any = one.chat.completions.create(model="mock", messages=sent, stream=True)
            text = "".join(piece.choices[0].delta.content or "" for piece in pieces)
            assert text.strip() == expected.text
            sent.append({"role": "assistant", "content": expected.text})
        # One without pictures is answered, too.
        hello: Any = [{"role": "user", "content": "hi"}]
        assert one.chat.completions.create(model="mock", messages=hello).choices


def test_single_requests_are_remembered_by_the_session_that_they_name(tmp_path: Path) -> None:
    feed = (IngestOptions(config=CONFIG), None)

    def ask(address: str, i: int) -> Any:
        # What was sent before is seen already.
        old: Any = [turn(50 + i), {"role": "assistant", "content": "red"}]
        sent: Any = [*old, turn(i)] if i % 2 else [turn(i)]
        with client(address) as one:
            return one.chat.completions.create(model="porch", messages=sent)

    for first in (0, 2):
        with server(tmp_path, feed=feed) as address:
            if not first:
                assert calls(address)(body={"name": "porch"})[0] == 201
            for i in (first, first + 1):
                expected = watch(range(i + 1))
                reply = ask(address, i)
                assert reply.choices[0].message.content == expected.ask(QUESTION).text
    saved = protokv.load(tmp_path / "porch.safetensors", MockBackbone())
    torch.testing.assert_close(
        saved.tensors()["near.keys"], watch(range(4)).tensors()["near.keys"], rtol=0, atol=0
    )
    assert saved.clock.steps == 4


def nest(depth: int) -> str:
    return '{"model": "mock", "messages": ' + "[" * depth + "]" * depth + "}"


REFUSED = [
    ([picture(b"GIF89a" + bytes(20), "gif")], 400, "no whole JPEG"),
    ([{"type": "image_url", "image_url": {"url": "https://localhost/a.jpg"}}], 400, "no address"),
    (
        [{"type": "image_url", "image_url": {"url": "data:image/png;base64,a*b="}}],
        400,
        "no address",
    ),
    ([picture(encode(np.zeros((700, 600, 3), np.uint8), "PNG"), "png")], 413, "400,000 pixels"),
    ([picture(bytes(9000))], 413, "8,000 bytes"),
    ([picture(FILES[0])] * 200, 413, "a request has at most"),
    ([{"type": "input_audio", "input_audio": {}}], 400, "input_audio"),
]


@pytest.fixture(scope="module")
def strict(made: Path) -> Any:
    """A client of an application with small limits."""
    limits = FedSessionLimits(frame_bytes=8000, frame_pixels=400_000)
    states = StateFolder(made, MockBackbone())
    fed = FedSessions(states, IngestOptions(config=CONFIG), limits)
    app = build_app(states, fed=fed, limits=ServerLimits(picture_bytes=150_000))
    with TestClient(app, base_url="http://localhost") as one:
        yield one


def refuse(one: TestClient, messages: Any, status: int = 400, **asked: Any) -> str:
    """Return what is said of a request that is refused."""
    asked = {"model": "mock", "messages": messages} | asked
    reply = one.post("/v1/chat/completions", json=asked)
    assert reply.status_code == status, reply.text
    said: str = reply.json()["error"]["message"]
    return said


@pytest.mark.parametrize(("parts", "status", "why"), REFUSED)
def test_pictures_that_cannot_be_are_refused_in_a_line(
    strict: TestClient, parts: list[Any], status: int, why: str
) -> None:
    said = [{"type": "text", "text": QUESTION}]
    assert why in refuse(strict, [{"role": "user", "content": said + parts}], status)


def bomb(width: int, height: int) -> bytes:
    """A PNG of a few bytes that says that it is so large."""
    whole = encode(np.zeros((1, 1, 3), np.uint8), "PNG")
    head = b"IHDR" + struct.pack(">II", width, height) + whole[24:29]
    return whole[:12] + head + struct.pack(">I", zlib.crc32(head)) + whole[33:]


@pytest.mark.filterwarnings("ignore::PIL.Image.DecompressionBombWarning")
@pytest.mark.parametrize("side", [6_000, 10_000, 60_000, 2**31 - 1])
def test_a_picture_that_says_it_is_huge_is_refused_before_it_is_decoded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, side: int
) -> None:
    decoded = list[Any]()
    monkeypatch.setattr("PIL.ImageFile.ImageFile.load", decoded.append)
    with pytest.raises((ConfigError, HTTPException)):
        converse(feed(tmp_path), [{"role": "user", "content": [picture(bomb(side, side), "png")]}])
    assert not decoded


def test_pictures_are_for_the_user_and_for_the_model_alone(strict: TestClient, made: Path) -> None:
    assert "not of a session" in refuse(strict, [turn(0)], 409, model="door")
    assert "it is always now" in refuse(strict, [turn(0)], at="1s")
    assert "it is always now" in refuse(strict, [turn(0)], model="door", at="1s")
    assert "of the user" in refuse(strict, [turn(0), turn(0) | {"role": "assistant"}, turn(1)])
    assert "length <= 4096" in refuse(strict, [{"role": "user"}] * 4097)
    app = build_app(StateFolder(made, MockBackbone()))
    with TestClient(app, base_url="http://localhost") as one:
        assert "--sessions" in refuse(one, [turn(0)], model="door")
    for depth in (200, 50_000):
        reply = strict.post("/v1/chat/completions", content=nest(depth))
        assert reply.status_code == 400


YES = {"type": "boolean"}


def schema(**fields: Any) -> JsonObject:
    return {
        "type": "object",
        "properties": fields,
        "required": [*fields],
        "additionalProperties": False,
        "title": "Seen",
    }


def ask_for(asked: Any) -> JsonObject:
    return {"type": "json_schema", "json_schema": {"name": "a", "schema": asked}}


FEW: list[tuple[JsonObject, list[Any]]] = [
    ({"enum": ["red", "green"]}, ["red", "green"]),
    ({"type": "string", "enum": ["red", "green"]}, ["red", "green"]),
    (schema(met=YES | {"description": "whether"}), [{"met": False}, {"met": True}]),
    (
        schema(met=schema(colour={"enum": ["red", "blue"]}), wait={"const": 3}),
        [{"met": {"colour": "red"}, "wait": 3}, {"met": {"colour": "blue"}, "wait": 3}],
    ),
    (
        {"enum": [{"met": False, "why": "red"}, {"met": True, "why": "star"}]},
        [{"met": False, "why": "red"}, {"met": True, "why": "star"}],
    ),
]


@pytest.mark.parametrize(("asked", "answers"), FEW)
def test_a_schema_of_few_answers_is_a_choice_among_them(
    asked: JsonObject, answers: list[Any]
) -> None:
    forms, schema = read_response_format(ask_for(asked))
    assert ([json.loads(one) for one in forms.values()], schema) == (answers, "")


FREE: list[JsonObject] = [
    {},
    {"type": "string"},
    {"enum": []},
    {"enum": "red"},
    {"enum": ["red", "red"]},
    {"enum": ["red", "green"], "pattern": "r"},
    schema(a=YES, b=YES),
    schema(a=YES, why={"type": "string"}),
    schema(a={"enum": list(range(65))}),
    schema(**{f"a{i}": YES for i in range(2000)}),
    reduce(lambda inner, _: schema(a=inner), range(150), YES),
]


@pytest.mark.parametrize("asked", FREE, ids=range(len(FREE)))
def test_any_other_schema_is_written_by_its_grammar(asked: JsonObject) -> None:
    assert read_response_format(ask_for(asked)) == ({}, json.dumps(asked))


def test_a_form_that_cannot_be_is_refused(strict: TestClient) -> None:
    for odd in ({"type": "json_schema"}, {"type": "xml"}, "text", ask_for([])):
        with pytest.raises(ConfigError, match="response_format: expected"):
            read_response_format(odd)
    few = ask_for({"enum": ["red", "green"]})
    said = refuse(strict, SAID, model="door", response_format=few, choices=["red", "blue"])
    assert "choices: response_format says" in said
    # The model knows words alone.
    said = refuse(strict, SAID, model="door", response_format={"type": "json_object"})
    assert "such JSON cannot be written" in said


def test_only_so_many_requests_with_pictures_come_at_once(tmp_path: Path) -> None:
    half = POST + b"Content-Length: 300\r\n\r\n" + b" " * 200
    limits = ServerLimits(body_bytes=100, waiting=1)
    with (
        server(tmp_path, feed=(IngestOptions(config=CONFIG), None), limits=limits) as address,
        connect(address, half),
        connect(address, half) as other,
    ):
        assert read_all(other).startswith(b"HTTP/1.1 503")
