"""Videos that the embedded model cannot make sense of: told at ingest and with every answer, with the way out."""

from __future__ import annotations

import shlex
from collections.abc import Sequence

from protokv_cli.output import Output

REAL_MODEL = "Qwen/Qwen2.5-VL-7B-Instruct"
NAMED = 5


def warn_of_source(out: Output, source: str, argument: str) -> None:
    """Before a run whose state will answer nothing of use; `argument` names the source on a command line."""
    out.warn(
        f"Warning: the embedded model reads only its own world of coloured shapes, and {source} is not of it: its "
        "answers will mean nothing."
    )
    out.warn(f"Hint: name a real model: protokv ingest {shlex.quote(argument)} --model {REAL_MODEL}")


def warn_of_answers(out: Output, sources: Sequence[str], how: str = "ingest with") -> None:
    """With answers that mean nothing; a few of the sources are named."""
    if sources:
        named = ", ".join(sources[:NAMED]) + (f" and {len(sources) - NAMED} more" if len(sources) > NAMED else "")
        out.warn(
            f"Warning: the embedded model reads only its own world of coloured shapes, and {named} "
            f"{'is' if len(sources) == 1 else 'are'} not of it: the answers mean nothing."
        )
        out.warn(f"Hint: {how} a real model: --model {REAL_MODEL}")
