"""Weights, tokenizer and identity of a model folder or hub name, from files that are checked before they are read.

Only safetensors files are read, no code of a checkpoint is run, and an incomplete checkpoint is refused, where
transformers would fill in random weights and warn. Knows no family.

What transformers' processors leave beside a model: the preprocessing of video and the chat template.

Both have had several file names; the order here is that of transformers. Knows no family and no arithmetic.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

from protokv.backbones.hub import commit_of
from protokv.backbones.identity import digest_weights, find_file, hash_config, read_json
from protokv.backbones.placement import Placement
from protokv.core.hook import NAME, register
from protokv.core.records import BackboneIdentity
from protokv.errors import ModelError

WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"
_PICKLES = ("pytorch_model.bin", "pytorch_model.bin.index.json")
_TOKENIZERS = ("tokenizer.json", "vocab.json", "tokenizer.model")


def load_model(kind: Any, path: str, placement: Placement) -> Any:
    """A model of transformers class `kind` for inference: text with this package's attention, vision with sdpa.

    Raises:
        ModelError: files are missing, damaged or pickles, tensors are missing in them, or a package that the placement
            needs is not installed.
    """
    register()
    check_weights(path)
    settings: dict[str, Any] = {}
    if placement.quantization is not None:
        settings["quantization_config"] = _bits_and_bytes(placement)
    if placement.device_map is not None or placement.quantization is not None:
        _require("accelerate", 'pip install "protokv[accelerate]"', f"loading it {_describe(placement)}")
        settings["device_map"] = placement.device_map or {"": placement.device}
    model, info = kind.from_pretrained(
        path,
        dtype=placement.dtype,
        use_safetensors=True,
        trust_remote_code=False,
        output_loading_info=True,
        attn_implementation={"text_config": NAME, "vision_config": "sdpa"},
        **settings,
    )
    if missing := sorted(info["missing_keys"]):
        raise ModelError(
            f"the weights of {path} lack {len(missing)} of the model's tensors, first of all {missing[0]}",
            hint="download the model again; a checkpoint of another architecture needs its own config.json",
        )
    # A checkpoint may be quantised without being asked to; such a model is where it belongs already.
    if not settings and getattr(model, "hf_quantizer", None) is None:
        model.to(placement.device)
    return model.eval().requires_grad_(False)


def load_tokenizer(path: str) -> tuple[Any, str]:
    """The tokenizer and the chat template of a model.

    Raises:
        ModelError: there is none of one or the other.
    """
    from transformers import AutoTokenizer

    if not any(find_file(path, filename) for filename in _TOKENIZERS):
        raise ModelError(
            f"there is no tokenizer in {path}: expected one of {', '.join(_TOKENIZERS)}",
            hint="copy the tokenizer files of the model there",
        )
    tokenizer = AutoTokenizer.from_pretrained(path, trust_remote_code=False)
    template = read_template(path) or tokenizer.chat_template
    if not template:
        raise ModelError(
            f"there is no chat template in {path}, so no question can be put to the model",
            hint="use the instruction-tuned variant of the model, or copy its chat_template.jinja there",
        )
    return tokenizer, template


def identify(path: str, name: str, config: Any, placement: Placement) -> BackboneIdentity:
    """Identify the model in the folder `path`, which the user calls `name`, in the dtype it is loaded in."""
    return BackboneIdentity(
        name=name,
        family=config.model_type,
        config_hash=hash_config(config.to_dict()),
        weights_digest=digest_weights(path),
        dtype=placement.dtype_name,
        # A folder that the user names is what it is, whatever it is called.
        revision=None if path == name else commit_of(path),
    )


def check_weights(path: str) -> None:
    """Refuse a folder whose weights are missing, incomplete or pickles; a hub name is left to the hub.

    Raises:
        ModelError: naming the file.
    """
    folder = Path(path)
    if not folder.is_dir():
        return
    if (folder / WEIGHTS).is_file():
        shards = [WEIGHTS]
    elif (folder / INDEX).is_file():
        shards = _shards(path)
    elif any((folder / pickle).is_file() for pickle in _PICKLES):
        raise ModelError(
            f"the weights in {path} are pickles ({_PICKLES[0]}), which can run code and are not read",
            hint="convert them to safetensors, or use a checkpoint that has model.safetensors",
        )
    else:
        raise ModelError(
            f"there are no weights in {path}: expected {WEIGHTS}, or {INDEX} and its shards",
            hint="download the model again",
        )
    missing = [shard for shard in shards if not (folder / shard).is_file()]
    if missing:
        raise ModelError(
            f"{len(missing)} of {len(shards)} weight files are missing in {path}, first of all {missing[0]}",
            hint="download the model again",
        )
    for shard in shards:
        _check_length(folder / shard)


def _shards(path: str) -> list[str]:
    weight_map = read_json(path, INDEX).get("weight_map")
    names = sorted({str(name) for name in weight_map.values()}) if isinstance(weight_map, dict) else []
    if not names or any(name != Path(name).name for name in names):
        raise ModelError(f"{path}/{INDEX} does not name weight files of its folder", hint="download the model again")
    return names


def _check_length(file: Path) -> None:
    """A safetensors file ends where the last of its tensors does."""
    size = file.stat().st_size
    with file.open("rb") as stream:
        length = int.from_bytes(stream.read(8), "little")
        try:
            header = json.loads(stream.read(length) if 8 + length <= size else b"")
            ends = [int(entry["data_offsets"][1]) for name, entry in header.items() if name != "__metadata__"]
            whole, said = 8 + length + max(ends, default=0), ", its header says {}"
        except (ValueError, AttributeError, LookupError, TypeError):
            whole, said = -1, ""
    if whole != size:
        raise ModelError(
            f"the weights file {file} is truncated or damaged: it has {size} bytes{said.format(whole)}",
            hint="download the model again",
        )


def _bits_and_bytes(placement: Placement) -> Any:
    from transformers import BitsAndBytesConfig

    _require("bitsandbytes", "pip install bitsandbytes", f"loading it {_describe(placement)}")
    if placement.quantization == "8bit":
        return BitsAndBytesConfig(load_in_8bit=True)
    return BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=placement.dtype)


def _describe(placement: Placement) -> str:
    return f"in {placement.quantization}" if placement.quantization else f"with the device map {placement.device_map}"


def _require(package: str, install: str, purpose: str) -> None:
    if not _installed(package):
        raise ModelError(f"{purpose} needs the package {package}, which is not installed", hint=install)


def _installed(package: str) -> bool:
    return find_spec(package) is not None


def find_devices(model: Any, modules: Sequence[str]) -> list[torch.device] | None:
    """Find the devices on which a spread model computes some of its modules; None if it is on one device.

    Modules offloaded to host memory or disk are computed on the first real device.
    """
    placed: dict[str, Any] | None = getattr(model, "hf_device_map", None)
    if not placed or len(set(placed.values())) == 1:
        return None
    main = next((place for place in placed.values() if place not in ("cpu", "disk")), "cpu")
    devices = []
    for module in modules:
        holders = [key for key in placed if key in ("", module) or module.startswith(f"{key}.")]
        place = placed[max(holders, key=len)] if holders else main
        devices.append(torch.device(main if place in ("cpu", "disk") else place))
    return devices


def read_video_processor(path: str) -> tuple[dict[str, Any], bool]:
    """Settings of the video processor of a folder or hub name; empty where there are none.

    Returns:
        The settings without those that are null, and whether they were written for video: an older folder may have
        those of still images only, which stand in for them.
    """
    nested = read_json(path, "processor_config.json").get("video_processor") or {}
    of_video = nested or read_json(path, "video_preprocessor_config.json")
    raw = of_video or read_json(path, "preprocessor_config.json")
    return {key: value for key, value in raw.items() if value is not None}, bool(of_video)


def read_template(path: str) -> str | None:
    """The chat template that a processor saved in its older form; None where the tokenizer carries the right one.

    A tokenizer reads `chat_template.jinja` by itself, but not the older `chat_template.json`, and then may carry the
    template of the text-only model that it was made from.
    """
    if find_file(path, "chat_template.jinja"):
        return None
    template: str | None = read_json(path, "chat_template.json").get("chat_template")
    return template
