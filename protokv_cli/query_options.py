"""Options of `protokv query` that no other subcommand has, declared once."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

Arguments = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="STATE QUESTION...",
        help="State that ingest wrote, and questions; - reads lines or JSONL from stdin. Without any: a prompt on "
        "a terminal, stdin otherwise.",
    ),
]
Named = Annotated[
    str | None,
    typer.Option("--state", "-s", metavar="STATE", help="The state; then all arguments are questions."),
]
File = Annotated[
    Path | None,
    typer.Option("--questions", metavar="FILE", help="Questions, one a line or a JSON object a line."),
]
At = Annotated[
    str | None,
    typer.Option(
        "--at",
        metavar="TIME",
        help="Ask the newest kept commit not after 12m or 7:30 of the stream, -10m before its end; of a live one "
        "also 14:05 or 2026-11-21T14:05.",
    ),
]
Watch = Annotated[
    str | None,
    typer.Option("--watch", metavar="TIME", help="Ask again and again, such as every 30s, a JSON line each."),
]
Verify = Annotated[
    bool, typer.Option("--verify/--no-verify", help="Check that every byte of the state is the one that was saved.")
]
Top = Annotated[
    int | None,
    typer.Option("--top", metavar="K", min=1, help="Of many states, the K answers that the model is surest of."),
]
Evidence = Annotated[bool, typer.Option("--evidence", help="Say which times of the stream each answer stood on.")]
MaxNewTokens = Annotated[int, typer.Option("--max-new-tokens", help="Tokens of an answer at the most.")]
Temperature = Annotated[float, typer.Option("--temperature", help="0 is greedy; above 0 draws.")]
TopP = Annotated[float, typer.Option("--top-p", help="Draw from this share of the probability.")]
