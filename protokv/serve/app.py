"""The web application: routes, and errors as OpenAI has them. Knows neither how states are read nor what is asked.

There is one model, so one thread answers, one question after another. A question beyond the limits is refused at once;
an answer that takes too long is cut off.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.requests import Request as WebRequest
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from protokv.core.session import Answer
from protokv.errors import ConfigError, NotUnderstood, ProtoKVError, SourceNotFound, StateNotFound
from protokv.serve import chat, responses
from protokv.serve.access import Access
from protokv.serve.connections import Limits
from protokv.serve.footage import Footage
from protokv.serve.page import Page
from protokv.serve.states import States
from protokv.state.watched import meaningless
from protokv.texts import cut

# The most of a request that is read before it is refused, in times of what it may have.
_DROPPED = 16


class TooMuch(ProtoKVError):
    """A question goes beyond the limits."""


def build_app(
    states: States,
    *,
    token: str | None = None,
    limits: Limits | None = None,
    videos: Sequence[Path] = (),
    name: str | None = None,
) -> Starlette:
    """Build the application.

    Args:
        states: answer the questions.
        token: clients must send it (`Authorization: Bearer TOKEN`); None: everybody on this machine may ask.
        limits: of the server.
        videos: folders whose videos the page may show, if a state has watched them.
        name: by which the server is reached besides the names of this machine; counts without a token only.

    Raises:
        ConfigError: no client could send the token.
    """
    server = _Server(states, Access(token, name), limits or Limits())
    page = Page(states, Footage(videos), token is not None)
    return Starlette(
        routes=[
            Route("/", page.index),
            Route("/health", server.health),
            Route("/healthz", server.health),
            Route("/page/state", server.guard(page.state)),
            Route("/page/videos", server.guard(page.videos)),
            # A player sends no token: with one, the address that `/page/videos` gave has a ticket.
            Route("/page/video", page.video if token else server.guard(page.video)),
            Route("/v1/models", server.guard(server.models)),
            Route("/v1/models/{name:path}", server.guard(server.model)),
            Route("/v1/chat/completions", server.answering(chat), methods=["POST"]),
            Route("/v1/responses", server.answering(responses), methods=["POST"]),
        ],
        exception_handlers={ProtoKVError: _refuse, HTTPException: _refuse_http, Exception: _fail},
        lifespan=server.lifespan,
    )


Handler = Callable[[WebRequest], Awaitable[Response]]


class _Server:
    def __init__(self, states: States, access: Access, limits: Limits) -> None:
        self._states, self._access, self._limits = states, access, limits
        self._pool = ThreadPoolExecutor(1, "protokv-serve")
        self._waiting = 0

    @asynccontextmanager
    async def lifespan(self, _: Starlette) -> AsyncIterator[None]:
        yield
        self._pool.shutdown(cancel_futures=True)

    async def health(self, _: WebRequest) -> Response:
        return JSONResponse({"status": "ok"})

    async def models(self, _: WebRequest) -> Response:
        found = self._states.names()
        return JSONResponse({"object": "list", "data": [self._describe(*one) for one in found.items()]})

    async def model(self, request: WebRequest) -> Response:
        name = request.path_params["name"]
        return JSONResponse(self._describe(name, self._states.find(name)))

    def _describe(self, name: str, path: Path) -> dict[str, Any]:
        return {"id": name, "object": "model", "created": self._states.created(path), "owned_by": "protokv"}

    def guard(self, handler: Handler) -> Handler:
        """Return a handler that answers only those who may ask."""

        async def guarded(request: WebRequest) -> Response:
            self._access.check(request.headers)
            return await handler(request)

        return guarded

    def answering(self, dialect: Any) -> Handler:
        """Return the handler of questions in a dialect: `chat` or `responses`."""

        async def answer(request: WebRequest) -> Response:
            asked: chat.Request = dialect.parse(await self._body(request), self._states.decoding)
            path = self._states.find(asked.model)
            if self._waiting >= self._limits.waiting:
                raise TooMuch("too many questions at once; ask again later")
            pieces, reply = self._ask(asked, path, request), dialect.Reply(asked)
            # Errors come before the first piece, so they have their HTTP status in a stream too.
            first = await anext(pieces)
            if asked.stream:
                return StreamingResponse(_events(reply, first, pieces), media_type="text/event-stream")
            last = first
            async for one in pieces:
                last = one
            assert isinstance(last, Answer)
            return JSONResponse(reply.whole(last))

        return self.guard(answer)

    async def _ask(self, asked: chat.Request, path: Path, request: WebRequest) -> AsyncIterator[str | Answer]:
        """Yield pieces of the answer as they come, and last the answer. Raises what the thread raised.

        It ends when the client leaves: nobody waits for an answer that nobody reads.
        """
        loop, queue = asyncio.get_running_loop(), asyncio.Queue[str | Answer | BaseException]()
        until_s = time.monotonic() + self._limits.answer_s
        left = False

        def tell(item: str | Answer | BaseException) -> None:
            loop.call_soon_threadsafe(queue.put_nowait, item)

        async def watch() -> None:
            while (await request.receive())["type"] != "http.disconnect":
                pass
            queue.put_nowait(HTTPException(400, "the client has left"))

        def end(work: Future[Answer | None]) -> None:
            # A client that reads slowly takes nobody's turn, and one that has its answer may ask again at once.
            loop.call_soon_threadsafe(self._release)
            if not work.cancelled() and (last := work.exception() or work.result()) is not None:
                tell(last)

        self._waiting += 1
        work = self._pool.submit(self._answer, asked, path, tell, lambda: left or time.monotonic() > until_s)
        work.add_done_callback(end)
        watcher = asyncio.create_task(watch())
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
            watcher.cancel()

    def _release(self) -> None:
        self._waiting -= 1

    def _answer(
        self, asked: chat.Request, path: Path, tell: Callable[[str], None], stop: Callable[[], bool]
    ) -> Answer | None:
        """Tell the pieces of an answer as they come; return it whole, or None if it was stopped."""
        session = self._states.session(path)
        if session.beyond_model and not asked.anyway:
            message = f'{meaningless(session.beyond_model)}; a request with "anyway": true is answered all the same'
            raise NotUnderstood(message)
        told: dict[str, Any] = {"evidence": asked.evidence, "turns": asked.turns, "system": asked.system}
        pieces = session.stream(asked.question, asked.decoding, **told)
        while not stop():
            try:
                tell(next(pieces))
            except StopIteration as end:
                answer: Answer = end.value
                return answer
        pieces.close()
        return None

    async def _body(self, request: WebRequest) -> bytes:
        body, most = bytearray(), self._limits.body_bytes
        size = declared = int(request.headers.get("content-length", 0))
        try:
            # Many clients read no answer before they have sent all, so what is somewhat too long is read and dropped.
            parts = request.stream()
            while size <= _DROPPED * most and (part := await anext(parts, None)) is not None:
                size += 0 if declared else len(part)
                if size <= most:
                    body += part
        except ClientDisconnect:
            raise HTTPException(400, "the request was cut short") from None
        if size > most:
            raise HTTPException(413, f"a request has at most {most:,} bytes")
        return bytes(body)


async def _events(reply: Any, first: str | Answer, pieces: AsyncIterator[str | Answer]) -> AsyncIterator[str]:
    """Yield the answer as server-sent events."""
    yield reply.begin()
    try:
        item = first
        while not isinstance(item, Answer):
            yield reply.piece(item)
            item = await anext(pieces)
        yield reply.end(item)
    except ProtoKVError as error:
        yield reply.fail(_error(error.message, _status(error)))


def _status(error: ProtoKVError) -> int:
    if isinstance(error, StateNotFound | SourceNotFound):
        return 404
    if isinstance(error, ConfigError):
        return 400
    if isinstance(error, TooMuch):
        return 503
    # The state is damaged, or another model made it.
    return 409


def _error(message: str, status: int, code: str | None = None) -> dict[str, Any]:
    kind = "invalid_request_error" if status < 500 else "server_error"
    return {"message": cut(" ".join(message.split())), "type": kind, "param": None, "code": code}


async def _refuse(_: WebRequest, error: Exception) -> Response:
    assert isinstance(error, ProtoKVError)
    status, code = _status(error), "beyond_model" if isinstance(error, NotUnderstood) else None
    return JSONResponse({"error": _error(error.message, status, code)}, status)


async def _refuse_http(_: WebRequest, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    return JSONResponse({"error": _error(error.detail, error.status_code)}, error.status_code, error.headers)


async def _fail(_: WebRequest, error: Exception) -> Response:
    """Answer for a fault of the server; what it was is in its log alone."""
    return JSONResponse({"error": _error("the server made a mistake; its log says which", 500)}, 500)
