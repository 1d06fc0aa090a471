"""Measure what memories keep of the keys and values of the full cache: the harm of reading apart
from that of encoding.

    python samples/studies/language/reading.py 6400 0 1 paper:budget=3200:mass_bias=log_n_over_s

The arguments are tokens, seed and steps a paragraph of a stream, and memories with their settings.
The full cache reads the stream; each memory is given what it made of every step, and is asked. Each
row is a JSON object: nats early, in the middle and late, and on unseen text divergence from and
agreement with the full cache."""

from __future__ import annotations

import json
import sys

from protokv.core.step import StepKV
from protokv.memories import MemoryConfig
from protokv.stream.session import Session
from protokv_cli.parsing import parse_setting
from samples.worlds.language import Language, make_stream, measure
from samples.worlds.llama import load_llama


def main(tokens: str, seed: str, redundancy: str, *memories: str) -> None:
    """Print a row for the full cache and for each memory."""
    backbone = load_llama()
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
    row, expected = measure(full, stream)
    print(json.dumps({"memory": "full", **row}), flush=True)
    for text in memories:
        name, *settings = text.split(":")
        session = Session.start(
            backbone, MemoryConfig.of(name, **dict(map(parse_setting, settings))), fps=1.0
        )
        for step in steps:
            session.memory.append(step)
        session.clock = full.clock
        print(json.dumps({"memory": text, **measure(session, stream, expected)[0]}), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
