"""Models that were downloaded before: the folder of a hub model in the local cache. Opens no connection."""

from __future__ import annotations

import re
from pathlib import Path

# One owner and one model: what could be a path (`.`, `..`, `~`, an absolute one) does not match.
_HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]{0,95}/[A-Za-z0-9][\w.-]{0,95}", re.ASCII)
_COMMIT = re.compile(r"[0-9a-f]{40}")


def cached_folder(name: str, revision: str | None = None) -> Path | None:
    """Where the files of a hub model are in the local cache; None where it is not there or the name is none.

    Args:
        name: `owner/model`.
        revision: branch, tag or commit, which is no path; None: the main branch.
    """
    if not _HUB_NAME.fullmatch(name) or ".." in name or "--" in name:
        return None
    from huggingface_hub import try_to_load_from_cache
    from huggingface_hub.errors import HFValidationError

    try:
        file = try_to_load_from_cache(name, "config.json", revision=revision)
    except HFValidationError:
        return None
    return Path(file).parent if isinstance(file, str) else None


def commit_of(folder: str | Path) -> str | None:
    """The commit that a folder of the cache holds; None of any other folder."""
    folder = Path(folder)
    return folder.name if folder.parent.name == "snapshots" and _COMMIT.fullmatch(folder.name) else None
