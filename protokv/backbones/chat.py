"""`PromptTemplate`: the model's own chat template, cut at the video.

The prefix before the video is forwarded once and kept as the sink of every memory, the suffix after
it carries the conversation. A control token in a text would end its turn early, so such a text is
refused.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, Literal

from protokv.core.backbone import ChatTurn
from protokv.errors import ModelError, QuestionError
from protokv.texts import JsonObject, check_question_text

_QUESTION = "protokv-question-goes-here"


class PromptTemplate:
    """Prefix and suffix of a conversation about one video, which comes first in it."""

    def __init__(
        self,
        tokenizer: Any,
        video_token: str,
        template: str | None = None,
        *,
        medium: Literal["video", "image", "text"] = "video",
        system: str | None = None,
    ) -> None:
        """Render the template, None: that of the tokenizer, and cut it at its placeholder for the
        video.

        `medium` is what `video_token` stands for in the template; "text": it knows neither, so the
        placeholder is put in front of the question. Without `system` the template puts there what
        it has.

        Raises:
            ModelError: the template does not show a video and then a question, or no system prompt.
            QuestionError: the system prompt is empty, too long, or spells a control token.
        """
        self._tokenizer = tokenizer
        self._video_token = video_token
        self._template = template
        self._medium = medium
        self._system = system
        if not (template or tokenizer.chat_template):
            raise ModelError(
                "there is no chat template, so no question can be put to the model",
                hint="use the instruction-tuned variant of the model, or copy its "
                "chat_template.jinja to its folder",
            )
        # Tokens with a role in the tokenizer, and tokens that were only added to it, such as image
        # placeholders.
        added = (str(token) for token in tokenizer.added_tokens_decoder.values() if token.special)
        self._control = sorted({*tokenizer.all_special_tokens, *added})
        self.control_ids = frozenset(tokenizer.convert_tokens_to_ids(self._control))
        if system is not None:
            refuse_control_tokens(
                check_question_text(system, "the system prompt"), self._control, "the system prompt"
            )
        before, video, after = self._render(_QUESTION, ())
        if not video or _QUESTION not in after:
            raise ModelError(
                f"the chat template shows no {video_token} followed by the question",
                hint="use the instruction-tuned variant of the model",
            )
        if system is not None and system.strip() not in before:
            raise ModelError(
                "its chat template has no place for a system prompt",
                hint="put it before the questions: query --system",
            )
        self.prefix_ids: list[int] = tokenizer.encode(before, add_special_tokens=False)

    def with_system(self, text: str | None) -> PromptTemplate:
        """Return the same with a system prompt, or without. Raises as when it is made."""
        settings: Any = {"template": self._template, "medium": self._medium, "system": text}
        return PromptTemplate(self._tokenizer, self._video_token, **settings)

    def suffix_ids(self, question: str, turns: Sequence[ChatTurn] = ()) -> list[int]:
        """Return the token ids after the video. QuestionError: a text has control tokens."""
        refuse_control_tokens(question, self._control)
        for asked, answered in turns:
            refuse_control_tokens(asked, self._control, "an earlier question")
            refuse_control_tokens(answered, self._control, "an earlier answer")
        _, _, after = self._render(question, turns)
        ids: list[int] = self._tokenizer.encode(after, add_special_tokens=False)
        return ids

    def _render(self, question: str, turns: Sequence[ChatTurn]) -> tuple[str, str, str]:
        """Return the conversation as text: before the video, its placeholder if there is one, and
        after it.
        """
        earlier = [] if self._system is None else [("system", self._system)]
        earlier += [
            pair for turn in turns for pair in zip(("user", "assistant"), turn, strict=True)
        ]
        messages = [
            self._message(role, text.strip()) for role, text in (*earlier, ("user", question))
        ]
        first = next(message for message in messages if message["role"] == "user")
        if self._medium == "text":
            first["content"] = f"{self._video_token}\n{first['content']}"
        else:
            first["content"].insert(0, {"type": self._medium})
        text: str = self._tokenizer.apply_chat_template(
            messages, chat_template=self._template, tokenize=False, add_generation_prompt=True
        )
        return text.partition(self._video_token)

    def _message(self, role: str, text: str) -> JsonObject:
        return {
            "role": role,
            "content": text if self._medium == "text" else [{"type": "text", "text": text}],
        }


def refuse_control_tokens(text: str, control: Iterable[str], where: str = "the question") -> None:
    """Refuse a text that spells a control token. QuestionError; the message begins with `where`."""
    for token in control:
        if token in text:
            raise QuestionError(f"{where} contains the control token {token}", hint="leave it out")
