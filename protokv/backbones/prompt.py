"""The model's own chat template, cut where the video stands: the prefix before it and the suffix after it.

The prefix is forwarded once and kept as the sink of every memory; the suffix carries the question. A control token in
a question would end the turn early, so a question that contains one is refused. Knows tokenizers, not models.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from protokv.errors import ConfigError, ModelError

_QUESTION = "protokv-question-goes-here"


class ChatPrompt:
    """Prefix and suffix of a one-turn conversation about one video."""

    def __init__(self, tokenizer: Any, video_token: str, template: str | None = None) -> None:
        """Render the template once.

        Args:
            tokenizer: a transformers tokenizer.
            video_token: the placeholder that the template puts where the video goes.
            template: the template's text where the tokenizer does not carry one.

        Raises:
            ModelError: the template does not show a video and a question in this order.
        """
        content = [{"type": "video"}, {"type": "text", "text": _QUESTION}]
        text = tokenizer.apply_chat_template(
            [{"role": "user", "content": content}],
            chat_template=template,
            tokenize=False,
            add_generation_prompt=True,
        )
        before, video, after = text.partition(video_token)
        opening, question, closing = after.partition(_QUESTION)
        if not video or not question:
            raise ModelError(
                f"the chat template shows no {video_token} followed by the question",
                hint="use the instruction-tuned variant of the model",
            )
        self._tokenizer = tokenizer
        # Those that have a role in the tokenizer, and those that were only added to it, such as image placeholders.
        added = (str(token) for token in tokenizer.added_tokens_decoder.values() if token.special)
        self._control = sorted({*tokenizer.all_special_tokens, *added})
        self._opening, self._closing = opening, closing
        self.prefix_ids: list[int] = tokenizer.encode(before, add_special_tokens=False)

    def suffix_ids(self, question: str) -> list[int]:
        """Token ids after the video.

        Raises:
            ConfigError: the question is empty or spells a control token.
        """
        check_question(question, self._control)
        text = f"{self._opening}{question.strip()}{self._closing}"
        ids: list[int] = self._tokenizer.encode(text, add_special_tokens=False)
        return ids


def check_question(question: str, control: Iterable[str]) -> None:
    """Refuse a question without text, or one that spells a control token. ConfigError."""
    if not question.strip():
        raise ConfigError("the question is empty", hint="ask something, for example: What shape appeared first?")
    for token in control:
        if token in question:
            raise ConfigError(f"the question contains the control token {token}", hint="leave it out")
