"""`protokv ingest` of several videos, as a user calls it."""

import json
import os
import shutil
import signal
import time
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest

from protokv.fleet import JobRecipe
from protokv.state.reader import StateReader
from protokv_cli.exits import ExitCode
from tests.cli.conftest import Program, read_to_the_end, write_video
from tests.fleet.conftest import InlinePool
from tests.fleet.recipes import MockRecipe

SMALL = ("--budget", "24")
LONG = Path(__file__).parents[2] / "samples" / "long" / "video.mp4"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("videos")
    for seed, name in enumerate(["one.mp4", "two.mp4", "more/three.mkv"]):
        (folder / name).parent.mkdir(exist_ok=True)
        write_video(folder / name, 2, seed=seed)
    (folder / "bad.mp4").write_bytes(b"no video")
    return folder


@pytest.fixture
def pools(monkeypatch: pytest.MonkeyPatch, mocked: None) -> list[tuple[int, list[str]]]:
    """Put workers of this process, with the mock, in the place of `LocalWorkerPool`; list their
    numbers and devices.
    """
    made: list[tuple[int, list[str]]] = []

    def make(recipe: JobRecipe, n: int, devices: list[str]) -> Any:
        made.append((n, devices))
        return nullcontext(InlinePool(recipe, n))

    monkeypatch.setattr("protokv.fleet.LocalWorkerPool", make)
    monkeypatch.setattr("protokv.fleet.JobRecipe", MockRecipe)
    return made


@pytest.mark.usefixtures("pools")
def test_a_folder_becomes_a_folder_of_states_and_what_fails_is_listed(
    protokv: Program, folder: Path
) -> None:
    planned = protokv("ingest", folder, "-o", "states/", *SMALL, "--dry-run")
    *plans, total = planned.rows()
    new = [(key, "new") for key in ("more/three", "one", "two")]
    assert [(row["key"], row["status"]) for row in plans] == [("bad", "failed"), *new]
    assert "bad.mp4" in plans[0]["failure"]["message"]
    said = "4 videos: 1 failed, 3 new, 0:06 to watch; nothing was written"
    assert planned.err.splitlines()[-1] == said
    assert total.items() >= {"type": "forecast", "all": 4, "failed": 1, "videos": 3}.items()
    assert not Path("states").exists()

    result = protokv("ingest", folder, "-o", "states/", *SMALL)
    assert result.code == ExitCode.PARTIAL
    rows = {row["key"]: row for row in result.rows() if row["type"] == "video"}
    watched = dict.fromkeys(("one", "two", "more/three"), "watched")
    assert {key: row["status"] for key, row in rows.items()} == {**watched, "bad": "failed"}
    ends = {"type": "fleet", "videos": 4, "watched": 3, "failed": 1, "left": 0}
    assert result.rows()[-1].items() >= ends.items()
    (failure,) = map(json.loads, Path("states/failures.jsonl").read_text().splitlines())
    assert (failure["source"], "bad.mp4" in failure["message"]) == (str(folder / "bad.mp4"), True)
    assert failure["exit_code"] == protokv("ingest", folder / "bad.mp4", *SMALL).code
    assert "1 of 4 videos have no whole state; why is in states/failures.jsonl" in result.err

    rest = protokv("ingest", folder, "-o", "states/", *SMALL, "--dry-run").rows()[-1]
    assert rest.items() >= {"done": 3, "failed": 1, "left_s": 0.0}.items()
    whole = (folder / "one.mp4", folder / "two.mp4")
    again = protokv("ingest", *whole, "-o", "states", *SMALL, "--format", "table")
    assert again.code == 0
    assert again.out.splitlines()[-1].startswith("2 videos: 2 done; 0:00 watched, ")
    assert not Path("states/failures.jsonl").exists()


@pytest.mark.usefixtures("pools")
def test_failures_are_lines_without_passwords_and_end_the_fleet_beyond_a_number(
    protokv: Program,
) -> None:
    gone = [f"gone{i}.mp4" for i in range(30)]
    result = protokv("ingest", *gone, "-o", "states", *SMALL, "--max-failures", "1")
    assert (result.code, result.rows()[-1]["left"] > 20) == (ExitCode.PARTIAL, True)

    named = "http://admin:s3cret@127.0.0.1:9/a.mp4?token=s3cret"
    run = ("ingest", named, "gone.mp4", "-o", "states", *SMALL)
    results = [protokv(*run, "--dry-run"), protokv(*run)]
    said = "".join(one.out + one.err for one in results)
    said += Path("states/failures.jsonl").read_text()
    assert said.count("http://127.0.0.1:9/a.mp4?token=***") >= 3
    assert "s3cret" not in said


@pytest.mark.parametrize(
    ("options", "made"),
    [
        ((), (1, ["auto"])),
        (("--workers", "3"), (3, ["auto"])),
        (("--devices", "0,1"), (2, ["cuda:0", "cuda:1"])),
        (("--devices", "cpu", "--workers", "2"), (2, ["cpu"])),
        (("--device", "cuda:1"), (1, ["cuda:1"])),
    ],
)
def test_a_worker_per_device_unless_told_otherwise(
    options: tuple[str, ...], made: tuple[int, list[str]], protokv: Program, pools: list[object]
) -> None:
    assert (
        protokv("ingest", "gone.mp4", "lost.mp4", "-o", "states", *SMALL, *options).code
        == ExitCode.PARTIAL
    )
    assert pools == [made]


@pytest.mark.wide
def test_a_signal_to_all_processes_of_a_fleet_is_a_stop_of_its_workers(
    protokv: Program, folder: Path
) -> None:
    command = ("ingest", folder / "one.mp4", LONG, "-o", "states", *SMALL, "-m", "protokv/mini")
    with protokv.start(*command, new_session=True) as process:
        # A slow machine says meanwhile how far it is.
        assert process.stdout
        while (first := json.loads(process.stdout.readline()))["type"] == "progress":
            pass
        assert first["key"] == "one"
        while not any(Path("states").glob(".*.lock")):
            time.sleep(0.01)
        os.killpg(process.pid, signal.SIGINT)
        out, err = read_to_the_end(process)
    rows = [row for row in map(json.loads, out.splitlines()) if row["type"] != "progress"]
    assert process.returncode == ExitCode.INTERRUPTED
    assert err.count("stopping after this step; once more to stop at once") == 1
    assert [row["status"] for row in rows[:-1]] == ["stopped"]
    assert rows[-1].items() >= {"watched": 1, "left": 1}.items()
    assert StateReader.open("states/one.safetensors").header.complete


@pytest.mark.usefixtures("pools")
@pytest.mark.parametrize("listing", ["list.txt", "-"])
def test_a_list_of_videos_is_a_file_or_stdin(
    listing: str, protokv: Program, folder: Path, tmp_path: Path
) -> None:
    named = shutil.copy(folder / "two.mp4", tmp_path / "zw\u00f6lf.mp4")
    lines = f"\ufeff{folder}/more\r\n\r\n{named}\r\n"
    Path("list.txt").write_text(lines, encoding="utf-8")
    result = protokv("ingest", "--from", listing, "-o", "states", *SMALL, stdin=lines)
    assert result.code == 0, result.err
    states = {row["state"] for row in result.rows() if row["type"] == "video"}
    assert states == {"states/three.safetensors", "states/zw\u00f6lf.safetensors"}


@pytest.mark.usefixtures("pools")
def test_a_folder_of_states_is_asked_and_inspected_as_one(protokv: Program, folder: Path) -> None:
    assert protokv("ingest", folder, "-o", "states/", *SMALL).code == ExitCode.PARTIAL
    rows = protokv("query", "--state", "states/", "what is first ?").rows()
    assert [row["state"] for row in rows] == [
        f"states/{key}.safetensors" for key in ("more/three", "one", "two")
    ]
    ranked = protokv("query", "states", "--top", "2", "what is first ?", "ring ?").rows()
    asked = [(question, rank) for question in ("what is first ?", "ring ?") for rank in (1, 2)]
    assert [(row["question"], row["rank"]) for row in ranked] == asked
    assert ranked[0]["mean_logprob"] == max(row["mean_logprob"] for row in rows)

    likely = protokv("query", "states", "--top", "3", "--choices", "red,blue", "ring ?").rows()
    shares = [row["probabilities"]["red"] for row in likely]
    assert shares == sorted(shares, reverse=True) == [row["probability"] for row in likely]
    table = protokv("query", "states", "--top", "2", "what is first ?", "-f", "table").out
    assert table.split()[:5] == ["rank", "state", "mean", "logprob", "answer"]
    assert [row["complete"] for row in protokv("inspect", "states/").rows()] == [True, True, True]
    table = protokv("inspect", "states/", "--format", "table").out
    assert " more/three" in table
    assert "3 states: 3 whole, 0 not" in table

    Path("states/one.safetensors").write_bytes(b"damaged")
    result = protokv("query", "states", "what is first ?")
    assert (result.code, len(result.rows())) == (ExitCode.PARTIAL, 2)
    *_, error, last = result.err.splitlines()
    assert (error.count("states/one.safetensors"), last) == (1, "1 of 3 states cannot be asked")
