"""Models of the hub: their files in the local cache, downloaded there if need be.

A hub that does not answer soon is taken as out of reach, and what is in the cache serves. The small files come first,
so that a model which is not supported is refused before gigabytes are on their way. Knows no families.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path
from typing import Any

from protokv.backbones.identity import weight_files

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
