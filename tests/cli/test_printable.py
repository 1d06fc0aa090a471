"""Foreign text on a terminal is shown and not obeyed, wherever it comes from."""

from __future__ import annotations

import json
import unicodedata
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from protokv import storage
from protokv_cli.tables import json_text, printable
from tests.cli.conftest import Program, write_video

# A window title, a cleared line, a C1 introducer, a turned direction, markup of rich, an emoji code of rich.
EVIL = "\x1b]0;owned\x07\x1b[2K\x9b31m\u202egpj.\u2066[bold red]x[/bold red][/nothing]:warning:\r\x08"
DANGEROUS = frozenset({"Cc", "Cf", "Cs", "Co", "Cn", "Zl", "Zp"})


def obeyed(text: str) -> set[str]:
    """Characters that a terminal would act on; line feeds are the program's own."""
    return {c for c in text if unicodedata.category(c) in DANGEROUS and c not in "\n\t\u200c\u200d"}


@given(st.text())
def test_nothing_that_a_terminal_obeys_is_left(text: str) -> None:
    assert not obeyed(printable(text))
    assert "\n" not in printable(text)
    assert not obeyed(printable(text, lines=True))


@given(st.text(st.characters(exclude_categories=sorted(DANGEROUS))))
def test_what_is_printable_is_left_as_it_is(text: str) -> None:
    assert printable(text) == text


@given(st.recursive(st.text(), lambda inner: st.dictionaries(st.text(), inner) | st.lists(inner)))
def test_json_says_the_same_and_holds_nothing_that_a_terminal_obeys(value: object) -> None:
    assert json.loads(json_text(value)) == value
    assert not obeyed(json_text(value))


def test_words_of_any_script_stay_words() -> None:
    for text in ("naïve café", "می‌خواهم", "日本語　です", "👩‍👩‍👧", "a\u00a0b"):
        assert printable(text) == text


@pytest.fixture
def evil(protokv: Program, mocked: None, video: Path) -> Path:
    """A state that says evil things wherever a state may say something, under an evil name."""
    assert protokv("ingest", video, "--budget", "24", "--quiet", "--json").code == 0
    found = storage.load_state("clip.safetensors")
    decoders = {EVIL: 2, "b": 1, "c": EVIL}
    source = {**(found.source or {}), "name": EVIL, "decoder": EVIL, "decoders": decoders, EVIL: EVIL}
    damaged = {**source, "damage": {"frames_lost": 1, "message": EVIL}}
    backbone = replace(found.backbone, name=EVIL, family=EVIL)
    path = protokv.folder / f"e\x1b[2Kvil\u202e{'[red]'}.safetensors"
    state = replace(found, source=damaged, backbone=backbone, settings={EVIL: EVIL}, created_by=EVIL)
    storage.save_state(state, path)
    return path


@pytest.mark.parametrize("command", ["inspect", "compare", "query", "verify", "ingest"])
def test_a_state_does_not_speak_to_the_terminal(protokv: Program, evil: Path, video: Path, command: str) -> None:
    arguments = {
        "inspect": ("inspect", evil),
        "compare": ("inspect", "clip.safetensors", evil),
        "query": ("query", evil, "what is first ?", "--model", "other"),
        "verify": ("inspect", evil, "--verify"),
        "ingest": ("ingest", video, "-o", evil, "--budget", "24"),
    }[command]
    for form in ("table", "plain", "json"):
        result = protokv(*arguments, "--format", form)
        assert result.out + result.err
        assert not obeyed(result.out), result.out
        assert not obeyed(result.err), result.err
        if command == "inspect" and form == "table":
            assert "[boldred]x[/boldred][/nothing]:warning:" in "".join(result.out.split())


def test_a_file_name_does_not_speak_to_the_terminal(protokv: Program, mocked: None, tmp_path: Path) -> None:
    clip = write_video(tmp_path / "clip.mp4", 2).rename(tmp_path / "a\x1b[2K[red]\u202e.mp4")
    for arguments in ((clip,), (clip, "--format", "table"), (f"{clip}\x1b[1m",), (clip, "--budget", "\x1b[1m")):
        result = protokv("ingest", *arguments)
        assert not obeyed(result.out + result.err), result
