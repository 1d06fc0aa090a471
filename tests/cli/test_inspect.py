"""`protokv inspect`: the document of a state, without its model."""

import json
import re
import shutil
from pathlib import Path

import pytest

from protokv.slots import SlotsFile
from protokv_cli.exits import ExitCode
from tests.cli.conftest import Program, Watch, write_video


@pytest.fixture
def state(protokv: Program, watched: Watch) -> Path:
    return Path(shutil.copy(watched("--memory", "paper"), protokv.folder))


def test_the_document_has_the_promised_fields_and_needs_no_model(
    protokv: Program, state: Path
) -> None:
    protokv.environment["PROTOKV_MODEL"] = "/nowhere/at/all"
    before = (state.read_bytes(), state.stat().st_mtime_ns)
    (document,) = protokv("inspect", state, "--json").rows()
    assert (state.read_bytes(), state.stat().st_mtime_ns) == before
    assert (document["format_version"], document["backbone"]["family"]) == (1, "qwen2_5_vl")
    memory = document["memory"]
    assert (memory["kind"], memory["changes"], memory["budget"]) == ("paper", {}, 24)
    stream = document["stream"]
    assert (stream["source"], stream["steps"], stream["duration_s"]) == ("clip.mp4", 12, 12.0)
    kept = stream["tokens_exact"] + memory["prototypes"] * memory["pseudo_tokens"]
    assert stream["tokens_kept"] == kept <= 24
    parts = {k: v for k, v in document["bytes"].items() if k not in ("total", "file")}
    assert document["bytes"]["total"] == sum(parts.values())
    assert document["bytes"]["file"] == state.stat().st_size
    assert len(document["layers"]) == 3


def test_the_table_begins_with_a_summary_and_shows_more_on_request(
    protokv: Program, state: Path
) -> None:
    protokv.environment["COLUMNS"] = "200"
    text = protokv("inspect", state, "--format", "table").out
    rows = dict(line.strip().split(maxsplit=1) for line in text.splitlines() if line)
    assert list(rows) == ["watched", "whole", "written", "kept", "size", "memory", "model"]
    assert rows["watched"].startswith("clip.mp4 (pyav), 0:12, to its end")
    assert rows["whole"].startswith("yes: every byte")
    assert rows["kept"].startswith(
        "72 tokens: the last 6 exactly (from 0:11), older ones as 2 prototypes"
    )
    assert "24 tokens" in rows["memory"]
    inner = protokv("inspect", state, "--format", "table", "--layers").out
    assert inner.startswith(text)
    assert re.search(r"split +1, 3 *$", inner, re.MULTILINE), "a pair of settings is no quantiles"
    for word in ("frames of the model", "memory", "bytes", "layers", "codebooks", "slots in use"):
        assert word in inner[len(text) :]


def test_every_source_and_its_damage_is_shown(
    protokv: Program, mocked: None, video: Path, tmp_path: Path
) -> None:
    cut = write_video(tmp_path / "cut.mkv", 12)
    cut.write_bytes(cut.read_bytes()[: cut.stat().st_size * 2 // 3])
    for source in (video, cut):
        result = protokv(
            "ingest", source, "--budget", "24", "--append", "-o", "s.safetensors", "--json"
        )
    assert result.code == ExitCode.PARTIAL
    stream = protokv("inspect", "s.safetensors", "--json").rows()[0]["stream"]
    whole, damaged = stream["sources"]
    assert (whole["name"], whole["damage"]) == ("clip.mp4", None)
    assert (damaged["name"], damaged["start_s"]) == ("cut.mkv", whole["end_s"])
    assert stream["damage"] == damaged["damage"]["message"] == result.rows()[-1]["damage"]
    text = " ".join(protokv("inspect", "s.safetensors", "--format", "table").out.split())
    assert "2 sources" in text
    assert f"damaged: {stream['damage']}; the state" in text


@pytest.mark.parametrize("suffix", [".pt", ".zarr", ".safetensors"])
def test_a_state_is_written_in_another_form_and_equals_itself(
    protokv: Program, state: Path, suffix: str
) -> None:
    other = protokv.folder / f"other{suffix}"
    (row,) = protokv("inspect", state, "-o", other, "--json").rows()
    assert row == {"state": str(state), "output": str(other), "bytes": row["bytes"]}
    assert row["bytes"] > 10_000
    result = protokv("inspect", state, other, "--json")
    (found,) = result.rows()
    assert (result.code, found["equal"]) == (ExitCode.DONE, True)


def test_a_target_is_replaced_only_if_it_is_of_the_same_video_or_by_force(
    protokv: Program, state: Path, tmp_path: Path
) -> None:
    thesis = protokv.folder / "thesis.pt"
    other = protokv.folder / "other.pt"
    thesis.write_text("three years of work")
    second = write_video(tmp_path / "second.mp4", 3, seed=4)
    assert protokv("ingest", second, "--budget", "24", "-o", other, "--json").code == 0
    for there, said in (
        (thesis, "no state that can be read"),
        (other, "the state of another stream"),
    ):
        before = there.read_bytes()
        result = protokv("inspect", state, "-o", there)
        assert (result.code, there.read_bytes()) == (ExitCode.MISMATCH, before)
        assert said in result.err
        assert protokv("inspect", state, "-o", there, "--force").code == 0
        assert protokv("inspect", state, "-o", there).code == 0
    alias = protokv.folder / "alias.safetensors"
    alias.symlink_to(state)
    for itself in (state, alias):
        assert protokv("inspect", state, "-o", itself, "--force").code == ExitCode.USAGE


def test_states_that_differ_are_told_apart_and_the_exit_code_says_so(
    protokv: Program, state: Path, video: Path
) -> None:
    assert protokv("ingest", video, "-o", "two.safetensors", "--budget", "24").code == 0
    result = protokv("inspect", state, "two.safetensors", "--json")
    (found,) = result.rows()
    assert (result.code, found["equal"]) == (ExitCode.FAILURE, False)
    protokv.environment["COLUMNS"] = "80"
    table = protokv("inspect", state, "two.safetensors", "--format", "table")
    assert all(f" {one['name']} " in table.out for one in found["tensors"])
    assert max(map(len, table.out.splitlines())) <= 80
    assert "memory.pseudo_tokens" in table.out
    assert "equal in all" in protokv("inspect", state, state, "--format", "table").out


def test_a_damaged_state_is_refused_unless_digests_are_skipped(
    protokv: Program, state: Path
) -> None:
    data = bytearray(state.read_bytes())
    header = int.from_bytes(data[:8], "little")
    begin, _ = json.loads(data[8 : 8 + header])["near.keys"]["data_offsets"]
    data[8 + header + begin] ^= 1
    state.write_bytes(data)
    for command, more in (
        ("inspect", []),
        ("inspect", ["-o", "b.pt"]),
        ("inspect", [state]),
        ("query", ["what ?"]),
    ):
        result = protokv(command, state, *more)
        assert (result.code, "tensor near.keys" in result.err) == (ExitCode.CORRUPT, True)
    assert not Path("b.pt").exists()
    assert (
        " whole    its bytes are not checked"
        in protokv("inspect", state, "--no-verify", "-f", "table").out
    )
    assert protokv("query", state, "what is first ?", "--no-verify").code == 0


def test_a_state_is_written_as_plain_tensors_for_engines_and_these_are_no_state(
    protokv: Program, state: Path
) -> None:
    target = protokv.folder / "states/clip.kv.safetensors"
    target.parent.mkdir()
    own = protokv.environment.pop("PROTOKV_MODEL")
    assert protokv("inspect", state, "-o", target).code == ExitCode.FAILURE
    (document,) = protokv("inspect", state, "-o", target, "-m", own, "--json").rows()
    assert SlotsFile(target).head.slots == document["slots"] <= 24 + 10
    shutil.copy(state, target.parent)
    (row,) = protokv("inspect", target.parent, "--json").rows()
    assert Path(row["state"]).name == state.name
    assert protokv("inspect", target).code == ExitCode.CORRUPT
