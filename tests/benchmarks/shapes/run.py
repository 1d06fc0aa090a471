"""A whole run: peaks, every memory's stages, the bytes of states, as one document; and its tables."""

from __future__ import annotations

import gc
import json
import resource
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from protokv.core.settings import Positions
from protokv.memories import MemoryConfig
from tests.benchmarks.decode import write_video
from tests.benchmarks.results import about, machine, table
from tests.benchmarks.shapes.models import Shape, build
from tests.benchmarks.shapes.oracles import attention_error
from tests.benchmarks.shapes.stages import Stopwatch, decode, measure, see
from tests.benchmarks.shapes.work import Peak, Work, measure_peak, state_bytes, vision_work, work_of

# bfloat16 keeps eight bits, and attention rounds twice.
TOLERANCE = {torch.bfloat16: 2**-6, torch.float32: 1e-4}
NOT_MEASURED = "not measured"
# A model of all layers takes longer for these in proportion to its layers, but for its head.
_PER_LAYER = (
    "vision tower",
    "forward",
    "update",
    "update: plan",
    "update: merge",
    "context",
    "first token",
    "per token",
)
# Columns of the summary.
_SHOWN = ("step behind the tower", "forward", "update", "context", "first token", "per token", "commit")


@dataclass(frozen=True, slots=True)
class Request:
    """The options of a run.

    Attributes:
        shape: the whole model.
        layers: how many of its layers are measured; all where None.
        vocabulary: how many of its words beside fewer layers; all where None.
        budgets, memories: each with each.
        rounds: of every stage.
        positions: at which a memory's tokens are shown; None: as each memory does by default.
        peak: side of the product and bytes of the copy that measure the device's peaks.
        video: frames, width and height of the file that is decoded.
    """

    shape: Shape
    device: torch.device
    dtype: torch.dtype
    budgets: Sequence[int]
    memories: Sequence[str]
    rounds: int
    positions: Positions | None = None
    layers: int | None = None
    vocabulary: int | None = None
    peak: tuple[int, int] = (1024, 2**26)
    video: tuple[int, int, int] = (240, 1280, 720)

    @property
    def cut(self) -> Shape:
        """The part of the model that is measured."""
        shape = self.shape
        if self.layers is None:
            return shape
        return shape.cut(self.layers, self.vocabulary or shape.text["vocab_size"])


def run(
    request: Request, proven: dict[str, bool], folder: Path, tell: Callable[[str], None] = lambda _: None
) -> dict[str, Any]:
    """Return the document of a run.

    Args:
        request: what to measure.
        proven: of `oracles.proven`; a memory that is not proven is not measured.
        folder: for the video.
        tell: called with the name of each part as it begins.
    """
    whole, cut, device, dtype = request.shape, request.cut, request.device, request.dtype
    tell("attention beside its plain form")
    error = attention_error(cut, 300, dtype, device)
    good = {name: is_good and error <= TOLERANCE[dtype] for name, is_good in proven.items()}
    peak = measure_peak(device, dtype, *request.peak)
    document: dict[str, Any] = {
        "machine": machine(device.type)
        | {
            "dtype": str(dtype)[6:],
            "tflop_s_of_a_product": round(peak.flop_s / 1e12, 3),
            "gb_s_of_a_copy": round(peak.bytes_s / 1e9, 1),
        },
        "notes": _notes(request, error),
        "withheld": [
            {"memory": name, "why": "it did not equal its literal form here"}
            for name in request.memories
            if not good[name]
        ],
        "stages": [],
        "held": [],
        "states": state_bytes(whole, request.budgets),
    }

    def add(memory: str, budget: int | str, stopwatch: Stopwatch, work: dict[str, Work], layers: float) -> None:
        rows = stage_rows(stopwatch, work, peak, None if cut.layers == whole.layers else layers)
        document["stages"] += [{"memory": memory, "budget": budget} | row for row in rows]

    tell("decoding")
    frames, width, height = request.video
    video = write_video(folder / "video.mp4", frames, width, height, 60)
    step_frames = whole.frame[1]
    most = int(frames / 30 * 2) // step_frames - 1
    add("any", "", decode(video, 2.0, step_frames, min(request.rounds, most), device), {}, 1)
    tell("vision tower")
    backbone = build(cut, dtype, device)
    seeing, steps = see(backbone, cut, request.rounds)
    tower = {"vision tower": vision_work(cut, dtype.itemsize)}
    add("any", "", seeing, tower, whole.vision_layers / cut.vision_layers)
    weights = sum(p.nbytes for part in (backbone._text, backbone._head) for p in part.parameters())  # type: ignore[attr-defined]
    memories = [name for name in request.memories if good[name]]
    for budget in request.budgets:
        for name in memories:
            tell(f"{name} at {budget}")
            placed = {} if request.positions is None else {"positions": request.positions}
            config = MemoryConfig.of(name, budget=budget, **placed)
            measured = measure(backbone, cut, config, steps, request.rounds)
            work = work_of(cut, config, measured.slots, dtype)
            add(name, budget, measured.stopwatch, work, whole.layers / cut.layers)
            document["held"].append(
                {"memory": name, "budget": budget, "tokens_seen": measured.tokens, "visible": measured.visible}
                | {"language_model_mb": round(weights / 1e6, 1)}
                | {f"{part}_mb": round(size / 1e6, 2) for part, size in measured.parts.items()}
            )
        gc.collect()
    document["resident_peak_mb"] = round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024)
    return document


def stage_rows(
    stopwatch: Stopwatch, work: dict[str, Work], peak: Peak, layers: float | None = None
) -> list[dict[str, Any]]:
    """Return a row for each stage: distribution, work and the share of the peak; None where no work is known.

    `layers` is how many times as many layers the whole model has, if fewer are measured.
    """
    rows = []
    for stage, times in stopwatch.times.items():
        row: dict[str, Any] = {"stage": stage} | distribution(times)
        given = work.get(stage)
        row["gflop"] = None if given is None else round(given.flop / 1e9, 3)
        row["mbytes"] = None if given is None else round(given.bytes / 1e6, 2)
        # A stage that did nothing in most rounds reaches no share.
        known = given is not None and row["median_ms"] > 0
        row["share_of_peak"] = (
            round(peak.least_ms(given) / row["median_ms"], 3) if given is not None and known else None
        )
        row["peak_mb"] = round(stopwatch.peaks[stage] / 1e6, 1) if stage in stopwatch.peaks else NOT_MEASURED
        if layers is not None:
            row["computed_ms"] = round(row["median_ms"] * layers, 1) if stage in _PER_LAYER else None
        rows.append(row)
    return rows


def distribution(times: Sequence[float]) -> dict[str, float | int]:
    """Return median, 95th percentile (the nearest rank) and worst, in the unit of the times."""
    ordered = sorted(times)
    n = len(ordered)
    return {
        "median_ms": round((ordered[(n - 1) // 2] + ordered[n // 2]) / 2, 3),
        "p95_ms": round(ordered[-(-95 * n // 100) - 1], 3),
        "worst_ms": round(ordered[-1], 3),
        "rounds": n,
    }


def summary_rows(document: dict[str, Any]) -> list[dict[str, Any]]:
    """Return a row for each memory and budget: medians in milliseconds, the worst update, and a state's MB."""
    stages = {(row["memory"], row["budget"], row["stage"]): row for row in document["stages"]}
    states = {(row["memory"], row["budget"]): row["mb"] for row in document["states"]}
    rows = []
    for memory, budget in dict.fromkeys((held["memory"], held["budget"]) for held in document["held"]):
        found = {stage: stages[memory, budget, stage] for stage in _SHOWN}
        row = {"memory": memory, "budget": budget} | {name: _short(found[name]["median_ms"]) for name in _SHOWN}
        worst = _short(found["update"]["worst_ms"])
        rows.append(row | {"update, worst": worst, "state, MB": states.get((memory, budget))})
    return sorted(rows, key=lambda row: int(row["budget"]))


def _short(milliseconds: float) -> float:
    """Round to three digits or more."""
    return round(milliseconds) if milliseconds >= 100 else round(milliseconds, 1 if milliseconds >= 10 else 2)


def write(folder: Path, name: str, document: dict[str, Any]) -> str:
    """Write `NAME.json` and `NAME.md`; return the text of the second."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"{name}.json").write_text(json.dumps(document, indent=1) + "\n")
    ran_on = document["machine"] | {"most resident memory of the process, MB": document["resident_peak_mb"]}
    parts = [about(ran_on), *document["notes"], "## Medians, ms", table(summary_rows(document))]
    for title in ("stages", "held", "withheld", "states"):
        if document[title]:
            parts += [f"## {title.capitalize()}", table(document[title])]
    text = "\n\n".join(parts) + "\n"
    (folder / f"{name}.md").write_text(text)
    return text


def _notes(request: Request, error: float) -> list[str]:
    whole, cut = request.shape, request.cut
    notes = [
        f"{whole.kind}: {whole.text}. Vision: {whole.vision}. {whole.tokens} tokens a step, random weights.",
        "A name behind a colon is a part of the stage before it; `forward`, `update` and `context` are part of `step "
        "behind the tower`, a step without decoding and vision tower. `gflop`, `mbytes`: by arithmetic, of the layers "
        "that were measured; `share_of_peak`: the time that this device's product and copy need for them, over the "
        "median. Where they are empty, a stage has no fixed amount of work, or none that is counted. `peak_mb`: the "
        "bytes that torch allocated above the level at the beginning of the stage, on CUDA.",
        "Before the measurements, every memory in the table equalled its literal form on small streams, and attention "
        f"its plain form: up to {error:.1e} in {str(request.dtype)[6:]}, the bound being "
        f"{TOLERANCE[request.dtype]:.1e}.",
        "`held`: bytes of the memory at the measured layers, with the slots that attention reads. `states`: bytes of a "
        "full state of the whole model in bfloat16, by arithmetic on the declarations of the memories.",
    ]
    if request.positions is not None:
        notes.append(f"Memories show their tokens with positions={request.positions}.")
    if request.device.type == "cpu":
        notes.append(
            "Milliseconds are CPU time of this process with one thread (`commit`: by the clock). "
            f"GPU figures: {NOT_MEASURED}, there is no GPU in this machine."
        )
    if cut.layers != whole.layers:
        notes.append(
            f"Measured: {cut.layers} of {whole.layers} layers of the language model, {cut.vision_layers} of "
            f"{whole.vision_layers} of the vision tower, a head of {cut.text['vocab_size']} words in place of "
            f"{whole.text['vocab_size']}. `computed_ms` is COMPUTED, not measured: the median times the ratio of "
            "layers, without the rest of the head."
        )
    return notes
