"""`protokv mcp`: agents ask and look at the states of a folder, and nothing else."""

import asyncio
import base64
import io
import json
import os
import shutil
import sys
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from protokv.ingestion import IngestOptions, ingest
from protokv.memories import DurableConfig
from protokv.serve.states import StateFolder
from protokv.stream.evidence import Evidence, EvidenceSpan
from protokv.video import open_source
from tests.cli.conftest import write_video
from tests.mock_backbone import MockBackbone

pytest.importorskip("mcp.server.mcpserver")
from mcp.client.client import Client
from mcp.client.stdio import StdioServerParameters, stdio_client

from protokv.serve.tools import build_tool_server

ROOT = Path(__file__).parents[2]
CONFIG = DurableConfig(budget=40)

EVIDENCE = Evidence((EvidenceSpan(1.0, 2.0, 0.5),), True)

_Tools = Callable[..., Coroutine[Any, Any, Any]]


def talk(folder: Path, ask: Callable[[_Tools], Coroutine[Any, Any, None]], **more: Any) -> None:
    """Let an agent call tools: of a call, what was returned, or the error as text."""
    states = StateFolder(folder, MockBackbone())

    async def run() -> None:
        async with Client(build_tool_server(states, **more)) as agent:
            await ask(lambda *of, **given: call(agent, *of, **given))

    asyncio.run(run())


async def call(agent: Client, tool: str, **given: Any) -> Any:
    told = await agent.call_tool(tool, given)
    if told.is_error:
        return told.content[0].text.removeprefix(f"Error executing tool {tool}: ")
    if tool == "frames":
        return [one.text if one.type == "text" else open_picture(one) for one in told.content]
    return [json.loads(one.text) for one in told.content]


@pytest.fixture(autouse=True)
def evidence(monkeypatch: pytest.MonkeyPatch) -> None:
    """A backbone without queries has none of its own."""
    monkeypatch.setattr("protokv.stream.asking.find_evidence", lambda *_: EVIDENCE)


def open_picture(part: Any) -> Any:
    return np.asarray(Image.open(io.BytesIO(base64.b64decode(part.data))), dtype=float)


def test_an_agent_lists_states_and_asks_them_as_a_session_is_asked(folder: Path) -> None:
    (folder / "torn.safetensors").write_bytes(b"no state")
    session = StateFolder(folder, MockBackbone())
    expected = session.open_session(folder / "door.safetensors").ask("what is red")

    async def ask(tools: _Tools) -> None:
        rows = {one["state"]: one for one in await tools("states")}
        assert set(rows) == {"door", "garden", "monday/door", "torn"}
        assert rows["garden"] | {"moments_s": 0} == {
            "state": "garden",
            "duration_s": 3.0,
            "videos": ["1.mp4"],
            "moments_s": 0,
        }
        assert "torn.safetensors" in rows["torn"]["error"]
        assert str(folder) not in rows["torn"]["error"]
        (found,) = await tools("ask", state="door", question="what is red")
        assert (found["answer"], found["faint"]) == (expected.text, False)
        assert found["evidence"] == [{"start_s": 1, "end_s": 2, "share": 0.5, "words": []}]
        how = {"state": "door", "question": "what", "choices": ["red", "green"]}
        (chosen,) = await tools("ask", **how)
        assert sum(chosen["probabilities"].values()) == pytest.approx(1)
        assert chosen["answer"] == max(chosen["probabilities"], key=chosen["probabilities"].get)
        (then,) = await tools("ask", **how, at="3s")
        assert then == chosen

    before = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    talk(folder, ask)
    assert {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()} == before


def test_what_an_agent_cannot_have_is_refused_in_one_line(folder: Path, tmp_path: Path) -> None:
    shutil.copy(folder / "door.safetensors", tmp_path / "outside.safetensors")
    (folder / "link.safetensors").symlink_to(tmp_path / "outside.safetensors")

    async def ask(tools: _Tools) -> None:
        for name in ("../outside", "link", "none", "", "/etc/passwd", "a\0b"):
            assert "there is no state" in await tools("ask", state=name, question="what")
            assert "there is no state" in await tools("frames", state=name, times=[0])
        assert "empty" in await tools("ask", state="door", question=" ")
        for at, why in (("1s", "no commit at or before 1 s"), ("?", "expected a length of time")):
            told = await tools("ask", state="door", question="what", at=at)
            assert why in told
            assert str(tmp_path) not in told
            assert "\n" not in told
        for times in ([-1], [3], [0] * 17):
            told = await tools("frames", state="door", times=times)
            assert told == "times: at most 16, below 3 seconds"
        assert "Unknown tool" in await tools("watch", video="clip.mp4")

    talk(folder, ask)


def test_frames_are_of_the_video_in_the_folder_and_else_the_nearest_that_the_state_keeps(
    folder: Path, tmp_path: Path
) -> None:
    clip = write_video(folder / "clip.mp4", 12)
    for name, thumbnails in (("clip", 16), ("bare", 0)):
        ingest(
            clip,
            folder / f"{name}.safetensors",
            CONFIG,
            backbone=MockBackbone(),
            fps=1.0,
            thumbnails=thumbnails,
        )
    with open_source(clip) as source:
        seen = {round(one.time_s, 3): one.image.astype(float) for one in source.frames()}

    def differ(image: Any, second: int) -> float:
        return float(abs(image - seen[second]).mean())

    async def look(tools: _Tools) -> None:
        asked = {"state": "clip", "times": [7.5, 2]}
        line, frame, then, _ = await tools("frames", **asked)
        assert (line, then) == ("7.5 s; 7.5 s of clip.mp4", "2 s; 2 s of clip.mp4")
        assert differ(frame, 7) < 12 < 40 < differ(frame, 8)
        # A link out of the folder is no video of it, nor is a file that has changed.
        shutil.move(clip, tmp_path / "clip.mp4")
        clip.symlink_to(tmp_path / "clip.mp4")
        line, kept, _, _ = await tools("frames", **asked)
        assert line == "the picture nearest to 7.5 s is of 8 s"
        assert differ(kept, 8) < 25
        clip.unlink()
        write_video(clip, 3, seed=5)
        assert (await tools("frames", **asked))[0] == line
        assert "not the video" in await tools("frames", state="bare", times=[1])

    talk(folder, look)


def test_an_agent_that_may_watch_makes_states_of_videos_in_the_folder_alone(
    folder: Path, tmp_path: Path
) -> None:
    outside = write_video(tmp_path / "outside.mp4", 2)
    (folder / "link.mp4").symlink_to(outside)
    write_video(folder / "monday/clip.mp4", 4)
    shutil.copy(folder / "monday/clip.mp4", folder / "hall.mp4")
    (folder / "hall.safetensors").symlink_to(tmp_path / "hall.safetensors")

    async def watch(tools: _Tools) -> None:
        for name in ("../outside.mp4", str(outside), "link.mp4", "", "/", ".", "rtsp://camera/1"):
            assert "no video in the folder" in await tools("watch", video=name)
        assert "a link stands" in await tools("watch", video="hall.mp4")
        assert "safetensors" in await tools("watch", video="door.safetensors")
        made = {"state": "monday/clip", "watched_s": 4.0, "complete": True, "damage": ""}
        # One waits for the other, and finds nothing left to do.
        calls = [tools("watch", video="monday/clip.mp4") for _ in range(2)]
        assert await asyncio.gather(*calls) == [[made], [made]]
        (found,) = await tools("ask", state="monday/clip", question="what")
        assert found["stream_time_s"] == 4.0

    talk(folder, watch, watching=IngestOptions(config=CONFIG, backbone=MockBackbone()))
    assert not (tmp_path / "hall.safetensors").exists()


def test_an_agent_speaks_to_the_program_over_stdin_and_stdout(tmp_path: Path) -> None:
    shutil.copy(ROOT / "samples/short/video.mp4", tmp_path)
    command = ["-m", "protokv", "mcp", str(tmp_path), "--watch", "--budget", "512"]
    server = StdioServerParameters(
        command=sys.executable, args=command, env=dict(os.environ), cwd=tmp_path
    )
    lengths = list[float]()

    async def note(done: float, *_: Any) -> None:
        lengths.append(done)

    async def run() -> None:
        with (tmp_path / "err").open("w") as errors:
            async with Client(stdio_client(server, errors)) as agent:
                tools = (await agent.list_tools()).tools
                hints = {one.name: bool(one.annotations) for one in tools}
                assert hints == {"states": True, "ask": True, "frames": True, "watch": False}
                await agent.call_tool("watch", {"video": "video.mp4"}, progress_callback=note)
                asked = {"state": "video", "question": "What shape appeared first?"}
                (answer,) = await call(agent, "ask", **asked)
                assert (answer["answer"], answer["notice"]) == ("bar", "")

    asyncio.run(run())
    assert lengths == sorted(lengths)
    assert lengths
    assert (tmp_path / "err").read_text() == ""
