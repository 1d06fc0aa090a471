"""`protokv mcp`: the states of a folder as tools of agents."""

from __future__ import annotations

import logging

from protokv_cli.options import (
    TOP_PANEL,
    DebugFlags,
    MemoryFlags,
    ModelFlags,
    check_options,
    note_unknown_variables,
    option,
)
from protokv_cli.output import Output
from protokv_cli.serve import ServerLog, StatesArgument, open_state_folder, require_packages


class _ToolFlags(DebugFlags, panel="Tools"):
    """What agents may do, and who answers them."""

    watch: bool = option("--watch", "Agents may also watch videos in DIR.", TOP_PANEL)
    engine: str | None = option(
        "--engine URL", "A vLLM with protokv.vllm answers, at this address.", TOP_PANEL
    )


def mcp(
    states: StatesArgument, *, flags: _ToolFlags, model: ModelFlags, memory: MemoryFlags
) -> None:
    """Let agents ask the states of a folder, by the Model Context Protocol on stdin and stdout.

    The tools are `states`, `ask` and `frames`, and with --watch also `watch`. States are only read,
    and nothing outside the folder is. Needs `pip install mcp`.

    ```sh
    protokv mcp states/
    protokv mcp videos/ --watch --budget 8k
    ```
    """
    out = Output(debug=flags.debug)
    note_unknown_variables(out)
    # A handler of the root keeps the package from adding its own.
    logging.getLogger().addHandler(ServerLog(out))
    with out.errors():
        check_options(
            (
                flags.engine and flags.watch,
                "an engine of others watches nothing",
                "leave out --watch or --engine",
            )
        )
        with require_packages("'mcp>=2.3'"):
            from protokv.serve.tools import build_tool_server
        from protokv.ingestion.options import IngestOptions

        known = open_state_folder(states, model, flags.engine)
        watching = IngestOptions(
            config=memory.config() if memory.is_chosen else None,
            backbone=known.backbone,
            thumbnails=memory.thumbnails,
            chunk=None,
        )
        build_tool_server(known, watching if flags.watch else None).run()
