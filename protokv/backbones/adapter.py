"""The common part of families of transformers, run through public methods of the model.

A family adds what only it knows: its frames, the text around a step, and where a position has
several components.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from copy import copy
from dataclasses import replace
from functools import cached_property
from typing import Any, ClassVar, Self

import torch
from torch import Tensor
from torch.nn.functional import pad

from protokv.backbones import loading
from protokv.backbones.chat import PromptTemplate
from protokv.backbones.decoder import LanguageDecoder
from protokv.backbones.files import read_video_processor
from protokv.backbones.pixels import check_image_arrays, make_image_processor
from protokv.backbones.stream_cache import CACHE_ARGUMENT, StreamCache, StreamCacheLayer
from protokv.core.backbone import (
    MOST_WORD_TOKENS,
    Backbone,
    BackboneIdentity,
    ChatTurn,
    PreparedStep,
)
from protokv.core.context import Context
from protokv.core.layers import LayerKind, declare_layer_tensors
from protokv.core.packing import check_tensor_shapes
from protokv.core.rotary import Angles
from protokv.core.step import Grid, Images, StepPositions, StepTokens, StreamClock
from protokv.core.tensors import Specs, TensorDict, Tensors
from protokv.device.arrays import concat_rows
from protokv.device.runs import Runs
from protokv.errors import ConfigError, ModelError, SourceUnreadable
from protokv.texts import JsonObject, Keywords


class TransformersBackbone(Backbone):
    """A model of transformers: its decoder, embeddings and head, found by its public methods.

    A family overrides `make_frames` and `look`, and where it differs what stands beside them.
    Frames of one size are prepared here, if `_frames` is an image processor and `_grid` is set.
    """

    position_components = 1
    frames_per_step = 1
    # The chat template's placeholder for the video, and the frames a second of the family's
    # examples.
    video_token: ClassVar[str] = "<video>"
    usual_fps: ClassVar[float] = 1.0
    # Words of a step: what closes the video before them, the text, what opens the next one. The
    # default is a line of text.
    words_form: ClassVar[tuple[str, str, str]] = ("", "\n{}", "")
    identify = staticmethod(loading.identify_model)
    read_decoder: ClassVar[type[LanguageDecoder]] = LanguageDecoder
    # if it is not as expected
    otherwise: ClassVar[str] = "install the range of transformers that protokv asks for"
    _grid: Grid

    @classmethod
    def load(cls, path: str, name: str, config: Any, placement: loading.Placement) -> Self:
        """Load weights, tokenizer, chat template and preprocessing of a folder. Raises as
        `hold`.
        """
        from transformers import MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING

        model = loading.load_model(
            MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING[type(config)], path, placement
        )
        tokenizer, template = loading.load_tokenizer(path)
        identity = cls.identify(path, name, config, placement)
        return cls.hold(model, path, tokenizer, template, identity)

    @classmethod
    def hold(
        cls,
        model: Any,
        processor: Any,
        tokenizer: Any,
        template: str | None,
        identity: BackboneIdentity,
    ) -> Self:
        """Wrap a loaded model; `processor` is a processor of transformers, or the path of a folder.

        ModelError: the model, its chat template or its preprocessing is none of the family.
        """
        try:
            prompt = cls.make_prompt(model.config, tokenizer, template)
            return cls(model, tokenizer, prompt, identity, cls.read_frames(processor))
        except (AttributeError, ImportError, TypeError) as error:
            raise ModelError(
                f"an internal of {type(model).__name__} is not where it is expected: {error}",
                hint=cls.otherwise,
            ) from error

    @classmethod
    def make_prompt(cls, config: Any, tokenizer: Any, template: str | None) -> PromptTemplate:
        """Return the prompt of a model, by default with the chat template as it is."""
        return PromptTemplate(tokenizer, cls.video_token, template)

    @classmethod
    def read_rate(cls, config: Any) -> tuple[int, float]:
        """Return the frames of a step, and the frames a second of the training of a model."""
        return cls.frames_per_step, float(getattr(config, "protokv_fps", cls.usual_fps))

    @classmethod
    def read_frames(cls, one: Any) -> Any:
        """Return what prepares frames, as a processor or the path of a folder says."""
        return cls.make_frames(*read_video_processor(one))

    @staticmethod
    def make_frames(raw: JsonObject, of_video: bool) -> Any:
        """Return what prepares frames, by what `read_video_processor` returned; by default frames
        of one size.
        """
        return make_image_processor(raw)

    def __init__(
        self,
        model: Any,
        tokenizer: Any,
        prompt: PromptTemplate,
        identity: BackboneIdentity,
        frames: Any = None,
    ) -> None:
        """Wrap a loaded model; `frames` are of `make_frames`.

        ModelError: the model has layers that no memory serves.
        """
        self._model = model
        self._decoder = self.read_decoder(model)
        self._frames = frames
        self._text = self._decoder.module
        self._head = model.get_output_embeddings()
        self._embedding = model.get_input_embeddings()
        config = self._decoder.config
        _, self.default_fps = self.read_rate(model.config)
        self.identity = identity
        self.max_position = getattr(config, "max_position_embeddings", None)
        # embeddings are not quantised in a quantised model
        self.dtype = self._embedding.weight.dtype
        # Where every layer has an embedding of every token too, that of the model ends with the
        # bits of the token's id.
        self._id_size = (
            4 // self.dtype.itemsize if getattr(config, "hidden_size_per_layer_input", None) else 0
        )
        self._padding_id = getattr(config, "pad_token_id", None) or 0
        self.device = self._embedding.weight.device
        placed = {*(getattr(model, "hf_device_map", None) or {}).values()}
        self._spread = len(placed) > 1 or "disk" in placed
        if self._spread:
            # Weights that are offloaded are on no device, and their hooks move what they are given.
            self.device = self._embedding(torch.zeros(1, dtype=torch.int64)).device
        elif self.device.type == "meta":
            # A model without weights still has states, which are numbers.
            self.device = torch.device("cpu")
        try:
            cache = StreamCache(self._decoder)
        except ConfigError as error:
            raise ModelError(error.message, hint=error.hint) from error
        first = next(i for i, one in enumerate(cache.layers) if isinstance(one, StreamCacheLayer))
        self.layer_kinds = [kind for kind, _ in cache.kinds]
        self.layers = len(cache.memory_layers)
        self.kv_heads, self.head_size = self._read_heads(first)
        why = (
            "the model is spread over devices"
            if self._spread
            else "its weights are quantized" * ("+" in identity.dtype)
        )
        self.runs: Runs = Runs(self.device, why, reads_memory=False)
        self.why_eager = why
        self._tokenizer = tokenizer
        self._prompt = prompt
        stop = model.generation_config.eos_token_id
        self.stop_ids = frozenset(
            stop if isinstance(stop, list) else [stop, tokenizer.eos_token_id]
        ) - {None}
        self.decoding = loading.read_generation_config(model.generation_config)

    @property
    def joins(self) -> bool:
        """Whether tokens that do not see each other go through it as each does alone: also if the
        highest position changes no angle of others.
        """
        return super().joins and self._decoder.rates_stay

    def _read_heads(self, layer: int) -> tuple[int, int]:
        """Return the KV heads of a layer with attention, and their size."""
        each = getattr(self._text.config, "per_layer_config", None)
        config = self._text.config if each is None else each[layer]
        size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        return config.num_key_value_heads, size

    @cached_property
    def _layer_specs(self) -> Specs:
        """What layers hold that a memory does not serve."""
        if set(self.layer_kinds) == {LayerKind.FULL}:
            return ()
        return declare_layer_tensors(self._forward_tokens().tensors())

    @cached_property
    def layer_devices(self) -> Sequence[torch.device] | None:  # type: ignore[override]
        """Device of each layer of a spread model; None: all on `device`."""
        if not self._spread:
            return None
        return [layer.device for layer in self._forward_tokens().memory_layers]

    @torch.inference_mode()
    def _forward_tokens(self) -> StreamCache:
        """Return the layers after a few tokens, which show what they hold, and on which device."""
        cache = StreamCache(self._decoder)
        self.forward(self.embed_text([0] * 4), self.text_positions(0, 4), cache)
        return cache

    def new_cache(self, held: Tensors | None = None, seen: int | None = None) -> StreamCache:
        """Return the layers of the model before the first token, or with what `TokenCache.tensors`
        returned.
        """
        cache = StreamCache(self._decoder)
        if held is not None:
            check_tensor_shapes(held, self._layer_specs)
            cache.load_layers(held, self._decoder.layer_devices_of_model(), seen)
        return cache

    @property
    def prefix_ids(self) -> list[int]:
        """Return the token ids in front of the video."""
        return self._prompt.prefix_ids

    def suffix_ids(self, question: str, turns: Sequence[ChatTurn] = ()) -> list[int]:
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
        ids = [token for token in ids if token not in self._prompt.control_ids][:MOST_WORD_TOKENS]
        _, blank, _ = self._words_parts("")
        return [*closing, *ids, *opening] if ids != blank else []

    def _words_parts(self, text: str) -> Iterator[list[int]]:
        return (self.encode(part.format(text)) for part in self.words_form)

    def after_words(
        self, ids: list[int], context: Context, clock: StreamClock
    ) -> tuple[list[int], Context, StreamClock]:
        """Leave out what closes the video in front of a question, and what the words opened for
        another one.
        """
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

    def spell_tokenizer(self) -> str:
        """Return the tokenizer as the library `tokenizers` writes it."""
        text: str = self._tokenizer.backend_tokenizer.to_str()
        return text

    def embed_token(self, token: Tensor) -> Tensor:
        """Return `[n, E]`."""
        embedding: Tensor = self._embedding(token)
        if not self._id_size:
            return embedding
        return torch.cat(
            (embedding, (token - self._padding_id).int()[:, None].view(embedding.dtype)), 1
        )

    def rotary(self, positions: Tensor) -> Angles:
        """Return the model's own angles, on the device of the positions."""
        return self._decoder.angles(positions)

    def forward(
        self, embeddings: Tensor, positions: Tensor, cache: Any, *, steps: Sequence[StepTokens] = ()
    ) -> Tensor:
        """Run `[T, E]` through the language model."""
        output = self._text(
            **self._inputs(embeddings),
            **self._step_arguments(steps, cache),
            **{CACHE_ARGUMENT: cache},
            position_ids=self._decoder.to_ids(positions),
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
        """Return `[..., vocabulary]` float32, kept within a bound if the config has one."""
        scores: Tensor = self._head(hidden).float().to(self.device)
        bound = getattr(self._text.config, "final_logit_softcapping", None)
        return scores if bound is None else torch.tanh(scores / bound) * bound

    def prepare(self, images: Images) -> PreparedStep:
        """Prepare one frame, `[1, 3, height, width]`."""
        return PreparedStep(
            self._process(images)["pixel_values"].flatten(0, -4).float(), self._grid
        )

    def name_pixels(self, step: PreparedStep) -> Keywords:
        """Return the pixels of a step by the names of the model's forward, and the id of a visual
        token as `token`. A family whose forward takes no steps of a video has none.
        """
        raise NotImplementedError

    def _process(self, images: Images, **settings: Any) -> Any:
        """Return what the image processor makes of the frames of a step. Raises as `prepare`."""
        check_image_arrays(images, self.frames_per_step)
        try:
            return self._frames(
                images=list(images),
                input_data_format="channels_last",
                return_tensors="pt",
                **settings,
            )
        except ValueError as error:
            raise SourceUnreadable(
                f"a frame of {images.shape[2]} x {images.shape[1]} pixels: {error}"
            ) from error

    def embed_steps(
        self, steps: Sequence[PreparedStep], times_s: Sequence[float]
    ) -> list[StepTokens]:
        """Return each step's visual tokens between its texts; steps do not see each other in the
        vision tower.
        """
        return self._frame(self._run_tower(self.look, steps), steps, times_s)

    def _run_tower(
        self, look: Callable[[Sequence[PreparedStep]], Any], steps: Sequence[PreparedStep]
    ) -> Any:
        """Return what `look` makes of some steps, captured where that can be."""

        def run(pixels: Tensor) -> Any:
            parts = torch.split(pixels, [len(step.pixels) for step in steps])
            return look(
                [replace(step, pixels=part) for step, part in zip(steps, parts, strict=True)]
            )

        return self.runs.run(
            "vision tower", tuple(step.grid for step in steps), run, self._move_pixels(steps)
        )

    def look(self, steps: Sequence[PreparedStep]) -> Sequence[Tensor]:
        """Return what the vision tower makes of each step, `[V, E]`; by default of one picture
        each.
        """
        return list(self._model.get_image_features(self._join_pixels(steps)).pooler_output)

    def frame_texts(self, time_s: float) -> tuple[str, str]:
        """Return the texts before and after the visual tokens of a step, which belong to it; by
        default none.
        """
        return "", ""

    def _frame(
        self, seen: Sequence[Tensor], steps: Sequence[PreparedStep], times_s: Sequence[float]
    ) -> list[StepTokens]:
        found = []
        for own, step, time_s in zip(seen, steps, times_s, strict=True):
            own = own.to(self.device)
            if self._id_size:
                own = pad(own, (0, self._id_size))  # layers take visual tokens for padding
            tokens = self.retime(StepTokens(own, step.grid), time_s)
            if tokens.embeddings is own:
                # The next pictures overwrite the result.
                tokens = replace(tokens, embeddings=own.clone())
            found.append(tokens)
        return found

    def retime(self, tokens: StepTokens, time_s: float) -> StepTokens:
        """Return an embedded step without words with the texts of another time around its visual
        tokens.
        """
        texts = self.frame_texts(time_s)
        if texts == ("", ""):
            return tokens
        seen = tokens.embeddings
        if tokens.visual is not None:
            seen = seen[tokens.visual]
        opening, closing = (self.embed_text(self.encode(text)) for text in texts)
        place = slice(len(opening), len(opening) + len(seen))
        return replace(tokens, embeddings=torch.cat((opening, seen, closing)), visual=place)

    def _move_pixels(self, steps: Sequence[PreparedStep]) -> Tensor:
        """Return the pixels of some steps on the device, one after the other, as they were
        prepared.
        """
        return concat_rows([step.pixels.to(self.device, non_blocking=True) for step in steps])

    def _join_pixels(self, steps: Sequence[PreparedStep]) -> Tensor:
        """Return the pixels of some steps, one after the other, as the vision tower takes them."""
        # Cast after the copy: a copy that casts waits.
        return self._move_pixels(steps).to(self.dtype)

    def encode(self, text: str) -> list[int]:
        """Return the token ids of plain text."""
        ids: list[int] = self._tokenizer.encode(text, add_special_tokens=False)
        return ids

    def _inputs(self, embeddings: Tensor) -> TensorDict:
        """Return embeddings `[T, E]` as arguments of the language model."""
        if not self._id_size:
            return {"inputs_embeds": embeddings[None]}
        own, bits = embeddings.tensor_split((-self._id_size,), 1)
        ids = bits.contiguous().view(torch.int32)[:, 0] + self._padding_id
        # Bits of what is not finite must not be looked up.
        ids = ids.clamp(0, self._decoder.config.vocab_size_per_layer_input - 1)
        return {
            "inputs_embeds": own[None],
            "per_layer_inputs": self._text.get_per_layer_inputs(ids[None]),
        }

    def _step_arguments(self, steps: Sequence[StepTokens], cache: StreamCache) -> Keywords:
        """Return what a model takes of steps beside embeddings: masks of frames that see both ways,
        or DeepStack.
        """
        fed = [
            # adds nothing to text
            pad(one.deepstack, (0, 0, one.visual.start, len(one) - one.visual.stop), value=-0.0)
            for one in steps
            if one.deepstack is not None and one.visual is not None
        ]
        if fed:
            # For a mask the host would wait for the device. An index serves as well, of the only
            # stream.
            only = torch.zeros(1, dtype=torch.int64, device=self.device)
            return {
                "visual_pos_masks": only,
                "deepstack_visual_embeds": list(torch.cat(fed, 1)[:, None]),
            }
        if (
            not steps
            or getattr(self._decoder.config, "use_bidirectional_attention", None) != "vision"
        ):
            return {}
        # For each token which step it is visual in; -1 for text.
        numbers = torch.full((sum(map(len, steps)),), -1, device=self.device)
        for number, own in enumerate(torch.split(numbers, [len(step) for step in steps])):
            own[steps[number].visual or slice(None)] = number
        return self._decoder.block_masks(numbers, cache)
