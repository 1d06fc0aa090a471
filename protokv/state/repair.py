"""Repair a damaged state: go back to its newest kept commit that is whole. Nothing is deleted.

A state is damaged if `verify` refuses it. A state that is locked, of a newer version, or that the system cannot read is
not: it raises, and stays. The damaged one gets a name of its own, `STATE.damaged` on disk and a branch in a repository.
"""

from __future__ import annotations

import shlex
from typing import Any

from protokv.errors import StateCorrupt, StateError, StateNotFound, shown
from protokv.state.checkpoint import admit
from protokv.state.describe import check_whole, written_at
from protokv.state.form import Form, StatePath, form_of
from protokv.state.snapshot import Header
from protokv.state.watched import is_before, same_stream


def repair(path: StatePath, *, set_aside: bool = False) -> dict[str, Any]:
    """Go back to the newest whole commit of a damaged state; do nothing to a whole one.

    Args:
        path: of the state.
        set_aside: if no commit is whole, give the damaged state its new name all the same, so that its place is free.

    Returns:
        Plain JSON: `state`; `damage`, what was wrong (None: the state is whole, and the rest is None too); `steps`,
        `stream_time_s` and `written` of the commit that is the state now; `lost_steps` and `lost_s`, what came after it
        (None: the damaged state does not tell); `passed_over`, the times of later commits that are damaged too;
        `damaged`, where the damaged state is now; `source`, the name of the video.

    Raises:
        StateCorrupt: no commit is whole.
        StateLocked: another process is writing the state.
        StateNotFound: there is neither a state nor a kept commit.
        StateError: the state is not damaged but cannot be read, or it cannot be written.
    """
    form = form_of(path)
    with form.repairing():
        damage = _damage_of(form, None)
        if damage is None:
            return _row(path)
        now = _header_of(form)
        passed_over: list[float] = []
        for time_s, at, header in _commits(form, now, damage):
            if _damage_of(form, at) is not None:
                passed_over.append(time_s)
                continue
            done = {"steps": header.clock.steps, "stream_time_s": time_s, "written": written_at(at)}
            if now is not None:
                done |= {"lost_steps": now.clock.steps - header.clock.steps}
                done |= {"lost_s": now.clock.stream_time_s - time_s}
            return _row(path, damage, now or header, passed_over=passed_over, damaged=form.go_back(at), **done)
        if set_aside:
            return _row(path, damage, now, passed_over=passed_over, damaged=form.go_back(None))
    if isinstance(damage, StateNotFound):
        raise damage
    video = shown(((now.source or {}) if now is not None else {}).get("name") or "VIDEO")
    raise StateCorrupt(
        f"{damage.message}; there is no whole commit to go back to",
        hint=f"watch it again: protokv ingest {shlex.quote(video)} -o {path} --force; --keep 3 keeps some next time",
    )


def _row(
    path: StatePath, damage: StateError | None = None, header: Header | None = None, **done: Any
) -> dict[str, Any]:
    keys = ("steps", "stream_time_s", "written", "lost_steps", "lost_s", "passed_over", "damaged")
    row = {"state": str(path), "damage": None if damage is None else damage.message, **dict.fromkeys(keys)}
    return row | {"source": (header.source or {}).get("name") if header is not None else None} | done


def _damage_of(form: Form, at: str | None) -> StateCorrupt | StateNotFound | None:
    """Return what is wrong with the current state or a kept commit; None if it is whole. StateError as `repair`."""
    try:
        check_whole(form.read(at, admit=admit))
    except (StateCorrupt, StateNotFound) as error:
        return error
    return None


def _header_of(form: Form) -> Header | None:
    try:
        return form.read_header()
    except (StateCorrupt, StateNotFound):
        return None


def _commits(form: Form, now: Header | None, damage: StateError) -> list[tuple[float, str, Header]]:
    """Return stream time, place and header of the earlier moments of a state, the newest first.

    Raises:
        StateCorrupt: the header of the state cannot be read, and commits of several streams are there.
    """
    found = [(header.clock.stream_time_s, at, header) for at, header in form.kept()]
    if now is not None:
        found = [one for one in found if is_before(one[2], now)]
    elif not all(same_stream(found[0][2], other) for _, _, other in found[1:]):
        raise StateCorrupt(
            f"{damage.message}; the kept commits beside it are of several streams",
            hint=f"choose one, such as: protokv inspect '{found[-1][1]}' -o OTHER",
        )
    return sorted(found, key=lambda one: one[0], reverse=True)
