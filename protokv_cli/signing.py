"""Signatures on the command line: `--sign` writes them, `--trust` requires them."""

from __future__ import annotations

import getpass
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import typer

from protokv.errors import ConfigError
from protokv_cli.output import Output
from protokv_cli.tables import pairs


@contextmanager
def trusting(keys: Path | None) -> Iterator[None]:
    """Let this block read only states that a key in this file has signed; with None, any state."""
    if keys is None:
        yield
        return
    from protokv.state import signatures

    with signatures.trusting(keys):
        yield


def check_trust_is_used(command: typer.Context) -> None:
    """Refuse `--trust` that is typed without `--append`: nothing would be held against it. ConfigError.

    As a setting for all commands it may stand.
    """
    source = command.get_parameter_source("trust")
    if not command.params["append"] and source is not None and source.name == "COMMANDLINE":
        raise ConfigError("--trust is for the state that --append goes on with", hint="leave it out, or add --append")


def sign_all(out: Output, state: str, key: Path) -> None:
    """Sign a state, or all states of a folder."""
    from protokv.fleet.plan import find_states, is_place
    from protokv.state.signatures import read_secret_key
    from protokv.state.signing import sign

    states = find_states(state) if is_place(state) else [state]
    with read_secret_key(key, lambda: _ask_password(key)) as secret:
        rows = (sign(one, secret) for one in states)
        out.show(rows, lambda row: [row["signature"]], lambda rows: (pairs(row, title="signed") for row in rows))


def warn_of_stale_signature(out: Output, state: str) -> None:
    """Warn before a commit to a signed state: the signature is of the former one."""
    signature = f"{os.path.realpath(state)}.minisig"
    if os.path.exists(signature):  # noqa: PTH110
        out.warn(
            f"Warning: {state} is signed, and what is committed now is not: {state}.minisig is of the former state; "
            f"sign it again: protokv inspect {state} --sign KEY"
        )


def _ask_password(key: Path) -> str:
    try:
        # Of the terminal itself; stdin may hold something else.
        with open(os.ctermid(), "r+b", buffering=0):  # noqa: PTH123
            return getpass.getpass(f"Password of {key}: ")
    except (OSError, EOFError) as error:
        hint = "ask on a terminal, or sign a file with minisign itself: minisign -Sm STATE"
        raise ConfigError(f"{key} has a password, and there is no terminal to ask for it", hint=hint) from error
