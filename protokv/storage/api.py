"""Save a state, load it and look at its header, whatever form its path has; and earlier commits of it.

A commit first gives the state that stands there a name of its own, then puts the new one in place, then removes what is
too old. So a crash in between leaves one too many at the most, and the next commit removes it. A kept commit counts
only if its header says that it is a moment of the same stream: same model, memory, rate and sources. Any other is never
answered from, never replaced and never removed.
"""

from __future__ import annotations

from contextlib import suppress

from protokv.core.records import BackboneIdentity
from protokv.core.snapshot import FORMAT_VERSION, Admit, Header, State
from protokv.core.step import StreamClock
from protokv.errors import StateError, StateNotFound
from protokv.storage.form import DEFAULT_SUFFIX, FORMS, Form, StatePath, form_of, is_url, settled
from protokv.storage.watched import is_before, same_stream

__all__ = [
    "DEFAULT_SUFFIX",
    "FORMAT_VERSION",
    "FORMS",
    "BackboneIdentity",
    "Header",
    "State",
    "StatePath",
    "StreamClock",
    "check_target",
    "is_url",
    "load_state",
    "moments",
    "read_header",
    "save_state",
    "stored_bytes",
]

# Kept commits are named to the millisecond; who asks for the time in a name means that commit.
ROUNDING_S = 5e-4


def check_target(path: StatePath) -> None:
    """Whether a state could be written to `path`: asked before hours of work, not after them. StateError if not."""
    form_of(path).check_target()


def save_state(state: State, path: StatePath) -> None:
    """Write a state; the path holds the old or the new one whole at any time.

    Raises:
        StateError: The suffix names no form, or the state cannot be written; the old one is still there.
        StateLocked: Somebody else is writing it.
    """
    with form_of(path) as form:
        form.replace(state)


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


def load_state(path: StatePath, *, verify: bool = True, at_s: float | None = None, admit: Admit | None = None) -> State:
    """Read a state, tensors on the CPU.

    Args:
        path: where it is.
        verify: check the digests of the tensors.
        at_s: take the newest commit that is not after this stream time, of those that are kept.
        admit: asked before memory is taken for the tensors; StateCorrupt if such a state cannot be.

    Raises:
        StateNotFound: Nothing is there, or all of it is after `at_s`; the message lists what there is.
        StateMismatch: The format is newer than this version reads.
        StateCorrupt: The state is damaged or hostile; the tensor or field is named where it can be.
        StateError: It cannot be read.
    """
    form = form_of(path, to_read=True)
    if at_s is None:
        return form.read(verify=verify, admit=admit)
    latest = at_s + ROUNDING_S

    def newest(there: list[tuple[float, str | None]]) -> State:
        fit = [at for time_s, at in there if time_s <= latest]
        if not fit:
            listed = ", ".join(f"{time_s:g} s" for time_s, _ in there)
            raise StateNotFound(
                f"{path} has no commit at or before {at_s:g} s; it has those at {listed}",
                hint="`protokv ingest --every 30s --keep 20` keeps earlier commits",
            )
        state = form.read(fit[-1], verify=verify, admit=admit)
        if state.clock.stream_time_s > latest:
            raise StateError(f"{path} was replaced meanwhile")
        return state

    return settled(path, lambda: _moments(form), newest)


def read_header(path: StatePath) -> Header:
    """Read and verify the header alone. Raises as `load` does."""
    return form_of(path, to_read=True).read_header()


def stored_bytes(path: StatePath) -> int:
    """Bytes that the state takes where it is kept. Raises as `load` does."""
    return form_of(path, to_read=True).stored_bytes()


def moments(path: StatePath) -> list[float]:
    """Stream times of the commits that `load` answers `at_s` from, ascending; the current one is the last.

    Raises as `load`.
    """
    return [time_s for time_s, _ in _moments(form_of(path, to_read=True))]


def _moments(form: Form) -> list[tuple[float, str | None]]:
    """Stream time and place of the kept commits of a state and of the state itself, ascending."""
    # Before the others are listed: what is committed meanwhile is kept as well, and later than this.
    now = form.read_header()
    past = [(header.clock.stream_time_s, at) for at, header in form.kept() if is_before(header, now)]
    return [*sorted(past), (now.clock.stream_time_s, None)]
