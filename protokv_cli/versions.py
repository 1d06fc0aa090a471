"""What `--version` says: this program and what its results depend on, from package metadata; nothing is imported."""

from __future__ import annotations

import platform
from importlib import metadata

from protokv.version import __version__

DEPENDS_ON = {"torch": "torch", "transformers": "transformers", "PyAV": "av", "decord": "decord"}


def describe_versions() -> str:
    """Lines of a name and a version, this program's first."""
    rows = [("protokv", __version__), ("Python", platform.python_version())]
    rows += [(name, _version(package)) for name, package in DEPENDS_ON.items()]
    return "\n".join(f"{name} {version}" for name, version in rows)


def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "not installed"
