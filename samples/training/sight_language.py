"""A language model learns to read codes of a vision tower: a codebook, and a small change of its
attention.

A code (`sight_tower`) times the codebook is a visual token. The codebook begins as the model's own
embeddings of the words for colours, shapes and places, so a red star is "red" + "star" + "top left"
at once. The model stays frozen but for additions of low rank to the four matrices of each attention
(LoRA, Hu et al. 2022).

A training video costs few tokens: of an event one token is shown, with a bias of log(steps it was
visible) in attention, and of all cells with nothing in them three, with a bias of log(their number
/ 3). Positions keep their gaps. Several questions about a video do not see each other. Each ends in
" Answer:", so an answer begins with the same token as its word in a sentence.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Final

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor, nn

from samples.training.compose import Seen
from samples.training.sight_tower import CELLS, CODES, fit_codes
from samples.worlds.pictures import COLOUR_NAMES, PLACES, SHAPES
from samples.worlds.questions import Fact, find_facts, phrase, pick

TYPES: Final = ("colour", "shape", "where", "at", "whether")
RANK: Final = 12
LINK_LAYER: Final = 2
LINK_RANK: Final = 32
SCALE: Final = 2.0
EMPTY_SHOWN: Final = 3
QUESTIONS: Final = 6
IGNORED: Final = -100
ANSWER: Final = " Answer:"
STOP: Final = 2
NAMES: Final = (*COLOUR_NAMES, *SHAPES, *PLACES, "nothing")
"""What the numbers of a code stand for."""
ADAPTED: Final = ("q_proj", "k_proj", "v_proj", "o_proj")


class LowRank(nn.Module):
    """A frozen linear layer and an addition of low rank, which is nothing at first."""

    def __init__(self, base: nn.Linear, rank: int) -> None:
        super().__init__()
        self.base = base
        self.down = nn.Parameter(torch.randn(rank, base.in_features) / base.in_features**0.5)
        self.up = nn.Parameter(torch.zeros(base.out_features, rank))

    def forward(self, x: Tensor) -> Tensor:
        """Return base(x) + SCALE up(down(x))."""
        self.added = F.linear(F.linear(x, self.down), SCALE * self.up)
        found: Tensor = self.base(x) + self.added
        return found


class Reader(nn.Module):
    """A `LlamaForCausalLM` that reads codes."""

    def __init__(self, model: Any, tokenizer: Any) -> None:
        super().__init__()
        self.model = model.requires_grad_(False)
        self.encode: Callable[[str], tuple[int, ...]] = lru_cache(65536)(
            lambda text: tuple(tokenizer.encode(text, add_special_tokens=False))
        )
        embedding = model.model.embed_tokens.weight
        self.codebook = nn.Parameter(
            torch.stack([embedding[list(self.encode(f" {word}"))].sum(0) for word in NAMES])
        )
        self.probe = nn.Linear(576, 30)
        with torch.no_grad():
            self.probe.weight.zero_()
            for group, rows in enumerate((slice(8, 16), slice(0, 8), slice(16, 25))):
                own = F.normalize(self.codebook[rows], dim=-1)
                self.probe.weight[10 * group + 1 : 10 * group + 1 + len(own)] = own
        self.newline = nn.Parameter(embedding[self.encode("\n")[0]].clone())
        for index, layer in enumerate(model.model.layers):
            rank = LINK_RANK if index == LINK_LAYER else RANK
            for name in ADAPTED:
                setattr(layer.self_attn, name, LowRank(getattr(layer.self_attn, name), rank))

    @torch.no_grad()
    def adopt(self, tensors: Mapping[str, Tensor]) -> None:
        """Take what `own` returned before."""
        for name, one in self.own().items():
            one.copy_(tensors[name])

    @torch.no_grad()
    def fit_probe(self, batches: Sequence[Batch]) -> None:
        """Let the probe begin as the best linear reading of what the link has found."""
        states = [
            self.states(batch, LINK_LAYER + 1)[:, -batch.labels.shape[1] :][batch.asked]
            for batch in batches
        ]
        found = F.one_hot(torch.cat([batch.found for batch in batches]), 10).float().flatten(1)
        weight, bias = fit_codes(F.rms_norm(torch.cat(states), (576,)), found, 3e-2)
        self.probe.weight.copy_(6 * weight)
        self.probe.bias.copy_(6 * bias)

    def own(self) -> dict[str, nn.Parameter]:
        """Return what is trained."""
        return {name: one for name, one in self.named_parameters() if one.requires_grad}

    def forward(self, batch: Batch) -> Tensor:
        """Return the logits `[n, vocabulary]` in front of the labels of a batch."""
        hidden = self.states(batch, None)[:, -batch.labels.shape[1] :][batch.labels != IGNORED]
        logits: Tensor = self.model.lm_head(self.model.model.norm(hidden))
        return logits

    def look(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """Return what the link has found, `[n, 3, 10]`: scores of shape, colour and place; and the
        square of its trace.

        The trace is what it leaves at all other words and visual tokens.
        """
        state = self.states(batch, LINK_LAYER + 1)
        m = batch.labels.shape[1]
        hidden = F.rms_norm(state[:, -m:][batch.asked], (576,))
        added = self.model.model.layers[LINK_LAYER].self_attn.o_proj.added.square().mean(-1)
        elsewhere = torch.cat((added[:, -m:][batch.real & ~batch.asked], added[:, :-m].flatten()))
        return self.probe(hidden).view(-1, 3, 10), elsewhere.mean()

    def states(self, batch: Batch, layers: int | None, *, normed: bool = False) -> Tensor:
        """Return states `[B, 1 + n + m, 576]` behind so many layers, or as the next one's attention
        reads them.
        """
        hidden = self.embed(batch)
        text = self.model.model
        angles = text.rotary_emb(hidden, batch.positions)
        for layer in text.layers[:layers]:
            hidden = layer(hidden, attention_mask=batch.mask[:, None], position_embeddings=angles)
        return text.layers[layers].input_layernorm(hidden) if normed else hidden

    def embed(self, batch: Batch) -> Tensor:
        """Return the embeddings `[B, 1 + n + m, 576]` of a batch."""
        embeddings = self.model.model.embed_tokens(batch.ids)
        embeddings = torch.where(batch.newline[..., None], self.newline, embeddings)
        visual = batch.codes @ self.codebook
        return torch.cat((embeddings[:, :1], visual, embeddings[:, 1:]), 1)


@dataclass(frozen=True, slots=True)
class Batch:
    """Videos with questions.

    Attributes:
        codes: `[B, n, CODES]` of the visual tokens, which stand behind the first token.
        ids, newline: `[B, 1 + m]`, of the text, and where the newline behind the video stands.
        positions, mask: `[B, 1 + n + m]` and `[B, 1 + n + m, 1 + n + m]`, an additive one.
        labels: `[B, m]`, of the token behind.
        kinds: type of each question, in the order of the answers.
        answers: which answer a label belongs to, for each label that is not ignored.
        found: `[questions, 3]`, shape, colour and place of what is asked about, each + 1; 0 if it
            did not appear.
        named: `[questions, CODES]`, what the question itself says of it.
        real, asked: `[B, m]`, which words are no padding, and which name what is asked about.
    """

    codes: Tensor
    ids: Tensor
    newline: Tensor
    positions: Tensor
    mask: Tensor
    labels: Tensor
    kinds: list[str]
    answers: Tensor
    found: Tensor
    named: Tensor
    real: Tensor
    asked: Tensor


def draw_events(rng: np.random.Generator, n: int, steps: int) -> list[Seen]:
    """Draw events in a video of so many steps; most have a shape, colour and place of their own."""
    looks = np.stack([rng.permutation(max(n, k))[:n] % k for k in (8, 8, 9)], 1)
    again = rng.random((n, 3)) < 0.08
    looks = np.where(again, rng.integers(0, 8, (n, 3)), looks)
    begin = np.sort(rng.integers(0, steps, n))
    return [
        Seen(
            *(int(one) for one in look), float(start), float(min(start + rng.integers(1, 5), steps))
        )
        for look, start in zip(looks, begin, strict=True)
    ]


def make_batch(
    rng: np.random.Generator,
    reader: Reader,
    videos: int,
    most_events: int,
    longest: int,
    draw_codes: Callable[[np.random.Generator, NDArray[np.int64]], Tensor],
    cut: bool = False,
) -> Batch:
    """Draw videos of one to `most_events` events in up to `longest` steps, and `QUESTIONS`
    questions about each.

    Args:
        rng: the source of all draws.
        reader: encodes the text.
        videos: B.
        most_events: of a video.
        longest: steps of a video.
        draw_codes: returns codes `[k, CODES]` for shapes, colours and places `[k, 3]`, -1 where a
            cell is empty.
        cut: leave out the answers of the questions.
    """
    rows = []
    kinds = []
    found = []
    named = []
    answers: list[int] = []
    for _ in range(videos):
        n = int(rng.integers(1, most_events + 1))
        steps = int(np.exp(rng.uniform(np.log(4), np.log(max(longest, 4)))))
        events = draw_events(rng, n, steps)
        when = [
            int(rng.integers(int(e.start_s), max(int(e.end_s), int(e.start_s) + 1))) for e in events
        ]
        empty = np.sort(rng.integers(0, CELLS * steps, EMPTY_SHOWN))
        at = np.array(
            [CELLS * w + e.place for w, e in zip(when, events, strict=True)] + empty.tolist()
        )
        looks = np.array(
            [(e.shape, e.colour, e.place) for e in events] + [(-1, -1, -1)] * EMPTY_SHOWN
        )
        crowd = rng.uniform(0, np.log(12), n) * (rng.random(n) < 0.3)
        lasted = np.log([max(e.end_s - e.start_s, 1) for e in events])
        bias = np.concatenate(
            (np.maximum(lasted, crowd), np.full(EMPTY_SHOWN, np.log(CELLS * steps / EMPTY_SHOWN)))
        )
        order = np.argsort(at, kind="stable")
        # Token, question, place in it, label, and 1 for what is asked about.
        text: list[tuple[int, int, int, int, int]] = []
        for q in range(QUESTIONS):
            kind, fact = ask(rng, events, steps)
            question = phrase(rng, kind, fact)
            (key,) = fact.slots.values()
            named.append(NAMES.index(key))
            begin = "".join(question.partition(key)[:2])
            reply = [] if cut else [*reader.encode(f" {fact.answer}"), STOP]
            ids = [-1, *reader.encode(question + ANSWER), *reply[:-1]]
            labels = [IGNORED] * (len(ids) - len(reply)) + reply
            key_at = len(reader.encode(begin))
            one = events[fact.evidence[-1]] if fact.evidence else None
            found.append(
                (0, 0, 0) if one is None else (one.shape + 1, one.colour + 1, one.place + 1)
            )
            columns = zip(ids, labels, strict=True)
            text += [
                (token, q, i, label, int(i == key_at)) for i, (token, label) in enumerate(columns)
            ]
            answers += [len(kinds)] * len(reply)
            kinds.append(kind)
        rows.append((looks[order], at[order] + 1, bias[order], 1 + CELLS * steps, text))
    longest_n = max(len(row[0]) for row in rows)
    longest_m = max(len(row[4]) for row in rows)
    B = videos
    L = 1 + longest_n + longest_m
    looks = np.full((B, longest_n, 3), -1)
    positions = np.zeros((B, L), np.int64)
    bias = np.full((B, L), -np.inf, np.float32)
    question = np.full((B, L), -2)
    ids = np.zeros((B, 1 + longest_m), np.int64)
    labels = np.full((B, longest_m), IGNORED)
    asked = np.zeros((B, longest_m), np.bool_)
    ids[:, 0], bias[:, 0], question[:, :1] = 1, 0, -1
    for b, (own, at, biased, start, text) in enumerate(rows):
        n = len(own)
        looks[b, :n], positions[b, 1 : 1 + n], bias[b, 1 : 1 + n], question[b, 1 : 1 + n] = (
            own,
            at,
            biased,
            -1,
        )
        token, number, place, label, key_word = (np.array(one) for one in zip(*text, strict=True))
        behind = slice(1 + longest_n, 1 + longest_n + len(text))
        ids[b, 1 : 1 + len(text)], labels[b, : len(text)] = token, label
        asked[b, : len(text)] = key_word == 1
        positions[b, behind], question[b, behind], bias[b, behind] = start + place, number, 0
    seen = np.tril(np.ones((L, L), np.bool_)) & (
        (question[:, None, :] == -1) | (question[:, None, :] == question[:, :, None])
    )
    mask = np.where(seen, bias[:, None, :], -np.inf).astype(np.float32)
    # Padding attends to itself, so that no row is empty.
    mask[:, np.arange(L), np.arange(L)] = np.where(np.isinf(bias), 0, bias)
    codes = draw_codes(rng, looks.reshape(-1, 3)).view(B, longest_n, CODES)
    newline = torch.from_numpy(ids == -1)
    return Batch(
        codes,
        torch.from_numpy(np.maximum(ids, 0)),
        newline,
        torch.from_numpy(positions),
        torch.from_numpy(mask),
        torch.from_numpy(labels),
        kinds,
        torch.tensor(answers),
        torch.tensor(found),
        F.one_hot(torch.tensor(named), CODES).float(),
        torch.from_numpy(question[:, -longest_m:] >= 0),
        torch.from_numpy(asked),
    )


def ask(rng: np.random.Generator, events: Sequence[Seen], steps: int) -> tuple[str, Fact]:
    """Draw something to ask about events, and return its type and what is true."""
    while True:
        kind = TYPES[int(rng.choice(len(TYPES), p=(0.24, 0.22, 0.22, 0.22, 0.1)))]
        found = find_facts(kind, events, steps)
        if found:
            return kind, pick(rng, found)


def draw_codes(rng: np.random.Generator, looks: NDArray[np.int64]) -> Tensor:
    """Return codes with a little noise."""
    codes = np.zeros((len(looks), CODES), np.float32)
    lit = np.flatnonzero(looks[:, 0] >= 0)
    shape, colour, place = looks[lit].T
    codes[lit, colour] = codes[lit, 8 + shape] = codes[lit, 16 + place] = 1
    codes[looks[:, 0] < 0, -1] = 1
    codes += rng.standard_normal(codes.shape, dtype=np.float32) * np.float32(0.07)
    return torch.from_numpy(codes)


def judge(logits: Tensor, batch: Batch) -> Mapping[str, list[bool]]:
    """Return for each type which of its answers are right, all tokens."""
    labels = batch.labels[batch.labels != IGNORED]
    ok = torch.ones(len(batch.kinds), dtype=torch.bool)
    ok[batch.answers[logits.argmax(-1) != labels]] = False
    found: dict[str, list[bool]] = {}
    for kind, right in zip(batch.kinds, ok.tolist(), strict=True):
        found.setdefault(kind, []).append(right)
    return found
