"""The page at `/`: one HTML file without an outside address, and the routes that it reads.

The file has one style and one script; the policy that goes with it allows these two by their digests, pictures from the
routes here, and nothing else. The page itself holds nothing about states, so it needs no token; its routes do.
"""

from __future__ import annotations

import base64
import hashlib
import hmac
import os
import re
import secrets
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import urlencode

import anyio
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import FileResponse, HTMLResponse, JSONResponse, Response
from starlette.types import Receive, Scope, Send

from protokv.errors import ProtoKVError
from protokv.serve.footage import Footage
from protokv.serve.states import States
from protokv.state.api import read_thumbnails
from protokv.state.snapshot import Header
from protokv.state.thumbnails import Thumbnail
from protokv.state.watched import WallClockLog, beyond_model, sources_of

T = TypeVar("T")

_HTML = Path(__file__).with_name("page.html")

# A player asks again and again while somebody watches.
_TICKET_S = 12 * 3600


class Page:
    """The routes of the page."""

    def __init__(self, states: States, footage: Footage, tickets: bool) -> None:
        """Read the file. With `tickets`, a video is shown only at an address that `videos` gave."""
        self._states, self._footage, self._tickets = states, footage, tickets
        # Looking for videos starts processes, so only so many requests do at once.
        self._few = anyio.CapacityLimiter(2)
        self._secret = secrets.token_bytes(32)
        self._html = _HTML.read_text(encoding="utf-8")
        self._headers = {"Content-Security-Policy": _policy(self._html), **_PRIVATE}

    async def index(self, _: Request) -> Response:
        """Return the page."""
        return HTMLResponse(self._html, headers=self._headers)

    async def state(self, request: Request) -> Response:
        """Return what the page shows of a state."""
        name, path = self._find(request)
        header, pictures = await self._run(self._read, path)
        shown = [{"time_s": one.time_s, "src": _data_url(one.jpeg)} for one in pictures]
        committed = self._states.created(path)
        return JSONResponse({"name": name, "committed": committed, **_facts(header), "thumbnails": shown})

    async def videos(self, request: Request) -> Response:
        """Return the videos of a state that a player can show, or why there is none."""
        name, path = self._find(request)

        def find() -> list[dict[str, Any]]:
            header, _ = self._read(path)
            return [
                {**one.original.span, "src": self._address(name, i)}
                for i, one in enumerate(self._footage.find(header, self._states.below(path)))
            ]

        try:
            return JSONResponse({"videos": await self._run(find), "why": None})
        except ProtoKVError as error:
            return JSONResponse({"videos": [], "why": error.message, "hint": error.hint})

    async def video(self, request: Request) -> Response:
        """Return a video, or the range of it that is wanted."""
        name, path = self._find(request)
        number = request.query_params.get("source", "")
        until, _, proof = request.query_params.get("ticket", "").partition("-")
        if self._tickets and not (
            until.isascii()
            and until.isdigit()
            and time.time() < int(until[:12])
            and hmac.compare_digest(proof.encode(), self._proof(name, number, until).encode())
        ):
            raise HTTPException(401, "the address of the video has expired")

        def find() -> Any:
            header, _ = self._read(path)
            found = dict(enumerate(self._footage.find(header, self._states.below(path))))
            return found.get(int(number)) if re.fullmatch(r"[0-9]{1,6}", number) else None

        found = await self._run(find)
        if found is None:
            raise HTTPException(404, "the state has no such video")
        return _OpenFile(found.open(), found.media_type)

    async def _run(self, function: Callable[..., T], *arguments: Any) -> T:
        return await anyio.to_thread.run_sync(function, *arguments, limiter=self._few)

    def _read(self, path: Path) -> tuple[Header, list[Thumbnail]]:
        self._states.check(path)
        return read_thumbnails(path)

    def _find(self, request: Request) -> tuple[str, Path]:
        name = request.query_params.get("name", "")
        return name, self._states.find(name)

    def _address(self, name: str, source: int) -> str:
        given = {"name": name, "source": str(source)}
        if self._tickets:
            until = str(int(time.time()) + _TICKET_S)
            given["ticket"] = f"{until}-{self._proof(name, str(source), until)}"
        return f"page/video?{urlencode(given)}"

    def _proof(self, name: str, source: str, until: str) -> str:
        return hmac.new(self._secret, f"{name}\n{source}\n{until}".encode(), hashlib.sha256).hexdigest()


class _OpenFile(FileResponse):
    """An open file, whole or a range of it; closed afterwards. What else gets its name meanwhile is not sent."""

    def __init__(self, number: int, media_type: str) -> None:
        self._number = number
        super().__init__(f"/dev/fd/{number}", media_type=media_type, headers=_PRIVATE, stat_result=os.fstat(number))

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            os.close(self._number)


_PRIVATE = {
    "Cache-Control": "no-store",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
    "Cross-Origin-Resource-Policy": "same-origin",
}


def _policy(html: str) -> str:
    def digest(tag: str) -> str:
        (text,) = re.findall(f"<{tag}>(.*?)</{tag}>", html, re.DOTALL)
        return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"

    return (
        f"default-src 'none'; script-src {digest('script')}; style-src {digest('style')}; img-src data:; "
        "media-src 'self'; connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    )


def _facts(header: Header) -> dict[str, Any]:
    clock, log = header.clock, WallClockLog.of(header.source)
    return {
        "sources": sources_of(header),
        "duration_s": clock.stream_time_s,
        "step_s": clock.step_seconds,
        "complete": header.complete,
        "model": header.backbone.name,
        "memory": header.memory.get("kind"),
        "beyond_model": beyond_model(header),
        "live": None
        if log is None
        else {"lost": log.lost, "committed": log.committed_at, "anchors": log.anchors, "gaps": log.gaps_in_all},
    }


def _data_url(jpeg: bytes) -> str:
    return f"data:image/jpeg;base64,{base64.b64encode(jpeg).decode()}"
