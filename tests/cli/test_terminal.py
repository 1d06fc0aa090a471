"""On a terminal: data goes where it was sent, and no line of the bar is left."""

from __future__ import annotations

import json
import re
from pathlib import Path

from tests.cli.conftest import Program
from tests.cli.terminal import run_on_terminal


def test_results_go_where_stdout_goes_while_a_bar_is_on_the_terminal(
    protokv: Program, mocked: None, video: Path
) -> None:
    out = protokv.folder / "out.jsonl"
    seen = run_on_terminal(protokv.environment, "ingest", video, "--budget", "24", "--json", stdout=out)
    assert seen.code == 0, seen.screen
    rows = [json.loads(line) for line in out.read_text().splitlines()]
    assert [row["type"] for row in rows][-2:] == ["commit", "summary"]
    assert '"type"' not in seen.screen
    assert "\x1b[2K" in seen.screen
    # Nothing of the bar is left.
    first, last = seen.lines()
    assert first.startswith("state: ")
    assert last == 'ask it: protokv query clip.safetensors "..."'


def test_json_on_the_terminal_itself_begins_on_lines_of_its_own(protokv: Program, mocked: None, video: Path) -> None:
    seen = run_on_terminal(protokv.environment, "ingest", video, "--budget", "24", "--json")
    assert seen.code == 0
    # A row may be longer than a line of the terminal; it begins one.
    begun = [found[1] for line in seen.lines() if (found := re.match(r'\{"type": "(\w+)"', line))]
    assert begun[:1] + begun[-2:] == ["started", "commit", "summary"]
    assert len(begun) == seen.screen.count('{"type": ')
