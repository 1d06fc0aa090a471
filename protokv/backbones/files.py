"""The files of a model: those of a package, a folder, the local cache of the hub, or the hub. Needs
no torch.

The digest of the weights covers each file's header, its size and evenly spaced samples, because
reading all weights of a large model takes longer than loading a state. A hub that does not answer
soon counts as out of reach.
"""

from __future__ import annotations

import hashlib
import json
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from importlib.metadata import EntryPoint, entry_points
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from protokv.backbones.sizes import KNOWN_MODELS
from protokv.errors import ModelError, ModelNotFound, ProtoKVError, did_you_mean
from protokv.machine import is_out_of_memory

BACKBONE_ENTRY_POINTS = "protokv.backbones"
"""The group by which an installed package registers `NAME = "MODULE:CLASS"`.

A name with a slash is a model that the package brings (`loading.PackagedModel`). Any other is a
family, that is the `model_type` of a config, and a `Backbone`.
"""

_WEIGHTS = "model.safetensors"
_INDEX = "model.safetensors.index.json"
_SAMPLE_BYTES = 1 << 16
_SAMPLES = 16
# Fields of a config that do not change the model's arithmetic.
_VOLATILE = frozenset(
    {"transformers_version", "dtype", "torch_dtype", "_name_or_path", "_attn_implementation"}
)


def read_model_file(path: str, filename: str) -> dict[str, Any]:
    """Read a JSON file of a model folder; return an empty dictionary if there is none. ModelError:
    it is not JSON.
    """
    file = Path(path) / filename
    if not file.is_file():
        return {}
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ModelError(
            f"{file} is not valid JSON: {error}", hint="download the model again"
        ) from error
    return content if isinstance(content, dict) else {}


def read_video_processor(held: Any) -> tuple[dict[str, Any], bool]:
    """Read the settings of the video processor of a processor, or of a folder, whose files are read
    as by transformers.

    Returned are those that are not null, and whether they are for video; those for still images
    stand in for them.
    """
    if isinstance(held, str):
        nested = read_model_file(held, "processor_config.json").get("video_processor") or {}
        of_video = nested or read_model_file(held, "video_preprocessor_config.json")
        raw = of_video or read_model_file(held, "preprocessor_config.json")
    else:
        image: Any = getattr(held, "image_processor", None)
        of_video = getattr(held, "video_processor", None)
        # transformers overwrites, in a video processor, the size of frames that files of SmolVLM
        # have
        # in this field.
        raw = (of_video or image).to_dict() | {
            "video_sampling": getattr(image, "video_sampling", None)
        }
    return {key: value for key, value in raw.items() if value is not None}, bool(of_video)


def list_weight_files(path: str) -> list[Path]:
    """Return the safetensors files of a model folder, in order; they need not exist."""
    folder = Path(path)
    if (folder / _WEIGHTS).is_file() or not (folder / _INDEX).is_file():
        return [folder / _WEIGHTS]
    return [
        folder / name for name in sorted(set(read_model_file(path, _INDEX)["weight_map"].values()))
    ]


def digest_weights(path: str) -> str:
    """Return sha256 over header, size and samples of every weight file."""
    digest = hashlib.sha256()
    for file in list_weight_files(path):
        digest.update(file.name.encode())
        size = file.stat().st_size
        digest.update(size.to_bytes(8, "little"))
        with file.open("rb") as stream:
            header = int.from_bytes(stream.read(8), "little")
            digest.update(stream.read(min(header, size)))
            for i in range(_SAMPLES):
                stream.seek(
                    (size - _SAMPLE_BYTES) * i // (_SAMPLES - 1) if size > _SAMPLE_BYTES else 0
                )
                digest.update(stream.read(_SAMPLE_BYTES))
    return digest.hexdigest()


@cache
def digest_known_weights(name: str) -> str:
    """Return `digest_weights` of a folder or a cached hub model; empty: its files are not here."""
    folder = find_model_folder(name)
    there = all(one.is_file() for one in list_weight_files(folder))
    return digest_weights(folder) if there else ""


def hash_config(config: dict[str, Any]) -> str:
    """Return sha256 of a model's configuration without the fields that do not change its
    arithmetic.
    """
    return hashlib.sha256(
        json.dumps(_without_volatile(config), sort_keys=True).encode()
    ).hexdigest()


def _without_volatile(value: Any) -> Any:
    if isinstance(value, dict):
        return {
            key: _without_volatile(inner) for key, inner in value.items() if key not in _VOLATILE
        }
    return [_without_volatile(inner) for inner in value] if isinstance(value, list) else value


# Packages


@cache
def find_entry_points(*, packaged: bool) -> dict[str, EntryPoint]:
    """Return the entry point of every model that an installed package brings, by its name, or of
    every family that one adds, by its `model_type`.
    """
    points = entry_points(group=BACKBONE_ENTRY_POINTS)
    return {point.name: point for point in points if ("/" in point.name) == packaged}


# The hub

# The files of a model besides its weights. No code, and no weights in other formats.
_SMALL = ("*.json", "*.jinja", "*.txt", "*.model")
# seconds to wait for the hub; its own client waits 10 s a request, and tries five times
_PATIENCE_S = 3.0


def download_model(name: str, check: Callable[[Path], None], revision: str | None = None) -> Path:
    """Return the folder of a hub model in the local cache; download the files that are missing
    there.

    `check` is called with the folder of the small files before weights are downloaded, and raises
    to refuse the model; `revision` is a branch, tag or commit. Raises the hub's errors, which
    `translate_model_errors` explains.
    """
    from huggingface_hub import snapshot_download
    from huggingface_hub.utils.tqdm import disable_progress_bars

    if not sys.stderr.isatty():
        disable_progress_bars()
    offline = not is_on_hub(name, revision)

    def bring(patterns: list[str]) -> Path:
        found = snapshot_download(
            name, revision=revision, allow_patterns=patterns, local_files_only=offline
        )
        return Path(str(found))

    folder = bring(list(_SMALL))
    check(folder)
    return bring([file.name for file in list_weight_files(str(folder))])


def is_on_hub(name: str, revision: str | None) -> bool:
    """Return whether the hub answers for this model; if not, it is in the cache. Raises as
    `download_model`.
    """
    from huggingface_hub import HfApi, errors

    try:
        HfApi().model_info(name, revision=revision, timeout=_PATIENCE_S)
    except Exception as error:  # the hub client may raise any error of its HTTP library
        if find_cached_model(name, revision) is not None:
            return False
        if isinstance(error, (errors.HfHubHTTPError, errors.HFValidationError)):
            raise
        raise errors.LocalEntryNotFoundError(f"{name} is not in the cache") from error
    return True


def find_cached_model(name: str, revision: str | None = None) -> Path | None:
    """Return the folder of a hub model in the local cache; None if it is not there. Opens no
    connection.
    """
    from huggingface_hub import try_to_load_from_cache
    from huggingface_hub.errors import HFValidationError

    try:
        file = try_to_load_from_cache(name, "config.json", revision=revision)
    except HFValidationError:
        return None
    return Path(file).parent if isinstance(file, str) else None


def find_model_folder(name: str) -> str:
    """Return the folder of a model: the name itself, or where it is in the local cache of the
    hub.
    """
    return name if Path(name).is_dir() else str(find_cached_model(name) or name)


def measure_cached_models() -> dict[str, int]:
    """Return the bytes of each model in the local cache by its name. Opens no connection."""
    from huggingface_hub import CacheNotFound, constants, scan_cache_dir

    try:
        found = scan_cache_dir(constants.HF_HUB_CACHE).repos
    except CacheNotFound:
        return {}
    return {one.repo_id: one.size_on_disk for one in found if one.repo_type == "model"}


@contextmanager
def translate_model_errors(name: str) -> Iterator[None]:
    """Turn errors of transformers, safetensors, the hub and torch into one clear line each, a
    ModelError.
    """
    try:
        yield
    except ModelError as error:
        raise type(error)(
            f"cannot load the model {name}: {error.message}", hint=error.hint
        ) from error
    except ProtoKVError:
        raise
    except Exception as error:  # a damaged folder may raise any error in transformers
        kind, message, hint = _explain(name, error)
        raise kind(f"cannot load the model {name}: {message}", hint=hint) from error


def _explain(name: str, error: Exception) -> tuple[type[ModelError], str, str]:
    """Return what to raise for an error, with a message and a hint."""
    from huggingface_hub import errors as hub

    if is_out_of_memory(error):
        hint = "use --dtype bfloat16, --device-map auto, --quantization 4bit, or a smaller model"
        return ModelError, "it does not fit into memory", hint
    line = (str(error).strip() or type(error).__name__).splitlines()[0]
    # transformers asks for these by sentences, of several kinds of errors.
    lacks = [one for one in ("accelerate", "bitsandbytes") if find_spec(one) is None]
    named = [one for one in lacks if one in str(error).lower()]
    if named or isinstance(error, ImportError):
        hint = f"pip install {' '.join(named)}" if named else "install the package that it names"
        return ModelError, line, hint
    similar = did_you_mean(
        name, [*find_entry_points(packaged=True), *(model.name for model in KNOWN_MODELS)]
    )
    # A restricted repository is one that is not found, too.
    for kind, message, hint in (
        (
            hub.GatedRepoError,
            "access to it is restricted",
            "ask for access on its page, then run: hf auth login",
        ),
        (
            hub.RevisionNotFoundError,
            "it has no such revision",
            "name a branch, a tag or a commit of it",
        ),
        (
            hub.RepositoryNotFoundError,
            "there is no such model on the hub",
            f"{similar} check the name; a private one needs: hf auth login",
        ),
        (
            hub.LocalEntryNotFoundError,
            "it is not in the local cache, and the hub cannot be reached",
            f"{similar} check the name and the connection, or name a local folder",
        ),
        (
            hub.HFValidationError,
            "it is neither a folder nor a name on the hub",
            f"{similar} names look like Qwen/Qwen2.5-VL-7B-Instruct",
        ),
    ):
        if isinstance(error, kind):
            absent = kind is hub.RepositoryNotFoundError
            return ModelNotFound if absent else ModelError, message, hint.strip()
    mend = "check the name or folder, and download the model again if its files are damaged"
    return ModelError, line, mend
