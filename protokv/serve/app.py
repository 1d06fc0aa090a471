"""The web application: routes, the token, and limits. Knows neither how states are read nor how questions are parsed.

There is one model, so one thread answers, one question after another. A question beyond the limits is refused at once;
an answer that takes too long is cut off.
"""

from __future__ import annotations

import asyncio
import hmac
import json
import time
import uuid
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.requests import Request as WebRequest
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from protokv.core.session import Answer
from protokv.errors import ConfigError, NotUnderstood, ProtoKVError, StateNotFound
from protokv.serve import chat
from protokv.serve.states import States
from protokv.storage.watched import meaningless


@dataclass(frozen=True, slots=True)
class Limits:
    """The limits of a server.

    Attributes:
        body_bytes: the most of a request.
        waiting: the most questions that are being answered or wait.
        answer_s: the longest time for an answer, waiting included.
    """

    body_bytes: int = 1 << 20
    waiting: int = 16
    answer_s: float = 120.0


class TooMuch(ProtoKVError):
    """A question goes beyond the limits."""


def build_app(states: States, *, token: str | None = None, limits: Limits | None = None) -> Starlette:
    """Build the application.

    Args:
        states: answer the questions.
        token: clients must send it (`Authorization: Bearer TOKEN`); None: everybody may ask.
        limits: of the server.
    """
    server = _Server(states, token, limits or Limits())
    return Starlette(
        routes=[
            Route("/healthz", server.health),
            Route("/v1/models", server.models),
            Route("/v1/models/{name:path}", server.model),
            Route("/v1/chat/completions", server.complete, methods=["POST"]),
        ],
        exception_handlers={ProtoKVError: _refuse, HTTPException: _refuse_http},
        lifespan=server.lifespan,
    )


class _Server:
    def __init__(self, states: States, token: str | None, limits: Limits) -> None:
        self._states, self._token, self._limits = states, token, limits
        self._pool = ThreadPoolExecutor(1, "protokv-serve")
        self._waiting = 0

    @asynccontextmanager
    async def lifespan(self, _: Starlette) -> AsyncIterator[None]:
        yield
        self._pool.shutdown(cancel_futures=True)

    async def health(self, _: WebRequest) -> Response:
        return JSONResponse({"status": "ok"})

    async def models(self, request: WebRequest) -> Response:
        self._authorise(request)
        found = self._states.names()
        return JSONResponse({"object": "list", "data": [self._describe(*one) for one in found.items()]})

    async def model(self, request: WebRequest) -> Response:
        self._authorise(request)
        name = request.path_params["name"]
        return JSONResponse(self._describe(name, self._states.find(name)))

    def _describe(self, name: str, path: Path) -> dict[str, Any]:
        return {"id": name, "object": "model", "created": self._states.created(path), "owned_by": "protokv"}

    async def complete(self, request: WebRequest) -> Response:
        self._authorise(request)
        asked = chat.parse(await self._body(request))
        path = self._states.find(asked.model)
        if self._waiting >= self._limits.waiting:
            raise TooMuch("too many questions at once; ask again later")
        pieces, number = self._ask(asked, path), uuid.uuid4().hex
        # Errors come before the first piece, so they have their HTTP status in a stream too.
        first = await anext(pieces)
        if asked.stream:
            return StreamingResponse(_events(number, asked, first, pieces), media_type="text/event-stream")
        answer = first
        async for one in pieces:
            answer = one
        assert isinstance(answer, Answer)
        return JSONResponse(chat.completion(number, asked, answer))

    async def _ask(self, asked: chat.Request, path: Path) -> AsyncIterator[str | Answer]:
        """Yield pieces of the answer as they come, and last the answer. Raises what the thread raised."""
        loop, queue = asyncio.get_running_loop(), asyncio.Queue[str | Answer | BaseException]()
        until_s = time.monotonic() + self._limits.answer_s
        left = False

        def tell(item: str | Answer | BaseException) -> None:
            loop.call_soon_threadsafe(queue.put_nowait, item)

        self._waiting += 1
        work = self._pool.submit(self._answer, asked, path, tell, lambda: left or time.monotonic() > until_s)
        try:
            while True:
                try:
                    item = await asyncio.wait_for(queue.get(), max(0.0, until_s - time.monotonic()))
                except TimeoutError:
                    raise TooMuch(f"no answer in {self._limits.answer_s:g} s; ask again later") from None
                if isinstance(item, BaseException):
                    raise item
                yield item
                if isinstance(item, Answer):
                    return
        finally:
            left = True
            work.cancel()
            self._waiting -= 1

    def _answer(
        self,
        asked: chat.Request,
        path: Path,
        tell: Callable[[str | Answer | BaseException], None],
        stop: Callable[[], bool],
    ) -> None:
        try:
            session = self._states.session(path)
            if session.beyond_model and not asked.anyway:
                message = f'{meaningless(session.beyond_model)}; a request with "anyway": true is answered all the same'
                raise NotUnderstood(message)
            pieces = session.stream(asked.question, asked.decoding)
            while not stop():
                try:
                    tell(next(pieces))
                except StopIteration as end:
                    tell(end.value)
                    return
            pieces.close()
        except BaseException as error:
            tell(error)

    async def _body(self, request: WebRequest) -> bytes:
        body = b""
        try:
            async for part in request.stream():
                body += part
                if len(body) > self._limits.body_bytes:
                    raise HTTPException(413, f"a request has at most {self._limits.body_bytes} bytes")
        except ClientDisconnect:
            raise HTTPException(400, "the request was cut short") from None
        return body

    def _authorise(self, request: WebRequest) -> None:
        if self._token is None:
            return
        given = request.headers.get("authorization", "").removeprefix("Bearer ")
        if not hmac.compare_digest(given.encode(), self._token.encode()):
            raise HTTPException(401, "the token is missing or wrong", {"WWW-Authenticate": "Bearer"})


async def _events(
    number: str, asked: chat.Request, first: str | Answer, pieces: AsyncIterator[str | Answer]
) -> AsyncIterator[str]:
    """Yield the answer as server-sent events."""
    yield _event(chat.chunk(number, asked, None))
    try:
        item = first
        while not isinstance(item, Answer):
            yield _event(chat.chunk(number, asked, item))
            item = await anext(pieces)
        yield _event(chat.chunk(number, asked, "", item))
        if asked.usage:
            yield _event(chat.usage_chunk(number, asked, item))
        yield "data: [DONE]\n\n"
    except ProtoKVError as error:
        yield _event({"error": _error(error.message, _status(error))})


def _event(data: dict[str, Any]) -> str:
    return f"data: {json.dumps(data)}\n\n"


def _status(error: ProtoKVError) -> int:
    if isinstance(error, StateNotFound):
        return 404
    if isinstance(error, ConfigError):
        return 400
    if isinstance(error, TooMuch):
        return 503
    # The state is damaged, or another model made it.
    return 409


def _error(message: str, status: int, code: str | None = None) -> dict[str, Any]:
    kind = "invalid_request_error" if status < 500 else "server_error"
    return {"message": " ".join(message.split()), "type": kind, "param": None, "code": code}


async def _refuse(_: WebRequest, error: Exception) -> Response:
    assert isinstance(error, ProtoKVError)
    status, code = _status(error), "beyond_model" if isinstance(error, NotUnderstood) else None
    return JSONResponse({"error": _error(error.message, status, code)}, status)


async def _refuse_http(_: WebRequest, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    return JSONResponse({"error": _error(error.detail, error.status_code)}, error.status_code, error.headers)
