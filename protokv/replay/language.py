"""The language study: what each memory keeps of a text, on the keys and values of a real language model.

A step is a chunk of tokens. Paragraphs of the text are streamed, each for some steps (redundancy), repeated exactly or
with some of its tokens changed. At the end of a stream the model reads the first tokens of paragraphs that it saw
early, in the middle and late, and of text that it did not see:

- recall, in nats: the mean negative log likelihood of the rest of a paragraph. It is small where the memory still lets
  the model copy it.
- divergence, in nats: KL of the next-token distributions on unseen text from those of the full cache, and how often the
  likeliest next token is the same. It is the harm that a memory does to the model.

The text is the docstrings of Python's standard library, which every machine has. Rows name its digest: rows of two
versions of Python are of different texts and are not mixed.
"""

from __future__ import annotations

import ast
import hashlib
import random
import re
import sysconfig
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from typing import Any, Final

import msgspec
import torch
from torch import Tensor
from torch.nn.functional import kl_div

from protokv.backbones.llama import Llama
from protokv.config import FullConfig
from protokv.core.session import Session
from protokv.errors import ConfigError
from protokv.replay.memories import Variant
from protokv.replay.metrics import resample
from protokv.replay.rows import cut_torn_row, decode_rows

CUE: Final = 8
"""Tokens of a paragraph that a question shows."""
ASKED: Final = 6
"""Paragraphs asked about at most, of each part of a stream."""
UNSEEN_TOKENS: Final = 128
PARTS: Final = {"early": (0.0, 0.25), "middle": (0.4, 0.6), "late": (0.9, 1.0)}
"""The part of a stream, as shares of its length, that a paragraph must lie in."""
_ROW_START: Final = b'{"seed":'
MEASURES: Final = (*PARTS, "kl", "agreement")


class Language(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The streams of a language study.

    Attributes:
        tokens: of a stream.
        step_tokens: of a step; a paragraph is cut to it.
        redundancy: steps that a paragraph stays; one stream for each.
        changed: shares of the tokens of a repeated paragraph that are changed; more than 0 needs redundancy.
        budgets: one token in so many is kept.
        first_seed, count: streams of each kind.
    """

    tokens: int = 2560
    step_tokens: int = 32
    redundancy: tuple[int, ...] = (1, 2, 4, 8)
    changed: tuple[float, ...] = (0.0, 0.1)
    budgets: tuple[int, ...] = (4, 10, 40)
    first_seed: int = 0
    count: int = 8

    @property
    def token_budgets(self) -> list[int]:
        """Return the budgets in tokens."""
        return [self.tokens // part for part in self.budgets]

    def kinds(self) -> list[tuple[int, float]]:
        """Return redundancy and changed share of every kind of stream."""
        return [(steps, share) for steps in self.redundancy for share in self.changed if steps > 1 or not share]


class LanguageRow(msgspec.Struct, frozen=True, kw_only=True):
    """One memory after one stream.

    Attributes:
        seed, redundancy, changed, tokens, step_tokens: the stream.
        text: digest of the text that paragraphs are drawn from.
        memory, budget, config: the label of the memory, the tokens that it keeps, and its settings.
        model: its identity, as states have it.
        early, middle, late: nats a token of paragraphs seen there.
        kl: nats; the divergence on unseen text from the full cache.
        agreement: share of unseen tokens after which the likeliest next token is that of the full cache.
        state_bytes: of the memory.
        step_ms: mean time of a step.
    """

    seed: int
    redundancy: int
    changed: float
    tokens: int
    step_tokens: int
    text: str
    memory: str
    budget: int
    config: dict[str, Any]
    model: dict[str, Any]
    early: float
    middle: float
    late: float
    kl: float
    agreement: float
    state_bytes: int
    step_ms: float

    @property
    def key(self) -> tuple[int, int, float, str, int]:
        """Names the row within a study."""
        return self.seed, self.redundancy, self.changed, self.memory, self.budget

    @property
    def facts(self) -> dict[str, Any]:
        """Return what all rows of one study agree on."""
        return {"text": self.text, "tokens": self.tokens, "step_tokens": self.step_tokens, "model": self.model}


@dataclass(frozen=True, slots=True)
class TextStream:
    """A stream and what is asked about it, as token ids.

    Attributes:
        steps: chunks of one length.
        asked: part -> paragraphs.
        unseen: text that is not in the stream.
    """

    steps: Sequence[list[int]]
    asked: dict[str, list[list[int]]]
    unseen: list[int]


@cache
def paragraphs() -> tuple[str, ...]:
    """Return English paragraphs of 40 words or more from the docstrings of Python's standard library, once each."""
    found: dict[str, None] = {}
    root = Path(sysconfig.get_paths()["stdlib"])
    for path in sorted(root.glob("*.py")) + sorted(root.glob("[a-z]*/*.py")):
        if path.parent.name in ("test", "idlelib", "lib2to3", "site-packages", "turtledemo"):
            continue
        try:
            tree = ast.parse(path.read_bytes())
        except (SyntaxError, ValueError):
            continue
        for node in ast.walk(tree):
            if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef):
                for block in re.split(r"\n\s*\n", ast.get_docstring(node) or ""):
                    words = block.split()
                    prose = sum(bool(re.fullmatch(r"[A-Za-z]+[,.;:]?", word)) for word in words)
                    if len(words) >= 40 and prose >= 0.85 * len(words):
                        found[" ".join(words)] = None
    return tuple(found)


def text_digest() -> str:
    """Return the sha256 of all paragraphs."""
    return hashlib.sha256("\n".join(paragraphs()).encode()).hexdigest()


def make_stream(study: Language, backbone: Llama, seed: int, redundancy: int, changed: float) -> TextStream:
    """Draw a stream: a function of its settings, the text and the tokenizer.

    Raises:
        ConfigError: the standard library of this machine has too little text.
    """
    T, n = study.step_tokens, study.tokens // study.step_tokens
    # 0 and 0.0 are the same share, and are to draw the same stream.
    draw = random.Random(f"{seed} {redundancy} {float(changed)}")
    texts = list(paragraphs())
    draw.shuffle(texts)
    drawn = (ids for text in texts if len(ids := backbone.tokenize(text)[:T]) == T)
    shown = [ids for ids, _ in zip(drawn, range(-(-n // redundancy)), strict=False)]
    unseen = [token for ids, _ in zip(drawn, range(-(-UNSEEN_TOKENS // T)), strict=False) for token in ids]
    if len(shown) * redundancy < n or len(unseen) < UNSEEN_TOKENS:
        raise ConfigError(
            f"the standard library here has {len(texts)} paragraphs, which is too few for {study.tokens} tokens",
            hint="use shorter streams, or another Python",
        )
    vocabulary = sorted({token for ids in shown for token in ids})
    steps = []
    for ids in shown:
        for turn in range(redundancy):
            noisy = [draw.choice(vocabulary) if turn and draw.random() < changed else token for token in ids]
            steps.append(noisy)
    asked = {}
    for part, (start, stop) in PARTS.items():
        inside = [
            ids for i, ids in enumerate(shown) if start * n <= i * redundancy and (i + 1) * redundancy <= stop * n
        ] or shown[-1:]
        asked[part] = inside if len(inside) <= ASKED else draw.sample(inside, ASKED)
    return TextStream(steps[:n], asked, unseen[:UNSEEN_TOKENS])


def nats(logits: Tensor, ids: Sequence[int]) -> float:
    """Return the mean negative log likelihood of `ids` behind the cue, given the logits `[n, vocabulary]` of all."""
    likely = logits.log_softmax(-1)[CUE - 1 : -1]
    return -float(likely.gather(1, torch.tensor(ids[CUE:], device=likely.device)[:, None]).mean())


def watch(backbone: Llama, variant: Variant, stream: TextStream) -> tuple[Session, float]:
    """Return a session that has read the stream, and the mean milliseconds of a step."""
    session = Session.start(backbone, variant.config, fps=1.0)
    began = time.perf_counter()
    for index, ids in enumerate(stream.steps):
        session.take([backbone.embed_chunk(ids)], [float(index)])
    return session, (time.perf_counter() - began) * 1e3 / len(stream.steps)


def measure(session: Session, stream: TextStream, expected: Tensor | None = None) -> tuple[dict[str, float], Tensor]:
    """Return what a session has kept of its stream, and its log probabilities `[n, vocabulary]` on unseen text.

    Kept are nats a token of each part; `kl` and `agreement` of a `LanguageRow` if those of the full cache are given.
    """
    row = {
        part: sum(nats(session.prefill(ids), ids) for ids in asked) / len(asked) for part, asked in stream.asked.items()
    }
    found = session.prefill(stream.unseen).log_softmax(-1)
    if expected is not None:
        row["kl"] = float(kl_div(found, expected, log_target=True, reduction="batchmean"))
        row["agreement"] = float((found.argmax(-1) == expected.argmax(-1)).double().mean())
    return row, found


def run_language(
    study: Language,
    backbone: Llama,
    variants: Sequence[Variant],
    done: Sequence[LanguageRow] = (),
    should_stop: Callable[[], bool] = lambda: False,
) -> Iterator[LanguageRow]:
    """Yield the rows that are not done, stream by stream. The full cache is read first: the others diverge from it.

    Raises:
        ConfigError: `done` has rows of another study.
    """
    model = {name: value for name, value in asdict(backbone.identity).items() if name not in ("name", "revision")}
    facts: dict[str, Any] = {
        "text": text_digest(),
        "tokens": study.tokens,
        "step_tokens": study.step_tokens,
        "model": model,
    }
    for row in done:
        for name, value in row.facts.items():
            if value != facts[name]:
                raise ConfigError(
                    f"the results are of another study: the {name} is not the same",
                    hint="name another file with -o, or start over with --force",
                )
    have = {row.key for row in done}
    full = Variant("full", FullConfig(budget=study.tokens))
    for seed in range(study.first_seed, study.first_seed + study.count):
        for redundancy, changed in study.kinds():
            keys = [(seed, redundancy, changed, one.label, one.budget) for one in variants]
            left = [one for key, one in zip(keys, variants, strict=True) if key not in have]
            if not left:
                continue
            stream = make_stream(study, backbone, seed, redundancy, changed)
            expected = watch(backbone, full, stream)[0].prefill(stream.unseen).log_softmax(-1)
            for variant in left:
                if should_stop():
                    return
                session, step_ms = watch(backbone, variant, stream)
                measured: dict[str, Any] = measure(session, stream, expected)[0]
                yield LanguageRow(
                    seed=seed,
                    redundancy=redundancy,
                    changed=changed,
                    memory=variant.label,
                    budget=variant.budget,
                    config=variant.to_dict(),
                    **facts,
                    **measured,
                    state_bytes=session.memory.bytes_held,
                    step_ms=round(step_ms, 2),
                )


def resume_rows(path: Path) -> list[LanguageRow]:
    """Return the rows that are done and cut off a torn last line; none where there is no file yet.

    Raises:
        ConfigError: the file holds something else.
    """
    if not path.exists():
        return []
    rows = [row for _, row in decode_rows(path, LanguageRow)]
    cut_torn_row(path, _ROW_START)
    return rows


def summarise_language(rows: Sequence[LanguageRow]) -> list[dict[str, Any]]:
    """Return a row for each memory on each kind of stream: mean, and 95 % interval over seeds, of each measure."""
    cells: dict[tuple[int, float, int, str], list[LanguageRow]] = {}
    for row in rows:
        cells.setdefault((row.redundancy, row.changed, row.budget, row.memory), []).append(row)
    found = []
    for (redundancy, changed, budget, memory), own in sorted(cells.items(), key=lambda cell: cell[0][:3]):
        told: dict[str, Any] = {"redundancy": redundancy, "changed": changed, "budget": budget, "memory": memory}
        told["streams"] = len(own)
        for name in MEASURES:
            values = {str(row.seed): [float(getattr(row, name))] for row in own}
            low, high = resample(values)
            mean = sum(one for (one,) in values.values()) / len(values)
            told[name] = {"mean": round(mean, 4), "low": round(low, 4), "high": round(high, 4)}
        told["state_bytes"] = max(row.state_bytes for row in own)
        told["step_ms"] = round(sum(row.step_ms for row in own) / len(own), 1)
        found.append(told)
    return found
