"""`protokv serve`: the states of a folder behind the interface that OpenAI's clients speak."""

from __future__ import annotations

import logging
import socket
import traceback
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from protokv.errors import ConfigError, StateNotFound
from protokv.state.moments import parse_duration
from protokv.texts import shorten_text
from protokv_cli.options import (
    TOP_PANEL,
    DebugFlags,
    Flags,
    MemoryFlags,
    ModelFlags,
    make_kwargs,
    note_unknown_variables,
    option,
    read_option,
)
from protokv_cli.output import Output
from protokv_cli.parsing import find_calibrations, parse_every

if TYPE_CHECKING:
    from protokv.serve import StateFolder

StatesArgument = Annotated[
    str, typer.Argument(metavar="DIR", help="Folder of states, also of those that are added later.")
]


_MOST_LINES = 60


class EngineFlags(DebugFlags):
    """Who answers."""

    engine: str | None = option(
        "--engine URL", "A vLLM with protokv.vllm answers, at this address.", TOP_PANEL
    )


class _ServerFlags(EngineFlags, panel="Server"):
    """Where the server listens, and what it allows."""

    host: str = option(
        "--host ADDRESS", "All but this machine need a token.", TOP_PANEL, default="127.0.0.1"
    )
    port: int = option(
        "--port NUMBER", "Port; 0: any free one.", TOP_PANEL, default=8000, min=0, max=65535
    )
    token: str | None = option(
        "--token TOKEN", "Clients must send it; PROTOKV_TOKEN hides it from other users."
    )
    origins: list[str] | None = option(
        "--allow-origin ORIGIN",
        "Pages of this site may ask, such as http://localhost:3000; repeatable.",
    )
    waiting: int = option("--waiting COUNT", "The most questions at once.", default=16, min=1)
    answer_time: str = option(
        "--answer-time TIME",
        "The longest time for an answer, waiting included.",
        default="2m",
        parse=parse_duration,
    )


class _SessionFlags(Flags, panel="Sessions that clients feed with frames"):
    """How many there may be, and when they are committed."""

    most: int = option(
        "--sessions COUNT",
        "The most at once, conversations with pictures too; 0: none.",
        TOP_PANEL,
        default=0,
        min=0,
    )
    every: str | None = option(
        "--every TIME", "As for ingest. Default: each minute.", parse=parse_every
    )
    keep: int | None = option(
        "--keep COUNT", "Keep the last COUNT commits of each, for query --at."
    )
    idle_s: str = option(
        "--idle TIME", "Put away what nobody feeds so long.", default="5m", parse=parse_duration
    )


def serve(
    states: StatesArgument,
    *,
    flags: _ServerFlags,
    model: ModelFlags,
    sessions: _SessionFlags,
    memory: MemoryFlags,
) -> None:
    """Answer questions over the web from the states of a folder: on a page, and for clients of
    OpenAI.

    The page at / shows the states and answers questions. For clients the name of a state is the
    model.

    The model is loaded once. States are only read; while ingest writes a state, its last commit
    answers. With --sessions, programs feed states with frames. Needs `pip install starlette
    uvicorn`.

    ```sh
    protokv serve states/ --port 8000
    PROTOKV_TOKEN=... protokv serve states/ --host 0.0.0.0
    protokv serve states/ --sessions 4 --budget 8k
    protokv serve states/ --engine http://localhost:8001 --sessions 4
    ```
    """
    with report_server(flags, "asyncio", "uvicorn", "protokv.serve") as out:
        if flags.token is None and flags.host not in ("localhost", "127.0.0.1", "::1"):
            raise ConfigError(
                f"{flags.host} can be reached from other machines",
                hint="set a token in PROTOKV_TOKEN",
            )
        with require_packages("starlette uvicorn"):
            from uvicorn import Server

            from protokv import serve as server
        known = open_state_folder(states, model, flags.engine, watches=sessions.most > 0)
        from protokv.ingestion.options import IngestOptions

        limits = server.ServerLimits(
            waiting=flags.waiting, answer_s=read_option(flags, "answer_time")
        )
        fed = None
        if sessions.most:
            kept = make_kwargs(sessions, "most", "idle_s")
            options = IngestOptions(config=memory.config(), thumbnails=memory.thumbnails, **kept)
            bounds = server.FedSessionLimits(sessions.most, idle_s=read_option(sessions, "idle_s"))
            fed = server.FedSessions(known, options, bounds)
        app = server.build_app(
            known, token=flags.token, limits=limits, fed=fed, origins=flags.origins or ()
        )
        family = socket.AF_INET6 if ":" in flags.host else socket.AF_INET
        try:
            listener = socket.create_server((flags.host, flags.port), family=family)
        except OSError as error:
            raise ConfigError(
                f"cannot listen: {error.strerror}", hint="name another --port or --host"
            ) from error
        shown = f"[{flags.host}]" if ":" in flags.host else flags.host
        address = f"http://{shown}:{listener.getsockname()[1]}/"
        out.note(f"states of {states} on {address} and, for clients of OpenAI, {address}v1")
        with listener:
            config = server.make_uvicorn_config(app, flags.host, flags.port, limits)
            Server(config).run(sockets=[listener])


@contextmanager
def report_server(flags: DebugFlags, *loggers: str) -> Iterator[Output]:
    """Tell errors, and what some loggers warn of, a line each."""
    out = Output(debug=flags.debug)
    note_unknown_variables(out)
    log = ServerLog(out)
    for name in loggers:
        logging.getLogger(name).addHandler(log)
        logging.getLogger(name).propagate = False
    with out.errors():
        yield out


@contextmanager
def require_packages(names: str) -> Iterator[None]:
    """Tell how to install what an import in this block lacks. ConfigError."""
    try:
        yield
    except ImportError as error:
        raise ConfigError(f"{error.name} is not installed", hint=f"pip install {names}") from None


def open_state_folder(
    folder: str, model: ModelFlags, engine: str | None, *, watches: bool = False
) -> StateFolder:
    """Return the states of a folder with their model, which is loaded; with the address of an
    engine, without its weights, unless it `watches`. Raises as `load_backbone_for_states`, and
    ConfigError.
    """
    if not (folder and Path(folder).is_dir()):
        raise StateNotFound(
            f"there is no folder {folder}", hint="name the folder that your states are in"
        )
    from protokv.backbones import load_backbone
    from protokv.ingestion.options import DEFAULT_MODEL
    from protokv.serve.states import StateFolder
    from protokv.state.folder import find_states
    from protokv.stream.engine import Engine
    from protokv.stream.opening import load_backbone_for_states

    how = model.choice | ({"device": "meta", "device_map": None} if engine and not watches else {})
    try:
        backbone = load_backbone_for_states(find_states(folder), **how)
    except StateNotFound:
        backbone = load_backbone(model.model or DEFAULT_MODEL, **model.placement)
    asked = None if engine is None else Engine(engine)
    return StateFolder(Path(folder), backbone, engine=asked, calibrations=find_calibrations())


class ServerLog(logging.Handler):
    """Writes a line for a warning or an error of the server; the traceback with `--debug`.

    Clients cause them, so it writes at most `_MOST_LINES` a minute.
    """

    def __init__(self, out: Output) -> None:
        super().__init__(logging.WARNING)
        self._out = out
        self._lines = Counter[int]()

    def emit(self, record: logging.LogRecord) -> None:
        """Write the first line of a record, and its exception."""
        minute = int(record.created / 60)
        self._lines = Counter({minute: self._lines[minute] + 1})
        if self._lines[minute] >= _MOST_LINES:
            if self._lines[minute] == _MOST_LINES:
                self._out.note("Warning: what else the server has to say this minute is left out")
            return
        error = record.exc_info[1] if record.exc_info else None
        cause = "" if error is None else f": {type(error).__name__}: {' '.join(str(error).split())}"
        text = (
            f"{record.levelname.capitalize()}: {record.getMessage().strip().splitlines()[0]}{cause}"
        )
        self._out.note(shorten_text(text, 300))
        if error is not None and self._out.debug:
            self._out.note("".join(traceback.format_exception(error)))
