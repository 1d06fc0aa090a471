"""`--sign` and `--trust` on the command line: who refuses what, with which exit code and words."""

from __future__ import annotations

import getpass
from pathlib import Path

import pytest

from protokv_cli.exits import Exit
from tests.cli.conftest import Program, write_video

minisign = pytest.importorskip("minisign")


@pytest.fixture(autouse=True)
def keys(protokv: Program) -> None:
    pair = minisign.KeyPair.generate()
    (protokv.folder / "keys.pub").write_bytes(bytes(pair.public_key))
    (protokv.folder / "open.key").write_bytes(bytes(pair.secret_key))
    pair.secret_key.encrypt("swordfish", opslimit=1 << 15, memlimit=1 << 20)
    (protokv.folder / "locked.key").write_bytes(bytes(pair.secret_key))


@pytest.mark.usefixtures("mocked")
def test_every_command_that_reads_refuses_what_is_not_signed(
    protokv: Program, video: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    state, more = "states/clip.safetensors", write_video(protokv.folder / "more.mp4", 2)
    Path("states").mkdir()
    assert protokv("ingest", video, "-o", state, "--budget", "24").code == 0
    append = ("ingest", more, "-o", state, "--budget", "24", "--append")
    assert "--trust is for the state that --append goes on with" in protokv("ingest", video, "--trust", "keys.pub").err
    served: list[object] = []
    monkeypatch.setattr("uvicorn.Server.run", lambda server: served.append(server))
    reading = [("query", state, "what is first ?"), ("inspect", state), ("inspect", state, "-o", "b.pt")]
    commands = [*reading, ("serve", "states"), append]
    for command in commands:
        result = protokv(*command, "--trust", "keys.pub")
        assert result.code == Exit.UNTRUSTED, command
        error, hint = result.err.splitlines()[-2:]
        assert error == f"Error: {state} is not signed: there is no {state}.minisig"
        assert "--sign KEY" in hint
    (row,) = protokv("inspect", "states/", "--trust", "keys.pub", "--json").rows()
    assert "is not signed" in row["failure"]
    assert not Path("b.pt").exists()
    assert not served

    (signed,) = protokv("inspect", "states/", "--sign", "open.key", "--json").rows()
    assert signed == {"state": state, "signature": f"{state}.minisig"}
    protokv.environment["PROTOKV_TRUST"] = "keys.pub"
    for command in commands:
        result = protokv(*command)
        assert result.code == 0, command
    assert len(served) == 1
    # The last of them has appended.
    assert f"{state}.minisig is of the former state; sign it again" in " ".join(result.err.split())
    assert "has changed since it was signed" in protokv("inspect", state).err
    # An interrupted run of one's own needs no signature, and its policy is over with it.
    del protokv.environment["PROTOKV_TRUST"]
    assert protokv("inspect", state).code == 0


def test_a_key_asks_for_its_password_on_the_terminal_only(
    protokv: Program, monkeypatch: pytest.MonkeyPatch, watched: object
) -> None:
    Path("clip.safetensors").write_bytes(watched("--memory", "paper").read_bytes())  # type: ignore[operator]
    sign = ("inspect", "clip.safetensors", "--sign", "locked.key", "--json")
    monkeypatch.setattr("os.ctermid", lambda: "/nowhere/tty")
    result = protokv(*sign, stdin="swordfish\n")
    assert (result.code, "there is no terminal to ask for it" in result.err) == (Exit.USAGE, True)
    monkeypatch.setattr("os.ctermid", lambda: "/dev/null")
    for password, code in (("sword", Exit.USAGE), ("swordfish", Exit.DONE)):
        monkeypatch.setattr(getpass, "getpass", lambda prompt, typed=password: typed)
        result = protokv(*sign)
        assert result.code == code, result.err
        assert "swordfish" not in result.err
    assert protokv("inspect", "clip.safetensors", "--trust", "keys.pub").code == 0
    for key in ("keys.pub", "gone.key", "clip.safetensors"):
        result = protokv(*sign[:-2], key)
        assert (result.code, len(result.err.splitlines())) == (Exit.USAGE, 2), result.err
