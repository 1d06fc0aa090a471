"""Loading a vision-language model by name or folder: the registry of families and `load_backbone`.

transformers is imported when a model is loaded that needs it, not before. `hub` brings files, `placement` knows devices
and dtypes, `loading` checks files, `failure` words the errors.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

from protokv.errors import ConfigError, ModelError
from protokv.mini import EMBEDDED, is_embedded, weights_folder

if TYPE_CHECKING:
    from protokv.backbones.base import Backbone
    from protokv.backbones.placement import Placement
    from protokv.core.records import BackboneIdentity

__all__ = ["EMBEDDED", "FAMILIES", "identify_backbone", "load_backbone", "require_model"]

# model_type of the config -> module and class
FAMILIES = {
    "qwen2_vl": ("protokv.backbones.qwen_vl", "QwenVL"),
    "qwen2_5_vl": ("protokv.backbones.qwen_vl", "QwenVL"),
    "qwen3_vl": ("protokv.backbones.qwen3_vl", "Qwen3VL"),
    "qwen3_vl_moe": ("protokv.backbones.qwen3_vl", "Qwen3VL"),
    "llava_onevision": ("protokv.backbones.llava_onevision", "LlavaOnevision"),
}


def load_backbone(
    name: str = EMBEDDED,
    *,
    device: str = "auto",
    dtype: str = "auto",
    device_map: str | None = None,
    quantization: str | None = None,
    revision: str | None = None,
    folder: Path | None = None,
) -> Backbone:
    """Load a model. An embedded one, on a CPU, sets torch to one thread for this process.

    Args:
        name: `protokv/mini` or `protokv/mini-order` (embedded), a local folder, or a hub name such as
            `Qwen/Qwen2.5-VL-7B-Instruct`. Only safetensors files are read; no code of a checkpoint is run.
        device: `auto` (CUDA where there is one, then MPS, then CPU), `cpu`, `cuda`, `cuda:N` or `mps`.
        dtype: `float32`, `bfloat16` or `float16`; `auto` is the checkpoint's own on an accelerator and float32 on a
            CPU. As a state names it, `bfloat16+4bit`, it includes the quantisation.
        device_map: `auto` or `balanced` spreads the layers over all devices (accelerate); None: `device` has them all.
        quantization: `4bit` or `8bit` quantises the weights while they are loaded (bitsandbytes); None: as they are.
        revision: branch, tag or commit of a hub model; None: its main branch.
        folder: where the files of `name` are, so that nothing is looked up or downloaded; None: `name` says it.

    Raises:
        ModelError: there is no such model, a file of it is missing or damaged, its family is not supported, a package
            that is needed is not installed, or it does not fit into memory.
        ConfigError: the device, dtype, device map or quantisation does not exist here, two of them contradict, or there
            is a revision of what is no hub model.
    """
    with _resolved(name, revision, folder, device, dtype, device_map, quantization) as (kind, path, config, placement):
        return kind.load(path, name, config, placement)


def identify_backbone(
    name: str = EMBEDDED,
    *,
    device: str = "auto",
    dtype: str = "auto",
    device_map: str | None = None,
    quantization: str | None = None,
    revision: str | None = None,
    folder: Path | None = None,
) -> BackboneIdentity:
    """The identity of the model that `load_backbone` gives, from its small files and a sample of its weights.

    Arguments and errors are those of `load_backbone`.
    """
    with _resolved(name, revision, folder, device, dtype, device_map, quantization) as (kind, path, config, placement):
        return kind.identify(path, name, config, placement)


@contextmanager
def _resolved(
    name: str,
    revision: str | None,
    folder: Path | None,
    device: str,
    dtype: str,
    device_map: str | None,
    quantization: str | None,
) -> Iterator[tuple[type[Backbone], str, Any, Placement]]:
    """Class, path, config and placement of a model; errors inside the block are those of the model."""
    import torch

    from protokv.backbones.identity import read_json
    from protokv.backbones.placement import Placement, PlacementRequest

    request = PlacementRequest.of(device=device, dtype=dtype, device_map=device_map, quantization=quantization)
    if is_embedded(name) and request.device.type == "cpu":
        # Their matrices are too small for a second thread to pay, and with one thread the same input gives the same
        # bytes on any number of cores.
        torch.set_num_threads(1)
    check_revision(name, revision)
    path = str(folder or (weights_folder(name) if is_embedded(name) else name))
    is_folder = _is_folder(path)
    if is_embedded(name) and request.device_map is None and request.quantization is None:
        # Without transformers, which takes longer to import than an answer takes.
        from protokv.backbones.embedded import Embedded

        config = read_json(path, "config.json")
        kind = request.dtype
        if kind == "auto":
            kind = "float32" if request.device.type == "cpu" else config["dtype"]
        yield Embedded, path, config, Placement(getattr(torch, kind), request.device)
        return
    from protokv.backbones.hub import quiet_transformers, translate_errors

    with translate_errors(name):
        if is_folder:
            _check_config(Path(path))
        else:
            from protokv.backbones.hub import fetch

            path = str(fetch(path, _check_config, revision))
        with quiet_transformers():
            from transformers import AutoConfig

            config = AutoConfig.from_pretrained(path, trust_remote_code=False)
            module, cls = FAMILIES[config.model_type]
            yield getattr(import_module(module), cls), path, config, request.placement(config)


def _check_config(folder: Path) -> None:
    """Refuse a folder without a config, or of no supported family. ModelError.

    transformers has no clear error for an architecture that it does not know, and looks for one that is not named in
    code of the checkpoint.
    """
    from protokv.backbones.identity import read_json

    if not (folder / "config.json").is_file():
        raise ModelError("there is no config.json in it", hint="name the folder that holds the model's own files")
    check_family(read_json(str(folder), "config.json").get("model_type"))


def require_model(name: str, revision: str | None = None) -> None:
    """Refuse a model that cannot be loaded for want of files, before anything heavy is imported; nothing is downloaded.

    Raises:
        ModelError: there is no such folder, the hub has no such model or revision, or it cannot be reached and the
            model is not in the cache.
        ConfigError: there is a revision of what is no hub model.
    """
    check_revision(name, revision)
    if is_embedded(name) or _is_folder(name):
        return
    from protokv.backbones.hub import require, translate_errors

    with translate_errors(name):
        require(name, revision)


def _is_folder(path: str) -> bool:
    """Whether a name is that of a folder; else it may be one of the hub. ModelError where it can be neither."""
    if Path(path).is_dir():
        return True
    if path.startswith((".", "/", "~")) or path.count("/") != 1:
        raise ModelError(f"there is no model folder at {path}", hint="name a folder with a config.json, or a hub name")
    return False


def check_revision(name: str, revision: str | None) -> None:
    """Refuse a revision of what is no hub model. ConfigError."""
    if revision is not None and (is_embedded(name) or _is_folder(name)):
        what = "an embedded model" if is_embedded(name) else f"{name}, a folder,"
        raise ConfigError(f"{what} has no revisions", hint="leave out --revision, or name a model of the hub")


def check_family(kind: object) -> None:
    """Refuse a `model_type` that is missing or of no supported family. ModelError."""
    if not isinstance(kind, str) or kind not in FAMILIES:
        what = "its config.json names no model_type" if kind is None else f"it is a {kind} model"
        raise ModelError(f"{what}, which is not supported", hint=f"supported families: {', '.join(FAMILIES)}")
