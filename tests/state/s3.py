"""An S3 server on loopback that records its requests and can refuse them or lose their answers.

moto answers. It checks a condition and writes in two steps, so the server takes one request at a time: only then are
conditional writes atomic, as in S3.
"""

from __future__ import annotations

import logging
import re
import threading
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Self

from moto.server import create_backend_app
from werkzeug.serving import WSGIRequestHandler, make_server

BUCKET = "bucket"


@dataclass(frozen=True)
class Request:
    """An answered request: its key without the bucket, and the bytes sent and received by the client."""

    method: str
    key: str
    sent: int
    received: int
    status: int


class _Quiet(WSGIRequestHandler):
    protocol_version = "HTTP/1.1"

    def log(self, *_: Any) -> None:
        pass


class S3Server:
    """A server with one bucket, as a context manager.

    Attributes:
        url: its address.
        requests: the answered requests, in order.
        before, after: called with method and key before and after a request is answered. If one returns a status, that
            is sent instead of the answer.
    """

    def __init__(self) -> None:
        self.requests: list[Request] = []
        self.before: Callable[[str, str], int | None] = lambda method, key: None
        self.after: Callable[[str, str], int | None] = lambda method, key: None
        self._app = create_backend_app("s3")
        self._one = threading.Lock()
        logging.getLogger("werkzeug").setLevel(logging.ERROR)
        self._server = make_server("127.0.0.1", 0, self._answer, threaded=True, request_handler=_Quiet)
        self._server.daemon_threads = True
        self._thread = threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
        self.url = f"http://127.0.0.1:{self._server.server_port}"

    def __enter__(self) -> Self:
        self._thread.start()
        self.call("PUT", f"/{BUCKET}")
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    @property
    def environment(self) -> dict[str, str]:
        """The variables that point a program at this server."""
        names = {"AWS_ACCESS_KEY_ID": "test", "AWS_SECRET_ACCESS_KEY": "test", "AWS_REGION": "us-east-1"}
        return {**names, "AWS_ENDPOINT_URL": self.url}

    def reset(self) -> None:
        """Forget the requests and the callbacks; the objects stay."""
        self.requests.clear()
        self.before = self.after = lambda method, key: None

    def call(self, method: str, path: str, data: bytes = b"", query: str = "") -> bytes:
        """Send a request of the test itself, which is not recorded. KeyError if it is refused."""
        signed = {"Authorization": "AWS4-HMAC-SHA256 Credential=test/20300101/us-east-1/s3/aws4_request"}
        with self._one:
            client = self._app.test_client()
            answer = client.open(path, method=method, data=data, query_string=query, base_url=self.url, headers=signed)
        if answer.status_code >= 300:
            raise KeyError(f"{method} {path}: {answer.status}")
        return answer.data

    def objects(self, prefix: str = "") -> dict[str, bytes]:
        """Return every object below a prefix, by key."""
        listed = self.call("GET", f"/{BUCKET}", query=f"list-type=2&prefix={prefix}").decode()
        return {key: self.call("GET", f"/{BUCKET}/{key}") for key in re.findall(r"<Key>([^<]*)</Key>", listed)}

    def put(self, key: str, data: bytes) -> None:
        self.call("PUT", f"/{BUCKET}/{key}", data)

    def delete(self, key: str) -> None:
        self.call("DELETE", f"/{BUCKET}/{key}")

    def _answer(self, environ: dict[str, Any], start: Callable[..., Any]) -> Iterable[bytes]:
        method, key = environ["REQUEST_METHOD"], environ["PATH_INFO"].removeprefix(f"/{BUCKET}").lstrip("/")
        answers: list[tuple[str, Any]] = []
        status = self.before(method, key)
        body: list[bytes] = []
        if status is None:
            with self._one:
                body = list(self._app(environ, lambda answer, headers, exc=None: answers.append((answer, headers))))
            sent = int(environ.get("CONTENT_LENGTH") or 0)
            self.requests.append(Request(method, key, sent, sum(map(len, body)), int(answers[0][0][:3])))
            status = self.after(method, key)
        else:
            # An unread body would break the connection for the next request.
            environ["wsgi.input"].read(int(environ.get("CONTENT_LENGTH") or 0))
        if status is not None:
            codes = {403: "AccessDenied", 500: "InternalError"}
            text = f"<Error><Code>{codes.get(status, 'Error')}</Code><Message>{status}</Message></Error>".encode()
            answers, body = [(f"{status} -", [("Content-Length", str(len(text)))])], [text]
        start(*answers[0])
        return [] if method == "HEAD" else body
