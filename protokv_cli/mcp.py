"""`protokv mcp`: the states of a folder as tools of agents."""

from __future__ import annotations

from protokv_cli.options import TOP_PANEL, MemoryFlags, ModelFlags, option
from protokv_cli.serve import (
    EngineFlags,
    StatesArgument,
    open_state_folder,
    report_server,
    require_packages,
)


class _ToolFlags(EngineFlags, panel="Tools"):
    """What agents may do, and who answers them."""

    watch: bool = option("--watch", "Agents may also watch videos in DIR.", TOP_PANEL)


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
    # A handler of the root keeps the package from adding its own.
    with report_server(flags, ""):
        with require_packages("'mcp>=2.3'"):
            from protokv.serve.tools import build_tool_server
        from protokv.ingestion.options import IngestOptions

        known = open_state_folder(states, model, flags.engine, watches=flags.watch)
        watching = IngestOptions(
            config=memory.config() if memory.is_chosen else None,
            backbone=known.backbone,
            thumbnails=memory.thumbnails,
            chunk=None,
        )
        build_tool_server(known, watching if flags.watch else None).run()
