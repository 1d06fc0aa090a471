"""`protokv models`: what published models take, which are in the local cache, and which fit."""

from __future__ import annotations

from pathlib import Path

import pytest

from protokv.backbones.hub import cached_models
from protokv.backbones.sizes import KNOWN_MODELS
from protokv.state.models import rows_of
from protokv_cli.exits import Exit
from tests.cli.conftest import Program

GIB = 1 << 30
ROOT = Path(__file__).parents[2]


def test_each_model_has_a_row_whose_keys_are_documented(protokv: Program) -> None:
    result = protokv("models", "--format", "json")
    assert result.code == Exit.DONE, result.err
    rows = result.rows()
    assert [row["name"] for row in rows] == [model.name for model in KNOWN_MODELS]
    text = (ROOT / "docs" / "reference" / "json.md").read_text(encoding="utf-8")
    assert not [key for key in rows[0] if f"`{key}`" not in text]
    assert protokv("models", "-f", "plain").out.splitlines() == [model.name for model in KNOWN_MODELS]


def test_the_table_fits_a_terminal_and_cuts_no_name(protokv: Program) -> None:
    protokv.environment["COLUMNS"] = "80"
    text = protokv("models", "-f", "table").out
    assert max(map(len, text.splitlines())) <= 80
    assert not [model.name for model in KNOWN_MODELS if model.name.partition("/")[2] not in text]
    assert "--model DIR" in text


def test_a_model_fits_where_its_weights_and_the_work_have_room_and_is_here_if_it_is_in_the_cache() -> None:
    devices = [{"name": "cpu", "free_bytes": 11 * GIB}, {"name": "cuda:0", "free_bytes": 8 * GIB}]
    rows = rows_of([*devices, {"name": "mps", "free_bytes": None}], {"Qwen/Qwen3-VL-2B-Instruct": 5})
    found = {row["name"]: row for row in rows}
    assert found["Qwen/Qwen3-VL-8B-Instruct"]["fits"] == {"float32": [], "bfloat16": [], "8bit": [], "4bit": ["cpu"]}
    assert found["Qwen/Qwen3-VL-2B-Instruct"]["fits"]["float32"] == ["cpu"]
    assert found["Qwen/Qwen3-VL-2B-Instruct"]["fits"]["bfloat16"] == ["cpu", "cuda:0"]
    assert {name: row["cached_bytes"] for name, row in found.items() if row["cached_bytes"]} == {
        "Qwen/Qwen3-VL-2B-Instruct": 5
    }


def test_the_cache_tells_names_and_bytes_and_may_be_absent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    assert cached_models() == {}
    folder = tmp_path / "hub" / "models--owner--name"
    for part in ("blobs", "refs", f"snapshots/{'0' * 40}"):
        (folder / part).mkdir(parents=True)
    (folder / "refs" / "main").write_text("0" * 40)
    (folder / "blobs" / "x").write_bytes(b"12345")
    (folder / "snapshots" / ("0" * 40) / "model.safetensors").symlink_to(folder / "blobs" / "x")
    assert cached_models() == {"owner/name": 5}
