"""Options of `protokv ingest` for several videos, declared once."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

Listing = Annotated[
    str | None,
    typer.Option(
        "--from",
        metavar="LIST",
        help='Videos from a file, one a line: a path, or {"source": ..., "key": ...}; - is stdin.',
    ),
]
Workers = Annotated[
    int | None,
    typer.Option("--workers", metavar="N", min=1, help="Processes, each with the model; one a device if left out."),
]
Devices = Annotated[
    str | None,
    typer.Option("--devices", metavar="LIST", help="Devices of the workers in turn, such as 0,1 or cpu."),
]
Ray = Annotated[
    str | None,
    typer.Option(
        "--ray",
        metavar="ADDRESS",
        help="Workers in a Ray cluster: HOST:PORT, or auto for RAY_ADDRESS, one that runs here, or a new one.",
    ),
]
Batch = Annotated[
    int,
    typer.Option("--batch", metavar="N", min=1, help="Streams per worker at a time, in shared forwards."),
]
DryRun = Annotated[bool, typer.Option("--dry-run", help="Say what is to be done; of one video how long it takes.")]
MaxFailures = Annotated[
    int | None,
    typer.Option("--max-failures", metavar="N", min=1, help="Begin no other video after N that failed."),
]
Failures = Annotated[
    Path | None,
    typer.Option("--failures", metavar="FILE", help="Where failures go; failures.jsonl beside the states."),
]
