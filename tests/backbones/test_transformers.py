"""The adapters rely on internals of transformers: the range that is asked for, and what must still be where it was."""

from __future__ import annotations

import tomllib
from importlib import import_module
from importlib.metadata import version
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from tests.backbones.tiny import BUILDERS
from tests.backbones.upstream import Upstream

PYPROJECT = Path(__file__).parents[2] / "pyproject.toml"

# What the package imports or calls, and what the tests compare with.
MODULES = [
    "transformers.AttentionInterface.register",
    "transformers.AutoConfig.from_pretrained",
    "transformers.AutoTokenizer.from_pretrained",
    "transformers.LlavaOnevisionForConditionalGeneration.from_pretrained",
    "transformers.Qwen2VLForConditionalGeneration.from_pretrained",
    "transformers.Qwen2_5_VLForConditionalGeneration.from_pretrained",
    "transformers.Qwen3VLForConditionalGeneration.from_pretrained",
    "transformers.Qwen3VLMoeForConditionalGeneration.from_pretrained",
    "transformers.BitsAndBytesConfig.to_dict",
    "transformers.utils.cached_file",
    "transformers.utils.logging.disable_progress_bar",
    "transformers.utils.logging.is_progress_bar_enabled",
    "transformers.models.llava_onevision.image_processing_pil_llava_onevision.LlavaOnevisionImageProcessorPil",
    "transformers.models.qwen2_vl.image_processing_pil_qwen2_vl.Qwen2VLImageProcessorPil",
    "transformers.models.qwen2_vl.image_processing_pil_qwen2_vl.smart_resize",
]
# Of every loaded model.
PARTS = [
    "lm_head.forward",
    "config.text_config.num_hidden_layers",
    "config.text_config.num_key_value_heads",
    "config.text_config.max_position_embeddings",
    "config.video_token_id",
    "generation_config.eos_token_id",
    "model.language_model.embed_tokens.weight",
    "model.language_model.rotary_emb.forward",
    "model.language_model.layers",
]
QWEN = ["model.visual.forward", "config.vision_config.spatial_merge_size"]
FAMILY_PARTS = {
    "qwen2_vl": QWEN,
    "qwen2_5_vl": [*QWEN, "config.vision_config.tokens_per_second"],
    "qwen3_vl": [*QWEN, "model.visual.deepstack_merger_list", "model.language_model._deepstack_process"],
    "qwen3_vl_moe": [*QWEN, "model.visual.deepstack_merger_list", "model.language_model._deepstack_process"],
    "llava_onevision": [
        "model.get_video_features",
        "model.image_newline",
        "config.vision_config.image_size",
        "config.vision_config.patch_size",
    ],
}


def lost(root: object, path: str, name: str = "") -> str:
    """Empty where `root` has the dotted path; else one line that says what is gone and from which version."""
    seen = name
    for part in path.split("."):
        if not hasattr(root, part):
            return f"transformers {version('transformers')} has moved {name}{path}: {seen.rstrip('.')} has no {part}"
        root, seen = getattr(root, part), f"{seen}{part}."
    return ""


def lost_import(path: str) -> str:
    """The same for a path that starts with a module."""
    parts = path.split(".")
    for n in range(len(parts), 0, -1):
        try:
            module = import_module(".".join(parts[:n]))
        except ModuleNotFoundError:
            continue
        return lost(module, ".".join(parts[n:]), f"{module.__name__}.")
    return f"there is no module {parts[0]}"


def test_the_installed_transformers_is_in_the_range_that_pyproject_asks_for() -> None:
    dependencies = tomllib.loads(PYPROJECT.read_text())["project"]["dependencies"]
    asked = next(r for r in map(Requirement, dependencies) if r.name == "transformers")
    installed = version("transformers")
    assert installed in asked.specifier, f"transformers {installed} is outside {asked.specifier}: widen it or go back"
    # An open end would promise versions that nobody has tried.
    assert any(part.operator in ("<", "==", "~=") for part in asked.specifier)


@pytest.mark.parametrize("path", MODULES)
def test_what_is_imported_is_where_it_was(path: str) -> None:
    assert not lost_import(path), lost_import(path)


@pytest.mark.parametrize("family", BUILDERS)
def test_the_parts_of_a_model_are_where_they_were(family: str, tmp_path: Path) -> None:
    model = Upstream(family, BUILDERS[family](tmp_path)).model
    gone = [line for path in [*PARTS, *FAMILY_PARTS[family]] if (line := lost(model, path, f"{family}: "))]
    assert not gone, "\n".join(gone)


def test_a_part_that_has_moved_is_named_with_the_version() -> None:
    said = lost_import("transformers.utils.logging.an_old_name.of_this")
    assert said == (
        f"transformers {version('transformers')} has moved transformers.utils.logging.an_old_name.of_this: "
        "transformers.utils.logging has no an_old_name"
    )
