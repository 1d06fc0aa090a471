"""The tower learns to see."""

from __future__ import annotations

import torch

from samples.training.model import make_model
from samples.training.vision_training import train_vision
from tests.training.tiny import SMALL


def test_the_vision_loss_falls():
    records = []
    visual = make_model(0, **SMALL).model.visual
    before = visual.blocks[0].attn.qkv.weight.clone()
    train_vision(visual, 0, 30, records.append, batch=8, workers=0)
    assert records[-1]["loss"] < 6.2
    assert visual.blocks[0].attn.qkv.weight.dtype == torch.float32
    assert not torch.equal(before, visual.blocks[0].attn.qkv.weight)
