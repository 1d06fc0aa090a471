"""`protokv doctor`: what this machine and this installation have, for a bug report."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

import typer

from protokv_cli import options
from protokv_cli.exits import Exit
from protokv_cli.output import Format, Output
from protokv_cli.tables import bytes_text, flat_lines, grid, pairs

if TYPE_CHECKING:
    from rich.console import RenderableType


def doctor(
    fmt: options.OutputFormat = Format.AUTO,
    as_json: options.Json = False,
    debug: options.Debug = False,
) -> None:
    """Show what this machine has and what is installed; `protokv models` shows which models fit.

    Paste it into a bug report. It holds no values of variables, no names of your models, and the home folder as ~. The
    exit code is 1 if something is broken.

    \b
    Examples:
      protokv doctor
      protokv doctor --format json
    """
    out = Output(fmt, as_json=as_json, quiet=False, debug=debug)
    with out.errors():
        from protokv.state.setup import describe_setup

        found = describe_setup()
        out.show([found], flat_lines, lambda _: _tables(found), apart=True)
        if found["problems"]:
            raise typer.Exit(Exit.FAILURE)


def _tables(found: Mapping[str, Any]) -> Iterator[RenderableType]:
    packages = [f"{name} {version or 'not installed'}" for name, version in found["packages"].items()]
    yield pairs(
        {
            "protokv": found["protokv"],
            "Python": f"{found['python']} in {found['program']}",
            "system": found["system"],
            "packages": ", ".join(packages),
            "variables set": ", ".join(found["variables"]) or "none",
        }
    )
    devices = found["devices"]
    rows = ((one["name"], _size(one["free_bytes"]), _size(one["memory_bytes"]), one["what"]) for one in devices)
    yield grid(("device", "free", "of", "what"), rows, left=("what",))
    video, cache, disk = found["video"], found["cache"], found["disk"]
    lacking = {name: one["missing"] for name, one in found["extras"].items()}
    space = {
        "video": video["ffmpeg"] or "cannot be read",
        "decodes": ", ".join(name for name, there in video["codecs"].items() if there) or "nothing",
        "extras": ", ".join(name for name, missing in lacking.items() if not missing) or "none",
        "not installed": "; ".join(f"{name}: {', '.join(missing)}" for name, missing in lacking.items() if missing),
        "cache": f"{cache['models']} models, {_size(cache['bytes'])} in {cache['folder']}",
        "disk": f"{_size(cache['free_bytes'])} free there, {_size(disk['free_bytes'])} in {disk['folder']}",
    }
    yield pairs({name: text for name, text in space.items() if text})
    yield pairs({f"problem {n}": text for n, text in enumerate(found["problems"], start=1)} or {"problems": "none"})


def _size(n: int | None) -> str:
    return "unknown" if n is None else bytes_text(n)
