"""The language study: what each memory keeps of a text, on the keys and values of a real language
model.

A step is a chunk of tokens. Paragraphs of the text are streamed, each for some steps (redundancy),
repeated exactly or with some of its tokens changed. At the end of a stream the model reads the
first tokens of paragraphs that it saw early, in the middle and late, and of text that it did not
see:

- recall, in nats: the mean negative log likelihood of the rest of a paragraph. It is small where
  the memory still lets the model copy it.
- divergence, in nats: KL of the next-token distributions on unseen text from those of the full
  cache, and how often the likeliest next token is the same. It is the harm that a memory does to
  the model.

A stream may also have what is said (`samples.worlds.lines`): lines that enter as words of a step,
as subtitles do. Then paragraphs stand for pictures, and asked are also the rest of quotes, in nats,
and the names in facts.

The text is the docstrings of Python's standard library, which every machine has. Rows name its
digest: rows of two versions of Python are of different texts and are not mixed.
"""

from __future__ import annotations

import ast
import hashlib
import random
import re
import sysconfig
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cache
from itertools import chain
from pathlib import Path
from typing import Any, Final

import msgspec
import torch
from torch import Tensor
from torch.nn.functional import kl_div

from protokv.errors import ConfigError
from protokv.memories import FullConfig
from protokv.replay.memories import MemoryVariant
from protokv.replay.metrics import bootstrap
from protokv.replay.rows import cut_torn_answer_row, parse_answer_rows, read_results_text
from protokv.stream.session import Session
from protokv.words.transcript import Transcript
from samples.worlds.lines import Said, draw_said
from samples.worlds.llama import Llama

CUE: Final = 8
"""Tokens of a paragraph that a question shows."""
ASKED: Final = 6
"""Paragraphs asked about at most, of each part of a stream."""
UNSEEN_TOKENS: Final = 128
PARTS: Final = {"early": (0.0, 0.25), "middle": (0.4, 0.6), "late": (0.9, 1.0)}
"""The part of a stream, as shares of its length, that a paragraph must lie in."""
_ROW_START: Final = b'{"seed":'
MEASURES: Final = {
    "early to late": tuple(PARTS),
    "said": tuple(f"said_{part}" for part in PARTS),
    "named": ("named",),
    "kl": ("kl",),
    "agree": ("agreement",),
}
"""Column of a table -> fields of a row that it shows; those about what is said are None where
nothing is.
"""


class Language(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The streams of a language study.

    Attributes:
        tokens: of a stream, without what is said.
        said_every: steps from one line that is said to the next; 0: nothing is said.
        step_tokens: of a step; a paragraph is cut to it.
        redundancy: steps that a paragraph stays; one stream for each.
        changed: shares of the tokens of a repeated paragraph that are changed; more than 0 needs
            redundancy.
        budgets: one token in so many is kept.
        first_seed, count: streams of each kind.
    """

    tokens: int = 2560
    said_every: int = 0
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
        return [
            (steps, share)
            for steps in self.redundancy
            for share in self.changed
            if steps > 1 or not share
        ]


class LanguageRow(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One memory after one stream.

    Attributes:
        seed, redundancy, changed, tokens, step_tokens, said_every: the stream.
        text: digest of the text that paragraphs are drawn from.
        memory, budget, config: the label of the memory, the tokens that it keeps, and its settings.
        model: its identity, as states have it.
        early, middle, late: nats a token of paragraphs seen there.
        said_early, said_middle, said_late: nats a token of quotes said there.
        named: share of the names in all facts that the model says.
        kl: nats; the divergence on unseen text from the full cache.
        agreement: share of unseen tokens after which the likeliest next token is that of the full
            cache.
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
    said_every: int = 0
    said_early: float | None = None
    said_middle: float | None = None
    said_late: float | None = None
    named: float | None = None

    @property
    def key(self) -> tuple[int, int, float, str, int]:
        """Names the row within a study."""
        return self.seed, self.redundancy, self.changed, self.memory, self.budget

    @property
    def facts(self) -> dict[str, Any]:
        """Return what all rows of one study agree on."""
        return {
            name: getattr(self, name)
            for name in ("text", "tokens", "step_tokens", "said_every", "model")
        }


@dataclass(frozen=True, slots=True)
class TextStream:
    """A stream and what is asked about it, as token ids.

    Attributes:
        steps: chunks of one length.
        asked: part -> paragraphs.
        unseen: text that is not in the stream.
        said: what is said in it; part -> quotes that are asked for.
    """

    steps: Sequence[list[int]]
    asked: dict[str, list[list[int]]]
    unseen: list[int]
    said: Said
    quotes: dict[str, list[list[int]]]


@cache
def paragraphs() -> tuple[str, ...]:
    """Return English paragraphs of 40 words or more from the docstrings of Python's standard
    library, once each.
    """
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


def make_stream(
    study: Language, backbone: Llama, seed: int, redundancy: int, changed: float
) -> TextStream:
    """Draw a stream: a function of its settings, the text and the tokenizer.

    Raises:
        ConfigError: the standard library of this machine has too little text.
    """
    T = study.step_tokens
    n = study.tokens // study.step_tokens
    # 0 and 0.0 are the same share, and are to draw the same stream.
    draw = random.Random(f"{seed} {redundancy} {float(changed)}")
    texts = list(paragraphs())
    draw.shuffle(texts)
    drawn = (ids for text in texts if len(ids := backbone.tokenize(text)[:T]) == T)
    shown = [ids for ids, _ in zip(drawn, range(-(-n // redundancy)), strict=False)]
    unseen = [
        token for ids, _ in zip(drawn, range(-(-UNSEEN_TOKENS // T)), strict=False) for token in ids
    ]
    if len(shown) * redundancy < n or len(unseen) < UNSEEN_TOKENS:
        raise ConfigError(
            f"the standard library here has {len(texts)} paragraphs, which is too few for "
            f"{study.tokens} tokens",
            hint="use shorter streams, or another Python",
        )
    vocabulary = sorted({token for ids in shown for token in ids})
    steps = []
    for ids in shown:
        for turn in range(redundancy):
            noisy = [
                draw.choice(vocabulary) if turn and draw.random() < changed else token
                for token in ids
            ]
            steps.append(noisy)
    asked = _draw_asked(
        draw, [(i * redundancy / n, (i + 1) * redundancy / n, ids) for i, ids in enumerate(shown)]
    )
    said = Said()
    quotes = dict[str, list[list[int]]]()
    if study.said_every:
        said = draw_said(backbone, draw, drawn, range(study.said_every - 1, n, study.said_every))
        quotes = _draw_asked(draw, [(step / n, (step + 1) / n, ids) for step, ids in said.quotes])
    return TextStream(steps[:n], asked, unseen[:UNSEEN_TOKENS], said, quotes)


def _draw_asked(
    draw: random.Random, shown: Sequence[tuple[float, float, list[int]]]
) -> dict[str, list[list[int]]]:
    """Return what is asked about each part: some of what lies in it, from one share of the stream
    to another.
    """
    asked = {}
    for part, (start, stop) in PARTS.items():
        inside = [ids for begin, end, ids in shown if start <= begin and end <= stop] or [
            shown[-1][2]
        ]
        asked[part] = inside if len(inside) <= ASKED else draw.sample(inside, ASKED)
    return asked


def nats(logits: Tensor, ids: Sequence[int], cue: int = CUE) -> float:
    """Return the mean negative log likelihood of `ids` behind the cue, given the logits `[n,
    vocabulary]` of all.
    """
    likely = logits.log_softmax(-1)[cue - 1 : -1]
    return -float(likely.gather(1, torch.tensor(ids[cue:], device=likely.device)[:, None]).mean())


def watch(backbone: Llama, variant: MemoryVariant, stream: TextStream) -> tuple[Session, float]:
    """Return a session that has read the stream, and the mean milliseconds of a step."""
    session = Session.start(backbone, variant.config, fps=1.0, attachments=[Transcript()])
    began = time.perf_counter()
    for index, ids in enumerate(stream.steps):
        tokens = backbone.embed_chunk(ids)
        if index in stream.said.lines:
            tokens = backbone.add_words(tokens, [stream.said.lines[index]])
        session.take([tokens], [float(index)])
    return session, (time.perf_counter() - began) * 1e3 / len(stream.steps)


def measure(
    session: Session, stream: TextStream, expected: Tensor | None = None
) -> tuple[dict[str, float], Tensor]:
    """Return what a session has kept of its stream, and its log probabilities `[n, vocabulary]` on
    unseen text.

    Kept are nats a token of each part, and what was said; `kl` and `agreement` of a `LanguageRow`
    if those of the full cache are given.
    """
    row = {
        part: sum(nats(session.prefill(ids), ids) for ids in asked) / len(asked)
        for part, asked in stream.asked.items()
    }
    for part, quotes in stream.quotes.items():
        row[f"said_{part}"] = sum(
            nats(session.prefill(ids), ids, len(ids) // 2) for ids in quotes
        ) / len(quotes)
    if facts := stream.said.facts:
        row["named"] = sum(
            int(session.prefill(ids)[-1].argmax()) == name for ids, name in facts
        ) / len(facts)
    found = session.prefill(stream.unseen).log_softmax(-1)
    if expected is not None:
        row["kl"] = float(kl_div(found, expected, log_target=True, reduction="batchmean"))
        row["agreement"] = float((found.argmax(-1) == expected.argmax(-1)).double().mean())
    return row, found


def run_language(
    study: Language,
    backbone: Llama,
    variants: Sequence[MemoryVariant],
    done: Sequence[LanguageRow] = (),
    should_stop: Callable[[], bool] = lambda: False,
) -> Iterator[LanguageRow]:
    """Yield the rows that are not done, stream by stream. The full cache is read first: the others
    diverge from it.

    Raises:
        ConfigError: `done` has rows of another study.
    """
    model = {
        name: value
        for name, value in asdict(backbone.identity).items()
        if name not in ("name", "revision")
    }
    facts: dict[str, Any] = {
        "text": text_digest(),
        "tokens": study.tokens,
        "step_tokens": study.step_tokens,
        "said_every": study.said_every,
        "model": model,
    }
    check_rows(done, facts)
    have = {row.key for row in done}
    variants = [
        replace(one, config=one.config.with_words(study.said_every > 0)) for one in variants
    ]
    exact = (one for one in variants if isinstance(one.config, FullConfig))
    full = next(exact, MemoryVariant("full", FullConfig(budget=study.tokens)))
    for seed in range(study.first_seed, study.first_seed + study.count):
        for redundancy, changed in study.kinds():
            keys = [(seed, redundancy, changed, one.label, one.budget) for one in variants]
            left = [one for key, one in zip(keys, variants, strict=True) if key not in have]
            if not left:
                continue
            stream = make_stream(study, backbone, seed, redundancy, changed)
            read = watch(backbone, full, stream)
            expected = read[0].prefill(stream.unseen).log_softmax(-1)
            for variant in left:
                if should_stop():
                    return
                session, step_ms = read if variant is full else watch(backbone, variant, stream)
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
                    state_bytes=session.state_bytes,
                    step_ms=round(step_ms, 2),
                )


def resume_rows(path: Path) -> list[LanguageRow]:
    """Return the rows that are done and cut off a torn last line; none where there is no file yet.

    Raises:
        ConfigError: the file holds something else.
    """
    if not path.exists():
        return []
    rows = [row for _, row in parse_answer_rows(path, LanguageRow)]
    cut_torn_answer_row(path, _ROW_START)
    return rows


def read_language(paths: Sequence[str | Path]) -> list[LanguageRow]:
    """Return the rows of some files, packed with gzip if they end in .gz; none if the first has no
    row of such a study.

    Raises:
        ConfigError: a file holds something else, or the rows are of different studies.
    """
    first = Path(paths[0])
    if not first.is_file() or not read_results_text(first).startswith(_ROW_START.decode()):
        return []
    rows = [row for path in paths for _, row in parse_answer_rows(Path(path), LanguageRow)]
    check_rows(rows, rows[0].facts)
    return rows


def check_rows(rows: Sequence[LanguageRow], facts: dict[str, Any]) -> None:
    """Refuse rows of another study. ConfigError."""
    for row in rows:
        for name, value in row.facts.items():
            if value != facts[name]:
                raise ConfigError(
                    f"the results are of another study: the {name} is not the same",
                    hint="name another file with -o, or start over with --force",
                )


def summarise_language(rows: Sequence[LanguageRow]) -> list[dict[str, Any]]:
    """Return a row for each memory on each kind of stream: mean, and 95 % interval over seeds, of
    each measure.
    """
    cells: dict[tuple[int, float, int, str], list[LanguageRow]] = {}
    for row in rows:
        cells.setdefault((row.redundancy, row.changed, row.budget, row.memory), []).append(row)
    found = []
    for (redundancy, changed, budget, memory), own in sorted(
        cells.items(), key=lambda cell: cell[0][:3]
    ):
        told: dict[str, Any] = {
            "redundancy": redundancy,
            "changed": changed,
            "budget": budget,
            "memory": memory,
        }
        told["streams"] = len(own)
        for name in chain.from_iterable(MEASURES.values()):
            if getattr(own[0], name) is None:
                continue
            values = {str(row.seed): [float(getattr(row, name))] for row in own}
            low, high = bootstrap(values)
            mean = sum(one for (one,) in values.values()) / len(values)
            told[name] = {"mean": round(mean, 4), "low": round(low, 4), "high": round(high, 4)}
        told["state_bytes"] = max(row.state_bytes for row in own)
        told["step_ms"] = round(sum(row.step_ms for row in own) / len(own), 1)
        found.append(told)
    return found
