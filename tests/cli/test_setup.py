"""`protokv doctor` and `models`: a report that holds nothing private, and what published models take."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

from protokv.backbones.sizes import KNOWN_MODELS
from protokv_cli.exits import Exit
from protokv_cli.models import describe_models
from tests.cli.conftest import Program

GIB = 1 << 30


@pytest.mark.parametrize("form", ["json", "table", "plain"])
def test_the_report_has_no_value_of_a_variable_and_not_the_name_of_the_user(
    protokv: Program, monkeypatch: pytest.MonkeyPatch, form: str
) -> None:
    protokv.environment |= {"PROTOKV_TOKEN": "s3cret", "HF_TOKEN": "s3cret", "HTTPS_PROXY": "http://me:s3cret@x"}
    monkeypatch.setattr(Path, "home", lambda: protokv.folder.parent)
    result = protokv("doctor", "-f", form)
    assert result.code == Exit.DONE, result.out
    text = "".join(line.strip() for line in result.out.splitlines())
    assert "s3cret" not in text
    assert str(protokv.folder.parent) not in text
    for said in ("PROTOKV_TOKEN", "HF_TOKEN", f"~/{protokv.folder.name}", "h264", "torch", "cpu"):
        assert said in text


def test_a_package_that_cannot_be_imported_is_a_problem_and_a_failure(
    protokv: Program, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(name: str) -> Any:
        if name in ("torch", "av"):
            raise OSError("libfoo.so: no such\nfile")
        return import_module(name)

    monkeypatch.setattr("protokv_cli.doctor.import_module", broken)
    result = protokv("doctor", "-f", "json")
    assert result.code == Exit.FAILURE
    (found,) = result.rows()
    assert found["problems"] == [f"{name} cannot be imported: libfoo.so: no such file" for name in ("av", "torch")]
    assert [one["name"] for one in found["devices"]] == ["cpu"]


def test_each_published_model_is_a_row_a_line_and_a_name(protokv: Program) -> None:
    names = [model.name for model in KNOWN_MODELS]
    assert [row["name"] for row in protokv("models", "--json").rows()] == names
    assert protokv("models", "-f", "plain").out.splitlines() == names
    protokv.environment["COLUMNS"] = "80"
    text = protokv("models", "-f", "table").out
    assert max(map(len, text.splitlines())) <= 80
    assert "--model DIR" in text


def test_a_model_fits_where_its_weights_and_the_work_have_room_and_is_here_if_it_is_in_the_cache() -> None:
    found = {
        row["name"]: row for row in describe_models({"cpu": 11 * GIB, "cuda:0": 8 * GIB}, {KNOWN_MODELS[0].name: 5})
    }
    assert found["Qwen/Qwen3-VL-8B-Instruct"]["fits"] == {"float32": [], "bfloat16": [], "8bit": [], "4bit": ["cpu"]}
    assert found["Qwen/Qwen3-VL-2B-Instruct"]["fits"]["float32"] == ["cpu"]
    assert found["Qwen/Qwen3-VL-2B-Instruct"]["fits"]["bfloat16"] == ["cpu", "cuda:0"]
    assert {name for name, row in found.items() if row["cached_bytes"]} == {KNOWN_MODELS[0].name}
