"""Frigate's and LLM Vision's own code ask `serve` what comes back: `python -m
samples.clients.count`.

The streams are drawn: each of three shapes appears one to four times in three minutes. Frigate
sends a picture a second, with ten turns of history, until it hears that one of them is back. LLM
Vision sends single requests of ten pictures, and asks for all three. A session that goes on answers
them, and tells afterwards when each shape came back: by the moments that it keeps, and by the
evidence of an answer. With --alone, each request is answered from what it has. Prints one JSON
object a stream, and last the counts, each with its 95 % interval.

Needs pip install opencv-python-headless httpx aiohttp openai.
"""

from __future__ import annotations

import argparse
import asyncio
import base64
import io
import json
import re
import threading
import time
from bisect import bisect_left
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import import_module
from itertools import count, groupby
from operator import attrgetter
from pathlib import Path
from tempfile import TemporaryDirectory
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock
from urllib.request import Request, urlopen

import numpy as np
import uvicorn
from numpy.typing import NDArray
from PIL import Image

from protokv.backbones import load_backbone
from protokv.ingestion.options import Every, IngestOptions
from protokv.memories import DurableConfig
from protokv.replay.metrics import bound_accuracy
from protokv.serve import FedSessions, StateFolder, build_app, make_uvicorn_config
from samples.clients.foreign import import_foreign
from samples.worlds.pictures import NUMBERS, SHAPES
from samples.worlds.world import World, WorldConfig

MODEL = "protokv/mini-order"
FIRST_SEED = 7_410_000
PICTURES = 200
BUDGET = 512
# An alert within so many seconds of the beginning of the second appearance is right.
SOON_S = 10
# So many seconds lie between two moments that a session keeps.
MOMENTS_S = 5
# A word tells apart what Frigate reads.
COUNTS = [
    {"condition_met": word != "one", "next_run_in": 1, "reasoning": word} for word in NUMBERS[1:]
]
FORM = {"type": "json_schema", "json_schema": {"name": "seen", "schema": {"enum": COUNTS}}}


@contextmanager
def serve() -> Iterator[str]:
    """Serve the embedded model, which reads the question alone, wherever a client puts it."""
    backbone = load_backbone(MODEL)
    own = backbone.question_ids

    def read(question: str, turns: Any = (), system: str | None = None) -> Any:
        condition = re.search('determine when "(.+?)" occurs', system or "")
        return own(condition[1] if condition else question.splitlines()[-1])

    backbone.question_ids = read  # type: ignore[method-assign]
    with TemporaryDirectory() as folder:
        states = StateFolder(folder, backbone)
        config = DurableConfig(budget=BUDGET)
        kept = IngestOptions(config=config, every=Every(seconds=MOMENTS_S), keep=PICTURES)
        fed = FedSessions(states, kept)
        running = uvicorn.Server(make_uvicorn_config(build_app(states, fed=fed), "127.0.0.1", 0))
        thread = threading.Thread(target=running.run)
        thread.start()
        while not running.started:
            time.sleep(0.01)
        try:
            yield f"http://127.0.0.1:{running.servers[0].sockets[0].getsockname()[1]}/v1"
        finally:
            running.should_exit = True
            thread.join()


@dataclass(frozen=True)
class Stream:
    """A picture for each second, and when each shape to ask for appears, in seconds."""

    seed: int
    pictures: list[NDArray[np.uint8]]
    seen: dict[str, list[float]]


def draw(seed: int) -> Stream:
    """Draw a stream."""
    config = WorldConfig(
        seed=seed, length_s=PICTURES, events_per_minute=8.0, counted=3, counted_in=(0, 3)
    )
    world = World(config)
    frames = [world.frame(second + 0.5) for second in range(PICTURES)]
    events = sorted(world.counted, key=attrgetter("shape"))
    seen = {
        SHAPES[shape]: sorted(one.start_s for one in alike)
        for shape, alike in groupby(events, attrgetter("shape"))
    }
    return Stream(seed, frames, seen)


def watch_as_frigate(url: str, code: Path, stream: Stream, shape: str, *, alone: bool) -> int:
    """Return how many pictures Frigate sent until it alerted; 0: it never did.

    `alone`: each request says that it is of another user, so nobody remembers it.
    """
    watching = import_foreign(code, "frigate.jobs.vlm_watch")
    client = import_foreign(code, "frigate.genai.plugins.openai").OpenAIClient(
        SimpleNamespace(
            base_url=url,
            api_key="frigate",
            model=MODEL,
            provider_options={},
            runtime_options={"response_format": FORM, "user": shape},
        )
    )
    sent = count(1)
    latest = 0
    runner: Any = None

    def next_frame(*_: object) -> NDArray[np.uint8] | None:
        nonlocal latest
        latest = next(sent)
        if latest == PICTURES:
            runner.cancel_event.set()
        if alone:
            client.genai_config.runtime_options["user"] = f"{shape} {latest}"
        return stream.pictures[latest - 1][..., ::-1]

    job = watching.VLMWatchJob(camera="porch", condition=f"How many times did the {shape} appear?")
    runner = watching.VLMWatchRunner(
        job,
        config=MagicMock(),
        cancel_event=threading.Event(),
        frame_processor=SimpleNamespace(get_current_frame=next_frame),
        genai_manager=SimpleNamespace(chat_client=client),
        dispatcher=None,
    )
    # Pictures come one after another, without their pauses.
    runner._wait_for_trigger = lambda _: None
    runner.run()
    assert job.iteration_count >= min(latest, PICTURES), job.error_message
    return latest if job.status == "success" else 0


def judge_alert(starts_s: list[float], alerted_s: int) -> str:
    """Return what an alert is, by when the shape appeared."""
    back_s = starts_s[1] if len(starts_s) > 1 else None
    if alerted_s == 0:
        return "missed" if back_s is not None else "quiet"
    if back_s is None or alerted_s <= back_s:
        return "false"
    return "right" if alerted_s <= back_s + SOON_S else "late"


def encode(picture: NDArray[np.uint8]) -> str:
    """Return a JPEG as base64."""
    file = io.BytesIO()
    Image.fromarray(picture).save(file, "JPEG", quality=85)
    return base64.b64encode(file.getvalue()).decode()


def ask_as_llm_vision(url: str, code: Path, stream: Stream, *, alone: bool) -> dict[str, str]:
    """Return how often LLM Vision heard that each shape appeared, after all pictures."""
    providers = import_foreign(code, "custom_components.llmvision.providers")
    name = f"porch-{stream.seed}"
    if not alone:
        body = json.dumps({"name": name}).encode()
        urlopen(f"{url}/streaming/sessions", body).close()
    words = {"type": "string", "enum": list(NUMBERS[1:])}
    structure = {"type": "object", "properties": {"times": words}, "required": ["times"]}

    async def send() -> dict[str, str]:
        async with import_module("aiohttp").ClientSession() as web:
            providers.async_get_clientsession = lambda _: web
            hass = SimpleNamespace(data={})
            model = MODEL if alone else name
            provider = providers.OpenAI(hass, "key", model, {"base_url": url})
            said = {}
            for first in range(0, PICTURES, 10):
                files = [encode(one) for one in stream.pictures[first : first + 10]]
                for shape in stream.seen if first + 10 == PICTURES else ["star"]:
                    call = SimpleNamespace(
                        provider="",
                        max_tokens=30,
                        response_format="json",
                        structure=json.dumps(structure),
                        base64_images=files,
                        filenames=[""] * len(files),
                        message=f"How many times did the {shape} appear?",
                        model_is_glimpse=lambda: False,
                    )
                    said[shape] = json.loads(await provider.vision_request(call))["times"]
                    # The other questions are about the last picture alone.
                    files = files[-1:] if not alone else files
            return said

    found = asyncio.run(send())
    return {shape: found[shape] for shape in stream.seen}


def ask_when(url: str, stream: Stream, shape: str) -> dict[str, Any]:
    """Return when the session of a stream says that a shape came back, in seconds: the first moment
    that knows more than one appearance (None: none does), and where its evidence begins.
    """
    name = f"porch-{stream.seed}"
    question = f"How many times did the {shape} appear?"

    def ask(**more: Any) -> Any:
        said = {"messages": [{"role": "user", "content": question}], "choices": NUMBERS[1:]}
        body = json.dumps({"model": name, **said, **more}).encode()
        with urlopen(f"{url}/chat/completions", body) as reply:
            return json.load(reply)

    def knows_of_it(moment_s: float) -> bool:
        text: str = ask(at=moment_s)["choices"][0]["message"]["content"]
        return text != NUMBERS[1]

    with urlopen(f"{url.removesuffix('/v1')}/page/state?name={name}") as reply:
        moments = json.load(reply)["commits_s"]
    place = bisect_left(moments, True, key=knows_of_it)
    spans = ask(evidence=True)["evidence"]
    return {
        "moment_s": moments[place] if place < len(moments) else None,
        "evidence_s": [one["start_s"] for one in spans],
    }


def judge_stream(row: dict[str, Any]) -> Iterator[tuple[str, bool]]:
    """Yield what is counted of a stream, and whether it was so."""
    seen = row["seen"]
    verdict = judge_alert(seen[row["shape"]], row["alerted_s"])
    for one in ("right", "late", "missed", "false", "quiet"):
        yield one, verdict == one
    for shape, said in row["llm_vision"].items():
        yield "counted right", said == NUMBERS[len(seen[shape])]
    for shape, when in row["when"].items():
        moment_s = when["moment_s"]
        if len(seen[shape]) == 1:
            yield "no moment, as it never came back", moment_s is None
            continue
        back_s = seen[shape][1]
        yield "its moment within 10 s", moment_s is not None and 0 <= moment_s - back_s <= SOON_S
        near = any(abs(one - back_s) <= SOON_S for one in when["evidence_s"])
        yield "evidence within 10 s", near


def count_rows(rows: Iterable[dict[str, Any]]) -> dict[str, str]:
    """Return how many were so, of how many, with Wilson's interval."""
    found: dict[str, list[bool]] = {}
    for row in rows:
        for what, was in judge_stream(row):
            found.setdefault(what, []).append(was)
    counts = {}
    for what, each in found.items():
        low, high = bound_accuracy(sum(each), len(each))
        counts[what] = f"{sum(each)} of {len(each)} ({low:.2f} to {high:.2f})"
    return counts


def main() -> None:
    """Count over some streams."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--streams", type=int, default=24)
    parser.add_argument("--code", type=Path, default=Path("clients-code"), help="their files")
    parser.add_argument("--alone", action="store_true", help="nobody remembers a request")
    parser.add_argument("--once", action="store_true", help="Frigate waits for what never returns")
    asked = parser.parse_args()
    rows = []
    with serve() as url:
        for seed in range(FIRST_SEED, FIRST_SEED + asked.streams):
            stream = draw(seed)
            waited = [one for one, at_s in stream.seen.items() if (len(at_s) == 1) == asked.once]
            if not waited:
                continue
            shape = waited[seed % len(waited)]
            row: dict[str, Any] = {"seed": seed, "seen": stream.seen, "shape": shape}
            row["llm_vision"] = ask_as_llm_vision(url, asked.code, stream, alone=asked.alone)
            row["when"] = {}
            if not asked.alone:
                row["when"] = {one: ask_when(url, stream, one) for one in stream.seen}
                session = f"{url}/streaming/sessions/porch-{seed}"
                urlopen(Request(session, method="DELETE")).close()
            row["alerted_s"] = watch_as_frigate(url, asked.code, stream, shape, alone=asked.alone)
            print(json.dumps(row), flush=True)
            rows.append(row)
    print(json.dumps(count_rows(rows)))


if __name__ == "__main__":
    main()
