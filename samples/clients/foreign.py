"""The code of other projects, at the commits that were tried: read from their repositories when a
script runs, and run as it is. What it imports of its own project beyond these files is a stand-in
that does nothing.
"""

from __future__ import annotations

import importlib
import sys
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest.mock import MagicMock
from urllib.request import urlopen

HOST = "https://raw.githubusercontent.com"
FRIGATE = "blakeblackshear/frigate/e3fa70189324e5eb3b1dba756c153f6696f457de"
LLM_VISION = "valentinfrlch/ha-llmvision/85fcb9832888c9f7e350f96b3a17f9c1a1aa7505"
FILES = {
    FRIGATE: (
        "frigate/const.py",
        "frigate/types.py",
        "frigate/jobs/job.py",
        "frigate/jobs/vlm_watch.py",
        "frigate/genai/__init__.py",
        "frigate/genai/prompts.py",
        "frigate/genai/plugins/openai.py",
        "frigate/data_processing/post/types.py",
    ),
    LLM_VISION: (
        "custom_components/llmvision/const.py",
        "custom_components/llmvision/providers.py",
    ),
}
ABSENT = ("frigate", "homeassistant", "boto3", "playhouse")


class _Absent(ModuleType):
    __path__: list[str] = []  # noqa: RUF012

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return MagicMock(name=name)


class _StandIns(Loader, MetaPathFinder):
    def find_spec(self, name: str, *_: object) -> ModuleSpec | None:
        known = name.partition(".")[0] in ABSENT
        return ModuleSpec(name, self, is_package=True) if known else None

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return _Absent(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        pass


def import_foreign(folder: Path, name: str) -> Any:
    """Import a module of a project; files that are not in a folder are fetched into it."""
    for project, paths in FILES.items():
        for path in paths:
            if not (file := folder / path).is_file():
                file.parent.mkdir(parents=True, exist_ok=True)
                with urlopen(f"{HOST}/{project}/{path}") as reply:
                    file.write_bytes(reply.read())
    if str(folder) not in sys.path:
        sys.path.insert(0, str(folder))
        sys.meta_path.append(_StandIns())
    return importlib.import_module(name)
