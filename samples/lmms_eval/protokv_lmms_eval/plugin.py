"""The plugin for lmms-eval: any model and memory of ours as its chat model `protokv`.

Found by the entry point group `lmms_eval.models`:

    lmms-eval --model protokv --tasks videomme
      --model_args model=Qwen/Qwen2.5-VL-7B-Instruct,memory=durable,budget=4000

The harness keeps its tasks, prompts and scores; a video is a stream, watched once. Importing this
needs lmms-eval."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

from lmms_eval.api.model import lmms
from lmms_eval.models.registry_v2 import ModelManifest

from protokv.core.decoding import Decoding
from protokv.errors import ConfigError
from protokv_lmms_eval.answerer import Answerer

MANIFEST: Final = ModelManifest("protokv", chat_class_path=f"{__name__}.ProtoKV")


class ProtoKV(lmms):
    """A chat model for requests with one video each; one process, one request at a time."""

    is_simple = False

    def __init__(
        self, model: str = "protokv/mini", batch_size: int | str = 1, **settings: Any
    ) -> None:
        """Load the model; see `Answerer`. `batch_size` comes from the harness and has no effect."""
        super().__init__()
        # The harness hands its general options to every model.
        for name in ("max_batch_size", "world_size"):
            settings.pop(name, None)
        self._answerer = Answerer(
            model, **{name: value for name, value in settings.items() if value is not None}
        )

    def generate_until(self, requests: Sequence[Any]) -> list[str]:
        """Return the answers in the order of the requests; each video is watched once."""
        wanted = [self._read(request) for request in requests]
        answers = [""] * len(requests)
        order = sorted(
            range(len(wanted)), key=lambda i: (wanted[i][0], wanted[i][2] or float("inf"))
        )
        for i in order:
            video, prompt, until_s, options = wanted[i]
            decoding = Decoding(max_new_tokens=int(options.get("max_new_tokens", 64)))
            text = self._answerer.answer(video, prompt, until_s=until_s, decoding=decoding)
            for stop in options.get("until") or ():
                text = text.split(stop)[0] if stop else text
            answers[i] = text
        return answers

    def loglikelihood(self, requests: Sequence[Any]) -> list[tuple[float, bool]]:
        """Refuse: a task that compares likelihoods has no stream."""
        raise NotImplementedError("protokv generates answers; choose a task that asks for them")

    def generate_until_multi_round(self, requests: Sequence[Any]) -> list[str]:
        """Refuse: a task of several rounds has no stream."""
        raise NotImplementedError("protokv answers single questions; choose a task of one round")

    def _read(self, request: Any) -> tuple[str, str, float | None, Mapping[str, Any]]:
        """Return the video, the prompt, the time until which it may be seen, and the options of
        generation.
        """
        _, to_messages, options, doc_id, task, split = request.args
        videos: list[tuple[str, float | None]] = []
        texts: list[str] = []
        for message in to_messages(self.task_dict[task][split][doc_id]):
            for part in message["content"]:
                if part["type"] == "text":
                    texts.append(part["text"])
                elif part["type"] == "video":
                    videos.append((str(part["url"]), part.get("end_time")))
                else:
                    raise ConfigError(
                        f"task {task} shows a question something other than a video: {part['type']}"
                    )
        if len(videos) != 1:
            raise ConfigError(
                f"task {task} shows a question {len(videos)} videos", hint="choose a task with one"
            )
        (video, until_s), prompt = (
            videos[0],
            "\n".join(text.strip() for text in texts if text.strip()),
        )
        return video, prompt, until_s, options
