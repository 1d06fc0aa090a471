"""States behind the web interface of OpenAI's clients: each state is a model by its name."""

from __future__ import annotations

from protokv.serve.app import ServerLimits, build_app, configure
from protokv.serve.sessions import SessionLimits, Sessions
from protokv.serve.states import States

__all__ = ["ServerLimits", "SessionLimits", "Sessions", "States", "build_app", "configure"]
