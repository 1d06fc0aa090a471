"""`protokv inspect --repair`: go back to the newest whole commit, and say what was lost; list what to run again."""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from typing import Any

import typer

from protokv.texts import count_text
from protokv_cli.exits import Exit
from protokv_cli.output import Format, Output
from protokv_cli.tables import grid, pairs, time_text


def repair_one(out: Output, state: str) -> None:
    """Repair a state, and say what was wrong, what is there now and what was lost."""
    from protokv.state.repair import repair

    row = repair(state)
    if out.format is Format.JSON:
        out.json(row)
    elif out.format is Format.PLAIN:
        out.plain("whole" if row["damage"] is None else _lost(row))
    elif row["damage"] is None:
        out.table(pairs({"state": state, "whole": "yes: all that must hold in a state was checked; nothing was done"}))
    else:
        now = f"as of {time_text(row['stream_time_s'])}, step {row['steps']}"
        rows = {
            "state": state,
            "was": row["damage"],
            "is now": f"{now}, written {row['written'] or 'at a time unknown'}",
        }
        rows |= {"lost": _lost(row), "damaged one": row["damaged"] or "gone"}
        if row["passed_over"]:
            rows["damaged too"] = "the commits at " + ", ".join(map(time_text, row["passed_over"]))
        out.table(pairs(rows, title="repaired"))
    if row["damage"] is not None:
        video = shlex.quote(row["source"] or "VIDEO")
        out.note(
            f"Hint: watch what was lost again: protokv ingest {video} -o {shlex.quote(state)}, with the options of then"
        )


def _lost(row: Mapping[str, Any]) -> str:
    if row["damaged"] is None:
        return "unknown: the state itself was gone"
    if row["lost_s"] is None:
        return f"all after {time_text(row['stream_time_s'])}; how much, the damaged state does not tell"
    return f"{time_text(row['lost_s'])} of the stream, {count_text(row['lost_steps'], 'step')}"


def repair_place(out: Output, place: str) -> None:
    """Repair the states of a folder, and list the videos to run again; end with exit code 3 if there are any."""
    from protokv.fleet.states import repair_all

    rows = []
    for row in repair_all(place):
        rows.append(row)
        if out.format is Format.JSON:
            out.json(row)
        elif out.format is Format.PLAIN:
            out.plain(row["source"])
        if row["damage"] is not None and row["damaged"] is not None:
            done = "nothing" if row["steps"] is None else f"its commit at {time_text(row['stream_time_s'])}"
            out.note(f"{row['state']} was damaged; {done} is in its place, and the damaged one is {row['damaged']}")
    if out.format is Format.TABLE and rows:
        cells = ((row["source"], row["damage"] or row["failure"] or "not watched to its end") for row in rows)
        out.table(grid(["run again", "why"], cells, left=("why",)))
    out.note(f"{count_text(len(rows), 'video')} to run again")
    if rows:
        raise typer.Exit(Exit.PARTIAL)
