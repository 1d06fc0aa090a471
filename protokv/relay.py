"""Listings of buckets at `gs://` and `az://` without the keys that obstore cannot name.

One such key ends obstore's listing of a whole page. Only obstore has the credentials, so a server
of this process stands between: it sends each request on as obstore signed it, and takes these keys
out of the answer.
"""

from __future__ import annotations

import html
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.error import HTTPError
from urllib.parse import urlsplit
from urllib.request import Request, urlopen

_OBJECT = re.compile(rb"<(?:Contents|Blob)>.*?<(?:Key|Name)>(.*?)</.*?</(?:Contents|Blob)>", re.S)
_TIMEOUT_S = 30.0


def can_name(key: str) -> bool:
    """Return True if obstore can name an object of this key."""
    parts = key.removeprefix("/").removesuffix("/").split("/")
    return not {"", ".", ".."} & set(parts)


@contextmanager
def relay_listings(place: str) -> Iterator[tuple[str, list[str]]]:
    """Give the address of a server before the store at `place`, and the list to which it adds the
    keys that it takes out.
    """
    left_out: list[str] = []
    there = urlsplit(place)

    def take_out(found: re.Match[bytes]) -> bytes:
        key = html.unescape(found[1].decode())
        if can_name(key):
            return found[0]
        left_out.append(key)
        return b""

    class Handler(BaseHTTPRequestHandler):
        def log_message(self, *_: object) -> None:
            """Say nothing."""

        def do_GET(self) -> None:
            headers = {name: value for name, value in self.headers.items() if name != "host"}
            asked = Request(f"{there.scheme}://{there.netloc}{self.path}", headers=headers)
            try:
                with urlopen(asked, timeout=_TIMEOUT_S) as answer:
                    data = _OBJECT.sub(take_out, answer.read())
                    self.send_response(200)
            except HTTPError as error:
                data = error.read()
                self.send_response(error.code)
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}{there.path}", left_out
        server.shutdown()
