"""Repair the states of a fleet, and list the videos to run again."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path, PurePosixPath
from typing import Any

from protokv.errors import StateError
from protokv.fleet.plan import REPOSITORY
from protokv.fleet.states import survey
from protokv.inspection.repair import repair
from protokv.storage.form import is_url, suffix_of
from protokv.video.address import VIDEO_SUFFIXES


def repair_all(place: str) -> Iterator[dict[str, Any]]:
    """Repair every damaged state of a place; yield a row for each video that has no whole, complete state then.

    A damaged state without a commit to go back to is set aside, so that the next run watches its video anew. A row is
    plain JSON: the keys of `repair`, `failure` (why a state cannot be repaired, or why its video failed), and `source`
    and `key` as in a manifest: with these rows as its list, the next run does what is left.

    Raises:
        StateNotFound: there is neither a state nor a failure.
    """
    for found in survey(place):
        state = found["state"]
        row: dict[str, Any] = {"source": None, "key": _key_of(place, state), "state": state, "damage": None}
        if found["memory"] is not None or found["source"] is None:
            try:
                row |= repair(state, set_aside=True)
            except StateError as error:
                row["failure"] = error.message
        if found["complete"] and row["damage"] is None and "failure" not in row:
            continue
        ran = found["source"] if found["memory"] is None else None
        source = ran or _find_video(row["key"], row["source"] or found["source"])
        yield {**row, "source": source, "failure": row.get("failure") or found["failure"]}


def _key_of(place: str, state: str) -> str:
    key = state.removeprefix(place.rstrip("/") + "/") if is_url(place) else Path(state).relative_to(place).as_posix()
    return key.removesuffix(REPOSITORY if is_url(place) else suffix_of(state) or "")


def _find_video(key: str, name: str | None) -> str:
    """Return the video of a key below this folder or one of its folders; else its name, which leads to a file only."""
    near = [Path(folder, key + suffix) for suffix in sorted(VIDEO_SUFFIXES) for folder in (Path(), *Path().glob("*/"))]
    found = next((one for one in near if one.is_file()), None)
    if found is not None:
        return str(found)
    own = PurePosixPath(str(name)).name
    return str(PurePosixPath(key).with_name(own)) if PurePosixPath(own).suffix in VIDEO_SUFFIXES else key
