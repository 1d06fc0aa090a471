"""`Answer`: one answer, its cost, what it stood on and what is promised of it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from protokv.core.decoding import FinishReason, TokenLogprob
from protokv.stream.evidence import Evidence


@dataclass(frozen=True, slots=True)
class Promise:
    """What an answer is promised to be, as it stands in JSON."""

    at_most_wrong: float  # share of the answers that are given
    known: bool  # False: the answer is withheld
    why: str  # why it is withheld; empty for an answer that is given
    calibration: str  # its name
    confidence: float  # share of calibrations whose promise holds
    questions: int  # the number that it was calibrated with
    videos: int
    types: Mapping[str, int]  # their types


@dataclass(frozen=True, slots=True)
class Answer:
    """One answer and its cost."""

    question: str
    text: str = ""  # the generated answer
    stream_time_s: float = 0.0  # stream time at which it was asked
    ttft_ms: float = 0.0  # from the arrival of the question to the first token
    total_ms: float = 0.0  # to the last one
    # slots of memory that attention could see, and tokens of steps that were read again
    context_tokens: int = 0
    tokens: int = 0  # generated tokens
    # mean log probability, in nats, of its tokens and its end: how sure the model is
    mean_logprob: float = 0.0
    # the stream times that the answer stands on; None unless asked for
    evidence: Evidence | None = None
    # also: it has the most tokens allowed, or it repeated itself
    finish_reason: FinishReason = "stop"
    turns: int = 0  # earlier turns of the conversation that the model read, the newest ones
    # for each token, first the one that was chosen; None unless `Decoding.top_logprobs` asks for
    # them
    chances: list[list[TokenLogprob]] | None = None
    # the share of each choice, together 1; None: there were none to choose from
    probabilities: Mapping[str, float] | None = None
    # the promise about it; None: nothing was asked for
    promise: Promise | None = None
