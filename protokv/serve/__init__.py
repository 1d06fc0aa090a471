"""States behind the web interface of OpenAI's clients: each state is a model by its name."""

from __future__ import annotations

from protokv.serve.app import ServerLimits, build_app, configure_server
from protokv.serve.sessions import FedSessionLimits, FedSessions
from protokv.serve.states import StateFolder

__all__ = ["FedSessionLimits", "FedSessions", "ServerLimits", "StateFolder", "build_app", "configure_server"]
