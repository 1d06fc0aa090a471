"""The package as a user sees it: its names, the README's code, its wheel, and the rules of its
rooms.
"""

import re
import subprocess
import sys
import tomllib
from pathlib import Path
from zipfile import ZipFile

import pytest
from hatchling.builders.wheel import WheelBuilder
from importlinter.cli import lint_imports

import protokv

ROOT = Path(__file__).parent.parent
DOCUMENTS = sorted(
    path
    for place in ("*.md", "docs/**/*.md", "samples/**/*.md", "protokv/**/*.md")
    for path in ROOT.glob(place)
)


def test_every_public_name_is_there_when_it_is_asked_for() -> None:
    assert all(getattr(protokv, name) is not None for name in protokv.__all__)
    assert issubclass(protokv.errors.StateNotFound, protokv.errors.ProtoKVError)
    with pytest.raises(AttributeError, match="forget_everything"):
        protokv.forget_everything  # noqa: B018


def test_the_code_of_the_readme_runs_and_answers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (code,) = re.findall(
        r"```python\n(.*?)```", (ROOT / "README.md").read_text(encoding="utf-8"), re.DOTALL
    )
    (tmp_path / "samples").symlink_to(ROOT / "samples")
    monkeypatch.chdir(tmp_path)
    exec(compile(code, "README.md", "exec"), {})
    # The first event of that video, from its questions file.
    assert capsys.readouterr().out.strip() == "diamond"


def test_it_runs_as_a_module() -> None:
    command = [sys.executable, "-m", "protokv", "--version"]
    result = subprocess.run(
        command, capture_output=True, text=True, check=True, timeout=60, cwd=ROOT
    )
    assert result.stdout.startswith(f"protokv {protokv.__version__}\n")


def test_rooms_import_only_rooms_below_them_and_make_no_circle() -> None:
    # The contracts are in pyproject.toml.
    assert lint_imports(str(ROOT / "pyproject.toml"), no_cache=True, no_logo=True) == 0


def test_the_wheel_holds_the_embedded_model_and_imports_nothing_beside_the_package(
    tmp_path: Path,
) -> None:
    (path,) = WheelBuilder(str(ROOT)).build(directory=str(tmp_path), versions=["standard"])
    wheel = ZipFile(path)
    names = set(wheel.namelist())
    assert {
        "protokv/mini/network.py",
        "protokv/mini/weights/model.safetensors",
        "protokv/py.typed",
    } <= names
    assert {name.split("/")[0] for name in names if ".dist-info" not in name} == {
        "protokv",
        "protokv_cli",
    }
    sources = [name for name in names if name.endswith(".py")]
    assert len(sources) > 50
    for name in sources:
        assert not re.search(rb"^ *(from|import) (samples|tests)\b", wheel.read(name), re.M), name


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_a_link_of_a_document_leads_to_a_file(document: Path) -> None:
    text = re.sub(r"```.*?```", "", document.read_text(encoding="utf-8"), flags=re.DOTALL)
    for target in re.findall(r"\]\(([^)#\s]+)", text):
        assert "://" in target or (document.parent / target).exists(), target


def test_the_guide_of_installing_says_what_each_extra_is_for() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    guide = (ROOT / "docs" / "guides" / "installing.md").read_text(encoding="utf-8")
    rows = " ".join(line.split("|")[1] for line in guide.splitlines() if line.startswith("| `"))
    assert set(re.findall(r"`([\w-]+)`", rows)) == set(project["optional-dependencies"])


def test_the_readme_is_short() -> None:
    assert len((ROOT / "README.md").read_text(encoding="utf-8").split()) <= 700
