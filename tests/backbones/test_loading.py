"""Loading models as users have them: shards, dtypes, device maps, quantisation; one clear line for
each error.
"""

import gc
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from huggingface_hub import save_torch_state_dict
from safetensors.torch import load_file
from transformers import AutoTokenizer, Qwen2_5_VLForConditionalGeneration

import protokv
from protokv.backbones import identify_backbone, load_backbone, loading
from protokv.backbones.files import find_entry_points, read_video_processor
from protokv.backbones.registry import wrap_model
from protokv.core.backbone import Backbone
from protokv.core.decoding import Decoding
from protokv.core.sharding import LayerShards
from protokv.errors import ConfigError, ModelError, StateMismatch
from protokv.memories import MemoryConfig
from protokv.stream.session import Session
from protokv.texts import Keywords
from tests.conftest import watched
from tests.core.streams import same

QUESTION = "what is the first star ?"


@pytest.fixture
def folder(tiny_folder: Path, tmp_path: Path) -> Path:
    return shutil.copytree(tiny_folder, tmp_path / "model")


def on_cpu(folder: Path | str, **settings: Any) -> Backbone:
    return load_backbone(str(folder), **({"device": "cpu", "dtype": "float32"} | settings))


def refused(folder: Path | str, **settings: Any) -> ModelError:
    with pytest.raises(ModelError) as caught:
        on_cpu(folder, **settings)
    assert caught.value.message.startswith(f"cannot load the model {folder}: ")
    assert "\n" not in caught.value.message + caught.value.hint
    assert caught.value.hint
    return caught.value


def test_shards_are_the_model_of_one_file_another_byte_is_another_and_a_missing_one_is_named(
    tiny: Backbone, folder: Path
) -> None:
    (folder / "model.safetensors").rename(folder / "whole")
    save_torch_state_dict(load_file(folder / "whole"), folder, max_shard_size="60KB")
    sessions = [
        watched(backbone, MemoryConfig.of("full", budget=64), [0])
        for backbone in (tiny, on_cpu(folder))
    ]
    assert torch.equal(*(session.prefill(QUESTION) for session in sessions))
    digests = {sessions[1].backbone.identity.weights_digest}
    shards = sorted(folder.glob("*.safetensors"))
    for shard in shards:
        data = bytearray(shard.read_bytes())
        data[-1] ^= 1
        shard.write_bytes(data)
        digests.add(identify_backbone(str(folder), device="cpu").weights_digest)
    assert len(digests) == 1 + len(shards) > 3
    shards[-1].unlink()
    assert shards[-1].name in refused(folder).message


def test_fast_kernels_take_every_norm_and_odd_hidden_features(folder: Path) -> None:
    model = on_cpu(folder)._model  # type: ignore[attr-defined]
    loading.use_fast_kernels(model)
    assert all(
        "forward" in vars(one) for one in model.modules() if type(one).__name__.endswith("RMSNorm")
    )
    assert model.model.visual.blocks[0].mlp.down_proj.weight.shape[1] == 24


def test_auto_on_a_cpu_keeps_16_bits_where_the_processor_multiplies_bfloat16(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    request = loading.PlacementOptions.parse("cpu")
    for multiplies, half in ((True, torch.bfloat16), (False, torch.float32)):
        monkeypatch.setattr(loading, "has_bfloat16_instructions", lambda found=multiplies: found)
        assert (
            request.placement(torch.float16).dtype
            == request.placement(torch.bfloat16).dtype
            == half
        )
        assert (
            request.placement(torch.float32).dtype == request.placement(None).dtype == torch.float32
        )
        assert load_backbone("protokv/mini", device="cpu").dtype == torch.float32


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"device": "tpu"}, "device tpu is not available"),
        ({"device": "cpu:1"}, "device cpu:1 is not available"),
        ({"device": "cuda:2"}, "device cuda:2 is not available"),
        ({"dtype": "int8"}, "no dtype 'int8'"),
        ({"dtype": "auto+4bit"}, r"dtype auto\+4bit and quantization None contradict"),
        ({"dtype": "bfloat16+2bit"}, "no quantization '2bit'"),
        (
            {"dtype": "bfloat16+4bit", "quantization": "8bit"},
            r"bfloat16\+4bit and quantization 8bit contradict",
        ),
        ({"device_map": "sequential", "device": "auto"}, "no device map 'sequential'"),
        (
            {"device_map": "auto", "device": "cpu"},
            "device map auto and device cpu both choose devices",
        ),
    ],
)
def test_contradicting_options_are_named(
    folder: Path, settings: dict[str, str], said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    with pytest.raises(ConfigError, match=said):
        on_cpu(folder, **settings)


def edit_config(folder: Path, section: str | None = None, **fields: Any) -> None:
    config = json.loads((folder / "config.json").read_text())
    (config[section] if section else config).update(fields)
    (folder / "config.json").write_text(json.dumps(config))


def drop_template(folder: Path) -> None:
    for file in folder.glob("chat_template*"):
        file.unlink()
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    settings.pop("chat_template", None)
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))


DAMAGES: dict[str, tuple[Callable[[Path], object], str]] = {
    "an adapter": (
        lambda f: (f / "adapter_config.json").write_text("{}"),
        "an adapter lies in its folder",
    ),
    "no config": (lambda f: (f / "config.json").unlink(), "there is no config.json"),
    "no JSON": (
        lambda f: (f / "config.json").write_text('{"model_type": '),
        "config.json is not valid JSON",
    ),
    "a long header": (lambda f: (f / "model.safetensors").write_bytes(b"\xff" * 9), "header"),
    "half a file": (lambda f: os.truncate(f / "model.safetensors", 1000), "header"),
    "a pickle, which is never opened": (
        lambda f: (f / "model.safetensors").rename(f / "pytorch_model.bin"),
        "model.safetensors",
    ),
    "no tokenizer": (
        lambda f: [file.unlink() for file in f.glob("tokenizer*")],
        "there is no tokenizer",
    ),
    "another family": (
        lambda f: edit_config(f, model_type="bert"),
        "its model_type is bert, which is not supported",
    ),
    "no template": (drop_template, "there is no chat template"),
    "a value of a wrong type": (
        lambda f: edit_config(f, "text_config", num_hidden_layers="three"),
        "",
    ),
    "weights of another size": (lambda f: edit_config(f, "text_config", intermediate_size=56), ""),
    "no layer that sees everything": (
        lambda f: edit_config(
            f,
            "text_config",
            use_sliding_window=True,
            sliding_window=64,
            max_window_layers=0,
            layer_types=None,
        ),
        "none of its layers has full attention",
    ),
}


@pytest.mark.parametrize(("damage", "said"), DAMAGES.values(), ids=DAMAGES.keys())
def test_a_damaged_folder_is_refused_in_one_line(
    folder: Path, damage: Callable[[Path], object], said: str
) -> None:
    damage(folder)
    assert said in refused(folder).message


def test_an_installed_package_adds_a_family(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "my_package-1.dist-info").mkdir()
    entry = (
        "[protokv.backbones]\nmy_vl = my_package.backbone:MyVL\nme/model = "
        "my_package.backbone:Packed\n"
    )
    (tmp_path / "my_package-1.dist-info" / "entry_points.txt").write_text(entry)
    (tmp_path / "my_package-1.dist-info" / "METADATA").write_text(
        "Metadata-Version: 2.1\nName: my-package\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    assert (
        find_entry_points.__wrapped__(packaged=False)["my_vl"].value == "my_package.backbone:MyVL"
    )
    assert "me/model" in find_entry_points.__wrapped__(packaged=True)


def test_too_little_memory_is_named(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loading, "measure_machine_memory", lambda: 1000)
    error = refused(folder)
    assert "does not fit into memory" in error.message
    assert "--quantization 4bit" in error.hint


def test_the_settings_for_video_come_before_those_for_images_the_newest_form_first(
    tmp_path: Path,
) -> None:
    # Processors of transformers 4 wrote the newest file without the settings of their parts.
    for name, content, found in (
        ("preprocessor_config", {"resample": 1, "crop_size": None}, ({"resample": 1}, False)),
        ("video_preprocessor_config", {"resample": 2}, ({"resample": 2}, True)),
        ("processor_config", {"num_image_tokens": 729}, ({"resample": 2}, True)),
        ("processor_config", {"video_processor": {"resample": 3}}, ({"resample": 3}, True)),
    ):
        (tmp_path / f"{name}.json").write_text(json.dumps(content))
        assert read_video_processor(str(tmp_path)) == found


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> Keywords:
    """Record the arguments of `from_pretrained`, as if every package were installed."""
    seen: Keywords = {}
    load: Callable[..., Any] = Qwen2_5_VLForConditionalGeneration.from_pretrained

    def fake(path: str, **settings: Any) -> Any:
        seen.update(settings)
        names = ("dtype", "attn_implementation", "output_loading_info")
        return load(path, **{name: settings[name] for name in names})

    monkeypatch.setattr(Qwen2_5_VLForConditionalGeneration, "from_pretrained", fake)
    return seen


def test_quantisation_and_device_map_reach_transformers(folder: Path, asked: Keywords) -> None:
    backbone: Any = on_cpu(folder, dtype="bfloat16", quantization="4bit")
    config = asked["quantization_config"]
    assert (config.load_in_4bit, config.bnb_4bit_quant_type) == (True, "nf4")
    assert config.bnb_4bit_compute_dtype == backbone.dtype == torch.bfloat16
    assert asked["device_map"] == {"": torch.device("cpu")}
    assert backbone.identity.dtype == "bfloat16+4bit"
    # Tower, head and odd sizes are left alone.
    skipped = set(config.llm_int8_skip_modules)
    for name, layer in backbone._model.named_modules():
        if isinstance(layer, torch.nn.Linear):
            fits = layer.in_features % 64 == 0 == layer.out_features % 32
            assert (name in skipped) != (fits and "language_model" in name)
    backbone = load_backbone(
        str(folder), dtype="float16", quantization="8bit", device_map="balanced"
    )
    assert asked["quantization_config"].load_in_8bit
    assert (asked["device_map"], backbone.identity.dtype) == ("balanced", "float16+8bit")
    # Only safetensors, and no code.
    assert (asked["use_safetensors"], asked["trust_remote_code"]) == (True, False)


def test_a_state_of_a_quantised_model_loads_it_again(
    folder: Path, asked: Keywords, tmp_path: Path
) -> None:
    path = tmp_path / "a.safetensors"
    protokv.save(
        Session.start(
            on_cpu(folder, quantization="4bit"), MemoryConfig.of("sliding-window", budget=20)
        ),
        path,
    )
    with pytest.raises(
        StateMismatch, match=r"backbone\.dtype is 'float32\+4bit', here it is 'float32'"
    ):
        protokv.load(path, on_cpu(folder))
    asked.clear()
    protokv.load(path, str(folder), device="cpu")
    assert asked["quantization_config"].load_in_4bit


def test_a_package_that_is_needed_and_missing_is_named_with_how_to_install_it(folder: Path) -> None:
    with pytest.raises(ModelError, match=r"requires `?(bitsandbytes|accelerate)`?.*`pip install"):
        on_cpu(folder, quantization="4bit")


def test_loading_leaves_the_garbage_collector_as_it_was(folder: Path) -> None:
    for switch in (gc.disable, gc.enable):
        switch()
        on_cpu(folder)
        assert gc.isenabled() == (switch is gc.enable)


def test_a_model_over_several_devices_answers_and_saves_as_on_one(
    tiny: Backbone, folder: Path, tmp_path: Path
) -> None:
    """The devices are different for torch, although all are one CPU."""
    model: Any = Qwen2_5_VLForConditionalGeneration.from_pretrained(
        folder, attn_implementation="protokv"
    )
    model.hf_device_map = {"model.language_model": "cpu", "model.visual": "disk"}
    spread = wrap_model(model, AutoTokenizer.from_pretrained(folder))
    assert spread.layer_devices == [torch.device("cpu")] * 3
    spread.layer_devices = [torch.device(name) for name in ("cpu", "cpu:0", "cpu:0")]
    sessions = [
        watched(backbone, MemoryConfig.of("durable", budget=40), range(8))
        for backbone in (tiny, spread)
    ]
    assert isinstance(sessions[1].memory, LayerShards)
    answers = [session.ask(QUESTION, Decoding(max_new_tokens=5)).text for session in sessions]
    assert answers[0] == answers[1]
    expected = sessions[0].prefill(QUESTION)
    assert torch.equal(sessions[1].prefill(QUESTION), expected)
    protokv.save(sessions[1], tmp_path / "state.safetensors")
    again = protokv.load(tmp_path / "state.safetensors", tiny)
    assert torch.equal(again.prefill(QUESTION), expected)
    assert same(again.tensors(), sessions[0].tensors())


NAMED = "kernels-community/flash-attn"


@pytest.mark.parametrize(
    ("section", "field", "value"),
    [
        (None, "_attn_implementation", NAMED),
        (None, "attn_implementation", NAMED),
        ("text_config", "_attn_implementation", NAMED),
        ("vision_config", "attn_implementation", f"{NAMED}@main"),
        (None, "attn_implementation", "flash_attention_2"),
        ("text_config", "experts_implementation", "sonicmoe"),
    ],
)
def test_no_config_chooses_an_attention_or_a_kernel(
    folder: Path, section: str | None, field: str, value: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = list[object]()
    for name in ("lazy_import_flash_attention", "kernelize"):
        monkeypatch.setattr(f"transformers.modeling_utils.{name}", lambda *a, **_: asked.append(a))
    edit_config(folder, section, **{field: value})
    on_cpu(folder)
    assert not asked
    assert os.environ["USE_HUB_KERNELS"] == "0"
