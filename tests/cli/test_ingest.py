"""`protokv ingest`: what it writes, says and ends with."""

from __future__ import annotations

import json
import shlex
import shutil
import signal
from collections.abc import Callable
from pathlib import Path

import pytest

from protokv.config import CONFIGS
from protokv_cli.exits import Exit
from tests.cli.conftest import Program, write_video
from tests.mock_backbone import MockBackbone
from tests.warmed import WarmedProgram

SMALL = ("--budget", "24", "--json")


def test_the_state_stands_here_under_the_name_of_the_video(protokv: Program, video: Path) -> None:
    result = protokv("ingest", video, *SMALL)
    assert result.code == 0, result.err
    assert (protokv.folder / "clip.safetensors").is_file()
    assert 'protokv query clip.safetensors "..."' in result.err


def test_json_lines_end_in_a_commit_and_a_summary(protokv: Program, video: Path) -> None:
    rows = protokv("ingest", video, *SMALL).rows()
    assert [row["type"] for row in rows[-2:]] == ["commit", "summary"]
    assert [row["type"] for row in rows[:2]] == ["started", "progress"]
    summary = rows[-1]
    assert summary["complete"] is True
    assert summary["damaged"] is False
    assert summary["steps"] == 12
    assert summary["stream_time_s"] == 12.0
    assert summary["file_bytes"] == (protokv.folder / "clip.safetensors").stat().st_size


def test_plain_output_is_the_path_alone(protokv: Program, video: Path) -> None:
    assert protokv("ingest", video, "--budget", "24", "--format", "plain").out == "clip.safetensors\n"


def test_a_table_names_the_state_and_its_size(protokv: Program, video: Path) -> None:
    result = protokv("ingest", video, "--budget", "24", "--format", "table")
    assert "clip.safetensors" in result.out
    assert "0:12, 12 steps" in result.out


def test_quiet_says_nothing_on_stderr(protokv: Program, video: Path) -> None:
    assert protokv("ingest", video, *SMALL, "--quiet").err == ""


def test_commits_come_as_often_as_asked(protokv: Program, video: Path) -> None:
    rows = protokv("ingest", video, *SMALL, "--every", "5steps").rows()
    assert [row["steps"] for row in rows if row["type"] == "commit"] == [5, 10, 12]
    rows = protokv("ingest", video, *SMALL, "--every", "4s", "-o", "by-time.safetensors").rows()
    # The end of the source is not known beforehand: the last commit says that it was reached.
    assert [row["stream_time_s"] for row in rows if row["type"] == "commit"] == [4.0, 8.0, 12.0, 12.0]


def test_kept_commits_are_states_that_every_command_reads(protokv: Program, video: Path) -> None:
    assert protokv("ingest", video, *SMALL, "--every", "4s", "--keep", "3").code == 0
    kept = sorted(path.name for path in protokv.folder.glob("clip.safetensors*"))
    # Who collects states does not collect them.
    assert [path.name for path in protokv.folder.glob("*.safetensors")] == ["clip.safetensors"]
    assert kept == ["clip.safetensors", "clip.safetensors@000004.000s", "clip.safetensors@000008.000s"]
    for name, time_s in zip(kept, (12.0, 4.0, 8.0), strict=True):
        assert protokv("query", name, "what is first ?").rows()[0]["stream_time_s"] == time_s
        assert protokv("inspect", name, "--json").rows()[0]["stream"]["duration_s"] == time_s


def test_a_second_video_goes_on_where_the_first_ended_and_the_command_may_be_repeated(
    protokv: Program, video: Path, tmp_path: Path
) -> None:
    (tmp_path / "other").mkdir()
    second = write_video(tmp_path / "other" / "second.mp4", 5, seed=3)
    append = ("ingest", second, *SMALL, "--append", "-o", "clip.safetensors")
    assert protokv("ingest", video, *SMALL).code == 0
    result = protokv(*append)
    assert result.code == 0, result.err
    assert "appending to clip.safetensors at 0:12" in result.err
    summary = result.rows()[-1]
    assert (summary["steps"], summary["stream_time_s"], summary["complete"]) == (17, 17.0, True)
    before = (protokv.folder / "clip.safetensors").read_bytes()
    for again in (append, ("ingest", video, *SMALL), ("ingest", video, *SMALL, "--append", "-o", "clip.safetensors")):
        result = protokv(*again)
        assert result.code == 0
        assert "nothing to do" in result.err
        assert [row["type"] for row in result.rows()] == ["started", "summary"]
    assert (protokv.folder / "clip.safetensors").read_bytes() == before
    assert protokv("query", "clip.safetensors", "what is first ?").rows()[0]["stream_time_s"] == 17.0
    refused = protokv("ingest", second, "--budget", "32", "--append", "-o", "clip.safetensors")
    assert refused.code == Exit.MISMATCH
    assert "budget is 24, this run's is 32" in refused.err


def test_constants_of_the_memory_are_set_one_by_one_and_shown(protokv: Program, video: Path) -> None:
    settings = ("--set", "split=1:5", "--set", "anchor=average", "--set", "idle-steps=7", "--set", "merge=false")
    assert protokv("ingest", video, *SMALL, "--memory", "paper", *settings, "--positions", "compact").code == 0
    memory = protokv("inspect", "clip.safetensors", "--json").rows()[0]["memory"]
    assert memory["positions"] == "compact"
    kept = {name: memory["config"][name] for name in ("split", "anchor", "idle_steps", "merge", "budget")}
    assert kept == {"split": [1, 5], "anchor": "average", "idle_steps": 7, "merge": False, "budget": 24}


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--set", "anchor"), "NAME=VALUE"),
        (("--set", "anchor=middle"), "anchor: expected one of"),
        (("--set", "pseudo_tokens=soon"), "pseudo_tokens: expected int"),
        (("--set", "kmax=3"), "kmax: there is no such setting of durable"),
        (("--set", "decay=off"), "decay: there is no such setting of durable"),
        (("--memory", "elephant"), "there is no memory 'elephant'"),
        (("--positions", "folded"), "positions: expected one of stream, compact"),
    ],
)
def test_a_wrong_setting_of_the_memory_is_one_clear_line(
    protokv: Program, video: Path, arguments: tuple[str, ...], said: str
) -> None:
    result = protokv("ingest", video, *SMALL, *arguments)
    assert result.code == Exit.USAGE
    assert said in result.err.splitlines()[0]
    assert not list(protokv.folder.glob("*.safetensors"))


def test_a_stream_beyond_the_positions_of_the_model_is_told_once_and_goes_on(
    protokv: Program, video: Path, tiny_folder: Path, tmp_path: Path
) -> None:
    folder = shutil.copytree(tiny_folder, tmp_path / "short-sighted")
    config = json.loads((folder / "config.json").read_text())
    config["text_config"]["max_position_embeddings"] = 10
    (folder / "config.json").write_text(json.dumps(config))
    result = protokv("ingest", video, *SMALL, "--model", folder)
    assert result.code == 0
    warnings = [line for line in result.err.splitlines() if line.startswith("Warning:")]
    assert len(warnings) == 1
    assert "trained on 10" in warnings[0]
    assert "positions=compact" in warnings[0]


@pytest.mark.parametrize("memory", CONFIGS)
def test_every_memory_can_be_asked_for(protokv: Program, video: Path, memory: str) -> None:
    assert protokv("ingest", video, *SMALL, "--memory", memory).code == 0


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (["absent.mp4"], Exit.NOT_FOUND, "absent.mp4"),
        (["notes.mp4"], Exit.FAILURE, "notes.mp4"),
        (["{video}", "--budget", "lots"], Exit.USAGE, "budget"),
        (["{video}", "--every", "often"], Exit.USAGE, "often"),
        (["{video}", "--every", "0s"], Exit.USAGE, "0s"),
        (["{video}", "--keep", "0"], Exit.USAGE, "keep 0"),
        (["{video}", "--append"], Exit.USAGE, "append"),
        (["{video}", "--append", "--force", "-o", "x.safetensors"], Exit.USAGE, "append"),
        (["{video}", "--memory", "elephant"], Exit.USAGE, "elephant"),
        (["{video}", "--fps", "0"], Exit.USAGE, "fps"),
        (["{video}", "--fps", "1e9"], Exit.USAGE, "fps"),
        (["{video}", "--budget", "1000000000"], Exit.USAGE, "budget"),
        (["{video}", "--model", "./absent-model"], Exit.FAILURE, "absent-model"),
        (["{video}", "--decoder", "vhs"], Exit.USAGE, "vhs"),
        (["{video}", "--device", "abacus"], Exit.USAGE, "abacus"),
        (["{video}", "-o", "x.npz"], Exit.USAGE, "expected a path that ends in one of"),
        (["{video}", "-o", "absent/x.safetensors", "--budget", "24"], Exit.FAILURE, "absent"),
        (["rtsp:/camera/1"], Exit.NOT_FOUND, "rtsp:/camera/1"),
        (["{video}", "--resume"], Exit.NOT_FOUND, "clip.safetensors"),
    ],
    ids=lambda v: " ".join(v) if isinstance(v, list) else "",
)
def test_a_mistake_is_one_error_line_one_hint_and_its_code(
    protokv: Program, video: Path, arguments: list[str], code: Exit, message: str
) -> None:
    (protokv.folder / "notes.mp4").write_text("not a video\n" * 100)
    result = protokv("ingest", *(a.format(video=video) for a in arguments))
    assert result.code == code
    lines = result.err.splitlines()
    assert lines[0].startswith("Error: ")
    assert message in lines[0]
    assert len(lines) <= 2
    assert all(line.startswith("Hint: ") for line in lines[1:])
    assert result.out == ""


def test_another_memory_or_video_is_not_mixed_into_a_state(protokv: Program, video: Path, tmp_path: Path) -> None:
    assert protokv("ingest", video, *SMALL).code == 0
    before = (protokv.folder / "clip.safetensors").read_bytes()
    result = protokv("ingest", video, "--budget", "32", "--json")
    assert result.code == Exit.MISMATCH
    assert "budget is 24, this run's is 32" in result.err
    (tmp_path / "other").mkdir()
    other = write_video(tmp_path / "other" / "clip.mp4", 3, seed=9)
    result = protokv("ingest", other, *SMALL)
    assert result.code == Exit.MISMATCH
    assert "clip.safetensors is the state of another clip.mp4, or clip.mp4 as it was before it changed" in result.err
    shutil.copy(other, tmp_path / "other" / "clip.mkv")
    result = protokv("ingest", tmp_path / "other" / "clip.mkv", *SMALL)
    assert result.code == Exit.MISMATCH
    assert "the state of another video, clip.mp4; this run's source is clip.mkv" in result.err
    assert "name another state with -o" in result.err
    assert (protokv.folder / "clip.safetensors").read_bytes() == before
    assert protokv("ingest", other, *SMALL, "--force").code == 0


def test_the_size_of_the_state_is_said_before_the_work_and_a_short_clip_takes_little_of_it(
    protokv: Program, mocked: None, video: Path
) -> None:
    result = protokv("ingest", video, "--json")
    started, summary = result.rows()[0], result.rows()[-1]
    assert started["most_bytes"] > 500_000
    assert summary["file_bytes"] == (protokv.folder / "clip.safetensors").stat().st_size < started["most_bytes"] / 10
    assert result.err.startswith("state: ")
    (first, *_) = protokv("ingest", video, "--memory", "full", "-o", "f.pt", "--json").rows()
    assert first["most_bytes"] is None


@pytest.mark.parametrize("flags", [(), ("--force",), ("-o", "self.safetensors", "--force"), ("--append",)])
def test_the_source_is_never_written_over(protokv: Program, mocked: None, video: Path, flags: tuple[str, ...]) -> None:
    clip = shutil.copy(video, protokv.folder / "self.safetensors")
    (protokv.folder / "link.safetensors").symlink_to(clip)
    for output in ((), ("-o", "link.safetensors")):
        arguments = (*flags, *output) if "--append" not in flags or output else (*flags, "-o", "self.safetensors")
        result = protokv("ingest", clip, "--budget", "24", *arguments)
        assert result.code == Exit.USAGE, result.err
        assert "is what is read, and would be written over" in result.err
        assert clip.read_bytes() == video.read_bytes()


def test_a_rate_above_that_of_the_source_is_told(protokv: Program, mocked: None, video: Path) -> None:
    result = protokv("ingest", video, "--budget", "24", "--fps", "16", "--json")
    assert "has 8 frames a second, and --fps 16 shows the model some of them more than once" in result.err
    assert "Warning" not in protokv("ingest", video, "--budget", "24", "--fps", "8", "--force", "--json").err


def test_the_slash_that_an_address_lacks_is_named(protokv: Program) -> None:
    for address in ("rtsp:/camera/1", "RTSP:camera/1"):
        assert "rtsp://camera/1" in protokv("ingest", address).err.splitlines()[1]
    assert "spelling" in protokv("ingest", "c:/absent.mp4").err.splitlines()[1]


@pytest.mark.parametrize("name", ["Talk [dQw4w9WgXcQ]", "a [bold]b", "it's [x\\]", "[/red]", "$HOME `x`"])
def test_any_name_is_shown_as_it_is_and_can_be_pasted(
    protokv: Program, mocked: None, video: Path, name: str, tmp_path: Path
) -> None:
    (tmp_path / "in").mkdir()
    odd = shutil.copy(video, tmp_path / "in" / (name.replace("/", "_") + ".mp4"))
    result = protokv("ingest", odd, "--budget", "24", "--format", "table")
    assert result.code == 0, result.err
    state = odd.stem + ".safetensors"
    assert state in result.out
    pasted = shlex.split(result.err.splitlines()[-1])
    assert pasted[2:5] == ["protokv", "query", state]
    assert odd.name in protokv("inspect", state, "--format", "table").out


def test_the_same_command_on_a_finished_state_changes_nothing(protokv: Program, video: Path) -> None:
    protokv("ingest", video, *SMALL)
    before = (protokv.folder / "clip.safetensors").read_bytes()
    assert protokv("ingest", video, *SMALL).code == 0
    assert (protokv.folder / "clip.safetensors").read_bytes() == before


def test_a_truncated_video_keeps_what_could_be_read_and_ends_as_partial(protokv: Program, tmp_path: Path) -> None:
    path = write_video(tmp_path / "cut.mkv", 12)
    path.write_bytes(path.read_bytes()[: path.stat().st_size * 2 // 3])
    result = protokv("ingest", path, *SMALL)
    assert result.code == Exit.PARTIAL, result.err
    assert f"\nError: {path}: " in result.err
    assert 0 < result.rows()[-1]["steps"] < 12
    assert protokv("query", "cut.safetensors", "what is first ?").code == 0


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_commits_and_the_same_command_ends_in_the_bytes_of_one_run(
    protokv: Program, start: Callable[..., WarmedProgram], tmp_path: Path, number: signal.Signals, code: int
) -> None:
    long = write_video(tmp_path / "long.mp4", 90, rate=2)
    arguments = ("ingest", long, "--budget", "24", "--json")
    with start(*arguments, "--every", "1steps") as process:
        process.stdout.readline()
        process.send_signal(number)
        out, err = process.communicate(timeout=120)
    assert process.returncode == code, err
    assert "stopping after this step" in err
    assert "is committed" in err
    assert '"complete": false' in out
    assert protokv(*arguments).code == 0
    resumed = (protokv.folder / "long.safetensors").read_bytes()
    assert protokv(*arguments, "-o", "whole.safetensors").code == 0
    assert (protokv.folder / "whole.safetensors").read_bytes() == resumed


def test_settings_come_from_flags_then_the_environment_then_the_file(protokv: Program, video: Path) -> None:
    def budget(*arguments: str) -> int:
        result = protokv("ingest", video, "--json", "--force", *arguments)
        assert result.code == 0, result.err
        return int(protokv("inspect", "clip.safetensors", "--json").rows()[0]["memory"]["budget"])

    (protokv.folder / "protokv.toml").write_text("[ingest]\nbudget = '20'\n")
    assert budget() == 20
    protokv.environment["PROTOKV_BUDGET"] = "22"
    assert budget() == 22
    assert budget("--budget", "24") == 24


def test_a_settings_file_that_cannot_be_read_is_named(protokv: Program, video: Path) -> None:
    (protokv.folder / "protokv.toml").write_text("[ingest\n")
    result = protokv("ingest", video)
    assert result.code == Exit.USAGE
    assert result.err.startswith("Error: protokv.toml cannot be read")


def test_a_dry_run_says_what_one_video_takes_and_writes_nothing(
    protokv: Program, mocked: None, video: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("protokv.backbones.load_backbone", MockBackbone)
    before = sorted(protokv.folder.iterdir())
    (row,) = protokv("ingest", video, "--budget", "24", "--dry-run", "--json").rows()
    assert sorted(protokv.folder.iterdir()) == before
    assert (row["type"], row["steps"], row["tokens"], row["tried_steps"]) == ("estimate", 12, 72, 9)
    assert row["seconds"] > 0
    started, *_, summary = protokv("ingest", video, "--budget", "24", "--json").rows()
    for name in ("state_bytes", "most_bytes"):
        assert row[name] == started[name]
    assert (row["steps"], row["tokens"]) == (summary["steps"], summary["tokens_seen"])
    text = protokv("ingest", video, "--budget", "24", "--dry-run", "--format", "table").out
    for said in ("12 steps", "72 in all", "about 0:0", "nothing was written"):
        assert said in text


def test_a_part_of_a_video_is_watched_and_continued(protokv: Program, mocked: None, video: Path) -> None:
    part = ("ingest", video, "--budget", "24", "--json", "--start", "0:04", "--duration", "5s", "-o", "p.pt")
    summary = protokv(*part).rows()[-1]
    assert (summary["steps"], summary["watched_s"], summary["complete"]) == (5, 5.0, True)
    assert "nothing to do" in protokv(*part).err
    stream = protokv("inspect", "p.pt", "--json").rows()[0]["stream"]
    assert stream["source"] == "clip.mp4 from 4 s for 5 s"
    whole = protokv("ingest", video, "--budget", "24", "-o", "p.pt")
    assert whole.code == Exit.MISMATCH
    assert protokv("ingest", video, "--start", "1h").code == Exit.USAGE
    assert protokv("ingest", video, video.parent, "-o", "d/", "--start", "2").code == Exit.USAGE
