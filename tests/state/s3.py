"""An S3 server on loopback, with one bucket: moto answers."""

from __future__ import annotations

import logging
import re
from typing import Self

from moto.server import ThreadedMotoServer, create_backend_app

BUCKET = "bucket"


class S3Server:
    """A server as a context manager; tests read and write its objects beside the program."""

    def __init__(self) -> None:
        logging.getLogger("werkzeug").setLevel(logging.ERROR)
        self._server = ThreadedMotoServer("127.0.0.1", port=0)
        self._client = create_backend_app("s3").test_client()

    def __enter__(self) -> Self:
        self._server.start()
        host, port = self._server.get_host_and_port()
        self.url = f"http://{host}:{port}"
        self.call("PUT", "")
        return self

    def __exit__(self, *_: object) -> None:
        self._server.stop()

    @property
    def environment(self) -> dict[str, str]:
        """The variables that point a program at this server."""
        names = {"AWS_ACCESS_KEY_ID": "test", "AWS_SECRET_ACCESS_KEY": "test", "AWS_REGION": "us-east-1"}
        return {**names, "AWS_ENDPOINT_URL": self.url}

    def call(self, method: str, key: str, data: bytes = b"", query: str = "") -> bytes:
        """Send a request of the test itself. KeyError if it is refused."""
        path = f"/{BUCKET}/{key}" if key else f"/{BUCKET}"
        signed = {"Authorization": "AWS4-HMAC-SHA256 Credential=test/20300101/us-east-1/s3/aws4_request"}
        answer = self._client.open(
            path, method=method, data=data, query_string=query, base_url=self.url, headers=signed
        )
        if answer.status_code >= 300:
            raise KeyError(f"{method} {path}: {answer.status}")
        return answer.data

    def objects(self, prefix: str = "") -> dict[str, bytes]:
        """Return every object below a prefix, by key."""
        listed = self.call("GET", "", query=f"list-type=2&prefix={prefix}").decode()
        return {key: self.call("GET", key) for key in re.findall(r"<Key>([^<]*)</Key>", listed)}

    def put(self, key: str, data: bytes) -> None:
        self.call("PUT", key, data)

    def delete(self, key: str) -> None:
        self.call("DELETE", key)
