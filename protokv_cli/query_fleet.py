"""`protokv query --state DIR/`: the same questions to every state of a fleet."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import typer

from protokv_cli.answers import row_of
from protokv_cli.beyond import warn_of_answers
from protokv_cli.exits import Exit
from protokv_cli.output import Format, Output

if TYPE_CHECKING:
    from protokv.fleet.ask import Reply


def query_fleet(
    out: Output,
    place: str,
    questions: Sequence[str],
    sampling: Mapping[str, Any],
    *,
    model: str | None,
    revision: str | None,
    device: str,
    device_map: str | None,
    top: int | None,
    at_s: float | None,
    verify: bool,
) -> None:
    """Ask all, and print a row per state and question, or the `top` of each question. Exit 3 if one cannot be asked.

    Args:
        out: where to.
        place: where the states are.
        questions: what to ask.
        sampling: the fields of `protokv.core.decoding.Decoding`.
        model: its name or folder; None: what the first state names.
        revision: of a hub model; None: what the first state names.
        device: where to load it; this and the next as for `load_backbone`.
        device_map: spread it over several devices instead.
        top: how many to print per question; None: all, as they come.
        at_s: of the commits to ask.
        verify: whether to check digests.
    """
    from protokv.core.decoding import Decoding
    from protokv.fleet.ask import Surest, ask_all, load_backbone_for
    from protokv.fleet.plan import find_states

    states = find_states(place)
    decoding = Decoding(**sampling)
    backbone = load_backbone_for(states, model, revision, device=device, device_map=device_map)
    surest = None if top is None else Surest(top)
    failed = 0
    beyond: dict[str, None] = {}

    def show(reply: Reply, rank: int | None = None) -> None:
        assert reply.answer is not None
        row = row_of(reply.answer, reply.state) | ({} if rank is None else {"rank": rank})
        if reply.beyond:
            row["beyond_model"] = True
        if out.format is Format.JSON:
            out.json(row)
        else:
            fields = [reply.state, f"{row['mean_logprob']:.3f}", row["answer"]]
            out.plain("\t".join([*fields, row["question"]] if len(questions) > 1 else fields))

    for reply in ask_all(states, backbone, questions, decoding, at_s=at_s, verify=verify):
        beyond |= dict.fromkeys(reply.beyond)
        if reply.failure is not None:
            failed += 1
            out.warn(f"Error: {reply.state}: {reply.failure.message}")
        elif surest is None:
            show(reply)
        else:
            surest.add(reply)
    for rank, reply in surest.ranked() if surest is not None else ():
        show(reply, rank)
    warn_of_answers(out, list(beyond))
    if failed:
        out.warn(f"{failed} of {len(states)} states cannot be asked")
        raise typer.Exit(Exit.PARTIAL)
