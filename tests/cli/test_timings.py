"""`--timings`: every stage has its seconds, in JSON as a key and otherwise on stderr, and nothing without it."""

from __future__ import annotations

from pathlib import Path

from tests.cli.conftest import Program

INGEST = {"imports", "model", "state", "wait for frames", "decode", "preprocess", "vision tower", "forward", "memory"}
QUERY = {"start", "imports", "state", "model", "session", "first token", "tokens"}


def test_both_commands_say_where_the_time_goes(protokv: Program, video: Path) -> None:
    watched = protokv("ingest", video, "--budget", "24", "--timings", "--json").rows()[-1]
    assert watched["timings"].keys() == INGEST | {"commit", "process cpu"}
    assert all(seconds >= 0 for seconds in watched["timings"].values())
    assert watched["timings"]["forward"] > 0
    rows = protokv("query", "clip.safetensors", "what is it?", "and now?", "--timings", "--json").rows()
    for row in rows:
        assert row["timings"].keys() == QUERY | {"process cpu"}
    # Of all questions so far.
    assert rows[1]["timings"]["first token"] > rows[0]["timings"]["first token"] > 0


def test_people_get_lines_on_stderr(protokv: Program, mocked: None, video: Path) -> None:
    result = protokv("ingest", video, "--budget", "24", "--timings", "--format", "plain")
    assert result.out == "clip.safetensors\n"
    for name in INGEST:
        assert f"\n{name} " in f"\n{result.err}"
    assert "(beside the others)" in result.err
    asked = protokv("query", "clip.safetensors", "star", "--timings", "--format", "plain")
    assert "first token" in asked.err
    assert "first token" not in asked.out


def test_nothing_is_said_without_it(protokv: Program, mocked: None, video: Path) -> None:
    result = protokv("ingest", video, "--budget", "24", "--json")
    assert "timings" not in result.out
    assert "forward" not in result.err
    assert "timings" not in protokv("query", "clip.safetensors", "star", "--json").out


def test_a_chunk_is_an_option_and_on_record(protokv: Program, mocked: None, video: Path) -> None:
    assert protokv("ingest", video, "--budget", "24", "--chunk", "5", "--json").code == 0
    refused = protokv("ingest", video, "--budget", "24", "--chunk", "4")
    # What is watched to its end is not read again, and another chunk would have read it otherwise.
    assert refused.code == 12
    assert "its chunk is 5, this run's is 4" in refused.err
