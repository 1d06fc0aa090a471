"""A vision tower for a language model: from a frame to one code a cell, which says what is in it.

The tower is a SigLIP of two layers on 6 x 6 patches, and the first half of LLaVA-OneVision's
projector. The means of four patches are nine cells. Each learns its shape and colour, and to give
its code, through linear heads that are not kept. A code has a number for each colour, shape and
place, and one for "nothing"; it is a linear reading of the cell, fitted in closed form. So a code
times a codebook of embeddings is linear as well, and fits into the second half of the projector
(`sight_model`).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor, nn
from transformers import LlavaOnevisionConfig, SiglipVisionModel
from transformers.models.llava_onevision.modeling_llava_onevision import (
    LlavaOnevisionMultiModalProjector,
)

from samples.worlds.events import Event, make_event
from samples.worlds.pictures import UNITS, draw, make_scenery, paint

SIDE: Final = 84
CELLS: Final = 9
CODES: Final = 8 + 8 + 9 + 1
BATCH: Final = 64
PEAK: Final = 3e-3


def make_config(text: dict[str, Any] | None = None, **tokens: int) -> LlavaOnevisionConfig:
    """Return the config of a LLaVA-OneVision with this tower; `text` is that of its language
    model.
    """
    return LlavaOnevisionConfig(
        vision_config={
            "model_type": "siglip_vision_model",
            "hidden_size": 64,
            "intermediate_size": 192,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "image_size": SIDE,
            "patch_size": 14,
            "vision_use_head": False,
        },
        text_config=text or {"model_type": "llama", "hidden_size": 576},
        vision_feature_layer=-1,
        vision_feature_select_strategy="full",
        tie_word_embeddings=True,
        **tokens,
    )


class Tower(nn.Module):
    """Frames `[B, 84, 84, 3]` uint8 to features `[B, 9, 576]` of cells."""

    def __init__(self) -> None:
        super().__init__()
        config = make_config()
        self.vision = SiglipVisionModel(config.vision_config)
        self.projector = LlavaOnevisionMultiModalProjector(config)

    def forward(self, frames: Tensor) -> Tensor:
        """Run tower and the first half of the projector, and average the four patches of a cell."""
        pixels = frames.permute(0, 3, 1, 2).float() / 127.5 - 1
        seen = self.vision(pixels, output_hidden_states=True).hidden_states[-1]
        hidden = self.projector.act(self.projector.linear_1(seen))
        return hidden.view(-1, 3, 2, 3, 2, hidden.shape[-1]).mean((2, 4)).flatten(1, 2)


def draw_frame(rng: np.random.Generator) -> tuple[NDArray[np.uint8], NDArray[np.int64]]:
    """Draw a frame with up to nine objects at any phase of their motion, and noise in two thirds of
    the frames.

    Returns the frame `[84, 84, 3]` and labels `[9, 2]`: shape + 1 and colour + 1 of each cell, 0
    for an empty cell.
    """
    labels = np.zeros((CELLS, 2), np.int64)
    share = (0.1, 0.3, 0.65)[int(rng.integers(3))]
    frame = draw(make_scenery(rng), float(rng.uniform(0, 10)), UNITS)
    for place in np.flatnonzero(rng.random(CELLS) < share).tolist():
        shape = int(rng.integers(8))
        colour = int(rng.integers(8))
        event: Event = make_event(
            rng, (shape, colour, place), 0.0, 4.0, 0.5 if share < 0.5 else 0.15
        )
        x, y = event.centre(float(rng.uniform(0, 3.5)))
        paint(frame, shape, event.size, event.tint, x, y)
        labels[place] = shape + 1, colour + 1
    if rng.random() < 0.66:
        frame += rng.standard_normal((UNITS, UNITS, 1), dtype=np.float32) * np.float32(
            rng.uniform(0, 8)
        )
    return np.clip(frame + 0.5, 0, 255).astype(np.uint8), labels


def draw_frames(rng: np.random.Generator, n: int) -> tuple[Tensor, Tensor]:
    """Return `n` frames and their labels, stacked."""
    frames, labels = zip(*(draw_frame(rng) for _ in range(n)), strict=True)
    return torch.from_numpy(np.stack(frames)), torch.from_numpy(np.stack(labels))


def to_codes(labels: Tensor) -> Tensor:
    """Return the codes `[..., 9, CODES]` that labels `[..., 9, 2]` stand for: ones for colour,
    shape and place.
    """
    lit = (labels[..., :1] > 0).float()
    shape, colour = (F.one_hot(one, 9)[..., 1:].float() for one in labels.unbind(-1))
    return torch.cat(
        (colour, shape, torch.eye(CELLS).expand(*labels.shape[:-1], CELLS) * lit, 1 - lit), -1
    )


def train_tower(
    tower: Tower, seed: int, steps: int, peak: float = PEAK
) -> Iterator[dict[str, float]]:
    """Train for `steps` batches, and yield the loss and the share of right objects every 100."""
    rng = np.random.default_rng([seed, 30])
    head = nn.Linear(576, 18 + CODES)
    own = [*tower.vision.parameters(), *tower.projector.linear_1.parameters(), *head.parameters()]
    optimizer = torch.optim.AdamW(own, lr=peak, betas=(0.9, 0.98), weight_decay=0.02)
    totals = torch.zeros(3)
    for step in range(steps):
        done = step / steps
        optimizer.param_groups[0]["lr"] = peak * min(1.0, step / 50, 1.05 - done**2)
        frames, labels = draw_frames(rng, BATCH)
        guess, codes = head(tower(frames)).split((18, CODES), -1)
        guess = guess.reshape(-1, 2, 9)
        loss = F.cross_entropy(guess.flatten(0, 1), labels.view(-1)) + 10 * F.mse_loss(
            codes, to_codes(labels)
        )
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(own, 1.0)
        optimizer.step()
        right = (guess.argmax(-1) == labels.view(-1, 2)).all(-1)
        lit = labels.view(-1, 2)[:, 0] > 0
        totals += torch.tensor(
            [loss.item(), right[lit].float().mean().item(), right[~lit].float().mean().item()]
        )
        if (step + 1) % 100 == 0:
            yield dict(zip(("loss", "objects", "empty"), (totals / 100).tolist(), strict=True)) | {
                "step": step + 1
            }
            totals.zero_()


@torch.no_grad()
def fit_codes(features: Tensor, codes: Tensor, ridge: float = 1e-3) -> tuple[Tensor, Tensor]:
    """Return the weight `[CODES, 576]` and bias `[CODES]` that read codes off features best."""
    mean = features.double().mean(0)
    target = codes.double().mean(0)
    x = features.double() - mean
    y = codes.double() - target
    gram = x.T @ x
    gram += ridge * gram.diagonal().mean() * torch.eye(len(gram), dtype=torch.float64)
    weight = torch.linalg.solve(gram, x.T @ y).T
    return weight.float(), (target - weight @ mean).float()


@torch.no_grad()
def see(tower: Tower, rng: np.random.Generator, frames: int) -> tuple[Tensor, Tensor]:
    """Return features and labels of drawn frames, a cell a row: `[9 n, 576]` and `[9 n, 2]`."""
    seen = [
        (tower(pictures), labels)
        for pictures, labels in (draw_frames(rng, BATCH) for _ in range(frames // BATCH))
    ]
    return torch.cat([one.flatten(0, 1) for one, _ in seen]), torch.cat(
        [labels.flatten(0, 1) for _, labels in seen]
    )
