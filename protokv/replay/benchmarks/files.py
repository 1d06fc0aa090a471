"""Find and read files below the folder of a data set.

Annotations are JSON or Parquet (the extra `benchmarks`). A path in annotations is not
trusted: the file is the one below the folder with the longest equal ending.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from string import ascii_uppercase
from typing import Any

from protokv.errors import ConfigError, SourceNotFound
from protokv.texts import JsonRecord

_VIDEOS = ("", "videos", "video", "src_videos", "data", "data/videos")
_SUFFIXES = (".mp4", ".mkv", ".webm", ".avi", ".mov", ".npy")


@dataclass(frozen=True, slots=True)
class AnnotationRecord:
    """An object of annotations, and its place for errors.

    Every reader raises ConfigError, which names the place, where the object is not as published.
    """

    values: JsonRecord
    where: str

    def read(self, name: str, *kinds: type) -> Any:
        """Return a field of one of some types, text by default."""
        value = self.values.get(name)
        if not isinstance(value, kinds or str) or isinstance(value, bool):
            raise self.refuse(
                f"{name} is {type(value).__name__}" if name in self.values else f"{name} is missing"
            )
        return value

    def read_all(self, name: str, what: str) -> Iterator[AnnotationRecord]:
        """Yield the objects of a list; `what` names one of them."""
        for number, values in enumerate(self.read(name, list)):
            yield AnnotationRecord(values, f"{self.where} {what} {number}")

    def read_options(self, name: str = "options") -> list[str]:
        """Return the options of a choice without the letter that some files write before them: `A.
        red` is `red`.
        """
        return [re.sub(r"^\(?[A-Z][.):]\s*", "", str(option)) for option in self.read(name, list)]

    def read_letter(self, options: Sequence[str]) -> str:
        """Return the answer, the letter of an option."""
        letter: str = self.read("answer").strip()
        if letter not in list(ascii_uppercase[: len(options)]):
            raise self.refuse(f"answer {letter!r} is none of {len(options)} options")
        return letter

    def refuse(self, why: str) -> ConfigError:
        """Return the error of this place."""
        return ConfigError(
            f"{self.where}: {why}", hint="use the annotations as they were published"
        )


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
    """Return the file that `find_dataset_file` finds. SourceNotFound: there is no such folder or
    file.
    """
    if not root.is_dir():
        raise SourceNotFound(
            f"there is no folder {root}", hint="name the folder of the data set with --data-root"
        )
    found = find_dataset_file(root, names)
    if found is None:
        raise SourceNotFound(
            f"{root} holds no annotations of {benchmark}: expected {' or '.join(names)}",
            hint="get it from its authors, and lay it out as they publish it",
        )
    return found


def read_annotations(path: Path) -> Iterator[AnnotationRecord]:
    """Yield the objects of a JSON list or a Parquet table. ConfigError: the file holds
    something else.
    """
    try:
        if path.suffix == ".parquet":
            import pyarrow.parquet as parquet

            rows: Any = parquet.read_table(path).to_pylist()
        else:
            rows = json.loads(path.read_text(encoding="utf-8"))
    except ImportError as error:
        raise ConfigError(
            f"reading {path.name} needs pyarrow", hint="pip install pyarrow"
        ) from error
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"{path} cannot be read as annotations: {error}", hint="download it again"
        ) from error
    if not isinstance(rows, list) or not all(isinstance(row, dict) for row in rows):
        raise ConfigError(f"{path} is no list of objects", hint="use the file as it was published")
    for number, row in enumerate(rows):
        yield AnnotationRecord(row, f"{path.name} entry {number}")


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
    complete = PurePosixPath(path).suffix.lower() in _SUFFIXES
    named = [
        place.with_name(place.name + end)
        for place in places
        for end in (("",) if complete else _SUFFIXES)
    ]
    named += [place.with_suffix(suffix) for place in places for suffix in _SUFFIXES]
    return next((path for path in named if path.is_file()), None)
