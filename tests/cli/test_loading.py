"""Models of the hub, at the command line: found in the cache by revision, and missing in two quick
lines.
"""

import os
import shutil
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib import reload
from pathlib import Path
from unittest import mock

import pytest

from protokv.backbones.files import digest_weights
from protokv.state.reader import StateReader
from protokv_cli.exits import ExitCode
from tests.cli.conftest import Program, Watch

NAME = "somebody/tiny-model"
SHA = "a" * 40
TAG = "v1.0"
TAGGED = "b" * 40


@contextmanager
def hub_environment(protokv: Program, **changes: str) -> Iterator[dict[str, str]]:
    """An online environment with a cache of its own. The hub's package reads it when its constants
    are loaded.
    """
    from huggingface_hub import constants

    kept = {
        k: v for k, v in protokv.environment.items() if k not in ("HF_HUB_OFFLINE", "PROTOKV_MODEL")
    }
    environment = (
        kept | {"HF_HOME": str(protokv.folder / "cache"), "HF_HUB_DISABLE_XET": "1"} | changes
    )
    try:
        with mock.patch.dict(os.environ, environment, clear=True):
            reload(constants)
            yield environment
    finally:
        reload(constants)


@pytest.fixture
def hub() -> Iterator[tuple[str, list[str]]]:
    """The address of a hub that has `NAME` without a revision v9 and no other model, and what it
    was asked for.
    """
    asked: list[str] = []

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            asked.append(self.path)
            self.send_response(404)
            known = self.path.startswith(f"/api/models/{NAME}/")
            self.send_header("X-Error-Code", "RevisionNotFound" if known else "RepoNotFound")
            self.send_header("Content-Length", "0")
            self.end_headers()

        def log_message(self, *_: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, args=(0.01,)).start()
        yield f"http://127.0.0.1:{server.server_port}", asked
        server.shutdown()


@pytest.mark.parametrize(
    ("named", "in_reach", "said", "code"),
    [
        ([NAME], False, "not in the local cache, and the hub cannot be reached", ExitCode.FAILURE),
        (["some/body"], True, "there is no such model on the hub", ExitCode.NOT_FOUND),
        ([NAME, "--revision", "v9"], True, f"{NAME}: it has no such revision", ExitCode.FAILURE),
    ],
)
def test_a_model_that_cannot_be_loaded_is_two_lines(
    protokv: Program,
    video: Path,
    hub: tuple[str, list[str]],
    named: list[str],
    in_reach: bool,
    said: str,
    code: ExitCode,
) -> None:
    address, asked = hub
    address = address if in_reach else "http://127.0.0.1:9"
    with hub_environment(protokv, HF_ENDPOINT=address) as environment:
        result = protokv("ingest", video, "--model", *named, env=environment)
    assert result.code == code
    error, hint = result.err.splitlines()
    assert said in error
    assert hint.startswith("Hint: ")
    # No second attempt.
    assert asked.count(f"/api/models/{named[0]}") <= 1


def test_each_state_is_made_and_asked_with_the_revision_that_it_records(
    protokv: Program, video: Path, tiny_folder: Path
) -> None:
    cache = protokv.folder / "cache" / "hub" / f"models--{NAME.replace('/', '--')}"
    for name, commit in (("main", SHA), (TAG, TAGGED)):
        folder = shutil.copytree(tiny_folder, cache / "snapshots" / commit)
        (cache / "refs").mkdir(exist_ok=True)
        (cache / "refs" / name).write_text(commit)
    weights = folder / "model.safetensors"
    content = bytearray(weights.read_bytes())
    content[-4] ^= 1
    weights.write_bytes(content)
    with hub_environment(protokv, HF_ENDPOINT="http://127.0.0.1:9") as environment:
        watch = ("ingest", video, "--model", NAME, "--revision", TAG, "--budget", "24")
        result = protokv(*watch, env=environment)
        assert result.code == ExitCode.DONE, result.err
        found = StateReader.open("clip.safetensors").header.backbone
        assert found.revision == TAGGED
        assert found.weights_digest == digest_weights(str(cache / "snapshots" / TAGGED))
        ask = ("query", "clip.safetensors", "what ?", "--max-new-tokens", "1")
        for named in ((), ("--model", NAME)):
            asked = protokv(*ask, *named, env=environment)
            assert asked.code == ExitCode.DONE, asked.err
        wrong = protokv(*ask, "--model", NAME, "--revision", "main", env=environment)
        assert "its backbone.weights_digest is" in wrong.err


def test_the_variable_is_a_default_for_states_whose_own_model_is_not_here(
    protokv: Program, watched: Watch, video: Path
) -> None:
    (protokv.folder / "states").mkdir()
    shutil.copy(watched(), protokv.folder / "states" / "tiny.safetensors")
    made = ("ingest", video, "--budget", "24", "--model", "protokv/mini", "-q")
    for name in ("a", "b"):
        assert protokv(*made, "-o", f"states/{name}.safetensors").code == ExitCode.DONE
    # The variable names the tiny model, and two states know that theirs is another one.
    asked = protokv("query", "states/", "what ?", "--max-new-tokens", "1")
    assert (asked.code, len(asked.rows())) == (ExitCode.DONE, 3), asked.err
    # It may name what is not there, while nobody needs it.
    elsewhere = protokv.environment | {"PROTOKV_MODEL": "/nowhere/at/all"}
    asked = protokv("query", "states/", "what ?", env=elsewhere)
    assert (asked.code, len(asked.rows())) == (ExitCode.PARTIAL, 2)
    assert "no model folder at /nowhere/at/all" in asked.err
    # What an option names is for all.
    model = protokv.environment["PROTOKV_MODEL"] + "/"
    refused = protokv("query", "states/", "what ?", "--model", model)
    assert (refused.code, len(refused.rows())) == (ExitCode.PARTIAL, 1), refused.err
