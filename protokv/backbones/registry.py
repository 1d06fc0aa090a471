"""Load or identify a vision-language model by name or folder: the families, and which one serves a
model.

transformers is imported only for a model that needs it. `files` finds and checks the files,
`loading` reads them.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import TYPE_CHECKING, Any

from protokv.backbones.files import (
    BACKBONE_ENTRY_POINTS,
    download_model,
    find_cached_model,
    find_entry_points,
    find_model_folder,
    is_on_hub,
    list_weight_files,
    read_model_file,
    translate_model_errors,
)
from protokv.errors import ConfigError, ModelError, ModelNotFound

if TYPE_CHECKING:
    from protokv.backbones.loading import Placement
    from protokv.core.backbone import Backbone, BackboneIdentity

_OWN = {
    "qwen2_vl": "qwen_vl:QwenVL",
    "qwen2_5_vl": "qwen_vl:QwenVL",
    "qwen3_vl": "qwen3_vl:Qwen3VL",
    "qwen3_vl_moe": "qwen3_vl:Qwen3VL",
    "qwen3_5": "qwen3_vl:Qwen3VL",
    "qwen3_5_moe": "qwen3_vl:Qwen3VL",
    "gemma4": "gemma4:Gemma4",
    "llava_onevision": "llava_onevision:LlavaOnevision",
    "smolvlm": "smolvlm:SmolVLM",
    "internvl": "internvl:InternVL",
}
MODEL_FAMILIES = {
    kind: EntryPoint(kind, f"protokv.backbones.{where}", BACKBONE_ENTRY_POINTS)
    for kind, where in _OWN.items()
} | find_entry_points(packaged=False)
"""The class of each family by the `model_type` of its config; imported when it is asked for."""
_UNTESTED = EntryPoint(
    "untested", "protokv.backbones.untested:GenericBackbone", BACKBONE_ENTRY_POINTS
)


def find_family(kind: str) -> Any:
    """Return the class of a `model_type`: its own, or that for any model."""
    return MODEL_FAMILIES.get(kind, _UNTESTED).load()


def load_backbone(
    name: str,
    *,
    device: str = "auto",
    dtype: str = "auto",
    device_map: str | None = None,
    quantization: str | None = None,
    revision: str | None = None,
    folder: Path | None = None,
    frame_tokens: int | None = None,
) -> Backbone:
    """Load a model. A packaged one may set torch to one thread for this process
    (`PackagedModel.adjust`).

    Args:
        name: of a packaged model such as `protokv/mini`, a local folder, or a hub name such as
            `Qwen/Qwen2.5-VL-7B-Instruct`. Only safetensors files are read; no code of a checkpoint
            is run.
        device: `auto` (CUDA if available, then MPS, then CPU), `cpu`, `cuda`, `cuda:N` or `mps`;
            `meta` leaves the weights out, for prompts, positions and states on the CPU.
        dtype: `float32`, `bfloat16` or `float16`. `auto` is the checkpoint's own dtype on an
            accelerator. On a CPU it is bfloat16 for a checkpoint of 16 bits if the processor
            multiplies bfloat16, and float32 otherwise; a packaged model may prefer another. A
            state's dtype such as `bfloat16+4bit` includes the quantisation.
        device_map: `auto` or `balanced` spreads the layers over all devices (accelerate); None:
            `device` has them all.
        quantization: `4bit` or `8bit` quantises the weights while they are loaded (bitsandbytes);
            None: not at all.
        revision: branch, tag or commit of a hub model; None: its main branch.
        folder: the folder with the files of `name`, so that nothing is looked up or downloaded;
            None: find it.
        frame_tokens: the most visual tokens of a frame (of the two frames of a step for Qwen);
            None: the model's own.

    Raises:
        ModelError: there is no such model, a file of it is missing or damaged, its family is not
            supported, a package that it needs is not installed, or it does not fit into memory.
        ConfigError: the device, dtype, device map or quantisation does not exist here, two of them
            contradict, `revision` is given for a model that is not on a hub, or the model takes no
            frames of such a cost.
    """
    options = {
        "device": device,
        "dtype": dtype,
        "device_map": device_map,
        "quantization": quantization,
    }
    with _resolved(name, options, revision, folder) as (family, path, config, placement):
        backbone = family.load(path, name, config, placement)
        if frame_tokens is not None:
            backbone.limit_frames(frame_tokens)
        return backbone


def identify_backbone(
    name: str, *, revision: str | None = None, **options: str | None
) -> BackboneIdentity:
    """Return the identity of the model that `load_backbone` gives with these arguments; no weights
    are loaded.
    """
    with _resolved(name, options, revision) as (family, path, config, placement):
        return family.identify(path, name, config, placement)


def wrap_model(model: Any, processor: Any) -> Backbone:
    """Return the backbone of a model and a processor of transformers that the caller has loaded.

    Its identity is that of the files which the model names, if they are here. Then a tokenizer will
    do for a processor, as they say how frames are prepared. ConfigError: this is no processor.
    ModelError: the model or its processor lacks what its family needs, or no memory serves its
    layers.
    """
    from protokv.backbones.decoder import require_model_object
    from protokv.backbones.loading import identify_held_model

    require_model_object(model)
    name = model.name_or_path or model.config.model_type
    folder = find_model_folder(name)
    stored = all(file.is_file() for file in list_weight_files(folder))
    tokenizer = getattr(processor, "tokenizer", processor)
    if not hasattr(tokenizer, "apply_chat_template") or (tokenizer is processor and not stored):
        raise ConfigError(
            f"a {type(processor).__name__} does not prepare both text and frames",
            hint="give what AutoProcessor.from_pretrained returns for this model",
        )
    with translate_model_errors(name):
        identity = identify_held_model(model)
        family = find_family(model.config.model_type)
        frames = folder if tokenizer is processor else processor
        template = getattr(processor, "chat_template", None)
        backbone: Backbone = family.hold(model, frames, tokenizer, template, identity)
    return backbone


def require_model(name: str, revision: str | None = None) -> None:
    """Refuse a model whose files are nowhere, as `load_backbone` does, before anything heavy is
    imported.
    """
    if is_hub_name(name, revision) and find_cached_model(name, revision) is None:
        with translate_model_errors(name):
            is_on_hub(name, revision)


@contextmanager
def _resolved(
    name: str, options: dict[str, Any], revision: str | None, folder: Path | None = None
) -> Iterator[tuple[type[Backbone], str, Any, Placement]]:
    """Yield family, path, config and placement of a model; turn errors inside the block into clear
    ones.
    """
    import torch

    from protokv.backbones.loading import PlacementOptions, quiet_transformers

    request = PlacementOptions.parse(**options)
    point = find_entry_points(packaged=True).get(name)
    packaged: Any = None if point is None else point.load()
    if packaged is not None:
        if request.device.type == "meta":
            # Its weights are small, and come with it.
            request = replace(request, device=torch.device("cpu"))
        request = packaged.adjust(request)
        folder = folder or packaged.folder(name)
    downloaded = is_hub_name(name, revision)
    path = str(folder or name)
    if packaged is not None and request.device_map is None and request.quantization is None:
        # A packaged model loads without transformers, whose import takes longer than an answer of a
        # small model.
        config = read_model_file(path, "config.json")
        yield packaged, path, config, request.placement(getattr(torch, config["dtype"]))
        return
    with translate_model_errors(name):
        if downloaded and folder is None:
            path = str(download_model(name, _check_family, revision))
        else:
            _check_family(Path(path))
        with quiet_transformers():
            from transformers import AutoConfig

            config = AutoConfig.from_pretrained(path, trust_remote_code=False)
            yield find_family(config.model_type), path, config, request.placement(config.dtype)


def is_hub_name(name: str, revision: str | None) -> bool:
    """Return True if a name may be one of the hub; raises as `load_backbone` does."""
    packaged = name in find_entry_points(packaged=True)
    if packaged or Path(name).is_dir():
        if revision is not None:
            what = "a model of a package" if packaged else f"{name}, a folder,"
            raise ConfigError(
                f"{what} has no revisions", hint="leave out --revision, or name a model of the hub"
            )
        return False
    if name.startswith((".", "/", "~")) or name.count("/") != 1:
        raise ModelNotFound(
            f"there is no model folder at {name}",
            hint="name a folder with a config.json, or a hub name (protokv models lists some)",
        )
    return True


def _check_family(folder: Path) -> None:
    """Refuse a folder without a config, or of a model without pictures; transformers has no clear
    error for either.
    """
    if not (folder / "config.json").is_file():
        raise ModelError(
            "there is no config.json in it", hint="name the folder that holds the model's own files"
        )
    if (folder / "adapter_config.json").is_file():
        raise ModelError(
            "an adapter lies in its folder, which transformers loads where peft is installed",
            hint="merge it into the model, or move adapter_config.json away",
        )
    kind = str(read_model_file(str(folder), "config.json").get("model_type"))
    if kind not in MODEL_FAMILIES:
        from transformers.models.auto.modeling_auto import (
            MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES as OTHERS,
        )

        if kind not in OTHERS:
            raise ModelError(
                f"its model_type is {kind}, which is not supported",
                hint=f"supported families: {', '.join(MODEL_FAMILIES)}",
            )
