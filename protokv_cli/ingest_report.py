"""What `protokv ingest` shows of one source, or of several live ones: notes before the run, its
progress, its result, and what to do next.

Imports the library whole, so it is imported when a run begins.
"""

from __future__ import annotations

import math
import re
import shlex
import time
from dataclasses import asdict
from pathlib import Path

import typer

from protokv.ingestion import IngestEvent, IngestOptions, events
from protokv.ingestion.estimate import IngestEstimate
from protokv.state.sources import describe_spans, describe_video_times
from protokv.texts import JsonObject, format_count
from protokv.timings import Timings
from protokv_cli.asking import format_evidence_line
from protokv_cli.exits import ExitCode
from protokv_cli.hooks import SubprocessHook
from protokv_cli.output import (
    Output,
    ProgressBar,
    explain_error,
    format_bytes,
    format_time,
    format_time_left,
    is_embedded_model,
    round_timings,
    show_timings,
)

# of the last event, but in JSON
_HIDDEN = ("source", "steps", "stream_time_s", "state_bytes", "complete", "damaged")


class EventPrinter(ProgressBar):
    """Shows the events of a run in the chosen format, and its progress. A run watches one source,
    or several live ones.
    """

    hook: SubprocessHook | None = None  # gets the answers to standing questions

    def __init__(
        self, out: Output, name: str, chosen: IngestOptions, timings: Timings | None = None
    ) -> None:
        """Show nothing yet. `name` is that of the source without secrets, or says how many there
        are; the last event is shown with `timings`.
        """
        super().__init__(out, "loading model", name, logs=not out.as_json)
        self._chosen = chosen
        self._timings = timings
        # By source.
        self._begun = dict[str, events.IngestStarted]()
        self._first = dict[str, tuple[float, float]]()
        self._failures = 0

    def follow(self, event: IngestEvent, source: str) -> None:
        """Show an event of a source: notes on stderr, and a JSON line, or a table at the end."""
        out = self._out
        ends = isinstance(event, events.IngestSummary)
        if isinstance(event, events.IngestStarted):
            self._begun[source] = event
            out.note_model(event.model, event.notice)
            _note_start(out, event, source)
        _note_news(out, event, source)
        if isinstance(event, events.IngestProgress) and not self._show_progress(event, source):
            return
        begun = self._begun.get(source)
        name = source if begun is None else begun.source
        row = {"type": name_event(event), "source": name, **asdict(event)}
        if self._timings is not None and ends:
            row["timings"] = round_timings(self._timings)
        if isinstance(event, events.QuestionAnswered):
            videos = event.videos
            del row["videos"]
            row |= describe_video_times(videos, time_s=event.stream_time_s)
            if event.evidence is not None:
                row["evidence"] = describe_spans(event.evidence, videos)
            if event.notice:
                out.note(f"Note: {event.notice}")
            if self.hook:
                self.hook(row)
        if out.as_json:
            out.json(row)
        elif isinstance(event, events.QuestionAnswered):
            out.text(_describe_answer(event, row))
        elif ends:
            show_timings(out, row.pop("timings", {}))
            out.record(
                {name: value for name, value in row.items() if value and name not in _HIDDEN}
            )
        if isinstance(event, events.IngestSummary):
            self._tell_damage(event, source)

    def fail(self, error: Exception, source: str) -> None:
        """Show why one of several sources ended."""
        self._failures += 1
        message, hint, code = explain_error(error)
        # Most messages name the source themselves.
        named = message if source in message else f"{source}: {message}"
        self._out.tell_failure(named, hint)
        if self._out.as_json:
            row = {"type": "failed", "source": source, "error": type(error).__name__}
            self._out.json({**row, "message": message, "hint": hint, "exit_code": int(code)})

    def end(self, states: str, stopped: ExitCode | None) -> None:
        """Say what to do next with the state, or the folder of them. A run that was `stopped` ends
        with the exit code of its signal, and one with failures or damage with that of a part.
        """
        out = self._out
        if stopped is not None:
            out.note(f"stopped; {states} is committed. Continue with the same command.")
            raise typer.Exit(stopped)
        if self._failures:
            raise typer.Exit(ExitCode.PARTIAL)
        if not self._chosen.ask:
            model = next(iter(self._begun.values())).model
            show_query_hint(out, states, model, self._chosen.backbone)

    def _show_progress(self, event: events.IngestProgress, source: str) -> bool:
        """Draw the bar; return True if a JSON line is due."""
        now_s = time.monotonic()
        done_s = event.stream_time_s
        length_s = event.duration_s
        if source not in self._first:
            self._first[source] = (now_s, done_s)
            self._note_share(event, self._begun[source])
        if self.due():
            self._name = source
            parts = [format_time(done_s), f"{event.frames_per_second:.0f} frames/s"]
            if length_s:
                began_s, from_s = self._first[source]
                left = format_time_left(done_s - from_s, length_s - done_s, now_s - began_s)
                share = f"{min(1.0, done_s / length_s):4.0%}"
                parts = [share, f"{parts[0]} / {format_time(length_s)}", *left, parts[1]]
            parts.append(f"state {format_bytes(event.state_bytes)}")
            self.show(parts, min(done_s, length_s or done_s), length_s)
        return self.row_due(source)

    def _note_share(self, event: events.IngestProgress, begun: events.IngestStarted) -> None:
        """Say what part of the video a new state will keep: what a step takes is known only now."""
        if begun.how == "started" and begun.most_bytes is not None and event.duration_s:
            tokens = event.tokens_seen * event.duration_s / event.stream_time_s
            self._out.note(_describe_share(tokens, event, self._chosen.memory.budget))

    def _tell_damage(self, summary: events.IngestSummary, source: str) -> None:
        """Say what of a source is not in its state."""
        if summary.damaged:
            why = str(summary.damage)
            hint = f"what could be read is in {summary.state}; ask it, or mend the video and"
        elif summary.words_lost:
            why = f"not all words are read: {summary.words_lost}"
            hint = "mend that, or choose other words with --subtitles (off: none), and"
        else:
            return
        self._failures += 1
        self._out.tell_failure(f"{source}: {why}", f"{hint} use --force")


def show_query_hint(out: Output, states: str, model: str | None, named: object) -> None:
    """Say how to ask a state, or the states of a folder; `named` is the model that the user
    named.
    """
    # A state names no folder of its model.
    folder = ["--model", str(named)] if named and Path(str(named)).is_dir() else []
    question = (
        "What shape appeared first?" if is_embedded_model(model) else "What happens in this video?"
    )
    out.note(f'ask it: {shlex.join(["protokv", "query", *folder, states])} "{question}"')


def _note_start(out: Output, started: events.IngestStarted, source: str) -> None:
    """Note where the run begins, and by which model and words."""
    if not started.locked:
        out.note(
            f"{started.state} cannot be locked there: nothing keeps others from writing it at the "
            "same time"
        )
    if started.how == "finished":
        out.note(f"{started.state} has watched {source} to its end; there is nothing to do")
        return
    if started.how != "started":
        how = "continuing" if started.how == "continued" else "appending to"
        out.note(f"{how} {started.state} at {format_time(started.stream_time_s)}")
    out.note(f"model: {started.model} in {started.dtype}", once=True)
    if started.words:
        out.note(f"words from {started.words}; --subtitles off leaves them out")


def _note_news(out: Output, event: IngestEvent, source: str) -> None:
    """Write a line if the words of a source are lost, or a live one is lost or too fast."""
    match event:
        case events.WordsLost():
            out.note(f"Warning: {event.words}: {event.why}; the video is watched all the same")
        case events.SourceNoted():
            out.note(f"Note: {event.source}: {event.note}")
        case events.SourceLost():
            out.error(
                f"{event.source} is lost at {format_time(event.stream_time_s)}: {event.why}; "
                "trying again"
            )
        case events.SourceRecovered():
            out.error(
                f"{event.source} is back at {format_time(event.stream_time_s)}, after "
                f"{format_time(event.gap_s)}"
            )
        case events.FramesDropped():
            rates = f"{event.stream_fps:.1f} a second come, the model takes {event.watched_fps:.1f}"
            out.note(
                f"{source}: frames are dropped: {rates}; sample fewer with --fps, or let the "
                "camera send smaller ones"
            )


def _describe_answer(event: events.QuestionAnswered, row: JsonObject) -> str:
    """Return a line such as `0:45 Is someone at the door? yes (0.97)`, and a second line with the
    evidence if it is known.
    """
    sure = math.exp(event.mean_logprob) if event.probability is None else event.probability
    at = format_time(event.stream_time_s)
    if "video" in row:
        at += f" ({format_time(row['video_time_s'])} of {row['video']})"
    line = f"{at} {event.question} {event.answer} ({sure:.2f})"
    if event.frames_dropped:
        line += (
            f", {event.late_s:.0f} s late, {format_count(event.frames_dropped, 'frame')} dropped"
        )
    stood = event.evidence and format_evidence_line(row["evidence"])
    return f"{line}\n{stood}" if stood else line


def name_event(event: IngestEvent) -> str:
    """Return the `type` of an event in JSON, such as `source_lost` of `SourceLost` and `started` of
    `IngestStarted`.
    """
    return re.sub(
        r"(?<!^)(?=[A-Z])", "_", re.sub("^Ingest|^Question", "", type(event).__name__)
    ).lower()


def _describe_share(
    tokens: float, memory: events.IngestProgress | IngestEstimate, budget: int
) -> str:
    """Return which part of the tokens of a whole video a budget keeps, and in which form."""
    kept = memory.near_tokens + memory.prototypes if memory.prototypes else budget
    if tokens <= kept:
        return "the budget keeps all of the video"
    times = tokens / kept
    part = round(times) if times > 9.5 else max(1.1, round(times, 1))
    share = f"the budget keeps 1/{part:g} of the video"
    if memory.prototypes:
        words = f", {budget - kept:,} are for words" if budget > kept else ""
        share += (
            f" ({memory.near_tokens:,} tokens exactly, {memory.prototypes:,} prototypes of older "
            f"ones{words})"
        )
    return share


def show_estimate(out: Output, found: IngestEstimate, budget: int) -> None:
    """Show what a run would take, as a table or one JSON object."""
    out.record({"type": "estimate", **asdict(found)}, title="nothing was written; it would be")
    if found.tokens and found.most_bytes is not None:
        out.note(_describe_share(found.tokens, found, budget))
