"""Prove that vLLM answers from states as `protokv query` does.

    python -m tests.engines.prove PYTHON_OF_VLLM [FAMILY ...]

It makes tiny models and states, starts a vLLM for each model, has many questions in flight with
ordinary prompts among them, and compares first tokens, log probabilities and texts with those of a
session. It ends with a table, and with 1 if anything differs.
"""

import json
import sys
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from io import BytesIO
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from urllib.request import Request, urlopen

import torch
from PIL import Image

from protokv.core.decoding import Decoding
from protokv.errors import EngineError
from protokv.ingestion import IngestOptions
from protokv.memories import DurableConfig
from protokv.serve import FedSessions, StateFolder
from protokv.serve.conversations import ChatMessage
from protokv.state.reader import StateReader
from protokv.stream.answer import Answer
from protokv.stream.engine import Engine, EngineSession
from protokv.stream.session import Session
from tests.conftest import random_frames
from tests.engines import material
from tests.engines.server import Server

MOST = 1e-4  # of a log probability in float32
NEAR_TIE = 1e-3  # two tokens so near to each other may change places
TOKENS = 6
IN_FLIGHT = 60
DECODING = Decoding(max_new_tokens=TOKENS, top_logprobs=10)


@dataclass
class Comparison:
    """What was compared, and what differed."""

    name: str
    questions: int = 0
    furthest: float = 0.0
    wrong: list[str] = field(default_factory=list)

    def compare(self, expected: Answer, found: Answer) -> None:
        """Compare token by token, until a near tie parts the two."""
        self.questions += 1
        ours = expected.chances or []
        theirs = found.chances or []
        for index, (own, other) in enumerate(zip(ours, theirs, strict=False)):
            chances = {token.id: token.log_probability for token in own}
            shared = [one for one in other if one.id in chances]
            off = max(abs(one.log_probability - chances[one.id]) for one in shared)
            self.furthest = max(self.furthest, off)
            if off > MOST or len({one.id for one in shared}) < 8:
                self.wrong.append(f"{expected.question!r}: token {index} is off by {off:.1e}")
                return
            if own[0].id != other[0].id:
                gap = own[1].log_probability - own[2].log_probability
                if gap > NEAR_TIE:
                    self.wrong.append(
                        f"{expected.question!r}: token {index} differs, gap {gap:.1e}"
                    )
                return
        if len(ours) != len(theirs) or expected.text != found.text:
            self.wrong.append(f"{expected.question!r}: {expected.text!r} and {found.text!r}")

    def row(self) -> str:
        verdict = "as query" if not self.wrong else f"{len(self.wrong)} WRONG"
        return f"| {self.name} | {self.questions} | {self.furthest:.1e} | {verdict} |"


def ask_plainly(server: Server, ids: list[int]) -> list[float]:
    """Return the log probabilities of the tokens that follow an ordinary prompt."""
    body = {"prompt": ids, "max_tokens": TOKENS, "temperature": 0, "logprobs": 0}
    request = Request(
        f"{server.url}/v1/completions",
        json.dumps(body).encode(),
        {"Content-Type": "application/json"},
    )
    with urlopen(request, timeout=600) as reply:
        found: list[float] = json.load(reply)["choices"][0]["logprobs"]["token_logprobs"]
    return found


@torch.inference_mode()
def follow_plainly(session: Session, ids: list[int]) -> list[float]:
    """Return the same by the model alone."""
    backbone = session.backbone
    found = list[float]()
    ids = list(ids)
    for _ in range(TOKENS):
        cache = backbone.new_cache()
        hidden = backbone.forward(
            backbone.embed_text(ids), backbone.text_positions(0, len(ids)), cache
        )
        likely = backbone.logits(hidden[-1]).log_softmax(-1)
        ids.append(int(likely.argmax()))
        found.append(float(likely.max()))
        if ids[-1] in backbone.stop_ids:
            break
    return found


def open_all(folder: Path, server: Server, names: Any, backbone: Any) -> dict[str, EngineSession]:
    engine = Engine(server.url)
    return {
        name: EngineSession.open(
            StateReader.open(folder / f"states/{name}.safetensors"), engine, name, backbone
        )
        for name in names
    }


def ask_many(
    label: str,
    server: Server,
    opened: dict[str, EngineSession],
    expected: dict[tuple[str, str], Answer],
    plain: dict[tuple[int, ...], list[float]],
) -> Comparison:
    """Have many questions in flight, each tenth request an ordinary prompt."""
    found = Comparison(label)
    pairs = list(expected)
    prompts = list(plain)

    def ask(number: int) -> None:
        name, question = pairs[number % len(pairs)]
        found.compare(expected[name, question], opened[name].ask(question, DECODING))
        if number % 10 == 0:
            prompt = prompts[number // 10 % len(prompts)]
            both = zip(ask_plainly(server, list(prompt)), plain[prompt], strict=False)
            if max(abs(ours - theirs) for ours, theirs in both) > MOST:
                found.wrong.append("an ordinary prompt")

    with ThreadPoolExecutor(IN_FLIGHT) as pool:
        list(pool.map(ask, range(IN_FLIGHT)))
    return found


def replace_while_asked(
    server: Server, folder: Path, name: str, sessions: dict[str, Session]
) -> Comparison:
    """Replace a state while it is asked: each answer is of the commit that was asked, or
    refused.
    """
    found = Comparison("a state replaced while it is asked")
    old = sessions[name]
    questions = material.make_questions(8, seed=5)
    expected = {question: old.ask(question, DECODING) for question in questions}
    opened = open_all(folder, server, [name], old.backbone)[name]

    def ask(number: int) -> None:
        question = questions[number % len(questions)]
        if number == IN_FLIGHT // 2:
            old.watch(random_frames(4711, old.backbone.frames_per_step))
            material.write_state(old, folder, name)
        with suppress(EngineError):
            found.compare(expected[question], opened.ask(question, DECODING))

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(ask, range(IN_FLIGHT)))
    now = open_all(folder, server, [name], old.backbone)[name]
    for question in questions:
        found.compare(old.ask(question, DECODING), now.ask(question, DECODING))
    return found


def ask_of_pictures(server: Server, folder: Path, backbone: Any) -> Comparison:
    """Let `serve` watch conversations that grow by a picture, and vLLM answer each time, as the
    session of the conversation does. Nothing stays in the folder.
    """
    found = Comparison("pictures that serve watched")
    states = StateFolder(folder / "states", backbone, engine=Engine(server.url))
    fed = FedSessions(states, IngestOptions(config=DurableConfig(budget=96)))
    questions = material.make_questions(4, seed=9)
    before = {*folder.rglob("*")}
    for topic in range(3):
        sent = list[ChatMessage]()
        for number, picture in enumerate(random_frames(800 + topic, 20)):
            file = BytesIO()
            Image.fromarray(picture).save(file, "PNG")
            question = questions[number % 4]
            sent.append(ChatMessage("user", question, [file.getvalue()]))
            asked = fed.converse(bytes([topic]), sent, bool)
            own = fed._conversations[-1].session
            found.compare(own.ask(question, DECODING), asked.ask(question, DECODING))
    del asked, fed, states
    if {*folder.rglob("*")} - before:
        found.wrong.append("files are left")
    return found


def prove_family(family: str, folder: Path, python: Path) -> list[Comparison]:
    """Prove one model."""
    backbone = material.load_model(material.write_model(family, folder / "model"))
    sessions = material.write_states(backbone, folder, 3)
    expected = {
        (name, question): session.ask(question, DECODING)
        for name, session in sessions.items()
        for question in material.make_questions(5)
    }
    prompts = [tuple(range(3 + n, 3 + n + 12)) for n in range(5)]
    first = next(iter(sessions.values()))
    plain = {prompt: follow_plainly(first, list(prompt)) for prompt in prompts}
    server = Server(python, folder)
    with server.running():
        opened = open_all(folder, server, sessions, backbone)
        return [
            ask_many(family, server, opened, expected, plain),
            ask_of_pictures(server, folder, backbone),
            replace_while_asked(server, folder, "s0", sessions),
        ]


def main() -> None:
    python, *families = sys.argv[1:]
    rows = list[Comparison]()
    print("| | questions | furthest log probability | answers |\n|---|---|---|---|")
    with TemporaryDirectory() as made:
        for family in families or material.FAMILIES:
            for row in prove_family(family, Path(made, family), Path(python)):
                rows.append(row)
                print(row.row(), *row.wrong[:5], sep="\n", flush=True)
    passed = sum(not row.wrong for row in rows)
    print(f"{passed} passed, {len(rows) - passed} failed")
    sys.exit(passed < len(rows))


if __name__ == "__main__":
    main()
