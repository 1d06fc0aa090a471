"""Find and read files below the folder of a data set.

Annotations are JSON or Parquet (the extra `benchmarks`). A path in annotations is not
trusted: the file is the one below the folder with the longest equal ending.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path, PurePosixPath
from string import ascii_uppercase
from typing import Any, TypeVar

import msgspec

from protokv.errors import ConfigError, SourceNotFound

_Rows = TypeVar("_Rows")
_VIDEOS = ("", "videos", "video", "src_videos", "data", "data/videos")
_SUFFIXES = (".mp4", ".mkv", ".webm", ".avi", ".mov", ".npy")


def strip_letters(options: Sequence[Any]) -> list[str]:
    """Return options without the letter that some files write before them: `A. red` is `red`."""
    return [re.sub(r"^\(?[A-Z][.):]\s*", "", str(option)) for option in options]


def list_choices(options: Sequence[str], form: str = "{}. {}", between: str = "\n") -> str:
    """List all options, each after its letter."""
    return between.join(
        form.format(letter, option)
        for letter, option in zip(ascii_uppercase, options, strict=False)
    )


def find_dataset_file(root: Path, names: Sequence[str]) -> Path | None:
    """Return the first file of some names, at most three folders below the root; None if there is
    none.
    """
    for name in names:
        for pattern in (name, f"*/{name}", f"*/*/{name}", f"*/*/*/{name}"):
            found = sorted(path for path in root.glob(pattern) if path.is_file())
            if found:
                return found[0]
    return None


def find_annotations(root: Path, names: Sequence[str], benchmark: str) -> Path:
    """Return the file that `find_dataset_file` finds. SourceNotFound: there is none."""
    found = find_dataset_file(root, names)
    if found is None:
        raise SourceNotFound(
            f"{root} holds no annotations of {benchmark}: expected {' or '.join(names)}",
            hint="name its folder, laid out as its authors publish it, with --data-root",
        )
    return found


def read_annotations(path: Path, kind: type[_Rows]) -> _Rows:
    """Read a JSON list or a Parquet table as a list of one kind. ConfigError: the file holds
    something else; names the place.
    """
    try:
        if path.suffix == ".parquet":
            import pyarrow.parquet as parquet

            return msgspec.convert(parquet.read_table(path).to_pylist(), kind)
        return msgspec.json.decode(path.read_bytes(), type=kind)
    except ImportError as error:
        raise ConfigError(
            f"reading {path.name} needs pyarrow", hint="pip install pyarrow"
        ) from error
    except (OSError, ValueError, msgspec.DecodeError) as error:
        raise ConfigError(
            f"{path} cannot be read as annotations: {error}",
            hint="use the annotations as they were published",
        ) from error


def find_dataset_video(root: Path, path: str) -> Path | None:
    """Return the video that annotations name; None if it is not there.

    Look for `/data/set/a.mp4` as `root/data/set/a.mp4`, then without its first folders one after
    another, each directly and in `videos/` and the like, and at last with other suffixes:
    conversions keep the stem.
    """
    parts = [
        part for part in PurePosixPath(path.replace("\\", "/")).parts if part not in ("/", ".")
    ]
    if not parts or ".." in parts:
        return None
    places = [root / folder / Path(*parts[i:]) for i in range(len(parts)) for folder in _VIDEOS]
    name = PurePosixPath(parts[-1])
    stem = name.stem if name.suffix.lower() in _SUFFIXES else name.name
    named = [*places, *(place.with_name(stem + end) for place in places for end in _SUFFIXES)]
    return next((path for path in named if path.is_file()), None)
