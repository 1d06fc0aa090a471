"""Live states at the command line: asked by the time of day, again and again, and what is said of
cameras and pipes.
"""

import signal
import time
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest

from protokv.errors import SourceDenied
from protokv.ingestion import Every, IngestEvent, SourceLost, ingest_events, several
from protokv.ingestion.live import LiveSource
from protokv.memories import DurableConfig
from protokv.state import moments
from protokv.texts import Keywords
from protokv_cli.exits import ExitCode
from protokv_cli.ingest_report import EventPrinter
from tests.cameras import EPOCH, World, gone
from tests.cli.conftest import Program, read_to_the_end, wait_for_commit
from tests.mock_backbone import MockBackbone
from tests.video.conftest import Clip, write

# Forty seconds in whole ones, a minute later fifty more.
SCRIPTS: list[list[Any]] = [[400, gone()], [("away", 60.0), 500, gone()]]
TICKS = [40 * i for i in range(200)]


@pytest.fixture
def camera(tmp_path: Path, mocked: None) -> Path:
    path = tmp_path / "camera.safetensors"
    world = World(*map(list, SCRIPTS))
    options: Keywords = {"backbone": MockBackbone(), "every": Every(n_steps=10), "keep": 20}
    with world.source("rtsp://admin:s3cret@camera/1") as source:
        list(
            ingest_events(
                source, path, DurableConfig(budget=40), should_stop=world.watched(source), **options
            )
        )
    return path


def clock(stream_s: float, form: str) -> str:
    return datetime.fromtimestamp(EPOCH + stream_s).strftime(form)


def test_a_live_state_answers_as_of_a_time_of_the_stream_of_the_day_or_before_its_end(
    camera: Path, protokv: Program, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("protokv_cli.parsing.time.time", lambda: EPOCH + 200.0)
    for at, stands_at in (
        ("35", 30.0),
        ("-100s", 40.0),
        (clock(35, "%Y-%m-%dT%H:%M:%S"), 30.0),
        (clock(70, "%Y-%m-%d %H:%M:%S"), 40.0),
        (clock(119, "%H:%M:%S"), 110.0),
    ):
        result = protokv("query", camera, "--at", at, "what is it", "--json")
        assert result.code == 0, result.err
        assert result.rows()[0]["stream_time_s"] == stands_at
        assert "commit_age_s" not in result.rows()[0]
    early = protokv("query", camera, "--at", "2001-02-03T04:05", "what is it")
    assert (early.code, "began at" in early.err) == (ExitCode.NOT_FOUND, True)
    assert protokv("query", camera, "--at", "25:99:1:1", "what is it").code == ExitCode.USAGE
    # An answer of the last commit says how old it is.
    monkeypatch.setattr("protokv_cli.parsing.time.time", lambda: EPOCH + 150.0 + 7.0)
    last = protokv("query", camera, "what is it", "--json")
    assert last.rows()[0]["commit_age_s"] == pytest.approx(7.0, abs=1.5)
    assert "committed" in last.err


@pytest.fixture
def berlin(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    with monkeypatch.context() as patch:
        patch.setenv("TZ", "Europe/Berlin")
        time.tzset()
        yield
    time.tzset()


@pytest.mark.usefixtures("berlin")
@pytest.mark.parametrize(
    ("now", "text", "meant"),
    [
        ("2026-10-25T02:10+01:00", "02:30", "2026-10-25T02:30+02:00"),
        ("2026-10-25T02:45+01:00", "2:30", "2026-10-25T02:30+01:00"),
        ("2026-10-25T09:00+01:00", "02:30:15", "2026-10-25T02:30:15+01:00"),
        ("2026-10-25T09:00+01:00", "2026-10-25 02:30", "2026-10-25T02:30+01:00"),
        ("2026-03-29T03:10+02:00", "02:30", "2026-03-28T02:30+01:00"),
        ("2026-03-29T09:00+02:00", "3:00:05", "2026-03-29T03:00:05+02:00"),
        ("2026-06-01T09:00+02:00", "14:05", "2026-05-31T14:05+02:00"),
        ("2026-06-01T09:00+02:00", "2026-06-01T02:30Z", "2026-06-01T04:30+02:00"),
    ],
)
def test_a_time_of_the_night_when_clocks_change_is_its_latest_past_moment(
    now: str, text: str, meant: str
) -> None:
    at, wanted = (datetime.fromisoformat(one).timestamp() for one in (now, meant))
    assert moments.parse_instant(text, at) == wanted


@pytest.mark.usefixtures("berlin")
def test_a_time_that_came_twice_is_said_with_both_and_one_that_never_came_is_refused(
    camera: Path, protokv: Program, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = datetime.fromisoformat("2027-10-31T09:00+01:00").timestamp()
    monkeypatch.setattr("protokv_cli.parsing.time.time", lambda: now)
    result = protokv("query", camera, "--at", "2:30", "what is it")
    both = "2027-10-31T02:30:00+0100 is meant, 2027-10-31T02:30:00+0200 is the other"
    assert f"2:30 came twice that night: {both}" in " ".join(result.err.split())
    never = protokv("query", camera, "--at", "2027-03-28 02:30", "what is it")
    assert (never.code, "the clocks went forward" in never.err) == (ExitCode.USAGE, True)


def test_inspect_shows_an_earlier_commit_and_what_was_missed_and_nothing_secret(
    camera: Path, protokv: Program
) -> None:
    kept = camera.with_name("camera.safetensors@000010.000s")
    form = "%Y-%m-%d %H:%M:%S"
    result = protokv("inspect", camera, "--at", clock(11, form), "--json")
    assert result.rows()[0]["bytes"]["file"] == kept.stat().st_size != camera.stat().st_size
    said = f"as of 0:10 ({clock(10, form)}), the last commit that is kept before"
    assert said in result.err
    table = protokv("inspect", camera, "--format", "table").out
    for text in ("rtsp://camera/1", "gaps in all 2", "lost in all 1:00", clock(0, form)):
        assert text in " ".join(table.split())
    assert "s3cret" not in table
    stream = protokv("inspect", camera, "--json").rows()[0]["stream"]
    seconds = stream["duration_s"] - stream["exact_from_s"]
    assert 0 < seconds < 40, "the exact tokens are of the last seconds, behind the gap"
    gap = stream["live"]["gaps"][0]
    assert (gap["from_s"], gap["to_s"]) == (40.0, 100.0)


def test_a_pipe_is_watched_and_a_signal_stops_it_at_once_while_it_waits(
    embedded: Program, tmp_path: Path
) -> None:
    data = write(Clip(TICKS, suffix="ts"), tmp_path / "x.ts").read_bytes()
    with embedded.start(
        "ingest", "-", "-o", "s.safetensors", "--budget", "64", "--json", "--every", "2s"
    ) as process:
        pipe: Any = process.stdin
        pipe.buffer.write(data)
        pipe.buffer.flush()
        wait_for_commit(process)
        # The pipe stays open, and nothing more comes.
        process.send_signal(signal.SIGTERM)
        assert process.wait(timeout=60) == ExitCode.TERMINATED
        assert "Continue with the same command" in read_to_the_end(process)[1]
    assert (tmp_path / "s.safetensors").exists()


@pytest.mark.usefixtures("mocked")
def test_a_camera_that_refuses_is_an_error_unless_it_is_waited_for_and_its_password_is_nowhere(
    protokv: Program, monkeypatch: pytest.MonkeyPatch
) -> None:
    follow = EventPrinter.follow

    def stop_when_lost(report: EventPrinter, event: IngestEvent, source: str) -> None:
        follow(report, event, source)
        if isinstance(event, SourceLost):
            signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr(EventPrinter, "follow", stop_when_lost)
    address = "rtsp://admin:s3cret@127.0.0.1:9/1?token=s3cret"
    refused = protokv("ingest", address, "-o", "s.safetensors", "--json")
    assert refused.code == ExitCode.NOT_FOUND, refused.err
    assert "nothing answers at rtsp://127.0.0.1:9/1?token=***: Connection refused" in refused.err
    assert not Path("s.safetensors").exists()
    result = protokv("ingest", address, "-o", "s.safetensors", "--json", "--give-up", "5m")
    assert result.code == ExitCode.INTERRUPTED, result.err
    assert "Connection refused; trying again" in result.err
    assert "s3cret" not in refused.err + result.out + result.err


@pytest.mark.usefixtures("mocked")
def test_several_live_sources_get_a_state_each_and_one_that_is_refused_leaves_the_others_alone(
    protokv: Program, monkeypatch: pytest.MonkeyPatch
) -> None:
    worlds = {
        "rtsp://a/1": World([200, gone()]),
        "rtsp://b/1": World([SourceDenied("rtsp://b/1: wrong password")]),
        "https://c/1": World([200, gone()]),
    }

    def open_world(address: str, *_: object) -> LiveSource:
        return worlds[address].source(address, for_s=5.0)

    monkeypatch.setattr("protokv.ingestion.run.open_live_source", open_world)
    monkeypatch.setattr(several, "IDLE_S", 0.0)
    result = protokv("ingest", *worlds, "-o", "states/", "--json")
    assert result.code == ExitCode.PARTIAL, result.err
    assert "Error: rtsp://b/1: wrong password" in result.err
    rows = result.rows()
    assert [one["source"] for one in rows if one["type"] == "failed"] == ["rtsp://b/1"]
    ends = {one["source"]: one for one in rows if one["type"] == "summary"}
    assert {name: one["complete"] for name, one in ends.items()} == {
        "rtsp://a/1": True,
        "https://c/1": True,
    }
    written = {one.stem for one in Path("states").glob("*.safetensors")}
    assert written == {"a-1", "c-1"}
    refused = protokv("ingest", *worlds, "-o", "states/", "--dry-run", "--ask", "what?")
    assert refused.code == ExitCode.USAGE
    assert "--dry-run and --ask: not for several live sources" in refused.err
