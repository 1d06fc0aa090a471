"""An engine on loopback that answers completions by ids as vLLM does, from sessions."""

import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from protokv.stream.session import Session
from protokv.stream.slots import find_lead
from protokv.texts import JsonObject


class StandIn:
    """States by name, each with its commit, and `find` for others; `replies` are given in place of
    answers.
    """

    def __init__(self) -> None:
        self.find: Callable[[str], tuple[str, Session] | None] = lambda _: None
        self.states = dict[str, tuple[str, Session]]()
        self.asked = list[dict[str, Any]]()
        self.keys = list[str | None]()
        self.replies = list[tuple[int, bytes]]()
        self.together = threading.Barrier(1)
        self._lock = threading.Lock()
        self.url = ""

    def complete(self, body: JsonObject, session: Session) -> Iterator[JsonObject]:
        """Yield a chunk for each likeliest token that follows the prompt."""
        # The lead of a question is among the slots.
        ids = [*find_lead(session), *body["prompt"]]
        for left in reversed(range(body["max_tokens"])):
            with self._lock:
                likely = session.read_question(ids).logits[-1].log_softmax(-1)
            token = int(likely.argmax())
            wanted = body.get("logprob_token_ids") or likely.topk(body["logprobs"]).indices.tolist()
            chances = {
                "tokens": [f"token_id:{token}"],
                "token_logprobs": [float(likely[token])],
                "top_logprobs": [{f"token_id:{one}": float(likely[one]) for one in wanted}],
            }
            stops = token in body.get("stop_token_ids", ())
            ended = "stop" if stops else None if left else "length"
            chosen = {"index": 0, "text": "?", "logprobs": chances, "finish_reason": ended}
            yield {"choices": [chosen]}
            if stops:
                return
            ids.append(token)

    def answer(self, body: JsonObject) -> tuple[int, bytes]:
        """Return the status and the body of a reply."""
        self.asked.append(body)
        self.together.wait(60)
        if self.replies:
            return self.replies.pop()
        wanted = body["kv_transfer_params"]
        found = self.states.get(wanted["state"]) or self.find(wanted["state"])
        if found is None:
            return 400, refuse(f"state {wanted['state']}: there is no state")
        commit, session = found
        if wanted["commit"] != commit:
            return 400, refuse(f"state {wanted['state']}: another commit of it is there")
        chunks = [*map(json.dumps, self.complete(body, session)), "[DONE]"]
        return 200, "".join(f"data: {chunk}\n\n" for chunk in chunks).encode()


def refuse(message: str) -> bytes:
    return json.dumps({"error": {"message": message, "code": 400}}).encode()


@contextmanager
def stand_in() -> Iterator[StandIn]:
    """An engine that listens; it is gone afterwards."""
    engine = StandIn()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            engine.keys.append(self.headers["Authorization"])
            status, reply = engine.answer(body)
            self.send_response(status)
            if status == 307:
                self.send_header("Location", "/elsewhere")
            self.end_headers()
            self.wfile.write(reply)

        def log_message(self, *_: Any) -> None:
            """Say nothing."""

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        engine.url = f"http://127.0.0.1:{server.server_port}"
        try:
            yield engine
        finally:
            server.shutdown()
            thread.join()
