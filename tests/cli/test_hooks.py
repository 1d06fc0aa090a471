"""`--exec`: a command of the user's that hangs, leaves children or is late."""

import os
import shlex
import sys
from pathlib import Path

import pytest

from protokv_cli import hooks
from protokv_cli.hooks import SubprocessHook


@pytest.fixture
def said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    monkeypatch.chdir(tmp_path)
    # A child waits for one of these, and holds the other one.
    os.mkfifo("never")
    os.mkfifo("alive")
    return []


@pytest.mark.parametrize(
    "leave",
    ["cat never > alive & wait", "(cat never > alive) & exec cat never", "cat never >alive"],
)
def test_a_command_beyond_its_limit_is_ended_with_all_its_children(
    said: list[str], leave: str
) -> None:
    with SubprocessHook(shlex.join(["sh", "-c", leave]), said.append, 0.5) as hook:
        hook({"answer": 1})
        # The end of the file comes when nobody has it open for writing any more.
        assert Path("alive").read_bytes() == b""
    assert [line for line in said if "timed out after 0.5 s" in line] == said != []


@pytest.mark.parametrize(
    "leave", ["cat never &", "cat never & exec true", "(cat never; cat never)&"]
)
def test_a_child_that_keeps_the_output_open_is_not_waited_for(said: list[str], leave: str) -> None:
    with SubprocessHook(shlex.join(["sh", "-c", leave]), said.append) as hook:
        for i in range(3):
            hook({"answer": i})
    assert said == []
    for _ in range(6):
        # Let the children end.
        os.close(os.open("never", os.O_RDWR))


def test_a_command_has_a_process_group_of_its_own_and_is_waited_for_at_the_end(
    said: list[str],
) -> None:
    code = "import os, sys; open('group', 'w').write(f'{os.getpgid(0)} {len(sys.stdin.read())}')"
    with SubprocessHook(shlex.join([sys.executable, "-c", code]), said.append) as hook:
        hook({"answer": "long" * 50_000})
    group, length = map(int, Path("group").read_text(encoding="utf-8").split())
    assert group != os.getpgid(0)
    assert length > 200_000


def test_of_answers_that_wait_too_long_the_oldest_are_left_out(
    said: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hooks, "_MOST_WAITING", 2)
    with SubprocessHook("sh -c 'echo > alive; exec cat never'", said.append, 1.0) as hook:
        hook({"answer": 0})
        Path("alive").read_bytes()
        for i in range(3):
            hook({"answer": i})
        assert said == ["Warning: --exec: sh is too slow; answers are left out"]
    # The first call may be ended before those that wait are.
    assert any("answers are left out at the end" in one for one in said)
