"""`protokv inspect --repair`: back to the newest whole commit; what is lost is said, and nothing is deleted."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from protokv.fleet.plan import Job, read_manifest
from protokv.state.commit import Lock
from protokv_cli.exits import Exit
from tests.cli.conftest import Program

KEPT = ("--budget", "24", "--every", "3s", "--keep", "4")
HEADER, TENSORS = 0.02, 0.9


def flip(state: Path, where: float = TENSORS) -> bytes:
    """Flip a bit of the document, or of a tensor; return the file's bytes now. A folder has a file for each."""
    file = state
    if state.is_dir():
        file = state / "zarr.json" if where == HEADER else min((state / "near" / "keys").glob("c*"))
    data = bytearray(file.read_bytes())
    data[int(len(data) * where)] ^= 1
    # As a disk does it, and not by a new file.
    with file.open("r+b") as same:
        same.write(data)
    return bytes(data)


@pytest.mark.usefixtures("mocked")
def test_a_damaged_state_goes_back_to_its_newest_whole_commit_and_stays_beside_it(
    protokv: Program, video: Path
) -> None:
    state, aside = Path("clip.zarr"), Path("clip.zarr.damaged")
    watch = ("ingest", video, "-o", state, *KEPT)
    assert protokv(*watch).code == 0
    names, whole = set(Path().iterdir()), protokv("inspect", state, "--repair", "--json")
    assert (whole.code, whole.rows()[0]["damage"], set(Path().iterdir())) == (0, None, names)
    shutil.copytree(state, "whole.zarr")

    damaged = flip(state)
    flip(Path(f"{state}@000009.000s"))
    with Lock(state):
        assert protokv("inspect", state, "--repair").code == Exit.LOCKED
    result = protokv("inspect", state, "--repair", "--json")
    assert result.code == 0
    (row,) = result.rows()
    assert "tensor near.keys" in row["damage"]
    assert (row["stream_time_s"], row["lost_s"], row["lost_steps"], row["passed_over"]) == (6.0, 6.0, 6, [9.0])
    assert (row["damaged"], row["source"]) == (str(aside), "clip.mp4")
    assert "protokv ingest clip.mp4" in result.err
    assert protokv("inspect", state, f"{state}@000006.000s").code == 0
    assert min((aside / "near" / "keys").glob("c*")).read_bytes() == damaged
    assert protokv(*watch).code == 0
    assert protokv("inspect", state, "whole.zarr").code == 0

    # The header does not tell what was lost, and the name is taken.
    flip(state, HEADER)
    result = protokv("inspect", state, "--repair", "--format", "table")
    assert (result.code, "how much, the damaged state does not tell" in result.out) == (0, True)
    assert Path(f"{aside}-2").exists()


@pytest.mark.usefixtures("mocked")
def test_nothing_to_go_back_to_is_one_line_and_the_state_stays(protokv: Program, video: Path) -> None:
    assert protokv("ingest", video, "-o", "clip.safetensors", "--budget", "24").code == 0
    damaged = flip(Path("clip.safetensors"))
    result = protokv("inspect", "clip.safetensors", "--repair")
    assert result.code == Exit.CORRUPT
    error, hint = result.err.splitlines()
    assert error.endswith("there is no whole commit to go back to")
    assert "protokv ingest clip.mp4 -o clip.safetensors --force" in hint
    assert [one.read_bytes() for one in Path().iterdir()] == [damaged]
    assert protokv("inspect", "gone.safetensors", "--repair").code == Exit.NOT_FOUND
    # Of two streams beside a header that says nothing, none is chosen.
    for seed, at in enumerate(("000006.000s", "000003.000s")):
        other = ("--budget", "24", "--set", f"seed={seed}", "--for", f"{6 - 3 * seed}s")
        assert protokv("ingest", video, "-o", f"{seed}.safetensors", *other).code == 0
        Path(f"{seed}.safetensors").rename(f"clip.safetensors@{at}")
    flip(Path("clip.safetensors"), HEADER)
    result = protokv("inspect", "clip.safetensors", "--repair")
    assert (result.code, "of several streams" in result.err) == (Exit.CORRUPT, True)


@pytest.mark.usefixtures("mocked")
def test_the_list_of_a_folder_is_the_list_of_the_next_run(protokv: Program, video: Path) -> None:
    for name in ("one", "more/two", "three", "four"):
        Path("videos", name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(video, f"videos/{name}.mp4")
        Path("states", name).parent.mkdir(parents=True, exist_ok=True)
        result = protokv("ingest", f"videos/{name}.mp4", "-o", f"states/{name}.safetensors", *KEPT)
        assert result.code == 0, result.err
    assert protokv("inspect", "states/", "--repair").code == 0
    flip(Path("states/one.safetensors"))
    for kept in Path("states/more").glob("two*"):
        flip(kept, HEADER)
    failure = {"source": "videos/bad.mp4", "key": "bad", "state": "states/bad.safetensors", "message": "no video"}
    Path("states/failures.jsonl").write_text(json.dumps(failure) + "\n")
    result = protokv("inspect", "states/", "--repair")
    assert result.code == Exit.PARTIAL
    rows = {row["key"]: row for row in result.rows()}
    assert {key: row["source"] for key, row in rows.items()} == {
        "bad": "videos/bad.mp4",
        "more/two": "videos/more/two.mp4",
        "one": "videos/one.mp4",
    }
    assert (rows["one"]["stream_time_s"], rows["more/two"]["stream_time_s"]) == (9.0, None)
    assert Path("states/more/two.safetensors.damaged").exists()
    assert not Path("states/more/two.safetensors").exists()
    assert {Job(row["source"], key) for key, row in rows.items()} == set(read_manifest(result.out.splitlines(), "it"))
    again = protokv("inspect", "states/", "--repair", "--format", "plain")
    assert (again.code, sorted(again.out.split())) == (Exit.PARTIAL, ["videos/bad.mp4", "videos/one.mp4"])
