"""`protokv query --state DIR/`: the same questions to every state of a fleet."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import typer

from protokv_cli.exits import Exit
from protokv_cli.output import Format, Output

if TYPE_CHECKING:
    from protokv.backbones.base import Backbone
    from protokv.fleet.ask import Reply
    from protokv.generate import Decoding


def query_fleet(
    out: Output,
    states: Sequence[str],
    questions: Sequence[str],
    decoding: Decoding,
    backbone: Backbone,
    row_of: Callable[[Any, str], dict[str, Any]],
    *,
    top: int | None,
    at_s: float | None,
    verify: bool,
) -> None:
    """Ask all, and print a row per state and question, or the `top` of each question. Exit 3 if one cannot be asked.

    Args:
        out: where to.
        states: where they are.
        questions: what to ask.
        decoding: how answers are generated.
        backbone: the model that made them.
        row_of: an answer, and the state that gave it, as JSON.
        top: how many to print per question; None: all, as they come.
        at_s: of the commits to ask.
        verify: whether to check digests.
    """
    from protokv.fleet.ask import Surest, ask_all

    surest = None if top is None else Surest(top)
    failed = 0

    def show(reply: Reply, rank: int | None = None) -> None:
        row = row_of(reply.answer, reply.state) | ({} if rank is None else {"rank": rank})
        if out.format is Format.JSON:
            out.json(row)
        else:
            fields = [reply.state, f"{row['mean_logprob']:.3f}", row["answer"]]
            out.plain("\t".join([*fields, row["question"]] if len(questions) > 1 else fields))

    for reply in ask_all(states, backbone, questions, decoding, at_s=at_s, verify=verify):
        if reply.failure is not None:
            failed += 1
            out.warn(f"Error: {reply.state}: {reply.failure.message}")
        elif surest is None:
            show(reply)
        else:
            surest.add(reply)
    for rank, reply in surest.ranked() if surest is not None else ():
        show(reply, rank)
    if failed:
        out.warn(f"{failed} of {len(states)} states cannot be asked")
        raise typer.Exit(Exit.PARTIAL)
