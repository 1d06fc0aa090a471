"""A promise: of the answers that are given, at most a share is wrong. The others are withheld.

A `Calibration` is made of answers that are known to be right or wrong (`replay.calibrate`). An
answer whose mean log probability is below a threshold is withheld. Half of the questions choose
where the test begins. The other half tests: from that threshold down, each is tried by the binomial
tail until one fails. So the promise holds in nine of ten calibrations, for questions like those.
The method is Learn then Test with fixed sequence testing (Angelopoulos et al. 2021,
https://arxiv.org/abs/2110.01052) for selective prediction (Geifman and El-Yaniv 2017,
https://arxiv.org/abs/1705.08500).
"""

from __future__ import annotations

import math
import re
from collections.abc import Generator, Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import msgspec
import torch

from protokv.core.settings import MemoryConfig
from protokv.errors import ConfigError
from protokv.stream.answer import Answer, Promise
from protokv.stream.stream import Stream
from protokv.texts import JsonObject

CONFIDENCE = 0.9  # share of calibrations whose promise holds
UNKNOWN = "I do not know"
_THRESHOLDS = 20
_OTHER_SHARE = 1.25  # the share of tokens kept may leave the calibrated range by this factor
# A question is known if it is as near to a calibrated one as this share of them are to each other.
_USUAL = 0.95


class ScoredAnswer(msgspec.Struct, frozen=True, array_like=True):
    """An answer of a calibration."""

    sure: float  # mean log probability of its tokens, nats
    wrong: bool
    unanswerable: bool = False  # the right answer is that there is none


class Calibration(msgspec.Struct, frozen=True, kw_only=True):
    """What is known of the answers of one memory of one model."""

    model: dict[str, str]  # its identity, as rows of `replay` have it
    memory: JsonObject  # the settings of the memory
    shares: tuple[float, float]  # least and greatest share of the stream's tokens that were kept
    videos: int
    types: dict[str, int]  # type of questions -> how many
    questions: tuple[str, ...]  # their texts
    novelty: float  # their distance; a question that is farther from all of them is another kind
    # the half that chooses where the test begins, and the half that tests; the surest first
    chooses: tuple[ScoredAnswer, ...]
    tests: tuple[ScoredAnswer, ...]

    def find_threshold(self, at_most_wrong: float) -> float | None:
        """Return the least log probability whose answers keep the promise; None: none does."""
        n = len(self.chooses)
        places = {n * part // _THRESHOLDS - 1 for part in range(1, _THRESHOLDS + 1)}
        grid = [self.chooses[place].sure for place in sorted(places) if place >= 0]
        doubts = [_doubt(self.chooses, least, at_most_wrong) for least in grid]
        found = None
        for least in grid[doubts.index(min(doubts)) :] if grid else ():
            if _doubt(self.tests, least, at_most_wrong) > 1 - CONFIDENCE:
                break
            found = least
        return found

    def knows(self, question: str) -> bool:
        """Return whether a question is as near to a calibrated one as most of these are to each
        other, by their words.
        """
        return _distance(_words(question), map(_words, self.questions)) <= self.novelty


@dataclass(frozen=True, slots=True)
class PromiseRule:
    """Gives or withholds the answers of one state."""

    name: str
    calibration: Calibration
    at_most_wrong: float
    threshold: float

    def decide(self, answer: Answer, stream: Stream) -> Answer:
        """Return an answer with its `Promise`; one that is withheld has the text
        `UNKNOWN`, and its tokens are not told.
        """
        known = self.calibration
        least, most = known.shares
        share = measure_kept_share(stream.config.budget, stream.clock.tokens_seen)
        why = ""
        if not least / _OTHER_SHARE <= share <= most * _OTHER_SHARE:
            kept = f"calibrated for 1/{1 / most:.0f} to 1/{1 / least:.0f} of a stream kept"
            why = f"{kept}, and this memory keeps 1/{1 / share:.0f}"
        elif not known.knows(answer.question):
            why = "not calibrated for such a question"
        elif answer.mean_logprob < self.threshold:
            why = "not sure enough"
        promise = Promise(
            at_most_wrong=self.at_most_wrong,
            known=not why,
            why=why,
            calibration=self.name,
            confidence=CONFIDENCE,
            questions=len(known.chooses) + len(known.tests),
            videos=known.videos,
            types=known.types,
        )
        if why:
            answer = replace(answer, text=UNKNOWN, chances=None)
        return replace(answer, promise=promise)

    def hold_back(
        self, pieces: Generator[Any, Any, Answer], stream: Stream
    ) -> Generator[Any, Any, Answer]:
        """Wait for a whole answer, and yield it, or that it is not known. What is no text is handed
        on, and so is what is sent for it.
        """
        sent = None
        try:
            while True:
                item = pieces.send(sent)
                sent = None if isinstance(item, str) else (yield item)
        except StopIteration as end:
            answer = self.decide(end.value, stream)
        yield answer.text
        return answer


def find_promise_rule(
    stream: Stream, folder: str | Path, at_most_wrong: float | None
) -> PromiseRule | None:
    """Return the rule for a state from the calibrations in a folder: of those for its model and its
    memory the one whose share of kept tokens is nearest. None: nothing is to be promised.

    ConfigError: there is none, or it does not allow the promise.
    """
    if at_most_wrong is None:
        return None
    if not 0 < at_most_wrong < 1:
        raise ConfigError(f"at most {at_most_wrong:g} wrong is no share", hint="such as 5%")
    config = stream.config
    share = measure_kept_share(config.budget, stream.clock.tokens_seen)
    wanted = stream.backbone.identity.weights_digest, config.name, config.changes()
    found = [
        (abs(math.log(share / math.sqrt(math.prod(one.shares)))), path.stem, one)
        for path in sorted(Path(folder).glob("*.json"))
        for one in read_calibrations(path)
        for memory in [MemoryConfig.from_dict(one.memory)]
        if (one.model["weights_digest"], memory.name, memory.changes()) == wanted
    ]
    if not found:
        command = f"protokv replay VIDEO... --questions FILE --memory {config.name}"
        raise ConfigError(
            f"nothing is calibrated for {config.name} with this model",
            hint=f"{command} --budget {config.budget} --calibrate NAME",
        )
    _, name, nearest = min(found, key=lambda one: one[0])
    threshold = nearest.find_threshold(at_most_wrong)
    if threshold is None:
        raise ConfigError(
            f"{name} cannot promise at most {at_most_wrong:.0%} wrong: it tested "
            f"{len(nearest.tests)} answers, and needs {count_needed_answers(at_most_wrong)} sure "
            "ones that are all right, or more with few wrong ones",
            hint="promise less, calibrate with more questions, or keep more tokens",
        )
    return PromiseRule(name, nearest, at_most_wrong, threshold)


def measure_kept_share(budget: int, tokens_seen: int) -> float:
    """Return the share of the tokens of a stream that a budget can keep."""
    return min(1.0, budget / max(1, tokens_seen))


def read_calibrations(path: Path) -> list[Calibration]:
    """Read a file of calibrations. ConfigError: it is none."""
    try:
        return msgspec.json.decode(path.read_bytes(), type=list[Calibration])
    except (OSError, msgspec.DecodeError) as error:
        raise ConfigError(f"{path} is no calibration: {error}", hint="make it again") from error


def _doubt(answers: Sequence[ScoredAnswer], least: float, at_most_wrong: float) -> float:
    """Return the chance of so few wrong answers, from a score on, if the share of wrong ones is
    not below the promise.
    """
    given = [one.wrong for one in answers if one.sure >= least]
    share = torch.tensor(at_most_wrong, dtype=torch.float64)
    law: Any = torch.distributions.Binomial(len(given), share)
    wrong = torch.arange(sum(given) + 1, dtype=torch.float64)
    return float(law.log_prob(wrong).exp().sum())


def count_needed_answers(at_most_wrong: float) -> int:
    """Return how many answers, none of them wrong, a test needs for a promise."""
    return math.ceil(math.log(1 - CONFIDENCE) / math.log1p(-at_most_wrong))


def measure_novelty(questions: Sequence[str]) -> float:
    """Return how far `_USUAL` of some questions lie, at most, from the nearest other one."""
    known = [_words(one) for one in questions]
    apart = sorted(_distance(one, (other for other in known if other != one)) for one in known)
    return apart[min(len(apart), math.ceil(_USUAL * (len(apart) + 1))) - 1]


def _words(text: str) -> frozenset[str]:
    return frozenset(re.findall(r"\w+", text.casefold()))


def _distance(words: frozenset[str], others: Iterable[frozenset[str]]) -> float:
    """Return the distance of Jaccard to the nearest of some sets of words."""
    return min((1 - len(words & one) / max(1, len(words | one)) for one in others), default=0.0)
