"""`protokv doctor` and `models`: a report that holds nothing private, and what published models
take.
"""

from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

from protokv.backbones.sizes import EMBEDDED_MODELS, KNOWN_MODELS
from protokv.texts import Keywords
from protokv_cli.exits import ExitCode
from protokv_cli.models import describe_models
from tests.cli.conftest import Program

GIB = 1 << 30


@pytest.mark.parametrize("form", ["json", "table"])
def test_the_report_has_no_value_of_a_variable_and_not_the_name_of_the_user(
    protokv: Program, monkeypatch: pytest.MonkeyPatch, form: str
) -> None:
    protokv.environment |= {
        "PROTOKV_TOKEN": "s3cret",
        "HF_TOKEN": "s3cret",
        "HTTPS_PROXY": "http://me:s3cret@x",
    }
    monkeypatch.setattr(Path, "home", lambda: protokv.folder.parent)
    result = protokv("doctor", "-f", form)
    assert result.code == ExitCode.DONE, result.out
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
    assert result.code == ExitCode.FAILURE
    (found,) = result.rows()
    assert found["problems"] == [
        f"{name} cannot be imported: libfoo.so: no such file" for name in ("av", "torch")
    ]
    assert [one["name"] for one in found["devices"]] == ["cpu"]


def test_each_published_model_is_a_row_and_a_line_with_its_whole_name(protokv: Program) -> None:
    names = [model.name for model in (*EMBEDDED_MODELS, *KNOWN_MODELS)]
    assert [row["name"] for row in protokv("models", "--json").rows()] == names
    protokv.environment["COLUMNS"] = "80"
    lines = protokv("models", "-f", "table").out.splitlines()
    assert max(map(len, lines)) <= 80
    assert [line.split()[0] for line in lines[1 : len(names) + 1]] == names
    assert [line for line in lines if line.startswith("For this machine: --model ")]
    assert all("Qwen3-VL" in row["name"] for row in protokv("models", "qwen3-vl", "--json").rows())


def test_a_model_fits_where_it_has_room_and_the_greatest_that_fits_a_gpu_is_recommended() -> None:
    def describe(**room: int) -> Keywords:
        found = describe_models(
            {name: size * GIB for name, size in room.items()}, {KNOWN_MODELS[0].name: 5}
        )
        return {row["name"]: row for row in found} | {
            "best": [row["name"] for row in found if row["recommended"]]
        }

    found = describe(cpu=11, gpu=8)
    fits = found["Qwen/Qwen3-VL-2B-Instruct"]["fits"]
    assert (fits["float32"], fits["bfloat16"]) == (["cpu"], ["cpu", "gpu"])
    assert found[KNOWN_MODELS[0].name]["cached_bytes"] == 5
    assert found["best"] == ["OpenGVLab/InternVL3_5-2B-HF"]
    assert describe(cpu=16)["best"] == ["llava-hf/llava-onevision-qwen2-0.5b-ov-hf"]
    assert describe(cpu=1)["best"] == []
