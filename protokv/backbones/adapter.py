"""The common part of families of transformers: the language model with its chat prompt.

`Adapter` runs the language model; a family adds its vision tower and positions. `ChatPrompt` is the model's own chat
template, cut at the video: the prefix before it is forwarded once and kept as the sink of every memory, the suffix
after it carries the conversation. A control token in a text would end its turn early, so such a text is refused.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from copy import copy
from dataclasses import replace
from functools import cached_property
from inspect import signature
from typing import Any, ClassVar, Self

import torch
from torch import Tensor

from protokv.backbones.loading import Placement, find_devices, identify, read_decoding
from protokv.core.attention import LocalKV
from protokv.core.backbone import MOST_WORDS, Backbone, BackboneIdentity, Turn
from protokv.core.context import Context
from protokv.core.hook import LinearStates
from protokv.core.layers import HybridShape, LayerKind, assign_layers
from protokv.core.step import StepPositions, StepTokens, StreamClock
from protokv.errors import ModelError, QuestionError
from protokv.texts import admit_question

_KINDS = {f"{kind.name.lower()}_attention": kind for kind in LayerKind}


class Adapter(Backbone):
    """A model of transformers whose text runs through one of its modules (`text_module`) and `model.lm_head`.

    Subclasses set `position_components`, take their vision tower under `guard_internals`, and add `prepare` and
    `embed_steps`, and `step_positions` where a position has several components.
    """

    text_module: ClassVar[str] = "model.language_model"
    # Words of a step: what closes the video before them, the text, what opens the next one. By default a line of text.
    words_form: ClassVar[tuple[str, str, str]] = ("", "\n{}", "")

    @classmethod
    def identify(cls, path: str, name: str, config: Any, placement: Placement) -> BackboneIdentity:
        """Return the identity of the model that `load` gives, without loading its weights."""
        return identify(path, name, config, placement)

    def __init__(self, model: Any, tokenizer: Any, prompt: ChatPrompt, identity: BackboneIdentity) -> None:
        """Take the language model's parts.

        Raises:
            ModelError: an internal of transformers that this adapter relies on has moved.
        """
        with guard_internals(model):
            self._text = model.get_submodule(self.text_module)
            self._head = model.lm_head
            self._rotary = self._text.rotary_emb
            self._embedding = self._text.embed_tokens
        config = model.config.get_text_config()
        self.identity = identity
        named = getattr(config, "layer_types", None) or ["full_attention"] * config.num_hidden_layers
        if odd := set(named) - _KINDS.keys():
            raise ModelError(
                f"some of its layers have {min(odd)}, which is not supported",
                hint=f"supported are {', '.join(_KINDS)}",
            )
        self._places = assign_layers([_KINDS[kind] for kind in named], self._shared_layers())
        self.max_position = getattr(config, "max_position_embeddings", None)
        # Embeddings are not quantised in a quantised model.
        self.dtype = self._embedding.weight.dtype
        layers = [f"{self.text_module}.layers.{i}" for i in range(config.num_hidden_layers)]
        spread = find_devices(model, [f"{self.text_module}.embed_tokens", *layers])
        self.device, *others = spread or [self._embedding.weight.device]
        own = [i for i, place in enumerate(self._places) if place.kind == LayerKind.FULL and not place.shared]
        if not own:
            raise ModelError(
                "none of its layers has full attention, so a memory has nothing to serve",
                hint="use a checkpoint with layers of full attention",
            )
        self.layers = len(own)
        self.kv_heads, self.head_size = self._read_heads(own[0])
        self.layer_devices = [others[i] for i in own] if others else None
        if len(own) < len(self._places):
            self.hybrid = self._carried_shape(others or None)
        self._tokenizer, self._prompt = tokenizer, prompt
        stop = model.generation_config.eos_token_id
        self.stop_ids = frozenset(stop if isinstance(stop, list) else [stop, tokenizer.eos_token_id]) - {None}
        self.decoding = read_decoding(model.generation_config)

    def _shared_layers(self) -> list[bool] | None:
        """Return which layers read keys and values of an earlier one of their kind; None: none of them."""
        return None

    def _read_heads(self, layer: int) -> tuple[int, int]:
        """Return the KV heads of a layer with attention, and their size."""
        each = getattr(self._text.config, "per_layer_config", None)
        config = self._text.config if each is None else each[layer]
        size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        return config.num_key_value_heads, size

    def _carried_shape(self, devices: Sequence[torch.device] | None) -> HybridShape:
        """Return what layers without full attention hold, by the names that configs of transformers have for it."""
        config = self._text.config
        kinds = [place.kind for place in self._places if not place.shared]
        sliding = recurrent = convolution = None
        if count := kinds.count(LayerKind.SLIDING):
            heads, size = self._read_heads([place.kind for place in self._places].index(LayerKind.SLIDING))
            sliding = (count, heads, config.sliding_window - 1, size)
        if count := kinds.count(LayerKind.LINEAR):
            keys = config.linear_num_key_heads * config.linear_key_head_dim
            values = config.linear_num_value_heads * config.linear_value_head_dim
            recurrent = (count, config.linear_num_value_heads, config.linear_key_head_dim, config.linear_value_head_dim)
            convolution = (count, 2 * keys + values, config.linear_conv_kernel_dim)
        return HybridShape(len(self._places), sliding, recurrent, convolution, self._places, devices)

    @property
    def prefix_ids(self) -> list[int]:
        """Return the token ids in front of the video."""
        return self._prompt.prefix_ids

    def suffix_ids(self, question: str, turns: Sequence[Turn] = ()) -> list[int]:
        """Return the token ids after the video."""
        return self._prompt.suffix_ids(question, turns)

    def with_system(self, text: str | None) -> Self:
        """Return this model with a system prompt in front of the video."""
        found = copy(self)
        found._prompt = self._prompt.with_system(text)
        found.settings = {name: value for name, value in self.settings.items() if name != "system"}
        if text is not None:
            found.settings["system"] = text
        return found

    def words_ids(self, text: str) -> list[int]:
        """Return the token ids of the words of a step, between those of `words_form`."""
        closing, ids, opening = self._words_parts(text)
        ids = [token for token in ids if token not in self._prompt.control_ids][:MOST_WORDS]
        _, blank, _ = self._words_parts("")
        return [*closing, *ids, *opening] if ids != blank else []

    def _words_parts(self, text: str) -> Iterator[list[int]]:
        return (self._tokenizer.encode(part.format(text), add_special_tokens=False) for part in self.words_form)

    def after_words(
        self, ids: list[int], context: Context, clock: StreamClock
    ) -> tuple[list[int], Context, StreamClock]:
        """Leave out what closes the video in front of a question, and what the words opened for another one."""
        closing, _, opening = self._words_parts("")
        if ids[: len(closing)] == closing:
            ids = ids[len(closing) :]
        if opening:
            clock = replace(clock, next_position=clock.next_position - len(opening))
            context = context.before(clock.next_position)
        return ids, context, clock

    def decode(self, ids: list[int]) -> str:
        """Return the text of generated ids without special tokens."""
        text: str = self._tokenizer.decode(ids, skip_special_tokens=True)
        return text

    def unknown_words(self, question: str) -> list[str]:
        """Return the words that a word-level tokenizer does not know, once each; byte-level tokenizers know all."""
        unknown = self._tokenizer.unk_token_id
        if unknown is None:
            return []
        tokens = self._tokenizer(question, return_offsets_mapping=True, add_special_tokens=False)
        pairs = zip(tokens["input_ids"], tokens["offset_mapping"], strict=True)
        return list(dict.fromkeys(question[start:stop].lower() for token, (start, stop) in pairs if token == unknown))

    def embed_text(self, ids: list[int]) -> Tensor:
        """Return `[n, E]`."""
        embeddings: Tensor = self._embedding(torch.tensor(ids, device=self.device))
        return embeddings

    def embed_token(self, token: Tensor) -> Tensor:
        """Return `[1, E]`."""
        embedding: Tensor = self._embedding(token)
        return embedding

    def rotary(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Return the model's own angles, on the device of the positions.

        With several components, M-RoPE assigns one to each frequency band.
        """
        flat = self._position_ids(positions.reshape(-1, self.position_components)).to(self.device)
        cos, sin = self._angles(flat)
        shape = (*positions.shape[:-1], cos.shape[-1])
        return cos[0].reshape(shape).to(positions.device), sin[0].reshape(shape).to(positions.device)

    def forward(
        self,
        embeddings: Tensor,
        positions: Tensor,
        context: Context,
        local_kv: LocalKV,
        *,
        steps: Sequence[StepTokens] = (),
    ) -> Tensor:
        """Run `[T, E]` through the language model."""
        hybrid = local_kv.hybrid
        output = self._text(
            **self._inputs(embeddings),
            position_ids=self._position_ids(positions),
            use_cache=False,
            **({} if hybrid is None else {self._past: LinearStates(hybrid)}),
            protokv_context=context,
            protokv_local=local_kv,
            **self._step_arguments(steps),
        )
        hidden: Tensor = output.last_hidden_state[0].to(self.device)
        return hidden

    def step_positions(
        self, tokens: StepTokens, *, origin: int, start: int, index: int, time_s: float
    ) -> StepPositions:
        """Return one position per token, in order, from `start` on."""
        T = len(tokens)
        return StepPositions(self.text_positions(start, T), (start + T - 1,))

    def logits(self, hidden: Tensor) -> Tensor:
        """Return `[..., vocabulary]` float32."""
        scores: Tensor = self._head(hidden).float().to(self.device)
        return scores

    def _framed(self, before: str, visual: Tensor, after: str, grid: tuple[int, int]) -> StepTokens:
        """Return a step of visual tokens `[n, E]` between two texts, which belong to it."""
        opening, closing = (
            self.embed_text(self._tokenizer.encode(text, add_special_tokens=False)) for text in (before, after)
        )
        place = slice(len(opening), len(opening) + len(visual))
        return StepTokens(torch.cat((opening, visual, closing)), grid, place)

    def _inputs(self, embeddings: Tensor) -> dict[str, Tensor]:
        """Return embeddings `[T, E]` as arguments of the language model."""
        return {"inputs_embeds": embeddings[None]}

    @cached_property
    def _past(self) -> str:
        """The argument of the language model that layers of linear attention read; transformers renamed it in 5.24."""
        return "cache" if "cache" in signature(self._text.forward).parameters else "past_key_values"

    def _angles(self, flat: Tensor) -> tuple[Tensor, Tensor]:
        """Return cos and sin `[1, n, R]` of positions in transformers' shape."""
        cos, sin = self._rotary(torch.zeros((), device=self.device), flat)
        return cos, sin

    def _step_arguments(self, steps: Sequence[StepTokens]) -> dict[str, Any]:
        """Return further arguments of a family's language model while steps are forwarded."""
        return {}

    def _position_ids(self, positions: Tensor) -> Tensor:
        """Return positions `[T, P]` in transformers' shape: `[1, T]` for RoPE, `[P, 1, T]` for M-RoPE."""
        return positions.T if self.position_components == 1 else positions.T[:, None]


@contextmanager
def guard_internals(model: Any) -> Iterator[None]:
    """Raise a clear error if transformers has moved an attribute.

    Raises:
        ModelError: an attribute is no longer there.
    """
    try:
        yield
    except AttributeError as error:
        raise ModelError(
            f"this version of transformers has moved an internal of {type(model).__name__}: {error}",
            hint="install the range of transformers that protokv asks for",
        ) from error


_QUESTION = "protokv-question-goes-here"


class ChatPrompt:
    """Prefix and suffix of a conversation about one video, which comes first in it."""

    def __init__(
        self,
        tokenizer: Any,
        video_token: str,
        template: str | None = None,
        *,
        text_only: bool = False,
        system: str | None = None,
    ) -> None:
        """Render the template and cut it.

        Args:
            tokenizer: a transformers tokenizer.
            video_token: the template's placeholder for the video.
            template: the template's text; None: the tokenizer carries it.
            text_only: the template knows no video, so `video_token` is put in front of the question.
            system: the system prompt; None: what the template puts there by itself.

        Raises:
            ModelError: the template does not show a video and then a question, or no system prompt.
            QuestionError: the system prompt is empty, too long, or spells a control token.
        """
        self._tokenizer, self._video_token, self._template = tokenizer, video_token, template
        self._text_only, self._system = text_only, system
        # Tokens with a role in the tokenizer, and tokens that were only added to it, such as image placeholders.
        added = (str(token) for token in tokenizer.added_tokens_decoder.values() if token.special)
        self._control = sorted({*tokenizer.all_special_tokens, *added})
        self.control_ids = frozenset(tokenizer.convert_tokens_to_ids(self._control))
        if system is not None:
            check_text(admit_question(system, "the system prompt"), self._control, "the system prompt")
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

    def with_system(self, text: str | None) -> ChatPrompt:
        """Return the same with a system prompt, or without. Raises as when it is made."""
        settings: Any = {"template": self._template, "text_only": self._text_only, "system": text}
        return ChatPrompt(self._tokenizer, self._video_token, **settings)

    def suffix_ids(self, question: str, turns: Sequence[Turn] = ()) -> list[int]:
        """Return the token ids after the video: earlier turns, the question, and the start of the answer.

        Raises:
            QuestionError: the question is empty, or a text spells a control token.
        """
        check_text(question, self._control)
        for asked, answered in turns:
            check_text(asked, self._control, "an earlier question")
            check_text(answered.strip() or "-", self._control, "an earlier answer")
        _, _, after = self._render(question, turns)
        ids: list[int] = self._tokenizer.encode(after, add_special_tokens=False)
        return ids

    def _render(self, question: str, turns: Sequence[Turn]) -> tuple[str, str, str]:
        """Return the conversation as text: before the video, its placeholder if there is one, and after it."""
        earlier = [] if self._system is None else [("system", self._system)]
        earlier += [pair for turn in turns for pair in zip(("user", "assistant"), turn, strict=True)]
        messages = [self._message(role, text.strip()) for role, text in (*earlier, ("user", question))]
        first = next(message for message in messages if message["role"] == "user")
        if self._text_only:
            first["content"] = f"{self._video_token}\n{first['content']}"
        else:
            first["content"].insert(0, {"type": "video"})
        text: str = self._tokenizer.apply_chat_template(
            messages, chat_template=self._template, tokenize=False, add_generation_prompt=True
        )
        return text.partition(self._video_token)

    def _message(self, role: str, text: str) -> dict[str, Any]:
        return {"role": role, "content": text if self._text_only else [{"type": "text", "text": text}]}


def check_text(text: str, control: Iterable[str], where: str = "the question") -> None:
    """Refuse an empty text, or one that spells a control token. QuestionError; the message begins with `where`."""
    if not text.strip():
        raise QuestionError(f"{where} is empty", hint="ask something, for example: What shape appeared first?")
    for token in control:
        if token in text:
            raise QuestionError(f"{where} contains the control token {token}", hint="leave it out")
