"""What a replay would do, before it does it: `--dry-run` of streams and of the tables of the paper."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from protokv.backbones.base import Backbone
from protokv.errors import ProtoKVError
from protokv.replay.dataset import Opened
from protokv.replay.presets import PRESETS
from protokv.replay.request import Request
from protokv_cli.output import Format, Output
from protokv_cli.tables import grid, pairs, time_text


def show_cost(out: Output, cost: Mapping[str, Any], opened: Opened) -> None:
    """A dry run."""
    if out.format is Format.JSON:
        out.json({"type": "plan", **cost, "missing": opened.missing, "notes": dict(opened.notes)})
        return
    rows = {name: cost[name] for name in ("videos", "memories", "questions", "hours", "steps", "answers")}
    if cost["estimate_s"] is not None:
        rows["estimate, at least"] = time_text(round(cost["estimate_s"]))
    rows |= {f"left out, {why}": n for why, n in cost["dropped"].items()}
    rows |= {f"left out, video {name}": why for name, why in opened.missing.items()}
    rows |= dict(opened.notes)
    out.table(pairs(rows, title="would be done: steps to encode and answers to give, over all memories"))


def show_preset(out: Output, name: str, request: Request, backbone: Backbone, fps: float | None) -> None:
    """What each data set of a table would take; one that is not there is named as missing."""
    preset = PRESETS[name]
    rows = []
    for cell in preset.cells:
        own = replace(request, dataset=cell.dataset)
        row: dict[str, Any] = {
            "dataset": cell.dataset,
            "budgets": list(request.budgets or cell.budgets),
            "compared": list(dict.fromkeys(variant.label for variant in cell.variants(request.budgets))),
            "delays_s": list(request.delays_s or cell.delays_s),
        }
        try:
            own.check()
            opened = own.open(backbone.identity.name)
            plan = own.plan(opened, backbone, fps)
            row |= own.cost(plan, backbone) | {"fps": plan.setup.fps, "missing": opened.missing}
        except ProtoKVError as error:
            row["absent"] = error.message
        rows.append(row)
    if out.format is Format.JSON:
        out.json({"type": "preset", "study": name, "title": preset.title, "models": list(preset.models), "cells": rows})
        return
    cells = (
        (
            row["dataset"],
            ", ".join(map(str, row["budgets"])),
            len(row["compared"]),
            *(
                ["-"] * 4
                if "absent" in row
                else [
                    row["videos"],
                    row["questions"],
                    row["hours"],
                    "-" if row["estimate_s"] is None else time_text(round(row["estimate_s"])),
                ]
            ),
        )
        for row in rows
    )
    head = ["data set", "budgets", "memories", "videos", "questions", "hours", "estimate, at least"]
    out.table(grid(head, cells, title=f"{name}: {preset.title}, in the paper by {', '.join(preset.models)}"))
    for row in rows:
        if "absent" in row:
            out.warn(f"{row['dataset']}: {row['absent']}")
        out.note(f"{row['dataset']}: {', '.join(row['compared'])}; and the baselines")
