"""States behind the web interface of OpenAI's clients: each state is a model by its name."""

from __future__ import annotations

from protokv.serve.app import ServerLimits, build_app, make_uvicorn_config
from protokv.serve.sessions import FedSessionLimits, FedSessions
from protokv.serve.states import StateFolder

__all__ = [
    "FedSessionLimits",
    "FedSessions",
    "ServerLimits",
    "StateFolder",
    "build_app",
    "make_uvicorn_config",
]
