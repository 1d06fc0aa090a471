"""A state in an object store, from the command line: an S3 server on loopback."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from protokv_cli.exits import Exit
from tests.cli.conftest import Program

pytest.importorskip("icechunk")
pytest.importorskip("moto.server")

from tests.state.s3 import S3Server

minisign = pytest.importorskip("minisign")

SMALL = ("--budget", "24", "--json")


@pytest.fixture
def store(monkeypatch: pytest.MonkeyPatch) -> Iterator[S3Server]:
    with S3Server() as server:
        for name, value in server.environment.items():
            monkeypatch.setenv(name, value)
        yield server


@pytest.mark.usefixtures("mocked")
def test_a_state_is_written_asked_inspected_and_repaired_there_as_on_disk(
    protokv: Program, store: S3Server, video: Path
) -> None:
    url = "s3://bucket/shelf/clip"
    assert f"Error: no state at {url}" in protokv("inspect", url).err
    assert protokv("ingest", video, "-o", url, *SMALL, "--for", "6s").code == 0
    first = store.objects("shelf/clip/chunks").keys()
    for target in (url, "clip.safetensors"):
        result = protokv("ingest", video, "-o", target, *SMALL, "--every", "6s", "--keep", "2")
        assert result.code == 0, result.err
        assert result.rows()[-1]["state"] == target
    assert protokv("inspect", url, "clip.safetensors").code == 0
    (document,) = protokv("inspect", url, "--verify", "--json").rows()
    assert document["stream"]["commits_s"] == [6.0, 12.0]
    for time, answered in [("11s", 6.0), ("1h", 12.0)]:
        there, here = (
            protokv("query", s, "what is first ?", "--at", time).rows()[0] for s in (url, "clip.safetensors")
        )
        assert (there["stream_time_s"], there["answer"]) == (answered, here["answer"])
    assert protokv("query", url, "what is first ?", "--at", "5s").code == Exit.NOT_FOUND
    assert protokv("inspect", url, "-o", "back.zarr").code == 0
    assert protokv("inspect", "back.zarr", url).code == 0
    assert protokv("inspect", url, "--repair").rows()[0]["damage"] is None
    pair = minisign.KeyPair.generate()
    Path("mine.key").write_bytes(bytes(pair.secret_key))
    Path("mine.pub").write_bytes(bytes(pair.public_key))
    assert "is not signed" in protokv("inspect", url, "--trust", "mine.pub").err
    assert protokv("inspect", url, "--sign", "mine.key").rows()[0]["signature"] == f"{url}.minisig"
    trusted = protokv("query", url, "what is first ?", "--trust", "mine.pub")
    assert (trusted.code, trusted.rows()[0]["stream_time_s"]) == (0, 12.0)
    # What the second commit has added.
    for key in store.objects("shelf/clip/chunks").keys() - first:
        store.delete(key)
    assert protokv("inspect", url).code == Exit.CORRUPT
    (row,) = protokv("inspect", url, "--repair", "--json").rows()
    assert (row["stream_time_s"], row["lost_s"]) == (6.0, 6.0)
    assert protokv("inspect", url, "--trust", "mine.pub").code == Exit.UNTRUSTED
    assert row["damaged"].startswith(f"{url} (branch damaged-")
    assert protokv("ingest", video, "-o", url, *SMALL, "--keep", "2").code == 0
    assert protokv("inspect", "back.zarr", url).code == 0
