"""`protokv doctor`: what this machine and this installation have, for a bug report without
secrets.
"""

from __future__ import annotations

import os
import platform
import re
import shutil
import sys
from importlib import import_module, metadata
from pathlib import Path
from typing import Any

import typer

from protokv.machine import measure_free_memory, measure_machine_memory
from protokv.texts import JsonObject
from protokv.version import __version__
from protokv_cli.exits import ExitCode
from protokv_cli.options import OutputFlags
from protokv_cli.output import tabulate_fields

_PACKAGES = (
    "torch",
    "transformers",
    "tokenizers",
    "safetensors",
    "av",
    "decord",
    "numpy",
    "typer",
    "rich",
    # of extras
    "starlette",
    "uvicorn",
    "obstore",
    "matplotlib",
    "pyarrow",
    "openai",
    "accelerate",
    "bitsandbytes",
)
_CODECS = ("h264", "hevc", "av1", "vp9", "vp8", "mpeg4", "mpeg2video", "mjpeg", "prores")
_VARIABLES = re.compile(
    r"PROTOKV_|HF_|CUDA_VISIBLE_DEVICES$|OMP_NUM_THREADS$|.*_PROXY$", re.IGNORECASE
)


def doctor(*, output: OutputFlags) -> None:
    """Show what this machine has and what is installed; `protokv models` shows which models fit.

    For a bug report: no values of variables, no names of your models, the home folder as ~. Exit
    code 1: it is broken.

    ```sh
    protokv doctor --format json
    ```
    """
    out = output.open()
    with out.errors():
        problems = list[str]()
        av = _import(problems, "av")
        installed = {one.name: one.version for one in metadata.distributions()}
        found: JsonObject = {
            "protokv": __version__,
            "python": f"{platform.python_version()} in {_hide_home(sys.prefix)}",
            "system": (
                f"{platform.system()} {platform.release()}, {platform.machine()}, {os.cpu_count()} "
                "processors"
            ),
            "packages": {name: installed.get(name, "not installed") for name in _PACKAGES},
            "devices": list_devices(problems),
            "video": {
                "codecs": [
                    name for name in _CODECS if av is not None and name in av.codecs_available
                ]
            },
            "variables": sorted(name for name in os.environ if _VARIABLES.match(name)),
            "disk": {
                "folder": _hide_home(Path.cwd()),
                "free_bytes": shutil.disk_usage(Path.cwd()).free,
            },
            "problems": problems,
        }
        devices = {one["name"]: {**one, "name": ""} for one in found["devices"]}
        out.show([found], lambda _: [tabulate_fields(found | {"devices": devices})])
        if problems:
            raise typer.Exit(ExitCode.FAILURE)


def list_devices(problems: list[str]) -> list[JsonObject]:
    """Return a row per device: its name, its memory and what is free of it; tell of problems."""
    found = [
        {
            "name": "cpu",
            "machine_memory_bytes": measure_machine_memory(),
            "free_bytes": measure_free_memory(),
        }
    ]
    torch = _import(problems, "torch")
    for number in range(torch.cuda.device_count() if torch is not None else 0):
        try:
            free, size = torch.cuda.mem_get_info(number)
            found.append(
                {"name": f"cuda:{number}", "machine_memory_bytes": size, "free_bytes": free}
            )
        except RuntimeError as error:
            problems.append(f"cuda:{number} cannot be used: {str(error).splitlines()[0]}")
    return found


def _import(problems: list[str], name: str) -> Any:
    try:
        return import_module(name)
    except Exception as error:  # a library that lacks another one raises what it likes
        problems.append(f"{name} cannot be imported: {_hide_home(' '.join(str(error).split()))}")
        return None


def _hide_home(text: object) -> str:
    home = str(Path.home())
    return str(text) if home == os.sep else str(text).replace(home, "~")
