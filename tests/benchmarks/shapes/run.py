"""A whole run: correctness, peaks, counts, every memory's stages, the bytes of states. Prints nothing."""

from __future__ import annotations

import gc
import resource
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from protokv.config import MemoryConfig
from protokv.config.base import Positions
from tests.benchmarks.decode import write_video
from tests.benchmarks.results import machine
from tests.benchmarks.shapes.counts import counts_of
from tests.benchmarks.shapes.models import Shape, build
from tests.benchmarks.shapes.oracles import attention_error, same_as_on_cpu
from tests.benchmarks.shapes.report import NOT_MEASURED, rows_of, stage_rows
from tests.benchmarks.shapes.stages import decode, measure, see
from tests.benchmarks.shapes.state_bytes import state_bytes
from tests.benchmarks.shapes.work import measure_peak, vision_work, work_of

# bfloat16 keeps eight bits, and attention rounds twice.
TOLERANCE = {torch.bfloat16: 2**-6, torch.float32: 1e-4}


@dataclass(frozen=True, slots=True)
class Request:
    """What is asked for.

    Attributes:
        shape: the whole model.
        layers: how many of its layers are measured; all where None.
        vocabulary: how many of its words beside fewer layers; all where None.
        budgets, memories: each with each.
        rounds: of every stage.
        stream: tokens seen, as a multiple of those that fill a memory.
        positions: at which what is in memory is shown; None: as each memory does by default.
        peak: side of the product and bytes of the copy that tell what the device can do.
        video: frames, width and height of the file that is decoded.
    """

    shape: Shape
    device: torch.device
    dtype: torch.dtype
    budgets: Sequence[int]
    memories: Sequence[str]
    rounds: int
    stream: float = 1.25
    positions: Positions | None = None
    layers: int | None = None
    vocabulary: int | None = None
    counts: bool = True
    peak: tuple[int, int] = (1024, 2**26)
    video: tuple[int, int, int] = (240, 1280, 720)

    @property
    def cut(self) -> Shape:
        """What is measured."""
        shape = self.shape
        if self.layers is None:
            return shape
        return shape.cut(self.layers, self.vocabulary or shape.text["vocab_size"])


def run(
    request: Request,
    proven: dict[str, bool],
    folder: Path,
    tell: Callable[[str], None] = lambda _: None,
    keep: Callable[[dict[str, Any]], object] = lambda _: None,
    earlier: dict[str, Any] | None = None,
) -> dict[str, Any]:
    """The document of a run.

    Args:
        request: what to measure.
        proven: of `oracles.proven`; what is not proven is not measured.
        folder: for the video.
        tell: is told what begins.
        keep: is handed the document, unfinished, whenever a memory has been measured.
        earlier: a document that was kept of the same request; what it has of a memory and a budget is taken over.
    """
    whole, cut, device, dtype = request.shape, request.cut, request.device, request.dtype
    tell("attention beside its plain form")
    error = attention_error(cut, 300, dtype, device)
    good = {
        name: is_good and error <= TOLERANCE[dtype] and same_as_on_cpu(name, device) for name, is_good in proven.items()
    }
    peak = measure_peak(device, dtype, *request.peak)
    about = machine(device.type) | {
        "dtype": str(dtype)[6:],
        "tflop_s_of_a_product": round(peak.flop_s / 1e12, 3),
        "gb_s_of_a_copy": round(peak.bytes_s / 1e9, 1),
    }
    document: dict[str, Any] = {"machine": about, "notes": _notes(request, error), "stages": [], "held": []}
    document["unfinished"], document["resident_peak_mb"] = str(request), _resident_mb()
    document["withheld"] = [
        {"memory": name, "why": "it did not equal its literal form here"} for name in request.memories if not good[name]
    ]
    tell("decoding")
    frames, width, height = request.video
    video = write_video(folder / "video.mp4", frames, width, height, 60)
    step_frames = whole.frame[1]
    most = int(frames / 30 * 2) // step_frames - 1
    decoding = decode(video, 2.0, step_frames, min(request.rounds, most), device)
    document["stages"] += [{"memory": "any", "budget": ""} | row for row in stage_rows(decoding, {}, peak)]
    tell("building the model")
    backbone = build(cut, dtype, device)
    tell("vision tower")
    seeing, steps = see(backbone, cut, request.rounds)
    tower = stage_rows(seeing, {"vision tower": vision_work(cut, dtype.itemsize)}, peak)
    if cut.layers != whole.layers:
        tower[-1]["computed_ms"] = round(tower[-1]["median_ms"] * whole.vision_layers / cut.vision_layers, 1)
    document["stages"] += [{"memory": "any", "budget": ""} | row for row in tower]
    document["states"] = state_bytes(whole, request.budgets)
    measured_before = _take_over(document, earlier)
    weights = sum(p.nbytes for part in (backbone._text, backbone._head) for p in part.parameters())  # type: ignore[attr-defined]
    for budget in request.budgets:
        for name in request.memories:
            if not good[name] or (name, budget) in measured_before:
                continue
            tell(f"{name} at {budget}")
            placed = {} if request.positions is None else {"positions": request.positions}
            config = MemoryConfig.of(name, budget=budget, **placed)
            measured = measure(backbone, cut, config, steps, request.rounds, request.stream)
            work = work_of(cut, config, measured.slots, dtype)
            document["stages"] += rows_of(config, measured, work, peak, whole, cut)
            held = {f"{part}_mb": round(size / 1e6, 2) for part, size in measured.parts.items()}
            document["held"].append(
                {"memory": name, "budget": budget, "tokens_seen": measured.tokens, "visible": measured.visible}
                | {"language_model_mb": round(weights / 1e6, 1)}
                | held
            )
            del measured
            gc.collect()
            document["resident_peak_mb"] = _resident_mb()
            keep(document)
    if request.counts:
        tell("counts")
        budget = request.budgets[-1]
        document["counts"] = [counts_of(MemoryConfig.of(name, budget=budget)) for name in request.memories]
    del document["unfinished"]
    return document


def _take_over(document: dict[str, Any], earlier: dict[str, Any] | None) -> set[tuple[str, int]]:
    """Rows of a run of the same request that was cut short; which memories and budgets these are of."""
    if earlier is None or earlier.get("unfinished") != document["unfinished"]:
        return set()
    document["stages"] += [row for row in earlier["stages"] if row["memory"] != "any"]
    document["held"] += earlier["held"]
    return {(row["memory"], row["budget"]) for row in earlier["held"]}


def _resident_mb() -> int:
    return round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024)


def _notes(request: Request, error: float) -> list[str]:
    whole, cut = request.shape, request.cut
    notes = [
        f"{whole.kind}: {whole.text}. Vision: {whole.vision}. {whole.tokens} tokens a step, random weights.",
        "Stages behind a colon are part of the stage before it; `forward`, `update` and `context` are part of `step "
        "behind the tower`, a step without decoding and vision tower. `gflop`, `mbytes`: by arithmetic, of what was "
        "measured; `share_of_peak`: the time that this device's product and copy would need for them, over the median. "
        "Where they are empty, a stage has no fixed amount of work, or none that is counted. `peak_mb`: what torch "
        "allocated above the level at the beginning of the stage, in the first round, which is not timed.",
        "Before anything was measured, every memory in the table equalled its literal form on small streams, and "
        f"attention its plain form: up to {error:.1e} in {str(request.dtype)[6:]}, the bound being "
        f"{TOLERANCE[request.dtype]:.1e}.",
        "`held`: what the memory holds of the layers measured, slots that attention reads included. `counts`: of 28 "
        "layers, the attention of each included (about 200 operations of a step), at a small size.",
        "`states`: bytes of a full state of the whole model in bfloat16, by arithmetic on what the memories declare.",
    ]
    if request.positions is not None:
        notes.append(f"What is in memory is shown with positions={request.positions}.")
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
