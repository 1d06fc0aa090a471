"""The videos of a fleet, the key of each, and where the states are.

The key of a file is its stem; below a folder, or a prefix or glob of an object store, it is the
path from there without the suffix, unless two differ only in it. The state of the key
`monday/door` is `monday/door.safetensors`.
Nothing is opened here; a missing video is reported when its turn comes.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from protokv.bucket import in_bucket, list_bucket, stands_for_many
from protokv.errors import ConfigError, SourceNotFound
from protokv.state.folder import require_path_name
from protokv.state.store import is_remote_state, make_state_name
from protokv.video.address import (
    LIVE,
    VIDEO_SUFFIXES,
    name_source,
    redact_source,
    source_kind,
    source_stem,
)


@dataclass(frozen=True, slots=True)
class VideoJob:
    """One video: its source as `open_source` takes it, and the key of its state, a relative path
    with `/`.
    """

    source: str
    key: str

    def to_dict(self) -> dict[str, str]:
        """Return plain JSON for reports; an address is without its secrets."""
        return {"source": name_source(self.source), "key": self.key}


def list_video_jobs(sources: Iterable[str], *, live: bool = False) -> list[VideoJob]:
    """Return every video once, in the order of the sources; within a folder or prefix sorted by
    name.

    ConfigError if two videos have one key, or one is live unless all are `live`; SourceNotFound if
    a folder or prefix holds none.
    """
    jobs: dict[str, VideoJob] = {}
    for job in (job for source in sources for job in _expand(source)):
        if not live and source_kind(job.source) in LIVE:
            raise ConfigError(
                f"{redact_source(job.source)} is live, and workers are for videos that end",
                hint=f"give it a run of its own: protokv ingest SOURCE -o {job.key}.safetensors",
            )
        other = jobs.setdefault(job.key, job)
        if other.source != job.source:
            raise ConfigError(
                f"{name_source(other.source)} and {name_source(job.source)} would both have the "
                f"state {job.key}",
                hint="name a folder that holds both, whose states have their paths, or ingest "
                "them into two folders",
            )
    return list(jobs.values())


def is_fleet_source(source: str) -> bool:
    """Return True if a source stands for the videos below it, not for one."""
    if in_bucket(source):
        return stands_for_many(source)
    return source_kind(source) == "file" and Path(require_path_name(source)).is_dir()


def _expand(source: str) -> Iterator[VideoJob]:
    if not is_fleet_source(source):
        yield VideoJob(source, make_video_key(source))
        return
    files = (path for path in Path(source).rglob("*") if path.is_file())
    below = ((path.relative_to(source).as_posix(), str(path)) for path in files)
    videos = [
        (name, path)
        for name, path in (list_bucket(source) if in_bucket(source) else below)
        if _is_video(name)
    ]
    if not videos:
        raise SourceNotFound(
            f"there is no video in {source}",
            hint="check its spelling; names end in .mp4, .mkv, ...",
        )
    alike = Counter(_cut_suffix(name) for name, _ in videos)
    for name, path in sorted(videos):
        key = _cut_suffix(name)
        yield VideoJob(path, key if alike[key] == 1 else name)


def make_video_key(source: str) -> str:
    """Return the key of a single video."""
    if source_kind(source) != "file" and not in_bucket(source):
        return source_stem(source)
    # The name of an object is the last part of its address.
    return _cut_suffix(PurePosixPath(Path(source).as_posix()).name) or "video"


def _is_video(name: str) -> bool:
    path = PurePosixPath(name)
    return path.suffix.lower() in VIDEO_SUFFIXES and not any(
        part.startswith(".") for part in path.parts
    )


def _cut_suffix(name: str) -> str:
    # Not by a path, which would give two keys of a bucket that differ in slashes one name.
    suffix = PurePosixPath(name).suffix
    return name.removesuffix(suffix) if suffix.lower() in VIDEO_SUFFIXES else name


def locate_fleet_state(place: str, key: str) -> str:
    """Return where the state of a key is."""
    folder, slash, stem = key.rpartition("/")
    name = folder + slash + make_state_name(stem)
    return f"{place.rstrip('/')}/{name}" if is_remote_state(place) else str(Path(place, name))
