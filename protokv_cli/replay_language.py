"""`protokv replay --study language`: what memories keep of a text, on a real language model."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
import typer

from protokv.backbones import load_backbone
from protokv.backbones.llama import Llama
from protokv.errors import ConfigError
from protokv.replay.language import (
    MEASURES,
    LanguageRow,
    resume_rows,
    run_language,
    summarise_language,
)
from protokv.replay.request import ReplayRequest
from protokv_cli.output import Format, Output
from protokv_cli.process import stopping
from protokv_cli.progress import Bar, left_text
from protokv_cli.tables import bytes_text, grid


def replay_language(
    out: Output,
    request: ReplayRequest,
    model: str,
    placement: Mapping[str, Any],
    output: Path,
    *,
    dry_run: bool,
    force: bool,
) -> None:
    """Run the rest of a language study, append its rows to `output`, and show the tables."""
    study = request.study.language
    assert study is not None
    worlds = {name: request.worlds[name] for name in ("first_seed", "count") if name in request.worlds}
    if len(worlds) < len(request.worlds):
        raise ConfigError(
            "a study of text has no scenes", hint="of the options of worlds, only --world SEED:COUNT fits"
        )
    study = msgspec.structs.replace(study, **worlds)
    variants = request.variants(model)
    total = len(variants) * len(study.kinds()) * study.count
    if dry_run:
        out.json(
            {"type": "plan", "streams": len(study.kinds()) * study.count, "memories": len(variants), "rows": total}
        )
        return
    if force:
        output.unlink(missing_ok=True)
    rows = resume_rows(output)
    backbone = load_backbone(model, **placement)
    if not isinstance(backbone, Llama):
        raise ConfigError(f"{model} does not read text", hint="name a Llama model with --model, or leave it out")
    bar, began_s = Bar(out, f"0 of {total} rows"), time.monotonic()
    with stopping(out.warn) as stop, output.open("ab") as file:
        try:
            found = run_language(study, backbone, variants, rows, should_stop=lambda: bool(stop))
            for done, row in enumerate(found, start=1):
                file.write(msgspec.json.encode(row) + b"\n")
                file.flush()
                rows.append(row)
                left = left_text(done, total - len(rows), time.monotonic() - began_s)
                bar.show([f"{len(rows)} of {total} rows", *left], len(rows), total)
        finally:
            bar.stop()
    show_language(out, rows)
    if stop.exit is not None:
        out.warn(f"stopped; what is done is in {output}. Continue with the same command.")
        raise typer.Exit(stop.exit)


def show_language(out: Output, rows: Sequence[LanguageRow]) -> None:
    """Show a table for each kind of stream and budget, or one JSON document."""
    found = summarise_language(rows)
    if out.format is Format.JSON:
        out.json({"type": "language", "rows": found})
        return
    kinds = dict.fromkeys((one["redundancy"], one["changed"], one["budget"]) for one in found)
    for redundancy, changed, budget in kinds:
        title = f"steps of a paragraph: {redundancy}, tokens changed: {changed:.0%}, tokens kept: {budget}"
        columns = {column: names for column, names in MEASURES.items() if names[0] in found[0]}
        table = [
            [
                one["memory"],
                *(" ".join(f"{one[name]['mean']:.2f}" for name in names) for names in columns.values()),
                bytes_text(one["state_bytes"]),
                one["step_ms"],
            ]
            for one in found
            if (one["redundancy"], one["changed"], one["budget"]) == (redundancy, changed, budget)
        ]
        out.table(grid(["memory", *columns, "state", "step ms"], table, title=title), "")
