"""The states of a folder as tools of agents, by the Model Context Protocol.

Nothing leads out of the folder. Agents read the docstrings of the tools.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from threading import Semaphore
from typing import Any

import anyio
from mcp.server.mcpserver import Context, Image, MCPServer
from mcp.server.mcpserver.exceptions import ToolError
from mcp.types import ToolAnnotations

from protokv.errors import ConfigError, ProtoKVError, StateError
from protokv.ingestion import IngestOptions, IngestProgress, IngestSummary, ingest_events
from protokv.serve.states import StateFolder
from protokv.state.frames import show_moments
from protokv.state.reader import StateReader
from protokv.state.sources import describe_spans, list_state_sources
from protokv.texts import JsonObject

_MOST_FRAMES = 16  # of a call
_MOST_SIDE = 1024  # pixels
_MOST_ASKED = 16  # questions to an engine at once
_UNTOLD = "not told by this engine or cache"


def build_tool_server(states: StateFolder, watching: IngestOptions | None = None) -> MCPServer:
    """Return a server of tools; with `watching`, agents may make states of the folder's videos."""
    tools = _StateTools(states, watching or IngestOptions())
    server = MCPServer("protokv")
    reads = ToolAnnotations(read_only_hint=True)
    for tool in (tools.states, tools.ask, tools.frames):
        server.tool(annotations=reads, structured_output=False)(tool)
    if watching is not None:
        states.let_watch()
        server.tool(structured_output=False)(tools.watch)
    return server


class _StateTools:
    def __init__(self, states: StateFolder, watching: IngestOptions) -> None:
        self._states = states
        self._watching = watching
        # There is one model; an engine answers many at once.
        self._model = Semaphore(_MOST_ASKED) if states.engine else states.lock
        self._one_watch = anyio.Lock()

    @contextmanager
    def _turn(self) -> Iterator[None]:
        """Hold the model, and tell errors of users in a line."""
        try:
            with self._model:
                yield
        except ProtoKVError as error:
            raise ToolError(self._states.word_error(error)) from None

    def states(self) -> list[JsonObject]:
        """List the states: memories of videos, each with its length in seconds, the names of its
        videos, and the moments, in seconds, as of which it can be asked.
        """
        found = []
        for name, path in self._states.list_all().items():
            row: JsonObject = {"state": name}
            try:
                reader = StateReader.open(path)
                row["duration_s"] = reader.header.clock.stream_time_s
                row["videos"] = [one.get("name") for one in list_state_sources(reader.header)]
                row["moments_s"] = reader.commits_s
            except StateError as error:
                row["error"] = self._states.word_error(error)
            found.append(row)
        return found

    def ask(
        self, state: str, question: str, choices: list[str] | None = None, at: str | None = None
    ) -> JsonObject:
        """Ask a state about its video. Asking changes nothing, and each question stands alone.

        With choices, such as ["yes", "no"], the answer is one of them, each with its probability.
        The evidence has the times, in seconds, that the answer stood on, which `frames` shows; if
        it is faint, the answer may be a guess. With at, such as "12m", the answer is as of then.
        """
        states = self._states
        with self._turn():
            path = states.find(state)
            session = states.open_session(path, at)
            tells = states.engine is None and not session.outside
            decoding = replace(states.decoding, choices=tuple(choices or ()))
            answer = session.ask(question, decoding, evidence=tells)
            notice, places = states.read_remarks(path)
        found = answer.evidence
        return {
            "answer": answer.text,
            "probabilities": answer.probabilities,
            "evidence": describe_spans(found.spans, places) if found else _UNTOLD,
            "faint": found and found.faint,
            "stream_time_s": answer.stream_time_s,
            "notice": notice,
        }

    def frames(self, state: str, times: list[float]) -> list[str | Image]:
        """Show what a state saw at some times, in seconds: frames of its video if that is in the
        folder, else the nearest of the few small pictures in the state.
        """
        with self._turn():
            path = self._states.find(state)
            found = show_moments(path, times, _MOST_FRAMES, self._states.holds, _MOST_SIDE)
            return [
                part for line, jpeg in found for part in (line, Image(data=jpeg, format="jpeg"))
            ]

    async def watch(self, video: str, context: Context) -> JsonObject:
        """Watch a video of the folder, by its name there, into a state of that name without its
        suffix. Called again, it goes on where it was stopped.
        """
        path = self._states.folder / video
        with self._turn():
            if not (self._states.holds(path) and path.is_file()):
                raise ConfigError(f"{video}: it is no video in the folder of the states")
            state = path.with_suffix(".safetensors")
            if state.is_symlink():
                raise ConfigError(f"{video}: a link stands where its state would")
        async with self._one_watch:
            events = ingest_events(path, state, options=self._watching)

            def go_on() -> Any:
                with self._turn(), self._states.lock:
                    return next(events)

            try:
                # Questions are answered between two events.
                while not isinstance(event := await anyio.to_thread.run_sync(go_on), IngestSummary):
                    if isinstance(event, IngestProgress):
                        await context.report_progress(event.stream_time_s, event.duration_s)
            finally:
                events.close()
        found = {name: getattr(event, name) for name in ("watched_s", "complete", "damage")}
        return {"state": Path(video).with_suffix("").as_posix(), **found}
