"""Earlier commits of a state, in any form: which are kept, and which answers for a stream time.

A commit first gives the state that stands there a name of its own, then puts the new one in place, then removes what is
too old. So a crash in between leaves one too many at the most, and the next commit removes it. A kept commit counts
only if its header says that it is a moment of the same stream: same model, memory, rate and sources. Any other is never
answered from, never replaced and never removed.
"""

from __future__ import annotations

from contextlib import suppress

from protokv.errors import StateError, StateNotFound
from protokv.snapshot.document import Admit
from protokv.snapshot.form import Form
from protokv.snapshot.schema import State
from protokv.snapshot.sources import is_before, same_stream

# Kept commits are named to the millisecond; who asks for the time in a name means that commit.
ROUNDING_S = 5e-4

# A reader meets a commit between looking and reading only once in a while.
_ATTEMPTS = 20


def commit(form: Form, state: State, keep: int | None = None) -> None:
    """Save a state and keep the last `keep` commits, the new one included; where None, none is kept or removed.

    Raises:
        StateLocked: somebody else has committed meanwhile.
        StateError: It cannot be written; the old one is still there.
    """
    if keep is not None and keep > 1:
        try:
            before = form.read_header()
        except StateError:
            before = None
        if before is not None and is_before(before, state):
            form.keep(before)
    form.replace(state)
    if keep is None:
        return
    # The new state is in place: who may not look for the others, or remove one, leaves it to the next commit.
    with suppress(StateError):
        ours = [(header, at) for at, header in form.kept() if same_stream(header, state)]
        past = sorted((header.clock.stream_time_s, at) for header, at in ours if is_before(header, state))
        stay = {at for _, at in past[max(0, len(past) - keep + 1) :]}
        for at in {at for _, at in ours} - stay:
            form.retire(at)


def load(form: Form, at_s: float | None = None, *, verify: bool = True, admit: Admit | None = None) -> State:
    """A state, or the newest of it and its earlier commits that is not after a stream time.

    Raises:
        StateNotFound: Nothing is there, or all of it is after that time; the message lists what there is.
        StateError: As `Form.read`.
    """
    if at_s is None:
        return form.read(verify=verify, admit=admit)
    for _ in range(_ATTEMPTS):
        there = moments(form)
        fit = [at for time_s, at in there if time_s <= at_s + ROUNDING_S]
        if not fit:
            listed = ", ".join(f"{time_s:g} s" for time_s, _ in there)
            raise StateNotFound(
                f"{form.path} has no commit at or before {at_s:g} s; it has those at {listed}",
                hint="`protokv ingest --every 30s --keep 20` keeps earlier commits",
            )
        try:
            state = form.read(fit[-1], verify=verify, admit=admit)
        except StateError:
            if moments(form) == there:
                raise
            continue
        if state.clock.stream_time_s <= at_s + ROUNDING_S:
            return state
    raise StateError(f"{form.path} is replaced faster than it can be read", hint="try again")


def moments(form: Form) -> list[tuple[float, str | None]]:
    """Stream time and place of the kept commits of a state and of the state itself, ascending."""
    # Before the others are listed: what is committed meanwhile is kept as well, and later than this.
    now = form.read_header()
    past = [(header.clock.stream_time_s, at) for at, header in form.kept() if is_before(header, now)]
    return [*sorted(past), (now.clock.stream_time_s, None)]
