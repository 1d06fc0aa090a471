"""Facts in a text, and facts that it never has, asked of SmolLM2-135M-Instruct.

A stream has paragraphs of 16 tokens, and half of the facts of `samples.worlds.lines` between them,
such as "The owner of the garage is Martha."; each stays for two steps. All facts are asked for,
those that never were said as well: the model goes on after "The owner of the garage is". Any
answer to the others is wrong.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from typing import Any, Final

import torch

from protokv.replay.memories import MemoryVariant
from protokv.replay.rows import AnswerRow
from protokv.stream.session import Session
from samples.worlds.language import paragraphs, text_digest
from samples.worlds.lines import ABOUT, FACT, NAMES
from samples.worlds.llama import load_llama

PARAGRAPHS: Final = 8
TOKENS: Final = 16
SIGHTS: Final = 2
UNSAID: Final = "unknown"


@torch.inference_mode()
def ask_facts(seeds: Sequence[int], variants: Sequence[MemoryVariant]) -> Iterator[AnswerRow]:
    """Yield the answers of each memory about each stream."""
    backbone = load_llama(device="cpu", dtype="float32")
    identity = asdict(backbone.identity)
    identity.pop("revision")
    for seed in seeds:
        draw = random.Random(seed)
        texts = [backbone.tokenize(text)[:TOKENS] for text in draw.sample(paragraphs(), PARAGRAPHS)]
        about = draw.sample(list(ABOUT.items()), len(ABOUT))
        begun = [FACT.format(*one) for one in about]
        said = dict(zip(begun[::2], draw.sample(NAMES, len(begun) // 2), strict=True))
        texts += [backbone.tokenize(f"{begin} {name}.") for begin, name in said.items()]
        draw.shuffle(texts)
        steps = [ids for ids in texts for _ in range(SIGHTS)]
        for variant in variants:
            session = Session.start(backbone, variant.config, fps=1.0)
            for index, ids in enumerate(steps):
                session.take([backbone.embed_chunk(ids)], [float(index)])
            for number, begin in enumerate(begun):
                likely = session.prefill(backbone.tokenize(begin))[-1].log_softmax(-1)
                best = int(likely.argmax())
                found = backbone.decode([best]).strip()
                expected = said.get(begin, UNSAID)
                kind = "said" if begin in said else "never"
                yield _make_row(
                    variant,
                    session,
                    video=f"text-{seed}",
                    question_id=f"{kind}-{number}",
                    question=begin,
                    expected=expected,
                    prediction=found,
                    correct=found == expected,
                    mean_logprob=round(float(likely[best]), 6),
                    model=identity,
                    stream={"text": text_digest(), "seed": seed, "fps": 1.0},
                )


def _make_row(variant: MemoryVariant, session: Session, **given: Any) -> AnswerRow:
    end_s = session.clock.stream_time_s
    return AnswerRow(
        **given,
        type="fact",
        reference="end",
        reference_s=end_s,
        delay_s=0.0,
        memory=variant.label,
        budget=variant.budget,
        config=variant.to_dict(),
        decoding={},
        asked_s=end_s,
        ttft_ms=0.0,
        total_ms=0.0,
        context_tokens=variant.budget,
        state_bytes=session.state_bytes,
        step_ms=0.0,
        tokens_seen=session.clock.tokens_seen,
        device="cpu",
    )
