"""`protokv doctor`: a report that holds what helps, and nothing that is private."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

from protokv_cli.exits import Exit
from tests.cli.conftest import Program


def test_the_report_names_versions_devices_codecs_extras_and_space(protokv: Program) -> None:
    result = protokv("doctor", "--format", "json")
    assert result.code == Exit.DONE, result.out
    (found,) = result.rows()
    assert found["packages"]["torch"]
    assert found["devices"][0]["name"] == "cpu"
    assert 0 < found["devices"][0]["free_bytes"] <= found["devices"][0]["memory_bytes"]
    assert found["video"]["codecs"]["h264"] is True
    assert {"serve", "plot", "object-store"} <= set(found["extras"])
    assert not {"test", "docs"} & set(found["extras"])
    assert found["disk"]["free_bytes"] > 0
    assert found["problems"] == []


def test_the_report_fits_a_terminal_and_a_bug_report(protokv: Program) -> None:
    protokv.environment["COLUMNS"] = "80"
    text = protokv("doctor", "-f", "table").out
    assert max(map(len, text.splitlines())) <= 80
    for said in ("Python", "libavcodec", "h264", "extras", "cache", "free there"):
        assert said in text
    assert "packages.torch\t" in protokv("doctor", "-f", "plain").out


@pytest.mark.parametrize("form", ["json", "table", "plain"])
def test_the_report_holds_no_value_of_a_variable_and_not_the_name_of_the_user(
    protokv: Program, monkeypatch: pytest.MonkeyPatch, form: str
) -> None:
    protokv.environment |= {"PROTOKV_TOKEN": "s3cret", "HF_TOKEN": "s3cret", "HTTPS_PROXY": "http://me:s3cret@x"}
    monkeypatch.setattr(Path, "home", lambda: protokv.folder.parent)
    text = "".join(line.strip() for line in protokv("doctor", "-f", form).out.splitlines())
    assert "s3cret" not in text
    assert str(protokv.folder.parent) not in text
    for said in ("PROTOKV_TOKEN", "HF_TOKEN", f"~/{protokv.folder.name}"):
        assert said in text


def test_a_package_that_cannot_be_imported_is_a_problem_and_a_failure(
    protokv: Program, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(name: str) -> Any:
        if name in ("torch", "av"):
            raise OSError("libfoo.so: no such\nfile")
        return import_module(name)

    monkeypatch.setattr("protokv.state.setup.import_module", broken)
    result = protokv("doctor", "-f", "json")
    assert result.code == Exit.FAILURE
    (found,) = result.rows()
    assert found["problems"] == [f"{name} cannot be imported: libfoo.so: no such file" for name in ("torch", "av")]
    assert [one["name"] for one in found["devices"]] == ["cpu"]
