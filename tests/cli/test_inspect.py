"""`protokv inspect`: the document of a state, without its model."""

from __future__ import annotations

from pathlib import Path

import pytest

from protokv_cli.exits import Exit
from tests.cli.conftest import Program


@pytest.fixture
def state(protokv: Program, video: Path) -> Path:
    result = protokv("ingest", video, "--budget", "24", "--preset", "paper", "--json")
    assert result.code == 0, result.err
    return protokv.folder / "clip.safetensors"


def test_the_document_holds_what_the_contract_promises(protokv: Program, state: Path) -> None:
    (document,) = protokv("inspect", state, "--json").rows()
    assert document["format_version"] == 1
    assert document["backbone"]["family"] == "qwen2_5_vl"
    memory = document["memory"]
    assert (memory["kind"], memory["preset"], memory["budget"]) == ("protokv", "paper", 24)
    assert memory["near_tokens"] + memory["prototypes"] * memory["pseudo_tokens"] == 24
    stream = document["stream"]
    assert (stream["source"], stream["steps"], stream["duration_s"]) == ("clip.mp4", 12, 12.0)
    assert stream["compression"] == pytest.approx(stream["tokens_seen"] / 24)
    parts = {k: v for k, v in document["bytes"].items() if k not in ("total", "file")}
    assert document["bytes"]["total"] == sum(parts.values())
    assert document["bytes"]["file"] == state.stat().st_size
    assert len(document["layers"]) == 3
    assert all(0 < layer["slots_in_use"] <= layer["slots"] for layer in document["layers"])


def test_it_needs_no_model(protokv: Program, state: Path) -> None:
    protokv.environment["PROTOKV_MODEL"] = "/nowhere/at/all"
    assert protokv("inspect", state).code == 0


def test_the_tables_show_stream_memory_bank_and_codebooks(protokv: Program, state: Path) -> None:
    text = protokv("inspect", state, "--format", "table").out
    for word in ("stream", "memory", "bytes", "bank", "codebooks", "clip.mp4", "compression", "slots in use"):
        assert word in text


def test_plain_lines_can_be_cut(protokv: Program, state: Path) -> None:
    lines = dict(line.split("\t", 1) for line in protokv("inspect", state, "--format", "plain").out.splitlines())
    assert lines["memory.budget"] == "24"
    assert "layers[0].slots" in lines


def test_inspecting_changes_nothing(protokv: Program, state: Path) -> None:
    before = (state.read_bytes(), state.stat().st_mtime_ns)
    protokv("inspect", state)
    assert (state.read_bytes(), state.stat().st_mtime_ns) == before


def test_what_is_no_state_is_told(protokv: Program, video: Path) -> None:
    assert protokv("inspect", "absent.safetensors").code == Exit.NOT_FOUND
    result = protokv("inspect", video)
    assert result.code == Exit.CORRUPT
    assert result.err.startswith("Error: ")
