"""The terminal: a bar, lines where nothing can be drawn, and no foreign text that it obeys."""

import io
import json
import os
import shutil
import subprocess
import sys
import unicodedata
from contextlib import redirect_stdout
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from hypothesis import given
from hypothesis import strategies as st

from protokv.state.checkpoint import save_state
from protokv.state.reader import load_state
from protokv_cli import output
from protokv_cli.output import Output, format_json, make_printable, tabulate_rows
from tests.cli.conftest import RUN, Program
from tests.cli.terminal import run_on_terminal
from tests.conftest import widen

DRAWING = "\x1b["
SHORT = Path(__file__).parents[2] / "samples" / "short" / "video.mp4"


@pytest.mark.parametrize("term", ["dumb", "unknown", "xterm-256color"])
def test_a_terminal_that_cannot_be_drawn_on_gets_lines_and_quiet_nothing(
    term: str, protokv: Program, mocked: None, video: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(output, "LOG_EVERY_S", -1.0)
    quiet = ("--quiet",) if term == "xterm-256color" else ()
    seen = run_on_terminal(
        protokv.environment, "ingest", video, "--budget", "24", *quiet, term=term
    )
    assert seen.code == 0
    assert DRAWING not in seen.screen
    assert "\r" not in seen.screen.replace("\r\n", "\n")
    if quiet:
        assert seen.lines()[0].split() == ["state", "clip.safetensors"]
    else:
        assert [line for line in seen.lines() if "frames/s, state" in line]


def test_results_go_where_stdout_goes_while_a_bar_is_on_the_terminal(
    protokv: Program, mocked: None, video: Path
) -> None:
    out = protokv.folder / "out.jsonl"
    seen = run_on_terminal(
        protokv.environment, "ingest", video, "--budget", "24", "--json", stdout=out
    )
    assert seen.code == 0, seen.screen
    rows = [json.loads(line) for line in out.read_text().splitlines()]
    assert [row["type"] for row in rows][-2:] == ["commit", "summary"]
    assert '"type"' not in seen.screen
    assert "\x1b[2K" in seen.screen
    # Nothing of the bar is left.
    _, share, *last = seen.lines()
    forms = "(6 tokens exactly, 18 prototypes of older ones)"
    assert share == f"the budget keeps 1/3 of the video {forms}"
    assert " ".join(last).startswith("ask it: protokv query --model ")


@pytest.mark.parametrize("streams", widen(["<&- >&-", "<&- 2>&-", ">&- 2>&-"], [">&- 2>&-"]))
def test_closed_streams_and_a_terminal_without_columns_change_no_exit_code(
    embedded: Program, streams: str
) -> None:
    line = f'{sys.executable} -c "{RUN}" ingest {SHORT} -o s.safetensors --budget 24 {streams}'
    environment = {**embedded.environment, "COLUMNS": "0"}
    done = subprocess.run(
        ["sh", "-c", line], cwd=embedded.folder, env=environment, timeout=120, check=False
    )
    assert done.returncode == 0
    assert load_state(embedded.folder / "s.safetensors").complete
    assert embedded("inspect", "s.safetensors", "-f", "table", env=environment).out.strip()


# A window title, a cleared line, a C1 introducer, a turned direction, markup of rich, an emoji code
# of rich.
EVIL = (
    "\x1b]0;owned\x07\x1b[2K\x9b31m\u202egpj.\u2066[bold red]x[/bold red][/nothing]:warning:\r\x08"
)
DANGEROUS: Any = ("Cc", "Cf", "Cs", "Co", "Cn", "Zl", "Zp")


def obeyed(text: str) -> set[str]:
    """Return the characters that a terminal would act on; line feeds are the program's own."""
    return {c for c in text if unicodedata.category(c) in DANGEROUS and c not in "\n\t\u200c\u200d"}


CELLS = st.lists(
    st.sampled_from(["96% 82-99*", "-87..-46* to full", "16,974", "x", ""]), min_size=7
)


@given(st.lists(CELLS, min_size=1, max_size=4), st.integers(44, 120))
def test_no_number_of_a_table_is_cut_at_any_width(rows: list[list[str]], columns: int) -> None:
    names = ["memory", "budget", "0 s", "1 min", "5 min", "8 min", "difference"]
    records = [dict(zip(names, cells, strict=False)) for cells in rows]
    screen = io.StringIO()
    with mock.patch.dict(os.environ, COLUMNS=str(columns)), redirect_stdout(screen):
        Output(as_json=False).table(tabulate_rows(names, records))
    wanted = {word for row in records for cell in row.values() for word in cell.split()}
    assert wanted <= {*screen.getvalue().split()}
    assert max(map(len, screen.getvalue().splitlines())) <= columns


@pytest.mark.parametrize("encoding", ["cp1252", "ascii", "latin-1", "cp437"])
def test_a_name_outside_of_the_encoding_of_stdout_is_escaped(encoding: str) -> None:
    name = "talk \u89c6\u9891 \U0001f3a5.mp4"
    code = f"""
from protokv_cli.output import Output
from protokv_cli.process import run_and_exit
def show():
    Output(as_json=True).record({{"source": {name!r}}})
    Output(as_json=False).record({{"source": {name!r}}})
    Output().note({name!r})
run_and_exit(show)
"""
    environment = os.environ | {"PYTHONIOENCODING": encoding}
    environment["PYTHONPATH"] = os.pathsep.join(sys.path)
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, env=environment, capture_output=True, timeout=60, check=True)
    row, shown = done.stdout.decode("ascii").splitlines()
    assert json.loads(row) == {"source": name}
    assert r"\u89c6\u9891 \U0001f3a5" in shown
    assert r"\u89c6" in done.stderr.decode("ascii")


@given(st.text(), st.text(st.characters(exclude_categories=DANGEROUS)))
def test_nothing_that_a_terminal_obeys_is_left_and_other_text_stays_unchanged(
    text: str, printable: str
) -> None:
    assert "\n" not in make_printable(text)
    for shown in (
        make_printable(text),
        make_printable(text, lines=True),
        format_json([text, {text: text}]),
    ):
        assert not obeyed(shown)
    assert json.loads(format_json([text, {text: text}])) == [text, {text: text}]
    for words in (printable, "naïve café", "می‌خواهم", "日本語　です", "👩‍👩‍👧", "a\u00a0b"):
        assert make_printable(words) == words


@pytest.mark.usefixtures("mocked")
def test_a_state_and_a_file_name_do_not_speak_to_the_terminal(
    protokv: Program, video: Path
) -> None:
    # A state that says evil things wherever a state may say something, under an evil name.
    assert protokv("ingest", video, "--budget", "24", "--quiet", "--json").code == 0
    found = load_state("clip.safetensors")
    damage = {"frames_lost": 1, "message": EVIL}
    source = {"name": EVIL, "decoders": {EVIL: 2, "b": 1}, EVIL: EVIL, "damage": damage}
    backbone = replace(found.backbone, name=EVIL, family=EVIL)
    evil = protokv.folder / "e\x1b[2Kvil\u202e[red].safetensors"
    state = replace(
        found,
        source={**(found.source or {}), **source},
        backbone=backbone,
        settings={EVIL: EVIL},
        created_by=EVIL,
    )
    save_state(state, evil)
    clip = shutil.copy(video, protokv.folder / "a\x1b[2K[red]\u202e.mp4")
    commands: list[tuple[object, ...]] = [
        ("inspect", evil),
        ("inspect", "clip.safetensors", evil),
        ("query", evil, "what is first ?", "--model", "other"),
        ("ingest", video, "-o", evil, "--budget", "24"),
        ("ingest", clip),
        ("ingest", clip, "--budget", "\x1b[1m"),
    ]
    for arguments in commands:
        for form in ("table", "json"):
            result = protokv(*arguments, "--format", form)
            assert result.out + result.err
            assert not obeyed(result.out + result.err), result
    assert "[boldred]x[/boldred][/nothing]:warning:" in "".join(
        protokv("inspect", evil, "-f", "table").out.split()
    )
