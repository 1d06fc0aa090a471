"""`protokv ingest` of several videos, as a user calls it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from protokv_cli.exits import Exit
from tests.cli.conftest import Program, write_video

SMALL = ("--budget", "24")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("videos")
    for seed, name in enumerate(["one.mp4", "two.mp4", "more/three.mkv"]):
        (folder / name).parent.mkdir(exist_ok=True)
        write_video(folder / name, 2, seed=seed)
    (folder / "bad.mp4").write_bytes(b"no video")
    return folder


def test_a_folder_becomes_a_folder_of_states_and_what_fails_is_listed(protokv: Program, folder: Path) -> None:
    planned = protokv("ingest", folder, "-o", "states/", *SMALL, "--dry-run")
    assert {row["key"]: row["status"] for row in planned.rows()} == dict.fromkeys(
        ["one", "two", "more/three", "bad"], "new"
    )
    assert planned.err.splitlines()[-1] == "4 videos: 4 new; nothing was written"
    assert not Path("states").exists()

    result = protokv("ingest", folder, "-o", "states/", *SMALL)
    assert result.code == Exit.PARTIAL
    rows = {row["key"]: row for row in result.rows() if row["type"] == "video"}
    assert {key: row["status"] for key, row in rows.items()} == {
        "one": "watched",
        "two": "watched",
        "more/three": "watched",
        "bad": "failed",
    }
    assert result.rows()[-1].items() >= {"type": "fleet", "videos": 4, "watched": 3, "failed": 1, "left": 0}.items()
    (failure,) = map(json.loads, Path("states/failures.jsonl").read_text().splitlines())
    assert failure["source"] == str(folder / "bad.mp4")
    assert failure["exit_code"] == protokv("ingest", folder / "bad.mp4", *SMALL).code
    assert "bad.mp4" in failure["message"]
    assert result.err.splitlines()[-1] == "1 of 4 videos have no whole state; why is in states/failures.jsonl"

    assert protokv("ingest", folder / "one.mp4", "-o", "single.safetensors", *SMALL).code == 0
    assert Path("states/one.safetensors").read_bytes() == Path("single.safetensors").read_bytes()

    again = protokv("ingest", folder / "one.mp4", folder / "two.mp4", "-o", "states", *SMALL, "--format", "table")
    assert again.code == 0
    assert "2: 0 watched, 2 done before, 0 failed, 0 left" in again.out
    assert not Path("states/failures.jsonl").exists()


def test_a_list_on_stdin_names_videos_and_keys(protokv: Program, folder: Path) -> None:
    lines = f'{folder}/one.mp4\n{{"source": "{folder}/two.mp4", "key": "named/so"}}\n'
    result = protokv("ingest", "--from", "-", "-o", "states", *SMALL, "--format", "plain", stdin=lines)
    assert result.code == 0, result.err
    assert sorted(result.out.splitlines()) == ["states/named/so.safetensors", "states/one.safetensors"]


@pytest.mark.parametrize(
    ("arguments", "code", "said"),
    [
        (("a.mp4", "b.mp4", "-o", "s.safetensors"), Exit.USAGE, "s.safetensors is the name of one"),
        (("a.mp4", "x/a.mkv"), Exit.USAGE, "a.mp4 and x/a.mkv would both have the state a"),
        (("a.mp4", "b.mp4", "--append", "-o", "s"), Exit.USAGE, "--append and --resume are for one video"),
        ((), Exit.USAGE, "there is no video to ingest"),
        (("--from", "gone.txt"), Exit.NOT_FOUND, "cannot read gone.txt"),
        (("*.mp4",), Exit.NOT_FOUND, "there is no video in *.mp4"),
    ],
)
def test_what_makes_no_sense_is_one_line_and_a_hint(
    arguments: tuple[str, ...], code: Exit, said: str, protokv: Program
) -> None:
    result = protokv("ingest", *arguments, *SMALL)
    assert result.code == code
    error, hint = result.err.splitlines()
    assert said in error
    assert hint.startswith("Hint: ")


def test_a_model_that_is_not_there_ends_the_fleet_as_it_ends_one_video(protokv: Program, folder: Path) -> None:
    result = protokv("ingest", folder, "-o", "states", "--model", "./nowhere", *SMALL)
    assert result.code == Exit.FAILURE
    assert result.err.splitlines()[0] == "Error: there is no model folder at ./nowhere"
