"""The files of a model folder: find, read, check and hash them. Needs no torch and no transformers.

Only safetensors weights are accepted, and an incomplete checkpoint is refused: transformers would fill in random
weights and warn. A config is held against the headers of the weight files before anything of its size is built. The
digest of the weights covers each file's header, its size and evenly spaced samples, because
reading all weights of a large model takes longer than loading a state.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final, NamedTuple

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
# The index of a model of a terabyte takes a tenth of this.
_JSON_BYTES: Final = 1 << 26
# The safetensors library reads no longer header.
_HEADER_BYTES: Final = 100_000_000
# Settings by which transformers repeats a module, as each family calls them.
_REPEATED: Final = re.compile(r"^(?!max_).*(layers?|depths?|blocks|experts)$")


def read_json(path: str, filename: str) -> dict[str, Any]:
    """Read a JSON file of a model folder; return an empty dictionary if there is none.

    Raises:
        ModelError: it is not JSON, or too long.
    """
    file = Path(path) / filename
    if not file.is_file():
        return {}
    if file.stat().st_size > _JSON_BYTES:
        raise ModelError(f"{file} has {file.stat().st_size} bytes; the most is {_JSON_BYTES}", hint=_DOWNLOAD_AGAIN)
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
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


class Stored(NamedTuple):
    """What weight files hold: tensors, their elements, and the bytes of these."""

    tensors: int
    elements: int
    nbytes: int


def check_weights(path: str) -> Stored:
    """Refuse a folder whose weights are missing, incomplete or pickles; return what they hold, by their headers.

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
    tensors = elements = nbytes = 0
    for name in names:
        file = folder / name
        try:
            # This reads the header, and compares it with the length of the file.
            with safe_open(file, framework="numpy") as library:
                shapes = [library.get_slice(key).get_shape() for key in library.keys()]  # noqa: SIM118
        except (SafetensorError, OSError) as error:
            raise ModelError(
                f"the weights file {file} is truncated or damaged: it has {file.stat().st_size} bytes ({error})",
                hint=_DOWNLOAD_AGAIN,
            ) from error
        tensors, elements = tensors + len(shapes), elements + sum(map(math.prod, shapes))
        nbytes += file.stat().st_size
    return Stored(tensors, elements, nbytes)


def check_repeats(path: str) -> None:
    """Refuse a config with more layers than the weights have tensors, as reading it takes memory for each layer.

    Raises:
        ModelError: naming the setting; or as `check_weights`.
    """
    most = check_weights(path).tensors
    for name, number in _repeats(read_json(path, "config.json")):
        if number > most:
            raise ModelError(
                f"its config.json has {name} {number}, and its weight files hold {most} tensors", hint=_DOWNLOAD_AGAIN
            )


def _repeats(value: Any, name: str = "") -> Iterator[tuple[str, float]]:
    """Yield name and number of each setting, at any depth, by which a module is repeated."""
    if isinstance(value, dict):
        for key, inner in value.items():
            yield from _repeats(inner, key)
    elif isinstance(value, list):
        for inner in value:
            yield from _repeats(inner, name)
    elif isinstance(value, int | float) and _REPEATED.match(name):
        yield name, value


def check_size(path: str, weights: int) -> None:
    """Refuse a config of a model with far more weights than the weight files hold, before such a model is built.

    Args:
        path: the folder.
        weights: elements of the parameters that the config asks for.

    Raises:
        ModelError: naming both numbers; or as `check_weights`.
    """
    stored = check_weights(path)
    # A file may leave out what is tied to another tensor; and packed weights take one bit at least.
    most = 8 * stored.nbytes if "quantization_config" in read_json(path, "config.json") else 2 * stored.elements
    if weights > most:
        raise ModelError(
            f"its config.json asks for {weights:,} weights, and its weight files hold {stored.elements:,}",
            hint=_DOWNLOAD_AGAIN,
        )


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
            digest.update(stream.read(min(header, size, _HEADER_BYTES)))
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
