"""The embedded model says what it cannot make sense of, and the examples in the help are questions that it can read."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from protokv.mini.world import World, WorldConfig
from protokv.video import open_source
from samples.render import render
from samples.training.vocabulary import split, token_ids
from tests.cli.conftest import Program
from tests.cli.test_documented import EXAMPLES

MARK = "drawn by the procedural world of protokv/mini"


SAMPLES = Path(__file__).parents[2] / "samples"


def test_every_command_warns_of_a_real_video_and_none_of_a_drawn_one(embedded: Program, video: Path) -> None:
    (embedded.folder / "states").mkdir()
    drawn = SAMPLES / "short" / "video.mp4"
    small = ("--budget", "64", "--duration", "2s", "--json")
    state = "states/a.safetensors"
    for one, target, beyond in ((video, state, True), (drawn, "states/b.safetensors", False)):
        result = embedded("ingest", one, "-o", target, *small)
        assert result.rows()[0]["beyond_model"] is beyond
        assert (f"Hint: name a real model: protokv ingest {one} --model Qwen/" in result.err) is beyond
        assert ("Warning" in result.err) is beyond
    alone = embedded("query", state, "What shape appeared first?", "What is visible now?", "-q")
    assert [row["beyond_model"] for row in alone.rows()] == [True, True]
    beyond_model = "clip.mp4 from 0 s for 2 s is not of it: the answers mean nothing"
    assert beyond_model in alone.err
    asked = embedded("query", "--state", "states/", "What shape appeared first?", "--json")
    assert [row.get("beyond_model", False) for row in asked.rows()] == [True, False]
    assert asked.err.count(beyond_model) == 1
    again = embedded("ingest", video, "-o", state, *small)
    assert "Warning" not in again.err
    questions = embedded.folder / "questions.jsonl"
    questions.write_text('{"question": "What shape appeared first?", "answer": "star", "ask_s": 1}\n')
    study = ("--questions", questions, "--delays", "0", "--memory", "durable", "--budget", "64", "--dry-run")
    assert "clip.mp4 is not of it: the answers mean nothing" in embedded("replay", video, *study).err
    assert "Warning" not in embedded("replay", drawn, *study).err


def test_matroska_keeps_the_mark_of_a_drawn_video(tmp_path: Path) -> None:
    render(World(WorldConfig(seed=7, length_s=1)), tmp_path / "drawn.mkv")
    with open_source(tmp_path / "drawn.mkv") as source:
        assert source.info.comment == MARK


@pytest.mark.parametrize("name", ["short", "minute", "long"])
def test_the_samples_are_marked(name: str) -> None:
    with open_source(SAMPLES / name / "video.mp4") as source:
        assert source.info.comment == MARK


@pytest.mark.parametrize("place", [place for place in EXAMPLES if place.startswith("help of")])
def test_the_questions_of_the_help_are_in_words_that_the_embedded_model_knows(place: str) -> None:
    asked = [text for command in EXAMPLES[place] for text in re.findall(r'"([^"]*\?)"', command)]
    assert asked or "query" not in place
    assert not [word for text in asked for word in split(text) if word not in token_ids()]
