"""Models of the hub, of one on loopback: downloaded once and shown, found offline, and missing in two quick lines."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib import reload
from pathlib import Path
from unittest import mock

import pytest

from protokv.backbones.files import digest_weights
from protokv.state.reader import Reader
from protokv_cli.exits import Exit
from tests.cli.conftest import Program, Result

NAME, SHA = "somebody/tiny-model", "a" * 40
TAG, TAGGED = "v1.0", "b" * 40


@dataclass
class Hub:
    """The part of a hub's interface that a download of one model needs; a folder holds the files of a commit."""

    folders: dict[str, Path]
    address: str = ""
    requests: list[str] = field(default_factory=list)

    def answer(self, path: str) -> tuple[int, bytes, str]:
        """Return status, body and ETag."""
        route, model = path.partition("?")[0], f"/api/models/{NAME}"
        for commit, folder in self.folders.items():
            name = {SHA: "main", TAGGED: TAG}[commit]
            default = [model] if commit == SHA else []
            if route in (*default, f"{model}/revision/{name}", f"{model}/revision/{commit}"):
                return 200, json.dumps({"id": NAME, "sha": commit, "siblings": []}).encode(), ""
            if route == f"{model}/tree/{commit}":
                files = [
                    {"type": "file", "path": file.name, "size": file.stat().st_size, "oid": _etag(file)}
                    for file in folder.iterdir()
                ]
                return 200, json.dumps(files).encode(), ""
            file = folder / route.rpartition("/")[2]
            if route.startswith(f"/{NAME}/resolve/{commit}/") and file.is_file():
                return 200, file.read_bytes(), _etag(file)
        return 404, b"{}", ""


def _etag(file: Path) -> str:
    return hashlib.sha1(file.read_bytes()).hexdigest()


@pytest.fixture
def hub(tiny_folder: Path) -> Iterator[Hub]:
    made = Hub({SHA: tiny_folder})

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            made.requests.append(self.path)
            status, body, etag = made.answer(self.path)
            self.send_response(status)
            if status == 404:
                known = self.path.startswith(f"/api/models/{NAME}/")
                self.send_header("X-Error-Code", "RevisionNotFound" if known else "RepoNotFound")
            commit = TAGGED if f"/{TAGGED}/" in self.path else SHA
            for name, value in {"ETag": f'"{etag}"', "X-Repo-Commit": commit, "Content-Length": str(len(body))}.items():
                self.send_header(name, value)
            self.end_headers()
            if self.command == "GET":
                self.wfile.write(body)

        do_HEAD = do_GET

        def log_message(self, *_: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        made.address = f"http://127.0.0.1:{server.server_port}"
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield made
        finally:
            server.shutdown()
            thread.join()


def environment_of(protokv: Program, endpoint: str) -> dict[str, str]:
    """Return the environment of an online program with an empty cache of its own."""
    kept = {k: v for k, v in protokv.environment.items() if k not in ("HF_HUB_OFFLINE", "PROTOKV_MODEL")}
    return kept | {"HF_HOME": str(protokv.folder / "cache"), "HF_ENDPOINT": endpoint, "HF_HUB_DISABLE_XET": "1"}


@contextmanager
def hub_environment(environment: dict[str, str]) -> Iterator[None]:
    """The hub's package reads its environment when its constants are loaded."""
    from huggingface_hub import constants

    try:
        with mock.patch.dict(os.environ, environment, clear=True):
            reload(constants)
            yield
    finally:
        reload(constants)


Call = Callable[..., Result]


@pytest.fixture
def call(protokv: Program) -> Call:
    """The program with a hub at an address."""

    def call(endpoint: str, *arguments: object, **changes: str) -> Result:
        environment = environment_of(protokv, endpoint) | changes
        with hub_environment(environment):
            return protokv(*arguments, env=environment)

    return call


def ingesting(video: Path, name: str = NAME) -> tuple[object, ...]:
    return ("ingest", video, "--model", name, "--budget", "24", "--json")


@pytest.mark.parametrize(
    ("name", "revision", "in_reach", "said", "code"),
    [
        (
            NAME,
            None,
            False,
            f"the model {NAME}: it is not in the local cache, and the hub cannot be reached",
            Exit.FAILURE,
        ),
        ("somebody/something-else", None, True, "there is no such model on the hub", Exit.NOT_FOUND),
        (NAME, "v9", True, f"cannot load the model {NAME}: it has no such revision", Exit.FAILURE),
    ],
)
def test_a_model_that_cannot_be_loaded_is_two_lines(
    call: Call, video: Path, hub: Hub, name: str, revision: str | None, in_reach: bool, said: str, code: Exit
) -> None:
    changes = {"PROTOKV_REVISION": revision} if revision else {}
    result = call(hub.address if in_reach else "http://127.0.0.1:9", *ingesting(video, name), **changes)
    assert result.code == code
    error, hint = result.err.splitlines()
    assert error.startswith("Error: ")
    assert said in error
    assert hint.startswith("Hint: ")
    # No second attempt.
    assert hub.requests.count(f"/api/models/{name}") <= 1


@pytest.fixture
def tagged(hub: Hub, tmp_path: Path) -> Hub:
    """A hub whose model has a tag with other weights than its main branch."""
    hub.folders[TAGGED] = shutil.copytree(hub.folders[SHA], tmp_path / "tagged")
    weights = hub.folders[TAGGED] / "model.safetensors"
    content = bytearray(weights.read_bytes())
    content[-4] ^= 1
    weights.write_bytes(content)
    return hub


def test_the_revision_is_downloaded_once_recorded_and_asked_again_without_the_hub(
    protokv: Program, call: Call, video: Path, tagged: Hub
) -> None:
    first = call(tagged.address, *ingesting(video), PROTOKV_REVISION=TAG)
    # No bars in a pipe.
    assert (first.code, "%" in first.err) == (Exit.DONE, False), first.err
    again = call("http://127.0.0.1:9", *ingesting(video), PROTOKV_REVISION=TAG)
    assert "there is nothing to do" in again.err
    state = protokv.folder / f"{video.stem}.safetensors"
    found = Reader.open(state).header.backbone
    assert found.revision == TAGGED
    assert found.weights_digest == digest_weights(str(tagged.folders[TAGGED]))
    main = call(tagged.address, "ingest", str(video), "-o", "main.zarr", "--model", NAME, "--budget", "24")
    assert main.code == Exit.DONE, main.err
    other = Reader.open(protokv.folder / "main.zarr").header.backbone
    assert (other.revision, other.weights_digest != found.weights_digest) == (SHA, True)
    # Both are in the cache now; each state is asked with the commit that made it.
    for name, options in ((state.name, ()), ("main.zarr", ()), (state.name, ("--model", NAME))):
        asked = call("http://127.0.0.1:9", "query", name, "what ?", "--max-new-tokens", "1", *options)
        assert asked.code == Exit.DONE, asked.err
    wrong = call("http://127.0.0.1:9", "query", "main.zarr", "what ?", "--model", NAME, "--revision", TAG)
    assert "its backbone.weights_digest is" in wrong.err
