"""The web application: routes, and errors as OpenAI has them. Knows neither how states are read nor
what is asked.

There is one model, so one thread answers and watches. Questions that wait are answered together,
and new ones join them (`protokv.stream.together`), unless other work waits. A question beyond the
limits is refused at once; an answer that takes too long is cut off.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import anyio
import uvicorn
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from protokv.errors import ConfigError, ProtoKVError, StateNotFound
from protokv.serve import chat, sessions
from protokv.serve.access import AccessCheck
from protokv.serve.connection import BoundedConnection
from protokv.serve.conversations import digest_parts
from protokv.serve.page import WebPage
from protokv.serve.sessions import FedSessions
from protokv.serve.states import StateFolder, name_model
from protokv.serve.waiting import WaitingQuestion, WaitingQuestions
from protokv.state.sources import VideoPlace, make_notice
from protokv.stream.answer import Answer
from protokv.stream.promise import find_promise_rule
from protokv.stream.together import AskedQuestion
from protokv.texts import JsonObject, shorten_text

# How often it is looked for sessions that nobody feeds.
_SWEEP_S = 1.0
# How long the end of a server waits for the last answer.
_STOP_S = 5.0

_Handler = Callable[[Request], Awaitable[Response]]


@dataclass(frozen=True, slots=True)
class ServerLimits:
    """The limits of a server."""

    body_bytes: int = 1 << 20  # the most of a request
    picture_bytes: int = 16 << 20  # the most of one that may have pictures
    waiting: int = 16  # the most questions that are being answered or wait, and pictures that come
    answer_s: float = 120.0  # the longest time for an answer, waiting included
    request_s: float = 30.0  # the longest time for a request to come whole, and its reply to go
    connections: int = 128  # at once; beyond, those go first that ask nothing


_LIMITS = ServerLimits()


class _TooMuch(ProtoKVError):
    """A question goes beyond the limits."""


def build_app(
    states: StateFolder,
    *,
    token: str | None = None,
    limits: ServerLimits = _LIMITS,
    fed: FedSessions | None = None,
    origins: Sequence[str] = (),
) -> Starlette:
    """Build the application; without a token (`Authorization: Bearer TOKEN`) everybody on this
    machine may ask.

    With `fed`, clients may feed sessions; pages of `origins`, such as http://localhost:3000, may
    ask, too. ConfigError: no client could send the token, or an origin is none.
    """
    server = _Server(states, AccessCheck(token, origins), limits, fed)
    page = WebPage(states)
    feed = server.routes("/v1/streaming/sessions", fed) if fed is not None else []
    return Starlette(
        routes=[
            Route("/", page.index),
            Route("/health", lambda _: JSONResponse({"status": "ok"})),
            Route("/page/state", server.guard(page.state)),
            Route("/v1/models", server.guard(server.models)),
            Route("/v1/models/{name:path}", server.guard(server.models)),
            Route("/v1/chat/completions", server.guard(server.answer), methods=["POST"]),
            *feed,
        ],
        middleware=[
            Middleware(
                CORSMiddleware,
                allow_origins=origins,
                allow_methods=("GET", "POST", "DELETE"),
                allow_headers=("*",),
            )
        ],
        exception_handlers=dict.fromkeys((ProtoKVError, HTTPException, Exception), server.refuse),
        lifespan=server.lifespan,
    )


def make_uvicorn_config(
    app: Starlette, host: str, port: int, limits: ServerLimits = _LIMITS
) -> uvicorn.Config:
    """Return how uvicorn serves an application, within limits. It logs to `logging` alone."""

    class Connection(BoundedConnection):
        request_s = limits.request_s

    return uvicorn.Config(
        app,
        host=host,
        port=port,
        # h11 bounds what comes before a body.
        http=Connection,
        h11_max_incomplete_event_size=16 * 1024,
        limit_concurrency=limits.connections,
        # As many are accepted at once, before one of them can be closed.
        backlog=limits.connections,
        timeout_keep_alive=10,
        timeout_graceful_shutdown=5,
        log_config=None,
        access_log=False,
        proxy_headers=False,
        server_header=False,
    )


class _Server:
    def __init__(
        self,
        states: StateFolder,
        access: AccessCheck,
        limits: ServerLimits,
        fed: FedSessions | None,
    ) -> None:
        self._states = states
        self._access = access
        self._limits = limits
        self._fed = fed
        # An engine answers many questions at once.
        threads = 1 if states.engine is None else self._limits.waiting
        self._pool = ThreadPoolExecutor(threads, "protokv-serve")
        self._waiting = 0
        self._questions = WaitingQuestions(self._open)
        self._coming = 0  # bodies that have pictures, as they are so large
        self._model = name_model(states.backbone.identity)

    @asynccontextmanager
    async def lifespan(self, _: Starlette) -> AsyncIterator[None]:
        sweeper = None if self._fed is None else asyncio.create_task(self._sweep(self._fed))
        yield
        if sweeper is not None:
            sweeper.cancel()
        try:
            # All other questions are given up by now.
            await asyncio.wait_for(self._work(int), _STOP_S)
            if self._fed is not None:
                await self._work(partial(self._fed.put_away, every_one=True))
        except TimeoutError:
            why = "an answer does not end; fed sessions stay as they were last committed"
            logging.getLogger("protokv.serve").error(why)
        self._pool.shutdown(wait=False, cancel_futures=True)

    async def _sweep(self, fed: FedSessions) -> None:
        while True:
            await asyncio.sleep(_SWEEP_S)
            await self._work(fed.put_away)

    def _work(self, call: Callable[..., Any], *arguments: Any) -> Awaitable[Any]:
        """Call in a thread that has the model."""

        def use_model() -> Any:
            with self._states.lock:
                return call(*arguments)

        def end(_: Any) -> None:
            self._questions.others -= 1

        self._questions.others += 1
        work = asyncio.get_running_loop().run_in_executor(self._pool, use_model)
        work.add_done_callback(end)
        return work

    def routes(self, path: str, fed: FedSessions) -> list[Route]:
        """Return the routes by which sessions are fed."""

        async def begin(request: Request) -> Response:
            asked = await self._read(
                request, self._limits.body_bytes, sessions.parse_session_request
            )
            return JSONResponse(await self._work(fed.open, asked), 201)

        async def push(request: Request) -> Response:
            name = request.path_params["name"]
            given = request.query_params.get("time_s")
            try:
                time_s = None if given is None else float(given)
            except ValueError:
                raise ConfigError("time_s: expected seconds") from None
            with (one := fed.find(name)).admit():
                decode = partial(
                    sessions.decode_uploaded_frame, most_pixels=fed.limits.frame_pixels
                )
                image = await self._read(request, fed.limits.frame_bytes, decode)
                reply = fed.add(one, fed.push(name, one, image, time_s))
                while not reply.done():
                    await self._work(fed.push_due)
                return JSONResponse(reply.result())

        async def end(request: Request) -> Response:
            return JSONResponse(await self._work(fed.close, request.path_params["name"]))

        each = (
            (path, begin, "POST"),
            (path + "/{name}/frame", push, "POST"),
            (path + "/{name}", end, "DELETE"),
        )
        return [
            Route(where, self.guard(handler), methods=[method]) for where, handler, method in each
        ]

    async def models(self, request: Request) -> Response:
        """List all states, or answer with the one that is named."""
        one = request.path_params.get("name")

        def read() -> list[JsonObject]:
            times = {} if self._fed is None else {self._model: 0}
            found = self._states.list_all()
            times |= {name: self._states.read_commit_time(path) for name, path in found.items()}
            return [
                {"id": name, "object": "model", "created": s, "owned_by": "protokv"}
                for name, s in times.items()
                if one in (None, name)
            ]

        models = await anyio.to_thread.run_sync(read)
        if one is None:
            return JSONResponse({"object": "list", "data": models})
        if not models:
            raise StateNotFound(f"there is no state {one!r}")
        return JSONResponse(models[0])

    def guard(self, handler: _Handler) -> _Handler:
        """Return a handler that answers only those who may ask."""

        async def guarded(request: Request) -> Response:
            self._access.check(request.headers)
            return await handler(request)

        return guarded

    async def answer(self, request: Request) -> Response:
        """Answer a question, whole or in pieces."""
        bounds = self._limits
        most = bounds.body_bytes if self._fed is None else bounds.picture_bytes
        parse = partial(chat.parse_chat_request, published=self._states.decoding)
        asked: chat.ChatRequest = await self._read(request, most, parse)
        path = self._find(asked)
        if self._waiting >= self._limits.waiting:
            raise _TooMuch("too many questions at once; ask again later")
        pieces = self._ask(asked, path, request)
        notice = make_notice(self._states.backbone.identity.name)
        places = list[VideoPlace]()
        if path is not None:
            notice, places = await anyio.to_thread.run_sync(self._states.read_remarks, path)
        reply = chat.ChatCompletion(asked, self._states.decode, notice, places)
        # Errors come before the first piece, so they have their HTTP status in a stream too.
        item = await anext(pieces)
        if asked.stream:
            return StreamingResponse(
                reply.stream(item, pieces, self._describe), media_type="text/event-stream"
            )
        while not isinstance(item, Answer):
            item = await anext(pieces)
        return JSONResponse(reply.whole(item))

    def _find(self, asked: chat.ChatRequest) -> Path | None:
        """Return where the state is that is asked; None: it is a conversation with pictures.
        ConfigError, StateNotFound.
        """
        own = self._fed is not None and asked.model == self._model
        if asked.at is not None and (own or asked.messages[-1].files):
            raise ConfigError("at: with pictures, and of the model itself, it is always now")
        if self._fed is None and any(one.files for one in asked.messages):
            raise ConfigError("messages: pictures are watched by serve --sessions COUNT")
        return None if own else self._states.find(asked.model)

    async def _ask(
        self, asked: chat.ChatRequest, path: Path | None, request: Request
    ) -> AsyncIterator[str | Answer]:
        """Yield pieces of the answer, and last the answer; raise what the thread raised. End when
        the client leaves.
        """
        loop = asyncio.get_running_loop()
        queue = asyncio.Queue[str | Answer | BaseException]()
        until_s = time.monotonic() + self._limits.answer_s
        left = False

        def send(item: str | Answer | BaseException) -> None:
            loop.call_soon_threadsafe(queue.put_nowait, item)

        async def watch() -> None:
            while (await request.receive())["type"] != "http.disconnect":
                pass
            queue.put_nowait(HTTPException(400, "the client has left"))

        def release() -> None:
            self._waiting -= 1

        def end(work: Future[Answer | None]) -> None:
            # The place is free as soon as the answer is made, however slowly its client reads it.
            loop.call_soon_threadsafe(release)
            if not work.cancelled() and (last := work.exception() or work.result()) is not None:
                send(last)

        self._waiting += 1
        host = request.client.host if request.client else ""
        told = request.headers.get("authorization", "")
        key = digest_parts([asked.topic, host.encode(), told.encode()])
        work = Future[Answer | None]()
        work.add_done_callback(end)
        one = WaitingQuestion(
            asked, path or key, send, lambda: left or time.monotonic() > until_s, work
        )
        self._questions.add(one)
        self._pool.submit(self._questions.answer)
        watcher = asyncio.create_task(watch())
        try:
            while True:
                try:
                    item = await asyncio.wait_for(queue.get(), max(0.0, until_s - time.monotonic()))
                except TimeoutError:
                    raise _TooMuch(
                        f"no answer in {self._limits.answer_s:g} s; ask again later"
                    ) from None
                if isinstance(item, BaseException):
                    raise item
                yield item
                if isinstance(item, Answer):
                    return
        finally:
            left = True
            work.cancel()
            watcher.cancel()

    def _open(self, one: WaitingQuestion) -> AskedQuestion:
        """Return what a question asks: a state, or the conversation whose client has a key."""
        asked = one.asked
        place = one.place
        with self._states.lock:
            if isinstance(place, bytes):
                assert self._fed is not None
                session = self._fed.converse(place, asked.messages, one.is_given_up)
            elif self._fed is not None and asked.messages[-1].files:
                session = self._fed.show(asked.model, asked.messages[-1].files, one.is_given_up)
            else:
                session = self._states.open_session(place, asked.at)
        how = {
            "evidence": asked.evidence,
            "turns": asked.turns,
            "system": asked.system,
            "promise": find_promise_rule(session, self._states.calibrations, asked.at_most_wrong),
        }
        return AskedQuestion(session, asked.text, asked.decoding, how, one.is_given_up)

    async def refuse(self, _: Request, error: Exception) -> Response:
        """Return the reply of an error."""
        headers = error.headers if isinstance(error, HTTPException) else None
        return JSONResponse({"error": self._describe(error)}, _find_status(error), headers)

    def _describe(self, error: Exception) -> JsonObject:
        """Return what to say of an error; what a fault of the server was is in its log alone."""
        message = "the server made a mistake; its log says which"
        if isinstance(error, HTTPException):
            message = error.detail
        elif isinstance(error, ProtoKVError):
            message = self._states.word_error(error)
        status = _find_status(error)
        kind = "invalid_request_error" if status < 500 else "server_error"
        return {
            "message": shorten_text(" ".join(message.split())),
            "type": kind,
            "param": None,
            "code": None,
        }

    async def _read(self, request: Request, most: int, parse: Callable[[bytes], Any]) -> Any:
        """Return what a body says, which is read in a thread. HTTPException; raises as `parse`."""
        body = bytearray()
        large = False
        try:
            async for part in request.stream():
                body += part
                if len(body) > most:
                    raise HTTPException(413, f"a request has at most {most:,} bytes")
                if len(body) > self._limits.body_bytes and not large:
                    if self._coming >= self._limits.waiting:
                        raise _TooMuch("too many pictures come at once; send them again later")
                    large = True
                    self._coming += 1
            return await anyio.to_thread.run_sync(parse, bytes(body))
        except ClientDisconnect:
            raise HTTPException(400, "the request was cut short") from None
        finally:
            self._coming -= large


def _find_status(error: Exception) -> int:
    if isinstance(error, HTTPException):
        return error.status_code
    known = ((StateNotFound, 404), (ConfigError, 400), (_TooMuch, 503), (ProtoKVError, 409))
    # Beyond the first three, the state is damaged, or another model made it.
    return next((status for kind, status in known if isinstance(error, kind)), 500)
