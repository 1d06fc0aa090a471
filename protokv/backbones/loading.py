"""Load a model of transformers: device and dtype (`Placement`), weights, tokenizer, identity. Knows
no family.

Only safetensors weights are read, no code of a checkpoint is run, and a checkpoint without some of
the model's tensors is refused: transformers would fill in random weights and warn.
"""

from __future__ import annotations

import gc
import hashlib
import math
import os
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from logging import ERROR, getLogger
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch.nn import Parameter, functional

from protokv.backbones.files import (
    digest_weights,
    find_model_folder,
    hash_config,
    list_weight_files,
    read_model_file,
)
from protokv.backbones.projections import join_projections
from protokv.backbones.rotation import speed_rotation
from protokv.core.attention import ATTENTION_NAME
from protokv.core.backbone import BackboneIdentity
from protokv.core.decoding import MOST_NEW_TOKENS, Decoding
from protokv.device.kernels import HALF_DTYPES, has_bfloat16_instructions
from protokv.errors import ConfigError, ModelError, suggest_name
from protokv.machine import measure_machine_memory

_WEIGHT_DTYPES = ("auto", "float32", "bfloat16", "float16")
_DEVICE_MAPS = ("auto", "balanced")
MODEL_ATTENTION = {"text_config": ATTENTION_NAME, "vision_config": "sdpa"}
_QUANTIZATIONS = ("4bit", "8bit")
# bitsandbytes packs together rows of a linear layer, and weights of a row (its block).
_ROWS = 32
_SAMPLED = 16  # numbers of a weight that tell it
_BLOCK = 64


@dataclass(frozen=True, slots=True)
class Placement:
    """Device, dtype and quantisation of a model."""

    dtype: torch.dtype  # dtype of weights, keys and values; a quantised model computes in it
    device: torch.device  # device of the model, or of what `device_map` does not place
    device_map: str | None = None  # spreads layers over several devices; None: it does not
    quantization: str | None = None  # quantisation of the weights, by bitsandbytes

    @property
    def dtype_name(self) -> str:
        """Return the name in a state: `bfloat16`, or `bfloat16+4bit`: quantised weights give other
        keys and values.
        """
        name = str(self.dtype).removeprefix("torch.")
        return f"{name}+{self.quantization}" if self.quantization else name


@dataclass(frozen=True, slots=True)
class PlacementOptions:
    """A placement as a user writes it, with every name checked; see `load_backbone`."""

    device: torch.device
    dtype: str
    device_map: str | None
    quantization: str | None

    @classmethod
    def parse(
        cls,
        device: str = "auto",
        dtype: str = "auto",
        device_map: str | None = None,
        quantization: str | None = None,
    ) -> PlacementOptions:
        """Check the names. ConfigError: one of them does not exist here, or two contradict each
        other.
        """
        plain, plus, in_dtype = dtype.partition("+")
        if plus and (plain == "auto" or quantization not in (None, in_dtype)):
            raise ConfigError(
                f"dtype {dtype} and quantization {quantization} contradict each other"
            )
        if device_map is not None and device != "auto":
            raise ConfigError(
                f"device map {device_map} and device {device} both choose devices",
                hint="leave one out",
            )
        quantization = in_dtype or quantization
        for what, value, known in (
            ("dtype", plain, _WEIGHT_DTYPES),
            ("quantization", quantization, _QUANTIZATIONS),
            ("device map", device_map, _DEVICE_MAPS),
        ):
            if value not in (None, *known):
                raise ConfigError(f"there is no {what} {value!r}", hint=suggest_name(value, known))
        return cls(_find_device(device), plain, device_map, quantization)

    def placement(self, own_dtype: torch.dtype | None) -> Placement:
        """Return the placement of a model whose checkpoint has `own_dtype`; None: it does not
        say.
        """
        if self.dtype != "auto":
            dtype = getattr(torch, self.dtype)
        elif self.device.type != "cpu":
            dtype = own_dtype or torch.bfloat16
        else:
            half = own_dtype in (torch.bfloat16, torch.float16) and has_bfloat16_instructions()
            dtype = torch.bfloat16 if half else torch.float32
        return Placement(dtype, self.device, self.device_map, self.quantization)


class PackagedModel(ABC):
    """What a backbone adds whose files lie in an installed package; see
    `files.BACKBONE_ENTRY_POINTS`.
    """

    @classmethod
    @abstractmethod
    def folder(cls, name: str) -> Path:
        """Return the folder with the files of the model of this name."""

    @classmethod
    def adjust(cls, request: PlacementOptions) -> PlacementOptions:
        """Return a requested placement with what this model prefers; as it is by default."""
        return request


def _find_device(name: str) -> torch.device:
    mps = torch.backends.mps.is_available()
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "mps" if mps else "cpu"
    there = {"cpu": 1, "meta": 1, "cuda": torch.cuda.device_count(), "mps": int(mps)}
    with suppress(RuntimeError):  # it is the name of no device
        device = torch.device(name)
        if (device.index or 0) < there.get(device.type, 0):
            return device
    raise ConfigError(
        f"device {name} is not available on this machine",
        hint="use --device auto, cpu, cuda, cuda:N or mps",
    )


def load_model(
    kind: Any, path: str, placement: Placement, attention: Mapping[str, str] | str = MODEL_ATTENTION
) -> Any:
    """Load a model of transformers class `kind` for inference; `attention` is by part, or of all.

    ModelError: some of the model's tensors are in no file. MemoryError: this machine holds less.
    OSError, SafetensorError, ImportError: a file is missing or damaged, or a package that the
    placement needs.
    """
    config = kind.config_class.from_pretrained(path, trust_remote_code=False)
    # A config may name kernels of a hub, which transformers would fetch and run. Parts follow.
    config._attn_implementation = None
    config._experts_implementation = None
    if placement.device.type == "meta":
        return _outline(kind, config, path, placement.dtype)
    _check_memory(path, config.dtype or torch.float32, placement)
    settings: dict[str, Any] = {}
    if placement.quantization is not None:
        # Weights on this device take no memory.
        with torch.device("meta"):
            outline = kind(config)
        settings["quantization_config"] = _quantization_config(
            placement, _list_unquantized(outline)
        )
    if placement.device_map is not None or placement.quantization is not None:
        settings["device_map"] = placement.device_map or {"": placement.device}
    model, info = kind.from_pretrained(
        path,
        config=config,
        dtype=placement.dtype,
        use_safetensors=True,
        trust_remote_code=False,
        output_loading_info=True,
        attn_implementation=attention,
        **settings,
    )
    if missing := sorted(info["missing_keys"]):
        why = (
            f"the weights of {path} lack {len(missing)} of the model's tensors, first of all "
            f"{missing[0]}"
        )
        hint = (
            "download the model again; a checkpoint of another architecture needs its own "
            "config.json"
        )
        raise ModelError(why, hint=hint)
    # A checkpoint may be quantised already; transformers has placed such a model.
    if not settings and getattr(model, "hf_quantizer", None) is None:
        model.to(placement.device)
        if placement.device.type == "cuda" and placement.dtype in HALF_DTYPES:
            use_fast_kernels(model)
            # Weights that were copied have left pieces of memory that fit no others.
            torch.cuda.empty_cache()
    return model.eval().requires_grad_(False)


def _outline(kind: Any, config: Any, path: str, dtype: torch.dtype) -> Any:
    """Return a model without weights; it knows its angles, and how it was published to answer."""
    from transformers import GenerationConfig

    with torch.device("meta"):
        model = kind(config).to(dtype)
    for module in model.modules():
        for name, own in module.named_children():
            if type(own).__name__.endswith("RotaryEmbedding") and hasattr(own, "config"):
                setattr(module, name, type(own)(own.config))
    with suppress(OSError):
        model.generation_config = GenerationConfig.from_pretrained(path)
    return model.eval()


@torch.no_grad()
def use_fast_kernels(model: Any) -> None:
    """Let a model in half precision run fewer and faster kernels on a device; results differ by
    rounding alone.

    A norm of the usual form is one kernel of torch in place of eight. Hidden features of MLPs are
    filled up with zeros to a multiple of 8: products of other sizes, as 3,420 in the tower of
    Qwen2.5-VL, take a slower kernel. Layers that read one input are one product. Queries and keys
    are rotated in three operations.
    """
    for module in model.modules():
        weight = getattr(module, "weight", None)
        eps = getattr(module, "variance_epsilon", getattr(module, "eps", None))
        if type(module).__name__.endswith("RMSNorm") and weight is not None and eps is not None:
            fused = partial(
                functional.rms_norm, normalized_shape=weight.shape, weight=weight, eps=eps
            )
            some = torch.linspace(-2, 3, len(weight)).to(weight)
            if torch.allclose(module(some), fused(some), rtol=0.02, atol=1e-3):
                module.forward = fused
        inner: list[Any] = [
            getattr(module, name, None) for name in ("gate_proj", "up_proj", "down_proj")
        ]
        if all(isinstance(layer, torch.nn.Linear) for layer in inner) and (
            more := -inner[2].in_features % 8
        ):
            inner[2].weight = _pad(inner[2].weight, (0, more))
            for layer in inner[:2]:
                layer.weight = _pad(layer.weight, (0, 0, 0, more))
                if layer.bias is not None:
                    layer.bias = _pad(layer.bias, (0, more))
    join_projections(model)
    speed_rotation(model)


def _pad(weight: torch.Tensor, more: Sequence[int]) -> Parameter:
    """Return a weight that is filled up with zeros."""
    return Parameter(functional.pad(weight, more), False)


@contextmanager
def quiet_transformers() -> Iterator[None]:
    """Silence the progress bars and the advice of transformers, and let Python look for no garbage.

    Imports make 400,000 objects that stay, and it would look at them again and again.
    """
    collects = gc.isenabled()
    gc.disable()
    # Some models ask a hub for code when they are made, if the package `kernels` is there.
    os.environ.setdefault("USE_HUB_KERNELS", "0")
    from transformers.utils import logging

    verbosity = logging.get_verbosity()
    bars = logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(verbosity)
        if bars:
            logging.enable_progress_bar()
        if collects:
            gc.enable()


def _list_unquantized(model: Any) -> list[str]:
    """Return the names of the linear layers that quantisation leaves alone, on any machine: a state
    may move.

    They are all those outside of the language model, such as the vision tower and the head, and
    those in it whose sizes bitsandbytes cannot pack on a processor with AVX512-BF16.
    """
    text = set(model.get_decoder().modules())
    return [
        name
        for name, layer in model.named_modules()
        if isinstance(layer, torch.nn.Linear)
        and (layer not in text or layer.in_features % _BLOCK or layer.out_features % _ROWS)
    ]


def _check_memory(path: str, saved: torch.dtype, placement: Placement) -> None:
    """Refuse more weights than the main memory holds; the system would end the process.
    MemoryError.
    """
    available = measure_machine_memory()
    if placement != Placement(placement.dtype, torch.device("cpu")) or available is None:
        return
    size = sum(file.stat().st_size for file in list_weight_files(path))
    if size * placement.dtype.itemsize / saved.itemsize > available:
        raise MemoryError


def _quantization_config(placement: Placement, skipped: list[str]) -> Any:
    from transformers import BitsAndBytesConfig

    # bitsandbytes logs a line for every layer of a step.
    getLogger("bitsandbytes").setLevel(ERROR)
    settings = {f"load_in_{placement.quantization}": True, "llm_int8_skip_modules": skipped}
    return BitsAndBytesConfig(
        bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=placement.dtype, **settings
    )


def load_tokenizer(path: str) -> tuple[Any, str | None]:
    """Load the tokenizer and the chat template of a model, None: its tokenizer has it. ModelError:
    no tokenizer.
    """
    from transformers import AutoTokenizer

    # transformers makes an empty tokenizer of nothing.
    if not any(
        (Path(path) / name).is_file()
        for name in ("tokenizer.json", "vocab.json", "tokenizer.model")
    ):
        raise ModelError(
            f"there is no tokenizer in {path}", hint="copy the tokenizer files of the model there"
        )
    tokenizer = AutoTokenizer.from_pretrained(path, trust_remote_code=False)
    # It does not read the older file by itself, and may carry the template of a text-only model.
    newer = (Path(path) / "chat_template.jinja").is_file()
    return tokenizer, None if newer else read_model_file(path, "chat_template.json").get(
        "chat_template"
    )


def read_generation_config(config: Any) -> Decoding:
    """Return how a model was published to answer, by transformers' `GenerationConfig`. ModelError:
    it makes no sense.

    What it does not say is not done: `generate` itself would draw from 50 tokens where no `top_k`
    is given.
    """
    draws = config.do_sample and config.top_k != 1
    names = ("max_new_tokens", "repetition_penalty", *(("top_k", "top_p") if draws else ()))
    found = {name: getattr(config, name) for name in names if getattr(config, name) is not None}
    if draws:
        found["temperature"] = 1.0 if config.temperature is None else config.temperature
    try:
        found["max_new_tokens"] = min(
            found.get("max_new_tokens", Decoding().max_new_tokens), MOST_NEW_TOKENS
        )
        return Decoding(**found)
    except (ConfigError, TypeError) as error:
        raise ModelError(
            f"its generation_config.json makes no sense: {error}", hint="correct or remove it"
        ) from error


def digest_model_parameters(model: Any) -> str:
    """Return sha256 over a sample of each weight of a model, and its active adapters."""
    digest = hashlib.sha256()
    for path, module in model.named_modules():
        known = {
            name: _list_parts(weight.detach()) or [_count_codes(module, weight.detach())]
            for name, weight in module.named_parameters(path, recurse=False)
        }
        passing = module._non_persistent_buffers_set
        for name, buffer in module.named_buffers(path, recurse=False):
            if name.rpartition(".")[2] not in passing:
                known[name] = [buffer]
        for name, parts in known.items():
            for part in parts:
                if not part.is_meta:
                    digest.update(name.encode() + _sample(part))
    for name, module in model.named_modules():
        # Layers with adapters, of peft. A model has a method of this name.
        if isinstance(getattr(type(module), "disable_adapters", None), property):
            active = (module.active_adapters, module.disable_adapters)
            digest.update(f"{name} {active}".encode())
    return digest.hexdigest()


def _list_parts(weight: torch.Tensor) -> list[torch.Tensor]:
    """Return the plain tensors that a weight consists of, which torch names for quantized ones;
    none: its kind does not say.
    """
    if hasattr(weight, "__tensor_flatten__"):
        parts = (getattr(weight, name) for name in weight.__tensor_flatten__()[0])
        return [inner for part in parts for inner in _list_parts(part) or [part]]
    plain = type(weight) is torch.Tensor and weight.is_floating_point()
    return [weight] if plain or weight.is_meta else []


def _count_codes(module: Any, weight: torch.Tensor) -> torch.Tensor:
    """Return how often each half of a byte stands in the first rows of a packed weight, `[16]`
    int64. A forward of bitsandbytes may change the order of codes in these rows, and their scales.
    """
    codes = weight.as_subclass(torch.Tensor).flatten()
    rows = max(getattr(module, "out_features", 0), _ROWS)
    halves = codes[: len(codes) * _ROWS // rows].cpu().view(torch.uint8)
    return torch.cat((halves >> 4, halves & 15)).bincount(minlength=16)


def identify_held_model(model: Any) -> BackboneIdentity:
    """Return which model this is, that somebody has loaded: by its files if they are here and its
    weights are theirs, else by a sample of its weights.
    """
    name = model.name_or_path or model.config.model_type
    folder = find_model_folder(name)
    weight = model.get_input_embeddings().weight
    stored = has_stored_weights(model, folder, weight.dtype)
    placement = Placement(weight.dtype, weight.device)
    digest = None if stored else digest_model_parameters(model)
    return identify_model(folder, name, model.config, placement, digest)


def has_stored_weights(model: Any, folder: str, dtype: torch.dtype) -> bool:
    """Return whether each weight of a model begins like one in the files of a folder, which have
    this dtype in the model; those that were packed since do not. Weights that transformers stacks,
    of experts, are not looked at.
    """
    files = list_weight_files(folder)
    if not all(file.is_file() for file in files):
        return False
    known = set[bytes]()
    for file in files:
        with safe_open(file, "pt") as opened:
            for name in opened.keys():  # noqa: SIM118 - it is no mapping
                stored = opened.get_slice(name)
                if shape := stored.get_shape():
                    part = stored[: _count_rows(shape)]
                    known |= {_sample(part), _sample(part.to(dtype))}
    for held in model.parameters():
        if held.is_meta or held.ndim not in (1, 2):
            continue
        if hasattr(held, "__tensor_flatten__"):
            return False
        plain = held.detach().as_subclass(torch.Tensor)
        if _sample(plain[: _count_rows(plain.shape)]) not in known:
            return False
    return True


def _count_rows(shape: Sequence[int]) -> int:
    """Return how many rows of a weight are looked at: the first one, or numbers of a column."""
    return 1 if math.prod(shape[1:]) > 1 else _SAMPLED


def _sample(weight: torch.Tensor) -> bytes:
    return weight.flatten()[:_SAMPLED].float().cpu().numpy().tobytes()


def identify_model(
    path: str, name: str, config: Any, placement: Placement, digest: str | None = None
) -> BackboneIdentity:
    """Identify the model in the folder `path`, called `name`; `digest`: of its weights, None: that
    of its files.
    """
    folder = Path(path)
    return BackboneIdentity(
        name=name,
        family=config.model_type,
        config_hash=hash_config(config.to_dict()),
        weights_digest=digest_weights(path) if digest is None else digest,
        dtype=placement.dtype_name,
        # A folder that the user names has no revision, even if its name looks like a commit.
        revision=folder.name if path != name and folder.parent.name == "snapshots" else None,
    )
