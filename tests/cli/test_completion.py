"""Completion: the values of options, and the script of the shell that is asked for."""

from __future__ import annotations

import pytest

from protokv.config import CONFIGS
from protokv.replay.benchmarks import BENCHMARKS
from protokv.replay.studies import SHIPPED
from protokv_cli.replay import DATASETS, STUDIES
from tests.cli.conftest import Program


def completed(protokv: Program, words: str) -> list[str]:
    protokv.environment |= {
        "_PROTOKV_COMPLETE": "complete_bash",
        "COMP_WORDS": words,
        "COMP_CWORD": str(len(words.split(" ")) - 1),
    }
    return protokv(prog_name="protokv").out.split()


@pytest.mark.parametrize(
    ("words", "values"),
    [
        ("protokv ingest --memory ", list(CONFIGS)),
        ("protokv ingest --memory dur", ["durable"]),
        ("protokv replay --memory paper,dur", ["paper,durable"]),
        ("protokv replay --study ", list(SHIPPED)),
        ("protokv ingest --decoder ", ["auto", "pyav", "decord"]),
        ("protokv query --dtype", []),
        ("protokv ingest --positions c", ["compact"]),
        ("protokv inspect --format ", ["auto", "table", "json", "plain"]),
    ],
)
def test_values_are_completed(protokv: Program, words: str, values: list[str]) -> None:
    assert completed(protokv, words) == values


@pytest.mark.parametrize(
    ("shell", "said"), [("bash", "complete -o"), ("zsh", "#compdef protokv"), ("fish", "complete --command protokv")]
)
def test_the_script_is_that_of_the_shell_that_is_named(protokv: Program, shell: str, said: str) -> None:
    protokv.environment["SHELL"] = "/bin/tcsh"
    result = protokv("--show-completion", shell)
    assert result.code == 0
    assert said in result.out
    assert "_PROTOKV_COMPLETE" in result.out


def test_the_studies_that_are_completed_are_those_that_there_are() -> None:
    assert STUDIES == SHIPPED
    assert tuple(BENCHMARKS) == DATASETS
