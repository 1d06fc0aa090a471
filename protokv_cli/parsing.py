"""The grammar of option values: settings, times, intervals, lists, and the commit that `--at TIME`
means.

Every function raises ConfigError, with an example as its hint, for a text that it cannot read.
"""

from __future__ import annotations

import json
import os
import re
import time
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from protokv.errors import ConfigError
from protokv.state.moments import find_stream_moment, parse_duration
from protokv_cli.output import Output, format_time

if TYPE_CHECKING:
    from protokv.ingestion import Every
    from protokv.replay.memories import SettingSweep
    from protokv.state.reader import StateReader

CALIBRATIONS_VARIABLE = "PROTOKV_CALIBRATIONS"


def parse_pair(
    text: str, what: str = "setting", example: str = "split=1:5 or seed=7"
) -> tuple[str, str]:
    """Return the name and the text of "name=value"."""
    name, _, value = (part.strip() for part in text.partition("="))
    if not (name and value):
        raise ConfigError(
            f"{what}: expected NAME=VALUE, got {text!r}", hint=f"for example {example}"
        )
    return name, value


def parse_setting(text: str) -> tuple[str, Any]:
    """Return name and value of "name=value": a number, true, false, "a:b" (two whole numbers) or a
    word.
    """
    name, value = parse_pair(text.replace("-", "_", text.partition("=")[0].count("-")))
    if pair := re.fullmatch(r"(\d{1,9}):(\d{1,9})", value, re.ASCII):
        return name, (int(pair[1]), int(pair[2]))
    try:
        return name, json.loads(value)
    except ValueError:
        return name, value


def parse_every(text: str) -> Every:
    """Return how often to commit: `30s`, `2m`, `1h` of stream time, `500steps`, or `never`."""
    from protokv.ingestion import COMMIT_NEVER, Every

    if text == "never":
        return COMMIT_NEVER
    steps = re.fullmatch(r"(\d{1,12}) ?steps?", text, re.ASCII)
    return Every(n_steps=int(steps[1])) if steps else Every(seconds=parse_duration(text))


def parse_steps(text: str) -> int | None:
    """Return a number of steps; None for `auto`."""
    if not re.fullmatch(r"\d{1,9}|auto", text, re.ASCII):
        raise ConfigError(
            f"expected a number of steps, got {text!r}", hint="for example 4, or auto"
        )
    return None if text == "auto" else int(text)


def parse_list(text: str | None) -> tuple[str, ...]:
    """Return the parts of `a,b,c`, without empty ones; None: none."""
    parts = tuple(part.strip() for part in (text or "").split(",") if part.strip())
    if text is not None and not parts:
        raise ConfigError(
            f"expected one or more, with commas between them, got {text!r}",
            hint="write it as a,b,c",
        )
    return parts


def parse_variation(text: str) -> SettingSweep:
    """Return the setting and values of `NAME=VALUE,...` or `MEMORY.NAME=VALUE,...`."""
    from protokv.replay.memories import SettingSweep

    name, values = parse_pair(text)
    memory, _, field = name.rpartition(".")
    found = {part: parse_setting(f"{field}={part}") for part in parse_list(values)}
    setting = next(iter(found.values()))[0]
    return SettingSweep(
        memory or None, setting, [(part, value) for part, (_, value) in found.items()]
    )


def open_commit_at(out: Output, state: str, at: str | None, verify: bool) -> StateReader:
    """Return the reader of the commit that `--at` means, None: the last. ConfigError,
    StateError.
    """
    from protokv.state.reader import StateReader

    reader = StateReader.open(state, verify=verify)
    if at is None:
        return reader
    try:
        moment = find_stream_moment(at, reader, time.time())
    except ConfigError as error:
        raise ConfigError(f"--at: {error.message}", hint=error.hint) from error
    if moment.note:
        out.note(moment.note)
    return reader.at(moment.stream_s)


def show_commit_note(
    out: Output, reader: StateReader, stream_time_s: float, age_s: float | None = None
) -> None:
    """Note the time of the commit if it differs from `--at`; without `--at`, its age. Of a live
    stream it has its date, too.
    """

    def describe(time_s: float) -> str:
        logs = [one for one in reader.wall_clocks if one.anchors[0][0] <= time_s]
        if not logs:
            return format_time(time_s)
        date = datetime.fromtimestamp(logs[-1].real_time(time_s))
        return f"{format_time(time_s)} ({date:%Y-%m-%d %H:%M:%S})"

    as_of = f"as of {describe(stream_time_s)}"
    at_s = reader.at_s
    if at_s is not None and format_time(stream_time_s) != format_time(at_s):
        out.note(f"{as_of}, the last commit that is kept before {describe(at_s)}")
    elif age_s is not None:
        out.note(f"{as_of}, committed {format_time(round(age_s, 1))} ago")


def parse_share(text: str) -> float:
    """Return a share: `5%` or `0.05`."""
    try:
        share = float(text.removesuffix("%")) / (100 if text.endswith("%") else 1)
    except ValueError:
        share = 0.0
    if not 0 < share < 1:
        raise ConfigError(f"{text!r} is no share", hint="such as 5%")
    return share


def find_calibrations() -> Path:
    """Return the folder of calibrations, which `CALIBRATIONS_VARIABLE` may name."""
    named = os.environ.get(CALIBRATIONS_VARIABLE)
    return Path(named) if named else Path(typer.get_app_dir("protokv")) / "calibrations"
