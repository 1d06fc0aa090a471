"""Write a state again in another form or place."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from protokv.core.snapshot import State, TensorInfo
from protokv.core.tensors import tensor_shapes
from protokv.errors import ConfigError, StateCorrupt
from protokv.memories import declare_state
from protokv.storage.api import check_not_read, check_replaceable, load_state
from protokv.storage.checkpoint import config_of, shape_of, tensor_info_of
from protokv.storage.form import StatePath
from protokv.storage.writer import Writer


def convert(path: StatePath, target: StatePath, *, overwrite: bool = False, digests: bool = True) -> dict[str, Any]:
    """Write the same state in the form that the path `target` chooses; return paths and stored bytes.

    Args:
        path: where the state is.
        target: where it goes; a state of the same sources there is replaced.
        overwrite: replace anything there.
        digests: verify the digests of the state.

    Raises:
        ConfigError: `target` is the state itself.
        StateMismatch: something else is there.
        StateError: the state is missing or damaged, or `target` cannot be written.
        StateLocked: another writer is writing `target`.
    """
    check_not_read(target, path)
    with Writer(target) as writer:
        state = load_state(path, verify=digests)
        if not overwrite:
            check_replaceable(target, state)
        (written,) = writer.commit(replace(state, tensor_info=_tensor_info(state)), wait=True)
    return {"state": str(path), "output": str(target), "bytes": written.file_bytes}


def _tensor_info(state: State) -> dict[str, TensorInfo]:
    """Describe the tensors of a state. Return nothing if it makes no sense: it can be copied all the same."""
    try:
        return tensor_info_of(declare_state(config_of(state), shape_of(state, tensor_shapes(state.tensors))))
    except (StateCorrupt, ConfigError):
        return {}
