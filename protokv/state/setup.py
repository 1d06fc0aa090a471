"""What this machine and this installation have, as plain JSON for a bug report.

Holds no secrets: no value of a variable of the environment, no name of a user's model, and the home folder as `~`.
Nothing is downloaded, and a package that cannot be imported is a problem in the report, not an error.
"""

from __future__ import annotations

import os
import platform
import re
import shutil
import sys
from collections.abc import Iterator
from importlib import import_module, metadata
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Final

from protokv import __version__
from protokv.backbones.hub import cached_models
from protokv.backbones.packaged import packaged_models
from protokv.machine import free_memory_bytes, memory_bytes

# fmt: off
_PACKAGES: Final = (
    "torch", "transformers", "tokenizers", "safetensors", "av", "decord", "zarr", "numpy", "typer", "rich",
)
# fmt: on
_CODECS: Final = ("h264", "hevc", "av1", "vp9", "vp8", "mpeg4", "mpeg2video", "mjpeg", "prores")
# Those of people who change the program.
_DEVELOPMENT: Final = ("test", "docs")
_VARIABLES: Final = re.compile(r"PROTOKV_|HF_|CUDA_VISIBLE_DEVICES$|OMP_NUM_THREADS$|.*_PROXY$", re.IGNORECASE)


def describe_setup() -> dict[str, Any]:
    """Return a document of this machine: versions, devices, codecs, extras, cache, space and problems.

    `problems` are sentences; it is empty if `protokv/mini` can watch a file here.
    """
    problems: list[str] = []
    return {
        "protokv": __version__,
        "python": f"{platform.python_version()} ({platform.python_implementation()})",
        "system": f"{platform.system()} {platform.release()}, {platform.machine()}",
        "program": hide_home(sys.prefix),
        "packages": {name: _version(name) for name in _PACKAGES},
        "devices": list_devices(problems),
        "video": _video(problems),
        "extras": {name: {"missing": missing} for name, missing in _extras()},
        "variables": sorted(name for name in os.environ if _VARIABLES.match(name)),
        "cache": _cache(problems),
        "disk": {"folder": hide_home(Path.cwd()), "free_bytes": _free_disk(Path.cwd())},
        "problems": problems,
    }


def hide_home(path: object) -> str:
    """Return a path or a text with the home folder as `~`."""
    home = str(Path.home())
    return str(path) if home == os.sep else str(path).replace(home, "~")


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _imported(name: str, problems: list[str]) -> Any:
    try:
        return import_module(name)
    except Exception as error:  # a library that lacks another one raises what it likes
        problems.append(f"{name} cannot be imported: {hide_home(' '.join(str(error).split()))}")
        return None


def list_devices(problems: list[str]) -> list[dict[str, Any]]:
    """Return a row per device: its name, what it is, its memory and what is free of it; tell of problems."""
    cpu = {
        "name": "cpu",
        "what": f"{os.cpu_count()} processors",
        "memory_bytes": memory_bytes(),
        "free_bytes": free_memory_bytes(),
    }
    torch = _imported("torch", problems)
    if torch is None:
        return [cpu]
    found = [cpu | {"what": f"{cpu['what']}, of which torch uses {torch.get_num_threads()}"}]
    for number in range(torch.cuda.device_count()):
        try:
            free, size = torch.cuda.mem_get_info(number)
            what = torch.cuda.get_device_name(number)
        except RuntimeError as error:
            problems.append(f"cuda:{number} cannot be used: {str(error).splitlines()[0]}")
            continue
        found.append({"name": f"cuda:{number}", "what": what, "memory_bytes": size, "free_bytes": free})
    if torch.backends.mps.is_available():
        # It shares the main memory.
        found.append(cpu | {"name": "mps", "what": "Apple GPU"})
    return found


def _video(problems: list[str]) -> dict[str, Any]:
    av = _imported("av", problems)
    if av is None:
        return {"ffmpeg": None, "codecs": {}}
    version = ".".join(map(str, av.library_versions["libavcodec"]))
    return {"ffmpeg": f"libavcodec {version}", "codecs": {name: name in av.codecs_available for name in _CODECS}}


def _extras() -> Iterator[tuple[str, list[str]]]:
    """Yield the extras of this package, each with what it lacks."""
    # huggingface_hub and transformers need it, too.
    from packaging.requirements import InvalidRequirement, Requirement

    try:
        described = metadata.metadata("protokv")
    except metadata.PackageNotFoundError:
        return
    required = metadata.requires("protokv") or []
    for extra in sorted(set(described.get_all("Provides-Extra") or ()) - set(_DEVELOPMENT)):
        missing = []
        for line in required:
            try:
                one = Requirement(line)
            except InvalidRequirement:
                continue
            if one.marker is None or one.marker.evaluate({"extra": ""}) or not one.marker.evaluate({"extra": extra}):
                continue
            version = _version(one.name)
            if version is None or not one.specifier.contains(version, prereleases=True):
                missing.append(f"{one.name}{one.specifier}")
        yield extra, missing


def _cache(problems: list[str]) -> dict[str, Any]:
    if not packaged_models():
        problems.append("the embedded model is not in this installation; install protokv again")
    if find_spec("huggingface_hub") is None:
        return {"folder": None, "models": 0, "bytes": 0, "free_bytes": None}
    from huggingface_hub.constants import HF_HUB_CACHE

    folder, sizes = Path(HF_HUB_CACHE), cached_models().values()
    return {"folder": hide_home(folder), "models": len(sizes), "bytes": sum(sizes), "free_bytes": _free_disk(folder)}


def _free_disk(folder: Path) -> int | None:
    """Return the free bytes at a folder, or at the nearest one above it that exists."""
    for place in (folder, *folder.parents):
        try:
            return shutil.disk_usage(place).free
        except OSError:
            continue
    return None
