"""`Backbone`, the interface of a vision-language model that reads a stream; `protokv.backbones`
finds the class.

A backbone turns frames and text into embeddings, gives steps their stream positions, and runs the
language model with a `TokenCache` (`protokv.core.attention`). It knows no memories, states or
command line.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate, combinations
from typing import Annotated, Any, Self

import torch
from msgspec import Meta
from torch import Tensor

from protokv.core.attention import TokenCache
from protokv.core.context import Context
from protokv.core.decoding import Decoding
from protokv.core.layers import LayerKind
from protokv.core.packing import check_tensor_shapes
from protokv.core.rotary import Angles, PreciseRotary
from protokv.core.step import Grid, Images, SpokenText, StepPositions, StepTokens, StreamClock
from protokv.core.tensors import Tensors
from protokv.device.runs import Runs, ready_for_copy
from protokv.errors import ConfigError, QuestionError
from protokv.texts import MOST_QUESTION_CHARACTERS, check_question_text

MOST_WORD_TOKENS = 1024  # the most tokens of what was said in a step; the rest is cut off

_MOST_QUESTION_TOKENS = 4096
"""A question of this length takes seconds on a CPU, and its keys and values little memory."""

ChatTurn = tuple[str, str]  # an earlier question of a conversation, and its answer


# name of a hub model: nothing that could be a path
_HubCommit = Annotated[str, Meta(pattern=r"\A[0-9a-f]{40}\Z")]


@dataclass(frozen=True, slots=True)
class BackboneIdentity:
    """Which model this is: enough to refuse a state that another model made."""

    name: str  # the name or folder it was loaded by
    family: str  # `model_type` of its config
    config_hash: str  # sha256 of its architecture
    # `float32`, `bfloat16` or `float16`; with `+4bit` or `+8bit` if the weights are quantized
    dtype: str
    weights_digest: str  # sha256 over a small sample of its weight files; empty if there are none
    # the commit that a hub model was loaded from; None otherwise
    revision: _HubCommit | None = None


@dataclass(frozen=True, slots=True)
class PreparedStep:
    """The frames of one step, prepared for the vision tower."""

    pixels: Tensor  # float32 on the host, in the shape of the family
    grid: Grid  # rows and columns of their visual tokens

    def ready_for(self, device: torch.device) -> PreparedStep:
        """Return it in memory from which this device copies while the host goes on."""
        return replace(self, pixels=ready_for_copy(self.pixels, device))

    def shows_the_same(self, other: PreparedStep) -> bool:
        """Return whether two steps have equal pixels."""
        return self.grid == other.grid and torch.equal(self.pixels, other.pixels)


class StreamModel(ABC):
    """What a stream must know of a model."""

    identity: BackboneIdentity  # name, family and digests of the model
    layers: int  # L, those with full attention, as in the next three
    kv_heads: int  # H
    head_size: int  # D
    position_components: int  # P
    # kinds of all layers of the model; empty: all have full attention
    layer_kinds: Sequence[LayerKind] = ()
    frames_per_step: int  # sampled frames that make one step
    default_fps: float  # the sampling rate of its training, in frames per second
    # settings of the preparation of frames, plain JSON; `frame_tokens`, if known, is the most
    # visual tokens of a step
    settings: Mapping[str, int | float | str]
    dtype: torch.dtype  # dtype of embeddings, keys and values
    # device of embeddings, positions and results, and of layers unless `layer_devices` differs
    device: torch.device
    # device of each layer of a spread model; None: all on `device`
    layer_devices: Sequence[torch.device] | None = None
    # whether each of these layers rotates its keys; None: all do, or none, as `rotary` says
    rotated: Sequence[bool] | None = None

    @abstractmethod
    def rotary(self, positions: Tensor) -> Angles:
        """Return cos and sin, `[..., D]` float32, half-split, of positions `[..., P]`, on their
        device.
        """

    @cached_property
    def precise_rotary(self) -> PreciseRotary:
        """The same angles, without their rounding: they add up at any position."""
        return PreciseRotary(self.rotary, self.position_components)

    def new_cache(self, held: Tensors | None = None, seen: int | None = None) -> TokenCache:
        """Return its layers without a token, or with what `TokenCache.tensors` returned after
        `seen` tokens. StateCorrupt: they lack it.
        """
        check_tensor_shapes(held or {}, ())
        return TokenCache(self.layers)


class Backbone(StreamModel):
    """A vision-language model that reads steps and text at given positions."""

    stop_ids: frozenset[int]  # tokens that end an answer
    # how the model was published to answer; greedily if nothing is said
    decoding: Decoding = Decoding()
    # a limit of what it reads, in one line for its user; empty: it reads any video
    notice: str = ""
    # position components that grow with the stream; others stay within the grid of a step
    moving: Sequence[int] = (0,)
    # number of positions that it was trained on; None: its config does not say
    max_position: int | None = None
    # whose attention shows the evidence of an answer; None: not measured
    reading_layers: Sequence[int] | None = None
    converses: bool = True  # whether the model was trained on conversations and system prompts
    runs: Runs | None = None  # of its vision tower
    # why `forward` cannot be captured (`protokv.device.runs`); empty: it can
    why_eager: str = ""

    @property
    def joins(self) -> bool:
        """Whether tokens that do not see each other go through the model as each does alone."""
        return set(self.layer_kinds) <= {LayerKind.FULL}

    @classmethod
    @abstractmethod
    def load(cls, path: str, name: str, config: Any, placement: Any) -> Backbone:
        """Load from a folder, whose transformers config was read; `placement` is a
        `protokv.backbones` `Placement`.
        """

    @classmethod
    def identify(cls, path: str, name: str, config: Any, placement: Any) -> BackboneIdentity:
        """Return the identity of the model that `load` gives; families tell it without loading the
        weights.
        """
        return cls.load(path, name, config, placement).identity

    def limit_frames(self, tokens: int) -> None:
        """Set the most visual tokens of a step, once, before a session. ConfigError: it cannot."""
        own = self.settings.get("frame_tokens")
        check_tokens_per_frame(self.identity.name, [own] if isinstance(own, int) else [], tokens)

    @property
    @abstractmethod
    def prefix_ids(self) -> list[int]:
        """Token ids of the chat prompt in front of the video."""

    @abstractmethod
    def suffix_ids(self, question: str, turns: Sequence[ChatTurn] = ()) -> list[int]:
        """Token ids of the chat prompt after the video: earlier turns, the question and the start
        of the answer.
        """

    def question_ids(
        self, question: str, turns: Sequence[ChatTurn] = (), system: str | None = None
    ) -> tuple[list[int], int]:
        """Return `suffix_ids` of what is asked, and how many of the turns are in them: the newest
        that have room.

        A conversation is a longer text after the video, so asking changes nothing and a state knows
        no conversation. A system prompt that comes after the video stands in front of the question.
        A model that does not converse reads the question alone. QuestionError: the question is
        empty or takes more than `_MOST_QUESTION_TOKENS`, or a text contains control tokens.
        """
        text = check_question_text(question)
        if not self.converses:
            turns = ()
            system = None
        if system is not None:
            text = f"{check_question_text(system, 'the system prompt').strip()}\n\n{text.strip()}"
        # Only so many characters can have room, so a long conversation costs little.
        characters = accumulate(len(asked) + len(answered) for asked, answered in reversed(turns))
        turns = turns[len(turns) - bisect_right(list(characters), MOST_QUESTION_CHARACTERS) :]
        for asked, answered in turns:
            check_question_text(asked, "an earlier question")
            # A model may answer with nothing.
            check_question_text(answered.strip() or "-", "an earlier answer")

        def with_last(count: int) -> list[int]:
            return self.suffix_ids(text, turns[len(turns) - count :])

        kept = (
            bisect_right(
                range(len(turns) + 1),
                _MOST_QUESTION_TOKENS,
                key=lambda count: len(with_last(count)),
            )
            - 1
        )
        ids = with_last(max(0, kept))
        if kept < 0:
            size = f"{len(ids):,} tokens; the most is {_MOST_QUESTION_TOKENS:,}"
            raise QuestionError(f"the question has {size}", hint="ask something shorter")
        return ids, kept

    def choice_ids(self, choices: Sequence[str]) -> list[list[int]]:
        """Return the ids of the tokens that an answer with each of the choices may begin with.

        It counts as it is spelt and with a capital, alone and behind a space, as chat templates
        differ. ConfigError: a choice is empty or no text, or two begin with the same token.
        """
        found: list[set[int]] = []
        for text in (check_question_text(choice, "a choice").strip() for choice in choices):
            spelt = (
                self.encode(space + one)
                for space in ("", " ")
                for one in (text, text[0].upper() + text[1:])
            )
            # Some tokenizers write the space as a token of its own.
            found.append(
                {
                    next((one for one in ids if self.decode([one]).strip()), ids[0])
                    for ids in spelt
                    if ids
                }
            )
        for (first, ours), (second, theirs) in combinations(zip(choices, found, strict=True), 2):
            if ours & theirs:
                raise ConfigError(
                    f"the choices {first} and {second} begin alike", hint="word them in another way"
                )
        return [sorted(ids) for ids in found]

    def with_system(self, text: str | None) -> Self:
        """Return this model, of the same weights, with a system prompt in front of the video; None:
        without one.

        QuestionError: the text is empty, too long, or contains control tokens. ConfigError,
        ModelError: the model or its chat template takes none.
        """
        raise ConfigError(f"{self.identity.name} takes no system prompt", hint="leave out --system")

    @abstractmethod
    def decode(self, ids: list[int]) -> str:
        """Return the text of generated ids, without special tokens."""

    def encode(self, text: str) -> list[int]:
        """Return the token ids of plain text, as an answer may have it. ConfigError: the model
        takes no choices.
        """
        raise ConfigError(f"{self.identity.name} takes no choices", hint="leave them out")

    def embed_text(self, ids: list[int]) -> Tensor:
        """Return embeddings `[n, E]` in the model's dtype."""
        return self.embed_token(torch.tensor(ids, dtype=torch.int64, device=self.device))

    @abstractmethod
    def embed_token(self, token: Tensor) -> Tensor:
        """Return the embeddings `[n, E]` of ids `[n]` int64, such as a generated one, that are on
        the device.
        """

    @abstractmethod
    def prepare(self, images: Images) -> PreparedStep:
        """Resize and normalise the frames of one step, on the host; any thread may call it.

        `images` are `[frames_per_step, height, width, 3]` uint8 RGB. ValueError: they are not;
        SourceUnreadable: a frame cannot be made to fit the model.
        """

    @abstractmethod
    def embed_steps(
        self, steps: Sequence[PreparedStep], times_s: Sequence[float]
    ) -> list[StepTokens]:
        """Run steps through the vision tower, none seeing another; `times_s`, of their frames, may
        become text.
        """

    def embed_step(self, images: Images, time_s: float = 0.0) -> StepTokens:
        """Return the tokens of one step from its frames."""
        (tokens,) = self.embed_steps([self.prepare(images)], [time_s])
        return tokens

    def retime(self, tokens: StepTokens, time_s: float) -> StepTokens:
        """Return an embedded step without words as it is at another time of its frames; by default
        itself, as its time is no text.
        """
        return tokens

    def words_ids(self, text: str) -> list[int]:
        """Return the ids of words after the pictures of a step, without control tokens.
        ConfigError: it reads none.
        """
        raise ConfigError(
            f"{self.identity.name} reads no words beside pictures", hint="leave the subtitles out"
        )

    def add_words(self, step: StepTokens, texts: Sequence[str]) -> StepTokens:
        """Return a step with what was said in it as text after its visual tokens; itself if that is
        nothing.
        """
        said = " ".join(" ".join(texts).split())
        ids = self.words_ids(said) if said else []
        if not ids:
            return step
        spoken = [one for one in texts if isinstance(one, SpokenText)]
        if spoken:
            start_s = min(one.start_s for one in spoken)
            said = SpokenText(said, start_s, max(one.end_s for one in spoken))
        visual = slice(*step.visual_span)
        embeddings = torch.cat((step.embeddings, self.embed_text(ids)))
        return replace(step, embeddings=embeddings, visual=visual, words=len(ids), words_text=said)

    def after_words(
        self, ids: list[int], context: Context, clock: StreamClock
    ) -> tuple[list[int], Context, StreamClock]:
        """Return a question, what it attends to and where the stream stands, if the last step ends
        with words.

        A family whose words close a video and open another one leaves both out of the question.
        """
        return ids, context, clock

    @abstractmethod
    def step_positions(
        self, tokens: StepTokens, *, origin: int, start: int, index: int, time_s: float
    ) -> StepPositions:
        """Return the stream positions of a step.

        `origin` is the position of the first token after the prompt prefix, or after the last
        words; the number `index` of the step and the time of its first frame count from there.
        `start` is one more than the highest so far.
        """

    def stream_times(
        self,
        positions: Tensor,
        clock: StreamClock,
        breaks: Tensor | None = None,
        origin: int | None = None,
    ) -> Tensor:
        """Return stream times, seconds, `[...]` float64, that lie within the steps at `positions`
        `[..., P]`.

        `breaks` are position and time after each step with words, `[n, 2]` float64, in order; None:
        no words. `origin` is the position at which the stream begins; None: after `prefix_ids`.
        """
        f64 = torch.float64
        origin = len(self.prefix_ids) if origin is None else origin
        ends = torch.tensor([[origin, 0.0], [clock.next_position, clock.stream_time_s]], dtype=f64)
        ends = (ends if breaks is None else torch.cat((ends[:1], breaks, ends[1:]))).to(
            positions.device
        )
        at = positions[..., 0].double()
        part = torch.searchsorted(ends[1:-1, 0].contiguous(), at, right=True)
        (first, since_s), (last, until_s) = ends[part].unbind(-1), ends[part + 1].unbind(-1)
        within = self.time_within(at - first, last - first, until_s - since_s, clock)
        # The words of a step stand after its pictures.
        return since_s + (within if breaks is None else within.minimum(until_s - since_s - 1e-3))

    def time_within(
        self, passed: Tensor, positions: Tensor, seconds: Tensor, clock: StreamClock
    ) -> Tensor:
        """Return the time, `[...]` float64, that has passed in a part of the stream between words,
        in proportion.

        All are `[...]` float64: positions since its beginning, and the positions and seconds that
        all of it takes.
        """
        return (passed + 0.5) / positions.clamp(min=1) * seconds

    @abstractmethod
    def forward(
        self,
        embeddings: Tensor,
        positions: Tensor,
        cache: TokenCache,
        *,
        steps: Sequence[StepTokens] = (),
    ) -> Tensor:
        """Run the language model over embeddings `[T, E]` at positions `[T, P]` int64; return
        hidden states `[T, E]`.

        The cache has the context that the tokens attend to, and earlier tokens; it takes their keys
        and values. `steps` are those that the embeddings belong to, for families that feed more
        than embeddings to the layers.
        """

    @abstractmethod
    def logits(self, hidden: Tensor) -> Tensor:
        """Return logits `[..., vocabulary]` float32 of hidden states `[..., E]`."""

    def text_positions(self, start: int, n_tokens: int) -> Tensor:
        """Return positions `[n, P]` int64 of text: the same number in every component."""
        line = torch.arange(start, start + n_tokens, device=self.device)
        return line[:, None].expand(-1, self.position_components)

    def spell_tokenizer(self) -> str:
        """Return the tokenizer as the library `tokenizers` writes it; empty if it knows words
        alone.
        """
        return ""

    def unknown_words(self, question: str) -> list[str]:
        """Return the words of a question that the tokenizer cannot represent, in order; none for
        real models.
        """
        return []


def check_tokens_per_frame(name: str, possible: Sequence[int], tokens: int) -> None:
    """Refuse what frames for a model cannot cost; `possible` are its numbers of tokens.
    ConfigError.
    """
    if tokens in possible:
        return
    most = "at most " if len(possible) > 1 else ""
    raise ConfigError(
        f"a frame for {name} has {most}{', '.join(map(str, possible)) or 'no'} visual tokens, and "
        "no other number",
        hint="give --frame-tokens one of these numbers, or leave it out",
    )
