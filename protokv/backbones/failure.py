"""One clear line for every error of transformers, the hub and torch that loading a model can raise."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from protokv.errors import ModelError

# Parts of the messages of allocators, on the host and on devices.
_NO_ROOM = ("can't allocate memory", "not enough memory", "cannot allocate memory", "out of memory")


@contextmanager
def quiet_transformers() -> Iterator[None]:
    """Silence its progress bars and advice."""
    from transformers.utils import logging

    verbosity, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(verbosity)
        if bars:
            logging.enable_progress_bar()


@contextmanager
def translate_errors(name: str) -> Iterator[None]:
    """Turn errors of transformers, the hub and torch into one clear line each.

    Raises:
        ModelError: whatever went wrong.
    """
    from huggingface_hub import errors as hub
    from safetensors import SafetensorError

    try:
        yield
    except ModelError as error:
        raise ModelError(f"cannot load the model {name}: {error.message}", hint=error.hint) from error
    except (
        MemoryError,
        OSError,
        ValueError,
        LookupError,
        TypeError,
        AttributeError,
        RuntimeError,
        ImportError,
        SafetensorError,
        hub.StrictDataclassError,
    ) as error:
        message, hint = _explain(error)
        raise ModelError(f"cannot load the model {name}: {message}", hint=hint) from error


def _explain(error: Exception) -> tuple[str, str]:
    """What went wrong and what to do about it."""
    from huggingface_hub import errors as hub

    causes: list[BaseException] = [error]
    while (cause := causes[-1].__cause__ or causes[-1].__context__) is not None:
        causes.append(cause)
    text = str(error).strip()
    # Of torch, whose own kind of it has this name; a model that is not there is refused without it.
    no_room = isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError"
    if no_room or any(part in text.lower() for part in _NO_ROOM):
        return (
            "it does not fit into memory",
            "use --dtype bfloat16, --device-map auto, --quantization 4bit, or a smaller model",
        )
    for kind, message, hint in (
        (hub.GatedRepoError, "access to it is restricted", "ask for access on its page, then run: hf auth login"),
        (hub.RevisionNotFoundError, "it has no such revision", "name a branch, a tag or a commit of it"),
        (
            hub.RepositoryNotFoundError,
            "there is no such model on the hub",
            "check the name; a private one needs: hf auth login",
        ),
        (
            hub.LocalEntryNotFoundError,
            "it is not in the local cache, and the hub cannot be reached",
            "check the name and the connection, or name a local folder",
        ),
        (
            hub.HFValidationError,
            "it is neither a folder nor a name on the hub",
            "names look like Qwen/Qwen2.5-VL-7B-Instruct",
        ),
    ):
        if any(isinstance(cause, kind) for cause in causes):
            return message, hint
    return (
        text.splitlines()[0] if text else type(error).__name__,
        "check the name or folder, and that this machine can reach or has cached the model",
    )
