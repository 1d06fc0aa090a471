"""The exported folder is a published checkpoint."""

from __future__ import annotations

import json

import torch
from transformers import AutoTokenizer, Qwen2_5_VLForConditionalGeneration

from samples.training.export import export
from samples.training.trainer import Trainer
from tests.training.tiny import SMALL, tiny


def test_an_exported_folder_is_a_qwen2_5_vl_that_transformers_loads(visual, bank, tmp_path):
    trainer = Trainer(visual, bank, 2, lambda record: None, **SMALL)
    trainer.run_stage(tiny(steps=2), 0)
    export(trainer.float_model(), tmp_path / "weights")
    names = {f.name for f in (tmp_path / "weights").iterdir()}
    assert {"config.json", "tokenizer.json", "tokenizer_config.json", "chat_template.jinja"} <= names
    assert {"generation_config.json", "preprocessor_config.json", "model.safetensors"} <= names
    assert not [f for f in tmp_path.iterdir() if f.name != "weights"]
    assert "config_hash" in json.loads((tmp_path / "weights" / "identity.json").read_text())
    settings = json.loads((tmp_path / "weights" / "preprocessor_config.json").read_text())
    assert settings["min_pixels"] == settings["max_pixels"] == 84 * 84
    model = Qwen2_5_VLForConditionalGeneration.from_pretrained(tmp_path / "weights", dtype=torch.float32)
    assert model.config.protokv_fps == 2.0
    assert model.lm_head.weight.data_ptr() == model.model.language_model.embed_tokens.weight.data_ptr()
    for name, parameter in model.named_parameters():
        trained = trainer.optimizer.masters.get(name)
        if trained is not None:
            torch.testing.assert_close(parameter, trained.bfloat16().float(), atol=0, rtol=0)
    assert AutoTokenizer.from_pretrained(tmp_path / "weights")("star?")["input_ids"]
