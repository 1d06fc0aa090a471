"""The embedded model says what it cannot make sense of, and the examples in the help are questions that it can read."""

from __future__ import annotations

import re
import shutil
from contextlib import nullcontext
from pathlib import Path

import pytest

from samples.training.vocabulary import split, token_ids
from tests.cli.conftest import Program
from tests.cli.test_documented import EXAMPLES
from tests.fleet.conftest import InlinePool

DRAWN = Path(__file__).parents[2] / "samples" / "short" / "video.mp4"
SMALL = ("--budget", "64", "--duration", "4s")
MEANINGLESS = "clip.mp4 from 0 s for 4 s is not of it: the answers mean nothing"
HINT = "Hint: name a real model: protokv ingest VIDEO --model "
ASKED = "What shape appeared first?"


@pytest.fixture
def states(embedded: Program, video: Path) -> Path:
    """A folder with the state of another video, a.safetensors, and of a drawn one, b.safetensors."""
    (embedded.folder / "states").mkdir()
    for source, name in ((video, "a"), (DRAWN, "b")):
        assert embedded("ingest", source, "-o", f"states/{name}.safetensors", "--json", *SMALL).code == 0
    return embedded.folder / "states"


def test_ingest_warns_of_another_video_and_then_names_no_question(embedded: Program, video: Path) -> None:
    for source, beyond in ((video, True), (DRAWN, False)):
        result = embedded("ingest", source, *SMALL, "--format", "table")
        assert result.code == 0
        assert (MEANINGLESS in result.err) is beyond
        assert (f"Hint: name a real model: protokv ingest {source} --model " in result.err) is beyond
        assert ("ask it:" in result.err) is not beyond
    again = embedded("ingest", video, *SMALL, "--json")
    assert "Warning" not in again.err
    assert [row["beyond_model"] for row in again.rows()] == [True, True]


def test_query_answers_about_another_video_only_anyway(embedded: Program, states: Path) -> None:
    refused = embedded("query", states / "a.safetensors", ASKED)
    assert (refused.code, refused.out) == (2, "")
    error, hint = refused.err.splitlines()
    assert error.startswith("Error: the embedded model reads only")
    assert error.endswith(MEANINGLESS)
    assert hint.startswith(HINT)
    assert "protokv models" in hint
    assert "--anyway" in hint
    asked = embedded("query", states / "a.safetensors", ASKED, "--anyway", "--json")
    assert asked.code == 0
    assert asked.rows()[0]["beyond_model"] is True
    assert asked.err.count(MEANINGLESS) == 1
    drawn = embedded("query", states / "b.safetensors", ASKED, "--json")
    assert (drawn.code, drawn.err) == (0, "")
    assert "beyond_model" not in drawn.rows()[0]


def test_query_of_a_folder_answers_from_the_states_that_it_can_and_says_which_it_left_out(
    embedded: Program, states: Path
) -> None:
    some = embedded("query", "--state", f"{states}/", ASKED, "--json")
    assert (some.code, [row["state"][-13:] for row in some.rows()]) == (3, ["b.safetensors"])
    assert some.err.count(MEANINGLESS) == some.err.count(HINT) == 1
    anyway = embedded("query", "--state", f"{states}/", ASKED, "--json", "--anyway")
    assert (anyway.code, [row.get("beyond_model", False) for row in anyway.rows()]) == (0, [True, False])


def test_inspect_says_which_videos_a_model_cannot_make_sense_of(embedded: Program, states: Path) -> None:
    one = embedded("inspect", states / "a.safetensors", "--json").rows()[0]["stream"]
    assert one["beyond_model"] is True
    assert one["sources"][0]["beyond_model"] is True
    assert (
        "mean nothing: protokv/mini cannot make sense"
        in embedded("inspect", states / "a.safetensors", "-f", "table").out
    )
    assert [row["beyond_model"] for row in embedded("inspect", states, "--json").rows()] == [True, False]


def test_a_fleet_has_it_in_the_record_of_each_video_and_in_one_line_at_the_end(
    embedded: Program, video: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Processes of workers are in `test_fleet.py`.
    monkeypatch.setattr("protokv.fleet.LocalPool", lambda recipe, n, *_: nullcontext(InlinePool(recipe, n)))
    folder = embedded.folder / "videos"
    folder.mkdir()
    for i in range(2):
        shutil.copy(video, folder / f"real{i}.mp4")
    shutil.copy(DRAWN, folder / "drawn.mp4")
    for _ in range(2):  # the second time all are done
        result = embedded("ingest", folder, "-o", "out/", "--budget", "64", "--json")
        rows = [row for row in result.rows() if row["type"] == "video"]
        assert {row["key"]: row["beyond_model"] for row in rows} == {"drawn": False, "real0": True, "real1": True}
        assert result.rows()[-1]["beyond_model"] == 2
        assert result.err.count("real0.mp4, real1.mp4 are not of it") == result.err.count("Warning") == 1


def test_replay_warns_of_a_real_video(embedded: Program, video: Path) -> None:
    questions = embedded.folder / "questions.jsonl"
    questions.write_text('{"question": "What shape appeared first?", "answer": "star", "ask_s": 1}\n')
    study = ("--questions", questions, "--delays", "0", "--memory", "durable", "--budget", "64", "--dry-run")
    assert "clip.mp4 is not of it: the answers mean nothing" in embedded("replay", video, *study).err
    assert "Warning" not in embedded("replay", DRAWN, *study).err


@pytest.mark.parametrize("place", [place for place in EXAMPLES if place.startswith("help of")])
def test_the_questions_of_the_help_are_in_words_that_the_embedded_model_knows(place: str) -> None:
    asked = [text for command in EXAMPLES[place] for text in re.findall(r'"([^"]*\?)"', command)]
    assert asked or "query" not in place
    assert not [word for text in asked for word in split(text) if word not in token_ids()]
