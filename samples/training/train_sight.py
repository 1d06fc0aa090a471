"""Put pictures in front of SmolLM2: `python -m samples.training.train_sight --out DIR [--seed N]`.

Trains a vision tower; sets and trains the links from questions to visual tokens in one early layer;
trains answers through all layers; and writes DIR/model, a LLaVA-OneVision that `protokv --model
DIR/model` reads. The same command goes on where it was stopped: behind the tower, or ten steps back
in a later stage. DIR/log.jsonl has every measurement.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import Tensor, nn
from transformers import AutoTokenizer, LlamaForCausalLM

from samples.training.sight_language import (
    IGNORED,
    LINK_LAYER,
    Batch,
    Reader,
    draw_codes,
    judge,
    make_batch,
)
from samples.training.sight_model import write_model
from samples.training.sight_surgery import plant
from samples.training.sight_tower import Tower, fit_codes, see, to_codes, train_tower
from samples.training.stages import Journal, save_atomically
from samples.worlds.llama import unpack_smollm2


@dataclass(frozen=True, slots=True)
class Amounts:
    """Steps of the three stages, frames that codes are fitted to, and questions, six a video, that
    surgery reads.
    """

    tower: int = 1500
    links: int = 80
    answers: int = 2000
    frames: int = 4096
    videos: int = 144


def load_reader() -> Reader:
    """Return the language model as a reader of codes."""
    source = unpack_smollm2()
    return Reader(
        LlamaForCausalLM.from_pretrained(source, dtype=torch.float32),
        AutoTokenizer.from_pretrained(source),
    )


def run_tower(folder: Path, seed: int, amounts: Amounts, say: Journal) -> dict[str, Tensor]:
    """Return the trained tower and the reading of its codes; train them if their file is
    missing.
    """
    path = folder / "tower.safetensors"
    if not path.exists():
        torch.manual_seed(seed)
        tower = Tower()
        for record in train_tower(tower, seed, amounts.tower):
            say({"stage": "tower", **record})
        features, labels = see(tower, np.random.default_rng([seed, 31]), amounts.frames)
        weight, bias = fit_codes(features, to_codes(labels.view(-1, 9, 2)).flatten(0, 1), 1e-4)
        save_atomically({**tower.state_dict(), "codes.weight": weight, "codes.bias": bias}, path)
    return load_file(path)


def train(
    reader: Reader,
    path: Path,
    names: Sequence[str],
    measure: Callable[[np.random.Generator], tuple[Tensor, dict[str, float]]],
    steps: int,
    rate: float,
    seed: int,
) -> Iterator[dict[str, Any]]:
    """Train some parameters of a reader up to `steps` batches, from where its file stands; yield
    means of every ten.

    The file is written every ten steps. `measure` draws a batch and returns its loss, and what else
    is known of it.
    """
    stored = load_file(path) if path.exists() else {"step": torch.tensor(0)}
    if path.exists():
        reader.adopt(stored)
    begin = int(stored["step"])
    rng = np.random.default_rng([seed, begin])
    own = [reader.own()[name] for name in names]
    optimizer = torch.optim.AdamW(own, lr=rate, betas=(0.9, 0.98), weight_decay=0.0)
    lately: dict[str, list[float]] = {}
    for step in range(begin, steps):
        optimizer.param_groups[0]["lr"] = (
            rate * min(1, (step - begin + 1) / 10) * (1.05 - (step / steps) ** 2)
        )
        loss, record = measure(rng)
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(own, 1.0)
        optimizer.step()
        for key, value in {"loss": loss.item(), **record}.items():
            lately.setdefault(key, []).append(value)
        if (step + 1) % 10 == 0 or step + 1 == steps:
            yield {
                "step": step + 1,
                **{key: round(float(np.mean(values)), 3) for key, values in lately.items()},
            }
            lately = {}
            save_atomically({**reader.own(), "step": torch.tensor(step + 1)}, path)


def run_links(reader: Reader, folder: Path, seed: int, amounts: Amounts, say: Journal) -> None:
    """Let one layer find what a question is about."""
    path = folder / "links.safetensors"

    def draw(rng: np.random.Generator) -> Batch:
        return make_batch(rng, reader, 12, 8, 300, draw_codes, cut=True)

    def look(rng: np.random.Generator) -> tuple[Tensor, dict[str, float]]:
        batch = draw(rng)
        guess, trace = reader.look(batch)
        right = (guess.argmax(-1) == batch.found).all(-1).float().mean().item()
        return F.cross_entropy(guess.flatten(0, 1), batch.found.view(-1)) + 0.1 * trace, {
            "found": right
        }

    if not path.exists():
        rng = np.random.default_rng([seed, 32])
        batches = [draw(rng) for _ in range(amounts.videos // 12)]
        say({"stage": "links", "words": plant(reader, batches)})
        reader.fit_probe(batches)
    others = ("codebook", "newline", "probe.weight", "probe.bias")
    names = [name for name in reader.own() if f".layers.{LINK_LAYER}." in name or name in others]
    for record in train(reader, path, names, look, amounts.links, 5e-4, seed):
        say({"stage": "links", **record})


def run_answers(reader: Reader, folder: Path, seed: int, amounts: Amounts, say: Journal) -> None:
    """Let all layers answer."""

    def answer(rng: np.random.Generator) -> tuple[Tensor, dict[str, float]]:
        batch = make_batch(rng, reader, 6, 8, 300, draw_codes)
        logits = reader(batch)
        right = {
            kind: float(np.mean(verdicts))
            for kind, verdicts in judge(logits.detach(), batch).items()
        }
        return F.cross_entropy(logits, batch.labels[batch.labels != IGNORED]), right

    names = [name for name in reader.own() if not name.startswith("probe")]
    for record in train(
        reader, folder / "answers.safetensors", names, answer, amounts.answers, 5e-4, seed
    ):
        say({"stage": "answers", **record})


def learned_of(tower: dict[str, Tensor], reader: Reader) -> dict[str, Tensor]:
    """Return what is added to the language model, in half precision; what is nothing is left
    out.
    """
    own = {name: one.detach() for name, one in reader.own().items() if not name.startswith("probe")}
    nothing = {
        name.removesuffix("up")
        for name, one in own.items()
        if name.endswith(".up") and not one.any()
    }
    kept = {name: one for name, one in own.items() if name.rpartition(".")[0] + "." not in nothing}
    return {name: one.half() for name, one in {**tower, **kept}.items() if ".linear_2." not in name}


def main(arguments: Sequence[str] | None = None, amounts: Amounts = Amounts()) -> int:
    """Train, write the model, and print its path."""
    parser = argparse.ArgumentParser(
        prog="python -m samples.training.train_sight", description=__doc__.splitlines()[0]
    )
    parser.add_argument(
        "--out", type=Path, required=True, help="folder for stages, log and the model"
    )
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    folder: Path = options.out
    say = Journal(folder)
    print(f"training; measurements go to {say.path}", file=sys.stderr)
    tower = run_tower(folder, options.seed, amounts, say)
    torch.manual_seed(options.seed)
    reader = load_reader()
    run_links(reader, folder, options.seed, amounts, say)
    run_answers(reader, folder, options.seed, amounts, say)
    learned = learned_of(tower, reader)
    save_atomically(learned, folder / "learned.safetensors")
    write_model(learned, folder / "model")
    print(folder / "model")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
