"""One visit to a GPU: the tests that need one, every family and memory beside the CPU, and times at
7B.

    python -m tests.benchmarks.gpu       # eight minutes; rows go to results/gpu-NAME.jsonl
    python -m tests.benchmarks.gpu --tiny --out rows  # the same parts with a tiny model on a CPU

Each part is a process with a limit of its own and appends its rows as it goes: one that hangs or
fails stops no other. The first ones check what is right and run beside each other, the others
measure and run alone. The 7B model has the shape of Qwen2.5-VL-7B, weights drawn at random on the
device, and a tokenizer of a few words."""

import argparse
import contextlib
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import torch

from protokv.backbones import load_backbone
from protokv.backbones.projections import join_projections
from protokv.core.backbone import Backbone
from protokv.core.decoding import Decoding
from protokv.core.step import StepKV
from protokv.device import kernels, runs
from protokv.memories import MEMORIES, MemoryConfig
from protokv.stream.opening import load, save
from protokv.stream.session import Session
from protokv.stream.taking import DueSteps, take_together
from protokv.stream.together import AskedQuestion, ask_together
from protokv.texts import JsonObject
from protokv.timings import Timings
from tests.backbones.tiny import BUILDERS, QWEN_SPECIAL, QWEN_TEMPLATE, qwen_tokens, write_tokenizer
from tests.benchmarks.results import RESULTS, machine
from tests.realsize.build import PUBLISHED
from tests.video.conftest import encode

ROOT = Path(__file__).parents[2]
CUDA = torch.cuda.is_available()
DEVICE = "cuda" if CUDA else "cpu"
MODEL = "Qwen2.5-VL-7B-Instruct"
SMALL: JsonObject = {
    "hidden_size": 64,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 64,
    "rope_scaling": {"type": "mrope", "mrope_section": [4, 2, 2]},
}
SMALL_VISION = {
    "depth": 2,
    "hidden_size": 32,
    "num_heads": 2,
    "intermediate_size": 16,
    "out_hidden_size": 64,
}
# Pixels of a side of a frame, and tokens of a step of two frames.
SIDE = 392
TOKENS = 196
QUESTION = "what is the first star ?"


@dataclass
class Visit:
    """What all parts share: where rows go, where the model and the clip are, and whether all of it
    is tiny.
    """

    part: str
    rows: Path
    work: Path
    tiny: bool
    share: int = 0

    def __post_init__(self) -> None:
        # A process of a part gets them as text.
        self.rows = Path(self.rows)
        self.work = Path(self.work)

    @property
    def model(self) -> Path:
        return self.work / "model"

    @property
    def config(self) -> MemoryConfig:
        return MemoryConfig.of("durable", budget=24 if self.tiny else 6000)

    @property
    def clip(self) -> Path:
        return self.work / "clip.mp4"

    def say(self, **row: Any) -> None:
        line = json.dumps({"part": self.part} | row)
        print(line[:400], flush=True)
        with self.rows.open("a") as file:
            file.write(line + "\n")

    @contextlib.contextmanager
    def trying(self, **what: Any) -> Iterator[None]:
        """Turn an error into a row."""
        try:
            yield
        except Exception as error:
            self.say(
                **what,
                error=f"{type(error).__name__}: {str(error)[:300]}",
                where=traceback.format_exc()[-900:],
            )


def sync() -> None:
    if CUDA:
        torch.cuda.synchronize()


def timed(call: Callable[[int], object], rounds: int) -> tuple[float, float]:
    """Return milliseconds a call until the device is done, and until the host is."""
    sync()
    start = time.perf_counter()
    for i in range(rounds):
        call(i)
    host = time.perf_counter()
    sync()
    return round(1e3 * (time.perf_counter() - start) / rounds, 3), round(
        1e3 * (host - start) / rounds, 3
    )


def peak() -> float:
    """Return the most GiB that torch has allocated on the device."""
    return round(torch.cuda.max_memory_allocated() / 2**30, 2) if CUDA else 0.0


def run_tests(visit: Visit) -> None:
    """Run the tests that need a GPU."""
    options = ["-m", "gpu", "-n", "0", "-q", "--tb=short", "-W", "default"]
    command = [sys.executable, "-m", "pytest", "tests/test_gpu.py", *options]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    lines = done.stdout.splitlines()
    (visit.rows.parent / "pytest-gpu.txt").write_text(done.stdout[-30000:] + done.stderr[-3000:])
    failed = [line[:300] for line in lines if line.startswith(("FAILED", "ERROR"))]
    visit.say(summary=lines[-1] if lines else done.stderr[-300:], failed=failed)


def compare_families(visit: Visit) -> None:
    """Watch and ask with every family and memory, in float32 on the CPU and on the device, and in
    bfloat16.
    """
    from tests.test_fake_cuda import SLIDING, small

    # cuDNN rounds what goes into a convolution to TF32 by default.
    cudnn: Any = torch.backends.cudnn
    cudnn.conv.fp32_precision = "ieee"
    families = list(BUILDERS)[visit.share :: 4]
    kinds = ["durable", "sliding-window"] if visit.tiny else list(MEMORIES)
    rows: list[JsonObject] = []
    for family in families[:1] if visit.tiny else families:
        folder = visit.work / family
        folder.mkdir()
        path = str(BUILDERS[family](folder))
        models = [
            load_backbone(path, device="cpu", dtype="float32"),
            load_backbone(path, device=DEVICE, dtype="float32"),
            load_backbone(path, device=DEVICE, dtype="bfloat16"),
        ]
        for kind, positions in product(
            kinds, ("stream",) if family in SLIDING else ("stream", "compact")
        ):
            with visit.trying(family=family, memory=kind, positions=positions):
                rows.append(_compared(models, small(kind, positions=positions)))
                visit.say(family=family, memory=kind, positions=positions, **rows[-1])
    far = [row for row in rows if row["first"] > 1e-3]
    visit.say(
        compared=len(rows), far=len(far), other_answers=sum(not row["same_answer"] for row in rows)
    )


def _compared(models: list[Backbone], config: Any) -> JsonObject:
    """Return how far logits and states are apart: behind the first step, and behind the sixth,
    after evictions.
    """
    # Its import changes threads and garbage collection.
    from tests.test_fake_cuda import watch_and_ask

    here, there, half = (watch_and_ask(one, config) for one in models)
    first, last = (
        float((one - other).abs().max())
        for one, other in zip(here.logits, there.logits, strict=True)
    )
    device = there.session.tensors()
    return {
        "first": first,
        "last": last,
        "largest": float(here.logits[1].abs().max()),
        "off": [
            key
            for key, one in here.session.tensors().items()
            if one.shape != device[key].shape
            or not torch.allclose(one.float(), device[key].float().cpu(), atol=1e-3)
        ],
        "same_answer": here.answer.text == there.answer.text,
        "half_finite": all(bool(one.isfinite().all()) for one in half.logits),
    }


def made_model(tiny: bool, **tokens: int) -> Any:
    """Return transformers' model of the published numbers on the device, with weights that are
    drawn there.
    """
    import transformers

    numbers = (
        PUBLISHED[MODEL]["config.json"] | {"bos_token_id": None, "eos_token_id": None} | tokens
    )
    if tiny:
        numbers |= SMALL | {
            "vision_config": numbers["vision_config"]
            | SMALL_VISION
            | {"fullatt_block_indexes": [1]}
        }
    config = transformers.Qwen2_5_VLConfig.from_dict(numbers)
    with torch.device(DEVICE):
        model = transformers.Qwen2_5_VLForConditionalGeneration._from_config(
            config, dtype=torch.bfloat16
        )
    return model.eval().requires_grad_(False)


def prepare(visit: Visit) -> None:
    """Write the model's folder and the clip."""
    start = time.perf_counter()
    visit.model.mkdir()
    tokens = qwen_tokens(write_tokenizer(visit.model, QWEN_SPECIAL, QWEN_TEMPLATE))
    side = 56 if visit.tiny else SIDE
    file = "preprocessor_config.json"
    limits = {"min_pixels": side * side, "max_pixels": side * side}
    (visit.model / file).write_text(json.dumps(PUBLISHED[MODEL][file] | limits))
    made_model(visit.tiny, **tokens).save_pretrained(visit.model)
    written = time.perf_counter()
    write_clip(visit.clip, 6 if visit.tiny else 60, 10 if visit.tiny else 80)
    visit.say(model_s=round(written - start, 1), clip_s=round(time.perf_counter() - written, 1))


def write_clip(path: Path, seconds: int, cell: int) -> None:
    """Write a picture of 16 by 9 cells of this many pixels that moves, another one every three
    seconds.
    """
    cells = np.random.default_rng(1).integers(0, 256, (seconds // 3, 9, 16, 3), np.uint8)
    still = (cells[i // 90].repeat(cell, 0).repeat(cell, 1) for i in range(seconds * 30))
    pictures = (np.roll(picture, (i * 3, i * 5), (0, 1)) for i, picture in enumerate(still))
    encode(path, (16 * cell, 9 * cell), pictures, 30, preset="ultrafast", crf="30")


def measure_steps(visit: Visit) -> None:
    """Time a step, a question and a state of some memories."""
    start = time.perf_counter()
    backbone = load_backbone(str(visit.model), device=DEVICE, dtype="bfloat16")
    sync()
    visit.say(loaded_s=round(time.perf_counter() - start, 1), weights_gib=peak(), **machine(DEVICE))
    side = 56 if visit.tiny else SIDE
    noise = np.random.default_rng(0)
    pictures = [
        noise.integers(0, 256, (2, side, side, 3), np.uint8) for _ in range(2 if visit.tiny else 24)
    ]
    prepared = [backbone.prepare(one) for one in pictures]
    with torch.inference_mode():
        steps = [backbone.embed_steps([one], [0.0])[0] for one in prepared]
    cases = [
        ("durable", 6000, True),
        ("sliding-window", 6000, True),
        ("durable", 1000, True),
        ("durable", 24000, True),
        ("durable", 6000, False),
        ("infinipot-v", 6000, True),
    ]
    for kind, budget, by_graphs in [("durable", 24, True)] if visit.tiny else cases:
        with visit.trying(memory=kind, budget=budget, by_graphs=by_graphs):
            _measure_memory(visit, backbone, kind, budget, prepared, steps, by_graphs)
    for count, chunk in ((1, 1), (4, 1), (1, 4)):
        with visit.trying(streams=count, chunk=chunk):
            _measure_streams(visit, backbone, prepared, count, chunk)
    for count in (2,) if visit.tiny else (1, 2, 4, 8):
        with visit.trying(together=count):
            _measure_together(visit, backbone, steps, count)


def _measure_streams(
    visit: Visit, backbone: Any, prepared: list[Any], count: int, chunk: int
) -> None:
    """Time a step of some sessions of one model in turn, or of chunks of steps."""
    sessions = [Session.start(backbone, visit.config) for _ in range(count)]
    some = [prepared[i % len(prepared)] for i in range(chunk)]

    def watch(i: int) -> None:
        session = sessions[i % count]
        clock = session.clock
        session.watch_prepared(some, [(clock.steps + n) * clock.step_seconds for n in range(chunk)])

    timed(watch, 12 * count)
    visit.say(
        streams=count, chunk=chunk, step_ms=round(timed(watch, 20)[0] / chunk, 2), peak_gib=peak()
    )


def _measure_together(visit: Visit, backbone: Any, steps: list[Any], count: int) -> None:
    """Time the answers to so many questions, and steps of so many streams: each captured by itself,
    in one forward that is captured around attention, and in one that is not captured.
    """
    one = Session.start(backbone, visit.config)
    for i in range(one.config.budget // len(steps[0]) + 5):
        one.take([steps[i % len(steps)]], [one.clock.next_start_s])
    decoding = Decoding(3 if visit.tiny else 10, temperature=0)
    rounds = 1 if visit.tiny else 3
    asked = [AskedQuestion(one, QUESTION, decoding) for _ in range(count)]
    sessions = [Session.start(backbone, visit.config) for _ in range(count)]

    def take(i: int, most: int) -> None:
        due = [DueSteps(own, [steps[i % len(steps)]], [own.clock.next_start_s]) for own in sessions]
        assert not take_together(due, most)

    def measure(way: str, most: int) -> None:
        timed(lambda i: take(i, most), 4)
        list(ask_together(asked, most))
        visit.say(
            together=count,
            way=way,
            steps_ms=timed(lambda i: take(i, most), 4 * rounds),
            answers_ms=timed(lambda _: list(ask_together(asked, most)), rounds),
            peak_gib=peak(),
        )

    measure("one by one", 1)
    measure("together", count)
    captured = backbone.runs.why_not
    backbone.runs.why_not = "left out"
    try:
        measure("together, not captured", count)
    finally:
        backbone.runs.why_not = captured


def _measure_memory(
    visit: Visit,
    backbone: Any,
    kind: str,
    budget: int,
    prepared: list[Any],
    steps: list[Any],
    by_graphs: bool,
) -> None:
    # Those of the tower stay from case to case.
    backbone.runs.why_not = "" if CUDA and by_graphs else "left out"
    device: Any = runs
    device._can_capture = lambda _: CUDA and by_graphs
    session = Session.start(backbone, MemoryConfig.of(kind, budget=budget))
    rounds = 2 if visit.tiny else 20
    row: JsonObject = {"memory": kind, "budget": budget, "by_graphs": by_graphs}
    session.timings = Timings()

    def take(i: int) -> None:
        session.take([steps[i % len(steps)]], [session.clock.next_start_s])

    def watch(i: int) -> None:
        session.watch_prepared([prepared[i % len(steps)]], [session.clock.next_start_s])

    for i in range(int(1.25 * budget) // len(steps[0]) + 5):
        take(i)
    if CUDA:
        torch.cuda.reset_peak_memory_stats()
    row["watch_ms"], row["watch_host_ms"] = timed(watch, rounds)
    row["take_ms"], row["take_host_ms"] = timed(take, rounds)
    # Parts wait for each other here, so together they may be more than the whole.
    laps: dict[str, list[float]] = {}
    for i in range(rounds):
        session.timings.seconds = {}
        session.timings.synchronise = sync
        watch(i)
        for part, seconds in session.timings.seconds.items():
            laps.setdefault(part, []).append(1e3 * seconds)
    session.timings.synchronise = None
    row |= {f"{part}_ms": round(statistics.median(each), 3) for part, each in laps.items()}
    row["memory_worst_ms"] = round(max(laps["memory"]), 3)
    first, *answers = (
        session.ask(QUESTION, Decoding(9, temperature=0)) for _ in range(2 + rounds // 4)
    )
    each = [(one.total_ms - one.ttft_ms) / max(1, one.tokens - 1) for one in answers]
    row |= {
        "first_answer_ttft_ms": round(first.ttft_ms, 2),
        "ttft_ms": round(statistics.median(one.ttft_ms for one in answers), 2),
        "token_ms": round(statistics.median(each), 2),
        "visible": first.context_tokens,
        "peak_gib": peak(),
        "held_mb": {part: round(size / 1e6, 1) for part, size in session.memory.nbytes().items()},
        "graphs": session.timings.graphs,
    }
    if CUDA and (kind, budget, by_graphs) == ("durable", 6000, True):
        calls = {
            "take": lambda: take(0),
            "update": lambda: update(session),
            "vision": lambda: backbone.embed_steps([prepared[0]], [0.0]),
            "question and a token": lambda: session.ask(QUESTION, Decoding(2, temperature=0)),
        }
        for what, call in calls.items():
            with visit.trying(profile=what), torch.inference_mode():
                visit.say(profile=what, **_profiled(call))
    path = visit.work / "state.safetensors"
    row["save_s"] = round(timed(lambda _: save(session, path), 1)[0] / 1e3, 3)
    row["load_s"] = round(timed(lambda _: load(path, backbone), 1)[0] / 1e3, 3)
    row["state_mb"] = round(path.stat().st_size / 1e6, 1)
    back, here = (one.prefill("what is red ?") for one in (load(path, backbone), session))
    visit.say(**row, same_logits=torch.equal(back, here))


def update(session: Session) -> None:
    """Let a memory take keys and values of noise."""
    memory: Any = session.memory
    near = memory._near
    size = near.keys.shape
    keys = torch.randn(*size[:2], TOKENS, size[3], device=DEVICE, dtype=near.keys.dtype)
    places = torch.zeros(TOKENS, near.positions.shape[1], dtype=torch.int64, device=DEVICE)
    index = near.last_step + 1
    session.memory.append(StepKV(keys, keys, places, torch.rand(TOKENS, 2, device=DEVICE), index))
    session.clock = replace(session.clock, steps=index + 1)


def _profiled(call: Callable[[], object], rounds: int = 3) -> JsonObject:
    """Return kernels and milliseconds that the device is busy, a call, and the kernels that take
    most.
    """
    from torch.profiler import ProfilerActivity, profile

    call()
    sync()
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as profiler:
        for _ in range(rounds):
            call()
        sync()
    kernels = [
        one
        for one in profiler.key_averages()
        if one.device_type.name == "CUDA" and one.self_device_time_total
    ]
    kernels.sort(key=lambda one: -one.self_device_time_total)
    most = [
        (one.key[:60], one.count // rounds, round(one.self_device_time_total / rounds / 1e3, 3))
        for one in kernels
    ]
    busy = sum(one.self_device_time_total for one in kernels) / rounds / 1e3
    return {
        "kernels": sum(one.count for one in kernels) // rounds,
        "busy_ms": round(busy, 3),
        "most": most[:10],
    }


def measure_kernels(visit: Visit) -> None:
    """Time ways to attend to slots with a bias in one layer, and their error beside float64."""
    sizes = (
        [(3, 60), (1, 60)]
        if visit.tiny
        else [(196, 6000), (196, 24000), (20, 6000), (1, 6000), (1568, 6000)]
    )
    for T, N in sizes:
        visit.say(T=T, N=N, **_kernels(T, N, 2 if visit.tiny else 30))
    size = (64, 96) if visit.tiny else (3584, 18944)
    for T in (1, 8, 32, 196):
        with visit.trying(joined_weights=T):
            visit.say(joined_weights=T, **_join_weights(T, size))


def _join_weights(T: int, size: tuple[int, int]) -> JsonObject:
    """Time the products of a layer apart, and joined as the product joins them, over as many
    weights as a cache cannot hold.
    """
    hidden, inner = size
    rows = {
        "q_proj": hidden,
        "k_proj": hidden // 7,
        "v_proj": hidden // 7,
        "gate_proj": inner,
        "up_proj": inner,
    }
    layers = torch.nn.ModuleList(
        torch.nn.ModuleDict({name: torch.nn.Linear(hidden, n) for name, n in rows.items()})
        for _ in range(4)
    )
    layers.to(DEVICE, torch.bfloat16).requires_grad_(False)
    x = torch.randn(T, hidden, device=DEVICE).bfloat16()
    products = [one for one in layers.modules() if isinstance(one, torch.nn.Linear)]

    def call(_: int) -> None:
        for one in products:
            one(x)

    found = {}
    for name in ("apart_ms", "joined_ms"):
        if name == "joined_ms":
            join_projections(layers)
        call(0)
        found[name] = timed(call, 20)
    return found


def _kernels(T: int, N: int, rounds: int) -> JsonObject:
    g = torch.Generator(DEVICE).manual_seed(0)
    H = 4
    D = 128
    M = 7 * T
    scale = D**-0.5
    q, k, v = (torch.randn(H, n, D, generator=g, device=DEVICE).bfloat16() for n in (M, N, N))
    bias = torch.randint(1, 1_000_000, (H, N), generator=g, device=DEVICE).float().log()
    bias[:, ::7] = -1e30
    logits = q.double() @ k.double().transpose(1, 2) * scale + bias[:, None]
    exact = logits.softmax(-1) @ v.double()
    exact_lse = logits.logsumexp(-1)
    del logits

    columns = kernels.make_bias_columns(bias, scale, k.dtype)
    ready = kernels.append_bias_columns(k, v, columns)
    ways: dict[str, Callable[[], Any]] = {
        "columns": lambda: kernels.compute_biased_attention(q, *ready, bias, scale),
        "products": lambda: kernels._by_products(q, k, v, bias[:, None], scale),
        "no bias": lambda: kernels.compute_attention(q, k, v, None, scale),
    }
    row: JsonObject = {}
    for name, call in ways.items():
        try:
            out, lse = call()
            error = float((out[..., :D].double() - exact).norm() / exact.norm())
            lse_error = float((lse[:, :M].double() - exact_lse).abs().max())
            row[name] = {"ms": timed(lambda _, call=call: call(), rounds)[0]}  # type: ignore[misc]
            row[name] |= {} if name == "no bias" else {"error": error, "lse_error": lse_error}
        except Exception as error_here:
            row[name] = {"raised": f"{type(error_here).__name__}: {str(error_here)[:120]}"}
    return row


def measure_command_line(visit: Visit) -> None:
    """Time ingest and query in processes of their own; kill a run, go on, and compare the bytes."""
    common = ["--model", str(visit.model), "--device", DEVICE, "--format", "json"]
    watching = [*common, "--dtype", "bfloat16", "--budget", "24" if visit.tiny else "6k"]
    often = ["-o", "b.safetensors", "--every", "2s" if visit.tiny else "10s"]
    ingest = ["ingest", str(visit.clip), *watching]
    ask = ["query", "a.safetensors", *common, "--max-new-tokens", "8", "--timings"]

    def start(*arguments: str) -> subprocess.Popen[str]:
        command = [sys.executable, "-m", "protokv", *arguments]
        pipe = subprocess.PIPE
        return subprocess.Popen(command, stdout=pipe, stderr=pipe, text=True, cwd=visit.work)

    def protokv(what: str, *arguments: str) -> None:
        begun = time.perf_counter()
        run = start(*arguments)
        out, err = run.communicate()
        rows = [json.loads(line) for line in out.splitlines() if line.startswith("{")]
        visit.say(
            what=what,
            rc=run.returncode,
            wall_s=round(time.perf_counter() - begun, 2),
            timings=[row["timings"] for row in rows if "timings" in row],
            answers=[
                {name: row.get(name) for name in ("ttft_ms", "total_ms")}
                for row in rows
                if "ttft_ms" in row
            ],
            err=err[-300:],
        )

    protokv("ingest", *ingest, "-o", "a.safetensors", "--timings")
    protokv("query in a new process", *ask, QUESTION, "what is red ?")
    with start(*ingest, *often) as run:
        assert run.stdout is not None
        commits = 0
        for line in run.stdout:
            commits += json.loads(line).get("type") == "commit"
            if commits == 2:
                run.kill()
                break
    protokv("go on after a kill", *ingest, *often)
    states = [(visit.work / f"{name}.safetensors").read_bytes() for name in "ab"]
    visit.say(what="states", same_bytes=states[0] == states[1], mb=round(len(states[0]) / 1e6, 1))


PARTS: dict[str, tuple[Callable[[Visit], None], int]] = {
    "tests": (run_tests, 130),
    "parity": (compare_families, 130),
    "prepare": (prepare, 130),
    "steps": (measure_steps, 150),
    "kernels": (measure_kernels, 40),
    "command line": (measure_command_line, 130),
}
"""Parts with the most seconds that each may take, the most important first."""
TOGETHER = ("tests", "parity", "prepare")
WHOLE_VISIT_S = 480


def run_part(visit: Visit, end: float) -> None:
    """Run a part in a process of its own; end it and all that it started at its limit."""
    seconds = min(PARTS[visit.part][1], end - time.monotonic())
    command = [
        sys.executable,
        "-m",
        "tests.benchmarks.gpu",
        "--visit",
        json.dumps(asdict(visit), default=str),
    ]
    start = time.monotonic()
    paths = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    surroundings = os.environ | {"PYTHONPATH": paths, "HF_HUB_OFFLINE": "1"}
    if visit.part in TOGETHER:
        surroundings |= {"OMP_NUM_THREADS": "4"}
    process = subprocess.Popen(command, cwd=ROOT, start_new_session=True, env=surroundings)
    try:
        state: int | str = process.wait(max(seconds, 0))
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        state = f"ended after {round(seconds)} s"
    visit.say(done=state, share=visit.share, took_s=round(time.monotonic() - start, 1))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder for the rows")
    parser.add_argument("--only", choices=tuple(PARTS), nargs="+", default=tuple(PARTS))
    parser.add_argument(
        "--tiny", action="store_true", help="a tiny model, as a test of this program"
    )
    parser.add_argument("--visit", type=json.loads, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.visit:
        visit = Visit(**given.visit)
        PARTS[visit.part][0](visit)
        return
    given.out.mkdir(parents=True, exist_ok=True)
    name = torch.cuda.get_device_name().split()[1].lower() if CUDA else "cpu"
    rows = given.out.resolve() / f"gpu-{name}.jsonl"
    end = time.monotonic() + WHOLE_VISIT_S
    rows.unlink(missing_ok=True)
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        work = Path(folder)
        visits = [
            Visit(part, rows, work, given.tiny, share)
            for part in given.only
            for share in range(4 if part == "parity" else 1)
        ]
        first = [one for one in visits if one.part in TOGETHER]
        with ThreadPoolExecutor(len(first) or 1) as pool:
            list(pool.map(lambda one: run_part(one, end), first))
        for one in visits:
            if one not in first and time.monotonic() < end:
                run_part(one, end)
    print(f"rows: {rows}")


if __name__ == "__main__":
    main()
