"""Models of the hub: download files, find them in the local cache, and word errors clearly. Knows no families.

A hub that does not answer soon counts as out of reach, and the cache serves. The small files come first, so that an
unsupported model is refused before gigabytes are downloaded. `translate_errors` turns every error that transformers,
the hub or torch can raise while a model is loaded into one clear line.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path
from typing import Any

from protokv.backbones.files import weight_files
from protokv.backbones.packaged import packaged_models
from protokv.backbones.sizes import KNOWN_MODELS
from protokv.errors import ModelError, ModelNotFound, did_you_mean
from protokv.machine import is_out_of_memory

# The files of a model besides its weights. No code, and no weights in other formats.
SMALL = ("*.json", "*.jinja", "*.txt", "*.model")
# The hub's own client waits 10 s a request, five times.
PATIENCE_S = 3.0

_before_bar: ContextVar[Callable[[], None] | None] = ContextVar("before_bar", default=None)


@contextmanager
def showing_downloads(before: Callable[[], None]) -> Iterator[None]:
    """Draw the hub's progress bars on stderr during downloads, and remove them afterwards.

    Outside this block, nothing is drawn.

    Args:
        before: called before a bar is drawn.
    """
    token = _before_bar.set(before)
    try:
        yield
    finally:
        _before_bar.reset(token)


def fetch(name: str, check: Callable[[Path], None], revision: str | None = None) -> Path:
    """Return the folder of a hub model in the local cache; download the files that are missing there.

    Args:
        name: `owner/model`.
        check: called with the folder of the small files before weights are downloaded; raises to refuse the model.
        revision: branch, tag or commit; None: the main branch.

    Raises:
        huggingface_hub.errors.HFValidationError: no hub has such a name.
        huggingface_hub.errors.RepositoryNotFoundError: there is no such model, or it is private.
        huggingface_hub.errors.RevisionNotFoundError: it has no such branch, tag or commit.
        huggingface_hub.errors.LocalEntryNotFoundError: it is not in the cache and the hub cannot be reached.
        ModelError: raised by `check`.
    """
    from huggingface_hub import snapshot_download

    with _quiet_hub(), _progress_bars(_before_bar.get()) as bars:
        online = _is_reachable(name, revision)

        def download(patterns: list[str]) -> Path:
            found = snapshot_download(
                name, revision=revision, allow_patterns=patterns, local_files_only=not online, tqdm_class=bars
            )
            return Path(str(found))

        folder = download(list(SMALL))
        check(folder)
        return download(weight_files(str(folder)))


def require(name: str, revision: str | None = None) -> None:
    """Refuse a model that is neither in the cache nor on a reachable hub; nothing is downloaded. Raises as `fetch`.

    It imports little: a misspelt name is refused without waiting for torch.
    """
    from huggingface_hub import errors

    with _quiet_hub():
        if cached_folder(name, revision) is None and not _is_reachable(name, revision):
            raise errors.LocalEntryNotFoundError(f"{name} is not in the cache")


def _is_reachable(name: str, revision: str | None) -> bool:
    """Return True if the hub answers for this model. Raise its refusal, unless the model is in the cache."""
    from huggingface_hub import HfApi, constants, errors
    from huggingface_hub.utils._validators import validate_repo_id

    validate_repo_id(name)
    if constants.HF_HUB_OFFLINE:
        return False
    try:
        HfApi().model_info(name, revision=revision, timeout=PATIENCE_S)
    except errors.HfHubHTTPError:
        if cached_folder(name, revision) is None:
            raise
        return False
    except Exception:  # the hub client may raise any error of its HTTP library
        return False
    return True


@contextmanager
def _quiet_hub() -> Iterator[None]:
    """Silence the hub's retry log; the caller reports the failure."""
    from huggingface_hub.utils import logging

    verbosity = logging.get_verbosity()
    logging.set_verbosity_error()  # type: ignore[no-untyped-call]
    try:
        yield
    finally:
        logging.set_verbosity(verbosity)


@contextmanager
def _progress_bars(before: Callable[[], None] | None) -> Iterator[Any]:
    """Yield a class of progress bars that draws nothing if `before` is None, and leaves nothing behind."""
    from huggingface_hub.utils.tqdm import tqdm

    opened: list[Any] = []

    class Bars(tqdm):
        def __init__(self, *arguments: Any, **options: Any) -> None:
            opened.append(self)
            if before is None:
                options["disable"] = True
            else:
                before()
            super().__init__(*arguments, **{**options, "leave": False})  # type: ignore[no-untyped-call]

    try:
        yield Bars
    finally:
        # The hub leaves some bars open.
        for bar in reversed(opened):
            bar.close()


# One owner and one model. Nothing that could be a path (`.`, `..`, `~`, an absolute path) matches.
_HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]{0,95}/[A-Za-z0-9][\w.-]{0,95}", re.ASCII)
_COMMIT = re.compile(r"[0-9a-f]{40}")


def cached_folder(name: str, revision: str | None = None) -> Path | None:
    """Return the folder of a hub model in the local cache; None if it is not there. Opens no connection.

    Args:
        name: `owner/model`.
        revision: branch, tag or commit, not a path; None: the main branch.
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


def cached_models() -> dict[str, int]:
    """Return the bytes of each model in the local cache by its name. Opens no connection."""
    from huggingface_hub import CacheNotFound, constants, scan_cache_dir

    try:
        found = scan_cache_dir(constants.HF_HUB_CACHE).repos
    except CacheNotFound:
        return {}
    return {one.repo_id: one.size_on_disk for one in found if one.repo_type == "model"}


def commit_of(folder: str | Path) -> str | None:
    """Return the commit that a folder of the cache holds; None for any other folder."""
    folder = Path(folder)
    return folder.name if folder.parent.name == "snapshots" and _COMMIT.fullmatch(folder.name) else None


# What is wrong with a name. A name that was meant may be close to it.
_ABSENT = "there is no such model on the hub"
_UNREACHED = "it is not in the local cache, and the hub cannot be reached"
_NO_NAME = "it is neither a folder nor a name on the hub"


@contextmanager
def quiet_transformers() -> Iterator[None]:
    """Silence the progress bars and the advice of transformers."""
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
        ModelError: naming the model and the cause.
    """
    from huggingface_hub import errors as hub
    from safetensors import SafetensorError

    try:
        yield
    except ModelError as error:
        raise type(error)(f"cannot load the model {name}: {error.message}", hint=error.hint) from error
    except (
        MemoryError,
        OSError,
        ValueError,
        LookupError,
        ArithmeticError,
        AssertionError,
        TypeError,
        AttributeError,
        RuntimeError,
        ImportError,
        SafetensorError,
        hub.StrictDataclassError,
    ) as error:
        message, hint = _explain(error)
        kind = ModelNotFound if message == _ABSENT else ModelError
        if message in (_ABSENT, _UNREACHED, _NO_NAME):
            known = [*packaged_models(), *(model.name for model in KNOWN_MODELS)]
            hint = " ".join(filter(None, (did_you_mean(name, known), hint)))
        raise kind(f"cannot load the model {name}: {message}", hint=hint) from error


def _explain(error: Exception) -> tuple[str, str]:
    """Return a message and a hint for an error."""
    from huggingface_hub import errors as hub

    causes: list[BaseException] = [error]
    while (cause := causes[-1].__cause__ or causes[-1].__context__) is not None:
        causes.append(cause)
    text = str(error).strip()
    if is_out_of_memory(error):
        return (
            "it does not fit into memory",
            "use --dtype bfloat16, --device-map auto, --quantization 4bit, or a smaller model",
        )
    for kind, message, hint in (
        (hub.GatedRepoError, "access to it is restricted", "ask for access on its page, then run: hf auth login"),
        (hub.RevisionNotFoundError, "it has no such revision", "name a branch, a tag or a commit of it"),
        (
            hub.RepositoryNotFoundError,
            _ABSENT,
            "check the name; a private one needs: hf auth login",
        ),
        (
            hub.LocalEntryNotFoundError,
            _UNREACHED,
            "check the name and the connection, or name a local folder",
        ),
        (
            hub.HFValidationError,
            _NO_NAME,
            "names look like Qwen/Qwen2.5-VL-7B-Instruct",
        ),
    ):
        if any(isinstance(cause, kind) for cause in causes):
            return message, hint
    return (
        text.splitlines()[0] if text else type(error).__name__,
        "check the name or folder, and that this machine can reach or has cached the model",
    )
