"""The benchmark at the shapes of real models, in one command; see `tests/benchmarks/README.md`.

python -m tests.benchmarks.shapes
python -m tests.benchmarks.shapes --model qwen2.5-vl-7b --budget 6k --memory durable full

Without options it measures both models, all budgets and every memory; of the second model only three memories, since
its language model has the shape of the first one's and only the vision tower differs.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from pathlib import Path

import torch

from protokv.memories import CONFIGS
from tests.benchmarks.results import RESULTS, table
from tests.benchmarks.shapes.models import MODELS
from tests.benchmarks.shapes.oracles import proven
from tests.benchmarks.shapes.run import Request, run, summary_rows, write

SOME = ["durable", "sliding-window", "full"]
BUDGETS = {"4k": 4000, "6k": 6000, "24k": 24_000}


def main() -> None:
    """Measure, write and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=sorted(MODELS), nargs="+", default=sorted(MODELS, reverse=True))
    parser.add_argument("--budget", choices=sorted(BUDGETS), nargs="+", default=["4k", "6k", "24k"])
    parser.add_argument("--memory", choices=sorted(CONFIGS), nargs="+")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--layers", type=int, help="of the language model; all on CUDA and one on a CPU by default")
    parser.add_argument("--rounds", type=int, help="of every stage; 50 on CUDA and 2 on a CPU by default")
    parser.add_argument("--positions", choices=("stream", "compact"), help="of the tokens in memory")
    parser.add_argument("--output", type=Path, default=RESULTS, help="folder of the JSON file and the table")
    given = parser.parse_args()
    on_cpu = given.device == "cpu"
    if on_cpu:
        torch.set_num_threads(1)
    elif not torch.cuda.is_available():
        parser.error("there is no CUDA device on this machine; use --device cpu")
    began = time.monotonic()
    tell = lambda what: print(f"{time.monotonic() - began:4.0f} s  {what}", file=sys.stderr)  # noqa: E731
    tell("correctness")
    good, withheld = proven(given.memory or list(CONFIGS)), []
    for model in given.model:
        request = Request(
            shape=MODELS[model],
            device=torch.device(given.device),
            dtype=torch.bfloat16,
            budgets=[BUDGETS[name] for name in given.budget],
            memories=given.memory or (list(CONFIGS) if model == given.model[0] else SOME),
            rounds=given.rounds or (2 if on_cpu else 50),
            positions=given.positions,
            layers=given.layers or (1 if on_cpu else None),
            vocabulary=1000 if on_cpu else None,
            peak=(1024, 2**26) if on_cpu else (8192, 2**31),
        )
        tell(model)
        where = f"-{given.positions}" if given.positions else ""
        name = f"shapes-{model}-{'-'.join(given.budget)}{where}-{given.device}"
        with tempfile.TemporaryDirectory() as folder:
            document = run(request, good, Path(folder), tell)
        write(given.output, name, document)
        print(f"{model}, {given.device}: medians, ms (see the notes of the file)\n\n{table(summary_rows(document))}")
        tell(f"wrote {name}.json and {name}.md to {given.output}")
        withheld += document["withheld"]
    if withheld:
        sys.exit("some memories did not equal their literal form, and there are no figures of them")


if __name__ == "__main__":
    main()
