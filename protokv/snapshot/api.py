"""Save a state, load it and look at its header: whatever form its path has."""

from __future__ import annotations

from protokv.records import BackboneIdentity, StreamClock
from protokv.snapshot import history
from protokv.snapshot.document import Admit
from protokv.snapshot.form import DEFAULT_SUFFIX, FORMS, StatePath, form_of, form_to_read, is_url
from protokv.snapshot.schema import FORMAT_VERSION, Header, State

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
    "load",
    "moments",
    "read_header",
    "save",
    "stored_bytes",
]


def check_target(path: StatePath) -> None:
    """Whether a state could be written to `path`: asked before hours of work, not after them.

    Raises:
        StateError: The suffix names no form, or the place is missing, may not be written to, or holds something else.
    """
    form_of(path).check_target()


def save(state: State, path: StatePath) -> None:
    """Write a state; the path holds the old or the new one whole at any time.

    Raises:
        StateError: The suffix names no form, or the state cannot be written; the old one is still there.
        StateLocked: Somebody else is writing it.
    """
    with form_of(path) as form:
        form.replace(state)


def load(path: StatePath, *, verify: bool = True, at_s: float | None = None, admit: Admit | None = None) -> State:
    """Read a state, tensors on the CPU.

    Args:
        path: where it is.
        verify: check the digests of the tensors.
        at_s: take the newest commit that is not after this stream time, of those that are kept.
        admit: asked before memory is taken for the tensors; StateCorrupt if such a state cannot be.

    Raises:
        StateNotFound: Nothing is there, or all of it is after `at_s`.
        StateMismatch: The format is newer than this version reads.
        StateCorrupt: The state is damaged or hostile; the tensor or field is named where it can be.
        StateError: It cannot be read.
    """
    return history.load(form_to_read(path), at_s, verify=verify, admit=admit)


def read_header(path: StatePath) -> Header:
    """Read and verify the header alone. Raises as `load` does."""
    return form_to_read(path).read_header()


def stored_bytes(path: StatePath) -> int:
    """Bytes that the state takes where it is kept. Raises StateNotFound if nothing is there."""
    return form_to_read(path).stored_bytes()


def moments(path: StatePath) -> list[float]:
    """Stream times of the commits that `load` answers `at_s` from, ascending; the current one is the last.

    Raises as `load`.
    """
    return [time_s for time_s, _ in history.moments(form_to_read(path))]
