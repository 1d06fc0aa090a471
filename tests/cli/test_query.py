"""`protokv query`: answers from a state alone."""

import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForImageTextToText

from protokv import Cache
from protokv.core.decoding import Decoding
from protokv_cli.exits import ExitCode
from tests.cli.conftest import Program, Watch
from tests.cli.terminal import run_on_terminal
from tests.mock_backbone import MockBackbone

KEYS = (
    "question answer stream_time_s ttft_ms total_ms context_tokens mean_logprob state "
    "finish_reason "
    "evidence faint timings decoding"
)
QUESTION = "what is first ?"


@pytest.fixture
def state(protokv: Program, watched: Watch) -> Path:
    return Path(shutil.copy(watched(), protokv.folder))


@pytest.fixture
def clip(protokv: Program, mocked: None, video: Path) -> str:
    """The state of the mock, which answers in a moment."""
    assert protokv("ingest", video, "--budget", "24", "--json").code == 0
    return "clip.safetensors"


def test_a_row_has_the_promised_keys_in_order_and_asking_changes_nothing(
    protokv: Program, state: Path
) -> None:
    before = (state.read_bytes(), state.stat().st_mtime_ns)
    (row,) = protokv("query", state, QUESTION, "--evidence", "--timings", "--json").rows()
    assert (state.read_bytes(), state.stat().st_mtime_ns) == before
    assert list(row) == KEYS.split()
    assert (row["stream_time_s"], row["context_tokens"]) == (12.0, 24 + 3)
    # The small model of the tests is one that nobody has measured.
    assert (row["faint"], 0 < len(row["evidence"]) <= 3) == (None, True)
    # In a pipe one question gives the text of its answer, and what it stood on in a line below.
    text = protokv("query", state, QUESTION, "--evidence").out
    assert re.search(r"^  stood on 0:\d\d to 0:\d\d \(\d+ %\)", text, re.MULTILINE)
    (plain,) = protokv("query", state, QUESTION, "--json").rows()
    assert list(plain) == KEYS.split()[:9]
    # Words without quotes are asked one by one, with a hint.
    result = protokv("query", state, "what", "is", "it?")
    assert [row["question"] for row in result.rows()] == ["what", "is", "it?"]
    assert "Hint: these are 3 questions; for one, use quotes: 'what is it?'" in result.err


def test_the_answer_is_the_same_in_every_form_and_a_table_repeats_one_of_several_questions(
    protokv: Program, clip: str
) -> None:
    answer = " ".join(protokv("query", clip, QUESTION, "--json").rows()[0]["answer"].split())
    assert " ".join(protokv("query", clip, QUESTION).out.split()) == answer
    twice = protokv("query", clip, QUESTION, QUESTION, "-f", "table").out
    assert " ".join(twice.split()) == f"{QUESTION} {answer} {QUESTION} {answer}"
    # Expected answers are compared, and the score is told.
    lines = [
        {"question": QUESTION, "answer": expected}
        for expected in (answer.upper() + ".", "never this")
    ]
    result = protokv("query", clip, "-", stdin="\n".join(map(json.dumps, lines)))
    assert [row["correct"] for row in result.rows()] == [True, False]
    assert "1 of 2 answers as expected (50.0%)" in result.err


def test_an_answer_may_be_one_of_some_choices(protokv: Program, clip: str) -> None:
    (row,) = protokv("query", clip, QUESTION, "--choices", "red, green", "--json").rows()
    assert sum(row["probabilities"].values()) == pytest.approx(1, abs=1e-3)
    shown = protokv("query", clip, QUESTION, "--choices", "red,green").out
    assert shown.startswith(f"{row['answer']}\n  red {row['probabilities']['red']:.2f}, green ")
    both = protokv("query", clip, QUESTION, "--choices", "red,green", "--temperature", "1")
    assert (both.code, "generates and draws nothing" in both.err) == (ExitCode.USAGE, True)


def test_a_kept_commit_answers_as_of_its_time(protokv: Program, mocked: None, video: Path) -> None:
    result = protokv("ingest", video, "--budget", "24", "--every", "3s", "--keep", "3", "--json")
    assert result.code == 0, result.err

    def at(command: str, time: str, *more: str) -> Any:
        return protokv(command, "clip.safetensors", *more, "--at", time, "--json")

    for asked, answered in (("6s", 6.0), ("8.9", 6.0), ("0:09", 9.0), ("1h", 12.0)):
        assert at("query", asked, QUESTION).rows()[0]["stream_time_s"] == answered
    assert at("inspect", "1h").rows()[0]["stream"]["commits_s"] == [6.0, 9.0, 12.0]
    shown = at("inspect", "0:08")
    assert shown.rows()[0]["stream"]["duration_s"] == 6.0
    assert shown.err == "as of 0:06, the last commit that is kept before 0:08\n"
    early = at("query", "5s", QUESTION)
    assert early.code == ExitCode.NOT_FOUND
    assert "no commit at or before 5 s; the first of 3 is at 6 s" in early.err.splitlines()[0]


def test_a_terminal_without_a_question_is_a_prompt_and_what_is_typed_a_conversation(
    protokv: Program, clip: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    heard: list[list[str]] = []
    suffix_ids = MockBackbone.suffix_ids

    def hear(model: MockBackbone, question: str, turns: Any = ()) -> list[int]:
        heard.append([asked for asked, _ in turns])
        return suffix_ids(model, question)

    monkeypatch.setattr(MockBackbone, "suffix_ids", hear)
    typed = f"{QUESTION}\n\n{'long ' * 600}\nwho is last ?\n\x04"
    out = protokv.folder / "answers.jsonl"
    seen = run_on_terminal(protokv.environment, "query", clip, "--json", stdout=out, typed=typed)
    assert seen.code == 0
    rows = [json.loads(line) for line in out.read_text().splitlines()]
    assert [row["question"] for row in (rows[0], rows[-1])] == [QUESTION, "who is last ?"]
    assert (heard[0], heard[-1][:1]) == ([], [QUESTION])
    assert "clip.safetensors at 0:12; type questions, one conversation" in seen.screen
    monkeypatch.setattr(MockBackbone, "converses", False)
    typed = f"{QUESTION}\nwho ?\nwhere ?\nExit\nwhen ?\n"
    seen = run_on_terminal(protokv.environment, "query", clip, typed=typed)
    assert " ".join(seen.screen.split()).count("does not read all earlier turns") == 1


def test_a_published_generation_is_the_default_of_query_and_options_win(
    protokv: Program, clip: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    published = Decoding(temperature=2.0, top_k=3, max_new_tokens=5)
    monkeypatch.setattr(MockBackbone, "decoding", published)
    asked = ("query", clip, QUESTION, "--timings", "--json")
    (row,) = protokv(*asked).rows()
    assert Decoding(**row["decoding"] | {"stop": (), "choices": ()}) == published
    (row,) = protokv(*asked, "--temperature", "0", "--max-new-tokens", "3").rows()
    chosen = [row["decoding"][name] for name in ("temperature", "top_k", "max_new_tokens")]
    assert chosen == [0, 3, 3]


def test_lines_and_json_lines_of_stdin_or_of_a_file_are_asked_before_those_of_the_command(
    protokv: Program, clip: str
) -> None:
    file = protokv.folder / "q.jsonl"
    file.write_text(f'{QUESTION}\n\n{{"question": "who ?", "id": "q7"}}\n')
    piped = protokv("query", clip, stdin=file.read_text()).rows()
    assert [row["question"] for row in piped] == [QUESTION, "who ?"]
    assert [row.get("id") for row in piped] == [None, "q7"]
    rows = protokv("query", clip, "--questions", file, "where ?").rows()
    assert [row["question"] for row in rows] == [QUESTION, "who ?", "where ?"]


def test_a_question_that_cannot_be_asked_is_named_and_the_others_are_answered(
    protokv: Program, clip: str
) -> None:
    file = protokv.folder / "q.jsonl"
    good = [QUESTION, "who ?"]
    bad = {
        2: b"star " * 20_000,
        3: b"a" * (3 << 20),
        4: rb'{"question": "a \ud800"}',
        5: b"not \xff UTF-8",
        6: b'{"question":',
        7: b'{"question": " "}',
    }
    file.write_bytes(
        b"\n".join([b"\xef\xbb\xbf" + good[0].encode(), *bad.values(), good[1].encode()])
    )
    states = protokv.folder / "states"
    states.mkdir()
    for name in ("a", "b"):
        shutil.copy(clip, states / f"{name}.safetensors")
    for state, times in ((clip, 1), ("states/", 2)):
        result = protokv("query", state, "--questions", file)
        assert result.code == ExitCode.USAGE
        assert [row["question"] for row in result.rows()] == good * times
        errors = [line for line in result.err.splitlines() if line.startswith("Error: ")]
        assert sorted(line.split(" of ")[0] for line in errors) == sorted(
            f"Error: line {number}" for number in bad
        )
        assert len(result.err) < 5000
    result = protokv("query", clip, "bad \udcff byte", good[0])
    assert (result.code, len(result.rows())) == (ExitCode.USAGE, 1)
    assert "question 1: " in result.err
    file.write_bytes(bad[4])
    refused = protokv("query", "absent.safetensors", "--questions", file)
    assert (refused.code, refused.err.startswith("Error: line 1 of")) == (ExitCode.USAGE, True)


def test_what_a_cache_saved_is_asked_as_any_other_state(
    protokv: Program, tiny_folder: Path
) -> None:
    model = AutoModelForImageTextToText.from_pretrained(tiny_folder, dtype=torch.float32).eval()
    cache = Cache(model, 24)
    with torch.no_grad():
        for start in range(8, 16):
            model(**cache.step({"input_ids": torch.arange(start, start + 10)[None]}))
            cache.commit()
    cache.save(protokv.folder / "talk.safetensors")
    asked = ("query", "talk.safetensors", QUESTION, "--json")
    (row,) = protokv(*asked).rows()
    assert (row["stream_time_s"], row["context_tokens"]) == (8.0, 24 + 4)
    refused = protokv(*asked, "--evidence")
    assert (refused.code, "tell no time" in refused.err) == (ExitCode.USAGE, True)
