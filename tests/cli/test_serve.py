"""`protokv serve` listens on this machine and loads the model of the states."""

import socket
from pathlib import Path
from typing import Any

import pytest
from starlette.testclient import TestClient

from protokv.ingestion import ingest_events
from protokv.memories import DurableConfig
from protokv.state.reader import StateReader
from tests.cli.conftest import Program
from tests.mock_backbone import MockBackbone
from tests.prepared import Prepared


@pytest.mark.usefixtures("mocked")
def test_it_listens_on_this_machine_alone_with_the_model_of_the_first_readable_state(
    protokv: Program, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[Any] = []
    monkeypatch.setattr(
        "uvicorn.Server.run",
        lambda server, sockets: seen.append((server.config, sockets[0].getsockname())),
    )
    protokv.environment["PROTOKV_PORT"] = "0"
    result = protokv("serve", tmp_path, "--model", "mock")
    assert result.code == 0, result.err
    host, port = seen[0][1]
    assert host == "127.0.0.1"
    assert f"http://127.0.0.1:{port}/v1" in result.err, "the port that is open, not 0"
    with socket.create_server((host, 0)) as taken:
        result = protokv(
            "serve", tmp_path, "--model", "mock", "--port", str(taken.getsockname()[1])
        )
    assert (result.code, "Hint: name another --port" in result.err) == (2, True)
    feeding = ("--sessions", "1", "--budget", "64", "--every", "5s", "--keep", "2", "--idle", "1m")
    for flags, opened in (((), 404), (feeding, 201)):
        assert protokv("serve", tmp_path, "--model", "mock", *flags).code == 0
        with TestClient(seen[-1][0].app, "http://localhost") as one:
            assert (
                one.post("/v1/streaming/sessions", content=b'{"name": "porch"}').status_code
                == opened
            )
    assert StateReader.open(tmp_path / "porch.safetensors").header.memory["budget"] == 64
    (tmp_path / "porch.safetensors").unlink()
    del protokv.environment["PROTOKV_MODEL"]
    (tmp_path / "a.safetensors").write_bytes(b"no state")
    assert protokv("serve", tmp_path).code == 13
    for name, model in (("b", "protokv/mini"), ("c", "a model that is not here")):
        path = tmp_path / f"{name}.safetensors"
        list(
            ingest_events(
                Prepared(1, 6), path, DurableConfig(budget=40), backbone=MockBackbone(model)
            )
        )
    assert protokv("serve", tmp_path).code == 0
    (tmp_path / "b.safetensors").unlink()
    assert "a model that is not here" in protokv("serve", tmp_path).err
