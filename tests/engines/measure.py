"""Measure what vLLM makes of states on a CPU, beside `protokv query` one by one, in turns.

python -m tests.engines.measure PYTHON_OF_VLLM SMOLLM2_FOLDER
"""

import sys
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any

import torch

from protokv.core.decoding import Decoding
from protokv.slots import SlotsFile
from protokv.stream.session import Session
from tests.engines import material
from tests.engines.prove import open_all
from tests.engines.server import Server

STATES = 4
ROUNDS = 3
DECODING = Decoding(max_new_tokens=16)


def read_long_text(backbone: Any, seed: int) -> Session:
    """Return a session that has read 1,370 tokens and keeps a third of them as slots."""
    return material.read_text(backbone, seed, budget=512, steps=32)


def measure_rates(session: Session, opened: Any, questions: list[str]) -> dict[str, list[float]]:
    """Return questions a second of each way, a number for each round."""
    rates: dict[str, list[float]] = {"query": [], "1": [], "8": [], "32": []}
    for _ in range(ROUNDS):
        for way, found in rates.items():
            count = {"query": 4, "1": 8, "8": 16, "32": 32}[way]
            asked = (questions * count)[:count]
            began = time.perf_counter()
            if way == "query":
                for question in asked:
                    session.ask(question, DECODING)
            else:
                with ThreadPoolExecutor(int(way)) as pool:
                    list(pool.map(lambda one: opened.ask(one, DECODING), asked))
            found.append(len(asked) / (time.perf_counter() - began))
    return rates


def main() -> None:
    python, model = map(Path, sys.argv[1:])
    backbone = material.load_smollm2(model)
    questions = material.ask_in_words()
    with TemporaryDirectory() as made:
        folder = Path(made)
        (folder / "model").symlink_to(model)
        sessions = material.write_states(backbone, folder, STATES, read_long_text)
        first = sessions["s0"]
        widths = {True: 80, False: 64}
        for bias, width in widths.items():
            options: dict[str, object] = {"dtype": "float32", "max-num-seqs": 32, "bias": bias}
            with Server(python, folder, options).running() as server:
                opened = open_all(folder, server, sessions, backbone)
                first_ms: dict[str, list[float]] = {"cold": [], "warm": []}
                off = list[float]()
                same = 0
                for times, question in zip(first_ms.values(), questions, strict=False):
                    for name, one in opened.items():
                        answer = one.ask(question, replace(DECODING, top_logprobs=10))
                        times.append(answer.ttft_ms)
                        likely = sessions[name].prefill(question)[-1].log_softmax(-1)
                        chances = (answer.chances or [])[0]
                        off.append(max(abs(float(likely[i]) - p) for i, p in chances))
                        same += int(likely.argmax()) == chances[0].id
                waits = ", ".join(f"{name} {median(ms):.0f} ms" for name, ms in first_ms.items())
                print(f"bias {bias}: first token {waits}")
                print(f"  furthest log probability, median {median(off):.2e}, most {max(off):.2e};")
                print(f"  {same} of {len(off)} first tokens as query")
                for way, found in measure_rates(first, opened["s0"], questions).items():
                    each = ", ".join(f"{rate:.2f}" for rate in found)
                    print(f"  {way}: {median(found):.2f} questions a second ({each})", flush=True)
            head = SlotsFile(folder / "states/s0.kv.safetensors").head
            each = 2 * backbone.layers * backbone.kv_heads * 4
            seen = first.clock.tokens_seen + first.sink_tokens
            print(f"  cache: {head.slots} slots {head.slots * each * width / 1e6:.1f} MB, ", end="")
            print(f"its {seen} tokens exactly {seen * each * 64 / 1e6:.1f} MB")
    print(f"torch {torch.__version__}, {torch.get_num_threads()} thread")


if __name__ == "__main__":
    main()
