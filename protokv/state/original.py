"""Find the video that a state has watched, to show what is in it. Frames of it are not in a state.

A state is untrusted and names no folder: the caller says where to look. A file counts only if its bytes have the
fingerprint in the state, so a state can name no file that its maker has not had.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path, PurePath
from typing import Any

from protokv.errors import SourceNotFound, SourceUnreadable, StateMismatch, shown
from protokv.state.snapshot import Header
from protokv.state.watched import records_of
from protokv.video.file import check_is_file, fingerprint


@dataclass(frozen=True, slots=True)
class Original:
    """A video file, and the stream times that it fills.

    Attributes:
        path: of the file; its content was checked.
        start_s, end_s: stream time of its beginning and end; `end_s` of the last one is that of the stream.
        skipped_s: what comes before `start_s` in the file: `--start` of the ingest.
    """

    path: Path
    start_s: float
    end_s: float
    skipped_s: float

    @property
    def span(self) -> dict[str, float]:
        """The times as plain JSON."""
        return {"start_s": self.start_s, "end_s": self.end_s, "skipped_s": self.skipped_s}

    def time_in_file(self, stream_s: float) -> float:
        """Return the time in the file of a stream time."""
        return stream_s - self.start_s + self.skipped_s


def find_originals(header: Header, places: Sequence[Path], hint: str = "", *, grown: bool = False) -> list[Original]:
    """Find the video of each source of a state.

    Args:
        header: of the state.
        places: folders in which a video of its name may be, or files; the first that is there counts.
        hint: of the error if nothing is there.
        grown: a file that has grown since counts too. A state can claim to have watched the first bytes of any file,
            so this is for those who may read the file anyway.

    Raises:
        SourceNotFound: a video is not there, or was never a file.
        SourceUnreadable: it cannot be read.
        StateMismatch: it has changed since, or is another one.
        StateCorrupt: the records of the sources make no sense.
    """
    records = records_of(header)
    starts_s = [float(one.get("start_s") or 0.0) for one in records]
    spans = pairwise([*starts_s, header.clock.stream_time_s])
    return [_find(record, span, places, hint, grown) for record, span in zip(records, spans, strict=True)]


def _find(
    record: Mapping[str, Any], span: tuple[float, float], places: Sequence[Path], hint: str, grown: bool
) -> Original:
    name, digest, size, skipped_s = _identity(record)
    # A name in a state is a name and leads nowhere.
    candidates = [
        place / name if place.is_dir() else place for place in places if PurePath(name).name == name or place.is_file()
    ]
    path = next((one for one in candidates if one.is_file()), None)
    if path is None:
        where = " or ".join(dict.fromkeys(map(str, places)))
        raise SourceNotFound(f"the video {shown(name)} of this state is not at hand: it is not in {where}", hint=hint)
    check_is_file(path)
    try:
        now = path.stat().st_size
        same = (now == size or (grown and now > size)) and fingerprint(path, size) == digest
    except OSError as error:
        raise SourceUnreadable(f"cannot read {path}: {error.strerror or error}") from error
    if not same:
        raise StateMismatch(f"{path} is not the video that this state watched, or has changed since", hint=hint)
    return Original(path, *span, skipped_s)


def _identity(record: Mapping[str, Any]) -> tuple[str, str, int, float]:
    """Return the name, digest and size of a file on record, and what was skipped of it."""
    name, grown = record.get("name"), record.get("grown")
    known = grown if isinstance(grown, dict) else record
    size, given = known.get("size_bytes"), known.get("fingerprint")
    # `protokv.video.derived.Part` makes the fingerprint and the name of a part.
    match = re.fullmatch(r"([0-9a-f]{64})(?:@(\d{1,12}\.\d{6})\+[\d.]*)?", given) if isinstance(given, str) else None
    if record.get("kind") != "file" or not isinstance(name, str) or type(size) is not int or match is None:
        raise SourceNotFound(f"there is no video file of this state: it watched {shown(name or 'frames')}")
    part = match[2]
    return (name if part is None else name.rpartition(" from ")[0]), match[1], size, float(part or 0.0)


def original_at(originals: Sequence[Original], stream_s: float) -> Original:
    """Return the video that is shown at a stream time; the last one at the end."""
    return next((one for one in originals if stream_s < one.end_s), originals[-1])
