"""`python -m protokv`: the command line, for where its script is not on the path."""

from __future__ import annotations

from protokv_cli.main import run

if __name__ == "__main__":
    run()
