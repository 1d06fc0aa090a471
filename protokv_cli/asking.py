"""Questions as users give them, and their answers: arguments, lines, JSON lines or a prompt; rows,
text and evidence.

A question that cannot be asked is told with its place, and the others are answered.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import asdict, dataclass, field, replace
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

import msgspec
import typer

from protokv.errors import ConfigError, ProtoKVError, QuestionError
from protokv.texts import JsonObject, JsonRecord, check_question_text, shorten_text
from protokv_cli.exits import ExitCode
from protokv_cli.options import TOP_PANEL, Flags, check_options, option, read_option
from protokv_cli.output import Output, format_time, round_timings
from protokv_cli.parsing import find_calibrations, parse_list, parse_share

if TYPE_CHECKING:
    from protokv.core.backbone import Backbone
    from protokv.core.decoding import Decoding
    from protokv.state.frames import StateVideos
    from protokv.state.header import StateHeader
    from protokv.state.sources import VideoPlace
    from protokv.stream.answer import Answer
    from protokv.stream.promise import PromiseRule
    from protokv.stream.session import Session
    from protokv.timings import Timings

_HINT = 'write {"question": "..."} or the bare question, one a line'


@dataclass(frozen=True, slots=True)
class UserQuestion:
    """One question, the expected answer and the name of it if there are any, and where it was
    given. QuestionError if it is no text.
    """

    text: str
    expected: str | None = None
    where: str = ""
    id: str | int | None = None

    def __post_init__(self) -> None:
        check_question_text(self.text)


class _Line(msgspec.Struct):
    """A question in JSON, and the answer that is expected if there is one."""

    question: str
    answer: str | None = None
    id: str | int | None = None


class QuestionErrors:
    """Tells of the questions that cannot be asked."""

    def __init__(self, out: Output) -> None:
        self._out = out
        self._any = False

    @contextmanager
    def at(self, where: str) -> Iterator[None]:
        """Tell of a question that is refused in this block, and go on."""
        try:
            yield
        except QuestionError as error:
            self._any = True
            self._out.tell_failure(f"{where}: {error.message}".removeprefix(": "), error.hint)

    def check(self) -> None:
        """End the command with the code for usage if a question was refused."""
        if self._any:
            raise typer.Exit(ExitCode.USAGE)


def read_questions(
    arguments: Sequence[str], file: Path | None, refusals: QuestionErrors
) -> Iterator[list[UserQuestion]]:
    """Yield the questions of a file, then the arguments, as they are at hand; `-` stands for the
    lines of stdin. ConfigError: no file.
    """
    if file is not None:
        try:
            yield from _parse_lines(str(file), str(file), refusals)
        except OSError as error:
            raise ConfigError(
                f"questions: {file} cannot be read: {error.strerror}", hint="name a file of lines"
            ) from error
    named = list[UserQuestion]()
    for number, argument in enumerate(arguments, start=1):
        if argument == "-":
            yield named
            yield from _parse_lines("-", "stdin", refusals)
            named = []
        else:
            where = f"question {number}" if len(arguments) > 1 else ""
            with refusals.at(where):
                named.append(UserQuestion(argument, where=where))
    yield named


_MOST_AT_ONCE = 1 << 16  # bytes of lines


def open_lines(place: str) -> AbstractContextManager[BinaryIO]:
    """Open a file of lines, or stdin for `-`."""
    return nullcontext(sys.stdin.buffer) if place == "-" else Path(place).open("rb")


def decode_line(line: bytes) -> str:
    """Return a line as text, without the mark that some editors begin a file with. Bytes that are
    not UTF-8 become halves of surrogate pairs, which are refused where text is needed.
    """
    return line.decode("utf-8-sig", "surrogateescape").strip()


def _parse_lines(place: str, name: str, refusals: QuestionErrors) -> Iterator[list[UserQuestion]]:
    numbers = count(1)
    with open_lines(place) as file:
        for lines in _read_lines(file):
            found = []
            for line in lines:
                where = f"line {next(numbers)} of {name}"
                with refusals.at(where):
                    if text := decode_line(line):
                        found.append(_parse(text, where))
            yield found


def _read_lines(file: Any) -> Iterator[list[bytes]]:
    """Yield the lines that come at once: a program may write the next one when it has an answer."""
    rest = b""
    while data := file.read1(_MOST_AT_ONCE):
        *lines, rest = (rest + data).split(b"\n")
        yield lines
    yield [rest]


def _parse(line: str, where: str) -> UserQuestion:
    if not line.startswith("{"):
        return UserQuestion(line, where=where)
    try:
        row = msgspec.json.decode(line, type=_Line)
    except (ValueError, RecursionError) as error:
        raise QuestionError(f"not a JSON object of a question: {error}", hint=_HINT) from error
    return UserQuestion(row.question, row.answer, where, row.id)


def read_typed_questions(refusals: QuestionErrors) -> Iterator[list[UserQuestion]]:
    """Yield the lines that a user types at the prompt, until exit, quit or Ctrl-D; Ctrl-C drops a
    line.
    """
    with suppress(ImportError):
        # For the arrow keys.
        import readline  # noqa: F401
    line = ""
    while line.lower() not in ("exit", "quit"):
        with refusals.at(""):
            if line:
                yield [UserQuestion(line)]
        try:
            # The prompt goes to stdout, which is for answers only unless it is the terminal.
            line = input("? " if sys.stdout.isatty() else "").strip()
        except KeyboardInterrupt:
            line = ""
            sys.stderr.write("\n")
        except EOFError:
            sys.stderr.write("\n")
            return


class AnswerFlags(Flags, panel="Answers"):
    """How an answer is written."""

    max_new_tokens: int | None = option(
        "--max-new-tokens COUNT", "Default: the model's, or 64.", TOP_PANEL
    )
    evidence: bool = option("--evidence", "Show the times that each answer stood on.", TOP_PANEL)
    at_most_wrong: str | None = option(
        "--at-most-wrong SHARE",
        "Answer, or say I do not know: of the answers given, at most 5% are wrong.",
        TOP_PANEL,
        parse=parse_share,
    )
    frames: Path | None = option(
        "--frames DIR", "Write the frames at these times as PNG, named by time."
    )
    video: Path | None = option(
        "--video PATH", "Their video or its folder. Default: beside the state, or here."
    )
    system: str | None = option("--system TEXT", "A system prompt, in front of each question.")
    choices: str | None = option(
        "--choices A,B", "Answer with the likeliest of these, such as yes,no.", TOP_PANEL
    )
    temperature: float | None = option(
        "--temperature NUMBER", "0 is greedy; above 0 draws. Default: as published."
    )
    top_p: float | None = option(
        "--top-p SHARE", "Draw from this share of the probability. Default: as published."
    )
    seed: int = option("--seed NUMBER", "Seed of the draws.", default=0)

    def decoding(self, backbone: Backbone | None = None) -> Decoding:
        """Return how a model draws; without one, only refuse numbers that cannot be.
        ConfigError.
        """
        from protokv.core.decoding import Decoding

        if backbone and self.system is not None and not backbone.converses:
            raise ConfigError(
                f"{backbone.identity.name} takes no system prompt", hint="leave out --system"
            )
        drawn = {name: getattr(self, name) for name in ("max_new_tokens", "temperature", "top_p")}
        drawn = {name: value for name, value in drawn.items() if value is not None}
        check_options(
            (
                self.choices and drawn,
                "--choices generates and draws nothing",
                "leave the other options out",
            )
        )
        drawn |= {"choices": parse_list(self.choices), "seed": self.seed}
        return replace(backbone.decoding if backbone else Decoding(), **drawn)


@dataclass
class Answerer:
    """Asks a session one question after another, and makes a row of each answer."""

    out: Output
    how: AnswerFlags
    refusals: QuestionErrors
    clock: Timings  # adds up the seconds of each stage
    timed: bool = False  # rows have these seconds
    # write each answer as it is generated, and what belongs to it in lines below
    shows: bool = False
    alone: bool = False  # then do not repeat the question before it
    at_prompt: bool = False  # questions are typed, and are one conversation
    _turns: list[tuple[str, str]] = field(default_factory=list)
    # Of the state that is asked.
    _notice: str = ""
    _places: Sequence[VideoPlace] = ()
    _promise: PromiseRule | None = None

    def ask_all(
        self,
        state: str,
        header: StateHeader,
        session: Session,
        questions: Iterable[Sequence[UserQuestion]],
        videos: StateVideos = (),
    ) -> Iterator[JsonObject]:
        """Yield the row of each answer of a state; `videos` are those that `--frames` are from.
        Questions that are at hand together are answered together.

        A refused question does not end the loop; at a prompt, neither does Ctrl-C during an answer.
        """
        from protokv.state.sources import find_notice, list_state_sources, list_video_places

        self._notice = find_notice(header)
        self._places = list_video_places(list_state_sources(header))
        decoding = self.how.decoding(session.backbone)
        if self.how.at_most_wrong is not None:
            from protokv.stream.promise import find_promise_rule

            wrong = read_option(self.how, "at_most_wrong")
            self._promise = find_promise_rule(session, find_calibrations(), wrong)
        for group in questions:
            try:
                for question, answer in self._stream(session, decoding, group):
                    row = self._make_row(answer, state, question.expected)
                    if question.id is not None:
                        row["id"] = question.id
                    if self.how.frames is not None:
                        from protokv_cli.frames import write_evidence_frames

                        row["frames"] = write_evidence_frames(
                            videos, answer, session, self.how.frames
                        )
                        self.out.note(f"{len(row['frames'])} frames are in {self.how.frames}")
                    if self.timed:
                        self.clock.add("first token", answer.ttft_ms / 1e3)
                        self.clock.add("tokens", (answer.total_ms - answer.ttft_ms) / 1e3)
                        row |= {"timings": round_timings(self.clock), "decoding": asdict(decoding)}
                    yield row
            except (KeyboardInterrupt, ProtoKVError) as error:
                if not self.at_prompt:
                    raise
                self.out.error(f"Error: {error.message}" if isinstance(error, ProtoKVError) else "")

    @property
    def _wants_evidence(self) -> bool:
        return self.how.evidence or self.how.frames is not None

    def _make_row(self, answer: Answer, state: str, expected: str | None) -> JsonObject:
        """Return the row of an answer; show its evidence, and the expected answer if it differs."""

        row: JsonObject = {
            "question": answer.question,
            "answer": answer.text,
            "stream_time_s": answer.stream_time_s,
            "ttft_ms": round(answer.ttft_ms, 3),
            "total_ms": round(answer.total_ms, 3),
            "context_tokens": answer.context_tokens,
            "mean_logprob": round(answer.mean_logprob, 6),
            "state": state,
            "finish_reason": answer.finish_reason,
        }
        if answer.probabilities is not None:
            row["probabilities"] = {
                choice: round(share, 4) for choice, share in answer.probabilities.items()
            }
            if self.shows:
                shares = [f"{one} {share:.2f}" for one, share in row["probabilities"].items()]
                self.out.text("  " + ", ".join(shares))
        if answer.evidence is not None:
            from protokv.state.sources import describe_spans

            spans = [
                one | {"share": round(one["share"], 4)}
                for one in describe_spans(answer.evidence.spans, self._places)
            ]
            # `faint` is null if a low share says nothing about the model.
            row |= {"evidence": spans, "faint": answer.evidence.faint}
            if self.shows and self._wants_evidence:
                self.out.text(format_evidence_line(spans, answer.evidence.faint))
        if answer.promise is not None:
            row["promise"] = asdict(answer.promise)
            if self.shows:
                for line in format_promise_lines(row):
                    self.out.note(line, once=True)
        if self._notice:
            row["notice"] = self._notice
            self.out.note(f"Note: {self._notice}", once=not self.shows)
        if expected is not None:
            from protokv.replay.questions import is_expected_answer

            row |= {"expected": expected, "correct": is_expected_answer(answer.text, expected)}
            if self.shows and not row["correct"]:
                self.out.text(f"  expected: {shorten_text(expected)}")
        return row

    def _stream(
        self, session: Session, decoding: Decoding, group: Sequence[UserQuestion]
    ) -> Iterator[tuple[UserQuestion, Answer]]:
        """Yield each question that can be asked, with its answer; say what the model does not read
        of it and of the conversation.
        """
        from protokv.stream.answer import Answer
        from protokv.stream.together import AskedQuestion, stream_together

        name = session.backbone.identity.name
        how = {
            "evidence": self._wants_evidence,
            "turns": tuple(self._turns),
            "system": self.how.system,
            "promise": self._promise,
        }
        asked = list[UserQuestion]()
        for one in group:
            with self.refusals.at(one.where):
                session.backbone.question_ids(one.text, self._turns, self.how.system)
                asked.append(one)
        pieces = stream_together([AskedQuestion(session, one.text, decoding, how) for one in asked])
        for one in asked:
            if words := shorten_text(", ".join(session.backbone.unknown_words(one.text)), 200):
                self.out.note(f"Note: {name} does not know {words}", once=True)
                self.out.note(f"Note: {session.backbone.notice}", once=True)
            if self.shows and not self.alone:
                self.out.text(shorten_text(one.text), end=" ")
            while not isinstance(answer := next(pieces), Answer):
                if self.shows:
                    self.out.text(answer, end="")
            if self.shows:
                self.out.text("")
                if answer.finish_reason == "repetition":
                    self.out.note("Note: the answer is cut, because it repeats itself")
            if answer.turns < len(self._turns):
                self.out.note(f"Note: {name} does not read all earlier turns", once=True)
            if self.at_prompt:
                self._turns.append((one.text, answer.text))
            yield one, answer


def format_spans(spans: Iterable[JsonRecord]) -> str:
    """Return spans of JSON as text, such as `0:07 to 0:09 (61 %), 1:02 to 1:03 (4 %)`, with the
    times of the videos where these differ from those of the stream.
    """
    texts = []
    for one in spans:
        more = f"{100 * one['share']:.0f} %"
        if "video" in one:
            start, end = (format_time(one[f"video_{name}_s"]) for name in ("start", "end"))
            more += f", {start} to {end} of {one['video']}"
        texts.append(f"{format_time(one['start_s'])} to {format_time(one['end_s'])} ({more})")
    return ", ".join(texts)


def format_evidence_line(spans: Sequence[JsonRecord], faint: bool | None = None) -> str:
    """Return a line such as `stood on 0:07 to 0:09 (61 %)`, and what was said then, in lines."""
    at = format_spans(spans)
    stood = f"stood on {at}"
    if faint or not at:
        stood = "no span stands out" + (
            f"; most {at}: this may no longer be in memory" if at else ""
        )
    said = sorted({word["start_s"]: word["text"] for one in spans for word in one["words"]}.items())
    words = [f"{format_time(start_s)} {shorten_text(text)}" for start_s, text in said]
    return "\n    ".join([f"  {stood}", *words])


def format_promise_lines(row: JsonRecord) -> list[str]:
    """Return lines that say what is promised of the answer of a row, and of one that is withheld
    why it is and where to look.
    """
    promise = row["promise"]
    kinds = ", ".join(f"{count} {name}".rstrip() for name, count in promise["types"].items())
    lines = [
        f"Promise: of the answers given at most {promise['at_most_wrong']:.0%} are wrong, on "
        f"questions like the {promise['questions']} of {promise['calibration']} ({kinds}; "
        f"{promise['videos']} videos)"
    ]
    if not promise["known"]:
        lines.append(f'Withheld "{shorten_text(row["question"])}": {promise["why"]}')
        if row.get("evidence"):
            lines.append(f"Look at {format_spans(row['evidence'])}")
    return lines
