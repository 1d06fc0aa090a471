"""Foreign text made fit for a message. Imports nothing, so that the lock needs nothing either."""

from __future__ import annotations


def shown(name: object) -> str:
    """A name out of a file, fit for an error message: ASCII, one line, not long."""
    return ascii(str(name)[:80])[1:-1]
