"""A state from somewhere else runs no code and opens no connection and no folder; only the user answers questions."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from protokv.backbones import load_backbone
from protokv.backbones.hub import cached_folder
from protokv.core.session import Session
from protokv.errors import ModelError, StateCorrupt
from protokv.memories import DurableConfig
from protokv.state import api as storage
from protokv.state.checkpoint import load, load_backbone_of, save
from protokv_cli.exits import Exit
from tests.cli.conftest import Program


def saved(folder: Path, path: Path, **identity: str) -> Path:
    """Save a state of the model in a folder, with other fields in the identity of its model."""
    backbone = load_backbone(str(folder), device="cpu", dtype="float32")
    save(Session.start(backbone, DurableConfig(budget=24)), path)
    state = storage.load_state(path)
    storage.save_state(replace(state, backbone=replace(state.backbone, **identity)), path)
    return path


@pytest.fixture
def trap(tmp_path: Path, tiny_folder: Path) -> Path:
    """A model folder whose config names code instead of an architecture; the code leaves a file behind."""
    folder = shutil.copytree(tiny_folder, tmp_path / "owner" / "model")
    config = json.loads((folder / "config.json").read_text())
    del config["model_type"]
    config["auto_map"] = {"AutoConfig": "trap.Config"}
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "trap.py").write_text(
        "from pathlib import Path\nfrom transformers import PretrainedConfig\n"
        f"Path({str(tmp_path / 'sprung')!r}).touch()\n"
        "class Config(PretrainedConfig):\n    model_type = 'trap'\n"
    )
    return folder


NAMES = ["owner/model", "./owner/model", "{trap}", "~/model", "owner/../owner/model"]


@pytest.mark.parametrize(("name", "user_names_it"), [*((name, False) for name in NAMES), ("owner/model", True)])
def test_no_code_runs_from_a_folder_that_a_state_or_the_user_names(
    name: str, user_names_it: bool, protokv: Program, trap: Path, tiny_folder: Path, tmp_path: Path
) -> None:
    state = saved(tiny_folder, tmp_path / "s.safetensors", name=name.format(trap=trap))
    del protokv.environment["PROTOKV_MODEL"]
    options = ("--model", trap) if user_names_it else ()
    result = protokv("query", state, "-", *options, stdin="y\n" * 5)
    assert result.code == Exit.FAILURE
    # A folder that only the state names is not even opened.
    assert ("names no model_type" in result.err) is user_names_it
    assert ("--model" in result.err.splitlines()[1]) is not user_names_it
    assert "y/N" not in result.err
    assert not (tmp_path / "sprung").exists()


def test_a_model_in_the_cache_is_followed_without_a_connection(
    tiny_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache, commit = tmp_path / "hub", "0" * 40
    repository = cache / "models--owner--model"
    shutil.copytree(tiny_folder, repository / "snapshots" / commit)
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text(commit)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(cache))
    monkeypatch.setattr("huggingface_hub.file_download.constants.HF_HUB_CACHE", str(cache))

    def connect(*_: object, **__: object) -> None:
        raise AssertionError("a state does not make protokv open a connection")

    monkeypatch.setattr("socket.socket.connect", connect)
    state = saved(tiny_folder, tmp_path / "s.safetensors", name="owner/model")
    # A folder of that name in the current one does not come before it.
    monkeypatch.chdir(tmp_path)
    (tmp_path / "owner" / "model").mkdir(parents=True)
    session = load(state, device="cpu")
    assert session.backbone.identity.name == "owner/model"
    assert cached_folder("owner/other") is None


@pytest.mark.parametrize("name", ["", ".", "..", "a", "a/b/c", "/a/b", "./a", "../b", "~/b", "a/..", "a--b/c", "a/b\n"])
def test_an_impossible_name_of_the_hub_is_nowhere_in_the_cache(name: str) -> None:
    assert cached_folder(name) is None


@pytest.mark.parametrize("dtype", ["", "auto", "int3", "float32+2bit", "\x1b[31m"])
def test_a_dtype_that_is_none_makes_a_state_corrupt(dtype: str, tiny_folder: Path, tmp_path: Path) -> None:
    state = storage.load_state(saved(tiny_folder, tmp_path / "s.safetensors", dtype=dtype))
    with pytest.raises(StateCorrupt, match=r"backbone\.dtype"):
        load_backbone_of(state, device="cpu")


def test_the_name_in_the_message_cannot_be_more_than_an_argument(tiny_folder: Path, tmp_path: Path) -> None:
    state = storage.load_state(saved(tiny_folder, tmp_path / "s.safetensors", name="$(touch x); y"))
    with pytest.raises(ModelError) as caught:
        load_backbone_of(state, device="cpu")
    assert caught.value.hint.endswith("--model '$(touch x); y'")


def test_no_library_reads_what_the_user_pipes_in() -> None:
    code = (
        "import os, sys\n"
        "from protokv_cli.process import withheld_stdin\n"
        "with withheld_stdin() as mine:\n"
        "    stolen = sys.stdin.read() + os.read(0, 100).decode()\n"
        "    print(repr(stolen), mine.read().split())\n"
        "print(repr(sys.stdin.read()))\n"
    )
    result = subprocess.run(
        [sys.executable, "-c", code], input="yes\nno\n", capture_output=True, text=True, check=True, timeout=60
    )
    assert result.stdout == "'' ['yes', 'no']\n''\n"
