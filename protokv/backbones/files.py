"""The files of a model folder: find, read, check and hash them. Needs no torch and no transformers.

Only safetensors weights are accepted, and an incomplete checkpoint is refused: transformers would fill in random
weights and warn. The digest of the weights covers each file's header, its size and evenly spaced samples, because
reading all weights of a large model takes longer than loading a state.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any, Final

from safetensors import SafetensorError, safe_open

from protokv.errors import ModelError

WEIGHTS: Final = "model.safetensors"
INDEX: Final = "model.safetensors.index.json"
_PICKLES: Final = ("pytorch_model.bin", "pytorch_model.bin.index.json")
_SAMPLE_BYTES: Final = 1 << 16
_SAMPLES: Final = 16
# Fields of a config that do not change the model's arithmetic.
_VOLATILE: Final = frozenset({"transformers_version", "dtype", "torch_dtype", "_name_or_path", "_attn_implementation"})
_DOWNLOAD_AGAIN: Final = "download the model again"


def read_json(path: str, filename: str) -> dict[str, Any]:
    """Read a JSON file of a model folder; return an empty dictionary if there is none.

    Raises:
        ModelError: it is not JSON.
    """
    file = Path(path) / filename
    if not file.is_file():
        return {}
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ModelError(f"{file} is not valid JSON: {error}", hint=_DOWNLOAD_AGAIN) from error
    return content if isinstance(content, dict) else {}


def read_video_processor(path: str) -> tuple[dict[str, Any], bool]:
    """Read the settings of the video processor of a folder.

    Several file names are in use; the order here is that of transformers.

    Returns:
        The settings that are not null, and whether they were written for video: an older folder may have settings for
        still images only, which stand in for them.
    """
    nested = read_json(path, "processor_config.json").get("video_processor") or {}
    of_video = nested or read_json(path, "video_preprocessor_config.json")
    raw = of_video or read_json(path, "preprocessor_config.json")
    return {key: value for key, value in raw.items() if value is not None}, bool(of_video)


def read_template(path: str) -> str | None:
    """Return the chat template of the older file `chat_template.json`; None if the tokenizer carries the right one.

    A tokenizer reads `chat_template.jinja` by itself, but not the older file, and then may carry the template of the
    text-only model that it was made from.
    """
    if (Path(path) / "chat_template.jinja").is_file():
        return None
    template: str | None = read_json(path, "chat_template.json").get("chat_template")
    return template


def weight_files(path: str) -> list[str]:
    """Return the names of the safetensors files of a model folder, in order; they need not exist.

    Raises:
        ModelError: the index names no files of its folder.
    """
    folder = Path(path)
    if (folder / WEIGHTS).is_file() or not (folder / INDEX).is_file():
        return [WEIGHTS]
    weight_map = read_json(path, INDEX).get("weight_map")
    names = sorted({str(name) for name in weight_map.values()}) if isinstance(weight_map, dict) else []
    if not names or any(name != Path(name).name for name in names):
        raise ModelError(f"{folder / INDEX} does not name weight files of its folder", hint=_DOWNLOAD_AGAIN)
    return names


def check_weights(path: str) -> None:
    """Refuse a folder whose weights are missing, incomplete or pickles.

    Raises:
        ModelError: naming the file.
    """
    folder = Path(path)
    names = weight_files(path)
    missing = [name for name in names if not (folder / name).is_file()]
    if names == missing == [WEIGHTS]:
        if any((folder / pickle).is_file() for pickle in _PICKLES):
            raise ModelError(
                f"the weights in {path} are pickles ({_PICKLES[0]}), which can run code and are not read",
                hint="convert them to safetensors, or use a checkpoint that has model.safetensors",
            )
        raise ModelError(
            f"there are no weights in {path}: expected {WEIGHTS}, or {INDEX} and its shards", hint=_DOWNLOAD_AGAIN
        )
    if missing:
        raise ModelError(
            f"{len(missing)} of {len(names)} weight files are missing in {path}, first of all {missing[0]}",
            hint=_DOWNLOAD_AGAIN,
        )
    for name in names:
        file = folder / name
        try:
            # This reads the header, and compares it with the length of the file.
            with safe_open(file, framework="numpy"):
                pass
        except (SafetensorError, OSError) as error:
            raise ModelError(
                f"the weights file {file} is truncated or damaged: it has {file.stat().st_size} bytes ({error})",
                hint=_DOWNLOAD_AGAIN,
            ) from error


def digest_weights(path: str) -> str:
    """Return sha256 over header, size and samples of every weight file; an empty string if one is missing."""
    digest = hashlib.sha256()
    for name in weight_files(path):
        file = Path(path) / name
        if not file.is_file():
            return ""
        digest.update(name.encode())
        size = file.stat().st_size
        digest.update(size.to_bytes(8, "little"))
        with file.open("rb") as stream:
            header = int.from_bytes(stream.read(8), "little")
            digest.update(stream.read(min(header, size)))
            for i in range(_SAMPLES):
                stream.seek((size - _SAMPLE_BYTES) * i // (_SAMPLES - 1) if size > _SAMPLE_BYTES else 0)
                digest.update(stream.read(_SAMPLE_BYTES))
    return digest.hexdigest()


def hash_config(config: dict[str, Any]) -> str:
    """Return sha256 of a model's configuration without the fields that do not change its arithmetic."""
    return hashlib.sha256(json.dumps(_without_volatile(config), sort_keys=True).encode()).hexdigest()


def _without_volatile(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _without_volatile(inner) for key, inner in value.items() if key not in _VOLATILE}
    return [_without_volatile(inner) for inner in value] if isinstance(value, list) else value
