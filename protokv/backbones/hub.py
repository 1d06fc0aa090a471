"""Models of the hub: their files in the local cache, downloaded there if need be.

A hub that does not answer soon is taken as out of reach, and what is in the cache serves. The small files come first,
so that a model which is not supported is refused before gigabytes are on their way. Knows no families.

Models that were downloaded before: the folder of a hub model in the local cache. Opens no connection.

One clear line for every error of transformers, the hub and torch that loading a model can raise.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path
from typing import Any

from protokv.backbones.identity import weight_files
from protokv.errors import ModelError

# What a model is made of besides weights. No code, and no weights in other formats.
SMALL = ("*.json", "*.jinja", "*.txt", "*.model")
# The hub's own wait is 10 s a request, five times over.
PATIENCE_S = 3.0

Before = Callable[[], None]
_shows: ContextVar[Before | None] = ContextVar("shows_downloads", default=None)


@contextmanager
def showing_downloads(before: Before) -> Iterator[None]:
    """Inside, the hub's bars are drawn on stderr while files are brought, and taken away afterwards.

    Nothing is drawn unless it is asked for here.

    Args:
        before: called before a bar is drawn.
    """
    token = _shows.set(before)
    try:
        yield
    finally:
        _shows.reset(token)


def fetch(name: str, check: Callable[[Path], None], revision: str | None = None) -> Path:
    """The folder of a hub model in the local cache, its files downloaded where they are not there yet.

    Args:
        name: `owner/model`.
        check: is given the folder with the small files, before weights are downloaded; raises to refuse it.
        revision: branch, tag or commit; None: the main branch.

    Raises:
        huggingface_hub.errors.HFValidationError: no hub has such a name.
        huggingface_hub.errors.RepositoryNotFoundError: there is no such model, or it is private.
        huggingface_hub.errors.RevisionNotFoundError: it has no such branch, tag or commit.
        huggingface_hub.errors.LocalEntryNotFoundError: it is not in the cache and the hub cannot be reached.
        ModelError: what `check` raises.
    """
    from huggingface_hub import snapshot_download

    with _quiet(), _bars(_shows.get()) as shown:
        online = _reaches(name, revision)

        def bring(patterns: list[str]) -> Path:
            found = snapshot_download(
                name, revision=revision, allow_patterns=patterns, local_files_only=not online, tqdm_class=shown
            )
            return Path(str(found))

        folder = bring(list(SMALL))
        check(folder)
        return bring(weight_files(str(folder)))


def require(name: str, revision: str | None = None) -> None:
    """Refuse a model that is neither in the cache nor on a hub within reach; nothing is downloaded. Raises as `fetch`.

    It imports little, so that who misspells a name need not wait for torch.
    """
    from huggingface_hub import errors

    with _quiet():
        if not _is_cached(name, revision) and not _reaches(name, revision):
            raise errors.LocalEntryNotFoundError(f"{name} is not in the cache")


def _reaches(name: str, revision: str | None) -> bool:
    """Whether the hub answers for this model. Raises its refusal, unless the model is in the cache already."""
    from huggingface_hub import HfApi, constants, errors
    from huggingface_hub.utils._validators import validate_repo_id

    validate_repo_id(name)
    if constants.HF_HUB_OFFLINE:
        return False
    try:
        HfApi().model_info(name, revision=revision, timeout=PATIENCE_S)
    except errors.HfHubHTTPError:
        if not _is_cached(name, revision):
            raise
        return False
    except Exception:  # what its HTTP library raises is no part of its interface
        return False
    return True


def _is_cached(name: str, revision: str | None) -> bool:
    from huggingface_hub import try_to_load_from_cache

    return isinstance(try_to_load_from_cache(name, "config.json", revision=revision), str)


@contextmanager
def _quiet() -> Iterator[None]:
    """The hub announces every attempt; what failed in the end is said in one line by who called."""
    from huggingface_hub.utils import logging

    verbosity = logging.get_verbosity()
    logging.set_verbosity_error()  # type: ignore[no-untyped-call]
    try:
        yield
    finally:
        logging.set_verbosity(verbosity)


@contextmanager
def _bars(before: Before | None) -> Iterator[Any]:
    """A class of bars that draws nothing where `before` is None, and else leaves nothing behind."""
    from huggingface_hub.utils.tqdm import tqdm

    made: list[Any] = []

    class Bars(tqdm):
        def __init__(self, *arguments: Any, **options: Any) -> None:
            made.append(self)
            if before is None:
                options["disable"] = True
            else:
                before()
            super().__init__(*arguments, **{**options, "leave": False})  # type: ignore[no-untyped-call]

    try:
        yield Bars
    finally:
        # The hub leaves some of its own open.
        for bar in reversed(made):
            bar.close()


# One owner and one model: what could be a path (`.`, `..`, `~`, an absolute one) does not match.
_HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]{0,95}/[A-Za-z0-9][\w.-]{0,95}", re.ASCII)
_COMMIT = re.compile(r"[0-9a-f]{40}")


def cached_folder(name: str, revision: str | None = None) -> Path | None:
    """Where the files of a hub model are in the local cache; None where it is not there or the name is none.

    Args:
        name: `owner/model`.
        revision: branch, tag or commit, which is no path; None: the main branch.
    """
    if not _HUB_NAME.fullmatch(name) or ".." in name or "--" in name:
        return None
    from huggingface_hub import try_to_load_from_cache
    from huggingface_hub.errors import HFValidationError

    try:
        file = try_to_load_from_cache(name, "config.json", revision=revision)
    except HFValidationError:
        return None
    return Path(file).parent if isinstance(file, str) else None


def commit_of(folder: str | Path) -> str | None:
    """The commit that a folder of the cache holds; None of any other folder."""
    folder = Path(folder)
    return folder.name if folder.parent.name == "snapshots" and _COMMIT.fullmatch(folder.name) else None


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
