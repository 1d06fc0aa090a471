"""Find and read files below the folder of a data set.

Annotations are JSON, JSON lines or Parquet (the extra `benchmarks`). A path in annotations is not trusted: the file is
the one below the folder with the longest equal ending.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path, PurePosixPath
from typing import Any, Final

from protokv.errors import ConfigError, SourceNotFound

_VIDEOS: Final = ("", "videos", "video", "src_videos", "data", "data/videos")
_SUFFIXES: Final = (".mp4", ".mkv", ".webm", ".avi", ".mov", ".npy")


def find_file(root: Path, names: Sequence[str]) -> Path | None:
    """Return the first file of some names, at most three folders below the root; None if there is none."""
    for name in names:
        for pattern in (name, f"*/{name}", f"*/*/{name}", f"*/*/*/{name}"):
            found = sorted(path for path in root.glob(pattern) if path.is_file())
            if found:
                return found[0]
    return None


def find_annotations(root: Path, names: Sequence[str], benchmark: str) -> Path:
    """Return the file that `find_file` finds. SourceNotFound: there is no such folder or file."""
    if not root.is_dir():
        raise SourceNotFound(f"there is no folder {root}", hint="name the folder of the data set with --data-root")
    found = find_file(root, names)
    if found is None:
        raise SourceNotFound(
            f"{root} holds no annotations of {benchmark}: expected {' or '.join(names)}",
            hint="samples/benchmarks/README.md says where each data set is obtained and how it is laid out",
        )
    return found


def find_video(root: Path, path: str) -> Path | None:
    """Return the video that annotations name; None if it is not there.

    Look for `/data/set/a.mp4` as `root/data/set/a.mp4`, then without its first folders one after another, each directly
    and in `videos/` and the like, and at last with other suffixes.
    """
    parts = [part for part in PurePosixPath(path.replace("\\", "/")).parts if part not in ("/", ".")]
    if not parts or ".." in parts:
        return None
    places = [root / folder / Path(*parts[i:]) for i in range(len(parts)) for folder in _VIDEOS]
    complete = PurePosixPath(path).suffix.lower() in _SUFFIXES
    named = [place.with_name(place.name + end) for place in places for end in (("",) if complete else _SUFFIXES)]
    # Conversions keep the stem and change the suffix.
    named += [place.with_suffix(suffix) for place in places for suffix in _SUFFIXES]
    return next((path for path in named if path.is_file()), None)


def read_records(path: Path) -> list[dict[str, Any]]:
    """Read the objects of a file: a JSON list, JSON lines, or a Parquet table. ConfigError: it holds something else."""
    try:
        if path.suffix == ".parquet":
            rows: Any = _read_parquet(path)
        elif path.suffix == ".jsonl":
            rows = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]
        else:
            rows = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path} cannot be read as annotations: {error}", hint="download it again") from error
    if not isinstance(rows, list) or not all(isinstance(row, dict) for row in rows):
        raise ConfigError(f"{path} is no list of objects", hint="use the file as it was published")
    return rows


def read_field(row: Mapping[str, Any], name: str, kind: type | tuple[type, ...], where: str) -> Any:
    """Return a field of a record. ConfigError: it is missing or of another type; names the record and the field."""
    value = row.get(name)
    if not isinstance(value, kind) or isinstance(value, bool):
        what = "is missing" if name not in row else f"is {type(value).__name__}"
        raise ConfigError(f"{where}: {name} {what}", hint="use the annotations as they were published")
    return value


def number_records(rows: Sequence[Mapping[str, Any]], path: Path) -> Iterator[tuple[Mapping[str, Any], str]]:
    """Yield records, each with its name for an error."""
    for number, row in enumerate(rows):
        yield row, f"{path.name} entry {number}"


def _read_parquet(path: Path) -> list[dict[str, Any]]:
    try:
        import pyarrow.parquet as parquet
    except ImportError as error:
        raise ConfigError(f"reading {path.name} needs pyarrow", hint="pip install 'protokv[benchmarks]'") from error
    rows: list[dict[str, Any]] = parquet.read_table(path).to_pylist()
    return rows
