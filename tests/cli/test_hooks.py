"""`--exec`: a command of the user's that hangs, leaves children, writes without end or is late."""

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
    monkeypatch.setattr(hooks, "_DRAIN_S", 0.01)
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


@pytest.mark.parametrize("write", ["yes", "cat /dev/zero", "yes >&2"])
def test_what_a_command_writes_is_bounded_and_that_is_said(
    said: list[str], capfd: pytest.CaptureFixture[str], write: str
) -> None:
    with SubprocessHook(
        shlex.join(["sh", "-c", f"({write}) 2>&1 | head -c 3000000"]), said.append
    ) as hook:
        hook({"answer": 1})
    assert len(capfd.readouterr().err) == hooks._MOST_OUTPUT
    assert {"writes much" in line for line in said} == {True}


def test_a_command_has_a_process_group_of_its_own_and_is_waited_for_at_the_end(
    said: list[str],
) -> None:
    code = "import os, sys; open('group', 'w').write(f'{os.getpgid(0)} {len(sys.stdin.read())}')"
    with SubprocessHook(shlex.join([sys.executable, "-c", code]), said.append) as hook:
        hook({"answer": "long" * 50_000})
    group, length = map(int, Path("group").read_text(encoding="utf-8").split())
    assert group != os.getpgid(0)
    assert length > 200_000
