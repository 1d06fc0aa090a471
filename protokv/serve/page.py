"""The page at `/`: one HTML file without an outside address, and the routes that it reads.

The file has one style and one script; the policy that goes with it allows these two by their
digests, pictures from the routes here, and nothing else. The page itself holds nothing about
states, so it needs no token; its routes do.
"""

from __future__ import annotations

import base64
import hashlib
import re
from pathlib import Path

import anyio
from starlette.requests import Request
from starlette.responses import HTMLResponse, JSONResponse, Response

from protokv.serve.states import StateFolder, name_model
from protokv.state.commit import is_locked
from protokv.state.reader import StateReader, read_thumbnails
from protokv.state.sources import WallClockLog, describe_standing_answers, describe_state_sources
from protokv.texts import JsonObject


class WebPage:
    """The routes of the page."""

    def __init__(self, states: StateFolder) -> None:
        """Read the file."""
        self._states = states
        self._html = Path(__file__).with_name("page.html").read_text(encoding="utf-8")
        self._headers = {"Content-Security-Policy": _policy(self._html), **_PRIVATE}

    async def index(self, _: Request) -> Response:
        """Return the page."""
        return HTMLResponse(self._html, headers=self._headers)

    async def state(self, request: Request) -> Response:
        """Return what the page shows of a state."""
        name = request.query_params.get("name", "")
        return JSONResponse(await anyio.to_thread.run_sync(self._describe, name))

    def _describe(self, name: str) -> JsonObject:
        path = self._states.find(name)
        header, pictures = read_thumbnails(path)
        log = WallClockLog.read(header.source)
        return {
            "name": name,
            "committed": self._states.read_commit_time(path),
            "sources": describe_state_sources(header),
            "duration_s": header.clock.stream_time_s,
            "step_s": header.clock.step_seconds,
            "complete": header.complete,
            "model": name_model(header.backbone),
            "memory": header.memory.get("kind"),
            "answers": describe_standing_answers(header),
            "live": log
            and {
                "lost": log.lost,
                "committed": log.committed_at,
                "anchors": log.anchors,
                "writing": is_locked(path) or path in self._states.fed,
            },
            "commits_s": StateReader.open(path).commits_s,
            "thumbnails": [
                {
                    "time_s": one.time_s,
                    "src": f"data:image/jpeg;base64,{base64.b64encode(one.jpeg).decode()}",
                }
                for one in pictures
            ],
        }


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
        f"default-src 'none'; script-src {digest('script')}; style-src {digest('style')}; img-src "
        "data:; "
        "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    )
