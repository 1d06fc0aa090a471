"""Google's and Azure's listings of one bucket, of two keys a page, on loopback."""

import base64
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import parse_qsl, urlsplit
from xml.sax.saxutils import escape

_HEAD = "<LastModified>2026-01-01T00:00:00.000Z</LastModified><ETag>a</ETag><Size>1</Size>"
_PROPERTIES = (
    "<Properties><Last-Modified>Thu, 01 Jan 2026 00:00:00 GMT</Last-Modified>"
    "<Content-Length>1</Content-Length><Content-Type>x</Content-Type></Properties>"
)
_PAGE_KEYS = 2


def _write_google(keys: Sequence[str], following: str) -> str:
    rows = "".join(f"<Contents><Key>{escape(key)}</Key>{_HEAD}</Contents>" for key in keys)
    more = f"<NextContinuationToken>{following}</NextContinuationToken>" if following else ""
    return f"<ListBucketResult xmlns='http://doc'>{rows}{more}</ListBucketResult>"


def _write_azure(keys: Sequence[str], following: str) -> str:
    rows = "".join(f"<Blob><Name>{escape(key)}</Name>{_PROPERTIES}</Blob>" for key in keys)
    more = f"<NextMarker>{following}</NextMarker>"
    return f"<EnumerationResults><Blobs>{rows}</Blobs>{more}</EnumerationResults>"


@contextmanager
def serve_listings(keys: Sequence[str], answers: int) -> Iterator[dict[str, str]]:
    """Give what points a program at this server. It answers so many listings, and refuses more."""
    asked: list[str] = []

    class Handler(BaseHTTPRequestHandler):
        def log_message(self, *_: object) -> None:
            """Say nothing."""

        def do_HEAD(self) -> None:
            self._answer(404, "")

        def do_GET(self) -> None:
            query = dict(parse_qsl(urlsplit(self.path).query))
            asked.append(self.path)
            if len(asked) > answers:
                self._answer(403, "no")
                return
            found = sorted(key for key in keys if key.startswith(query.get("prefix", "")))
            start = int(query.get("continuation-token") or query.get("marker") or 0)
            end = start + _PAGE_KEYS
            write = _write_google if "list-type" in query else _write_azure
            self._answer(200, write(found[start:end], str(end) if end < len(found) else ""))

        def _answer(self, status: int, text: str) -> None:
            self.send_response(status)
            self.send_header("Content-Length", str(len(text.encode())))
            self.end_headers()
            self.wfile.write(text.encode())

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
        place = f"http://127.0.0.1:{server.server_port}"
        yield {
            "GOOGLE_BASE_URL": f"{place}/storage",
            "GOOGLE_SKIP_SIGNATURE": "true",
            "AZURE_STORAGE_ENDPOINT": f"{place}/account",
            "AZURE_STORAGE_ACCOUNT_NAME": "account",
            "AZURE_STORAGE_ACCOUNT_KEY": base64.b64encode(b"key").decode(),
            "AZURE_ALLOW_HTTP": "true",
        }
        server.shutdown()
