"""transformers' own whole models over the same video and question, to compare the adapters with.

Nothing of an adapter is used here but its rate: pixels come from transformers' PIL processors, text
from the chat template, placeholders are merged by the model itself, and positions are its own but
for text behind a Qwen video, which transformers starts inside the video's time span.
"""

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple
from unittest.mock import patch

import numpy as np
import torch
from torch import Tensor
from transformers import AutoModelForImageTextToText, AutoTokenizer
from transformers.models.gemma4.image_processing_pil_gemma4 import Gemma4ImageProcessorPil
from transformers.models.gemma4.processing_gemma4 import Gemma4Processor
from transformers.models.got_ocr2.image_processing_pil_got_ocr2 import GotOcr2ImageProcessorPil
from transformers.models.internvl.processing_internvl import InternVLProcessor
from transformers.models.llava_onevision.image_processing_pil_llava_onevision import (
    LlavaOnevisionImageProcessorPil,
)
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil
from transformers.models.qwen3_vl.processing_qwen3_vl import Qwen3VLProcessor
from transformers.models.smolvlm import processing_smolvlm
from transformers.models.smolvlm.image_processing_pil_smolvlm import SmolVLMImageProcessorPil
from transformers.models.smolvlm.processing_smolvlm import SmolVLMProcessor

from protokv.core.tensors import TensorDict
from protokv.texts import JsonObject
from tests.backbones.tiny import PATCH

Video = Sequence[np.ndarray]
Said = Sequence[tuple[str, str]]
# Without the format, an image of one or three rows is taken for one of as many channels.
AS_FRAMES = {"input_data_format": "channels_last", "return_tensors": "pt"}


class Prompt(NamedTuple):
    """A video in steps of frames `[F, height, width, 3]`, the words behind each step, and a
    question about it.
    """

    video: Video
    question: str
    step_seconds: float = 1.0
    words: Sequence[str] = ()

    @property
    def frames(self) -> list[np.ndarray]:
        return [image for images in self.video for image in images]

    @property
    def times_s(self) -> list[float]:
        return [index * self.step_seconds for index in range(len(self.video))]


def messages(question: str, *said: tuple[str, str]) -> list[JsonObject]:
    """Return a conversation about a video, which is in the user's first message; `said` has roles
    and texts.
    """
    found = [
        {"role": role, "content": [{"type": "text", "text": text}]}
        for role, text in (*said, ("user", question))
    ]
    first = next(one for one in found if one["role"] == "user")
    return [
        one | {"content": [{"type": "video"}, *one["content"]]} if one is first else one
        for one in found
    ]


class Upstream:
    """One model of transformers with eager attention, and its tokenizer."""

    def __init__(self, family: str, folder: Path, dtype: torch.dtype = torch.float32) -> None:
        self.family = family
        self.folder = folder
        self.model = AutoModelForImageTextToText.from_pretrained(
            folder, dtype=dtype, attn_implementation="eager"
        ).eval()
        self.tokenizer = AutoTokenizer.from_pretrained(folder)
        # In older folders the template is in a file of its own, which only a processor reads.
        older = folder / "chat_template.json"
        if older.is_file():
            self.tokenizer.chat_template = json.loads(older.read_text())["chat_template"]

    def chat(self, question: str, *said: tuple[str, str]) -> tuple[list[int], list[int]]:
        """Return token ids before and after the placeholder of the video; see `messages`."""
        if self.family in TEXTS:
            before, after = TEXTS[self.family](self, Prompt((), question), said).split(CUT)
            return tuple(
                self.tokenizer.encode(text, add_special_tokens=False) for text in (before, after)
            )
        ids = self.tokenizer.apply_chat_template(
            messages(question, *said), add_generation_prompt=True
        )
        at = ids["input_ids"].index(self.model.config.video_token_id)
        return ids["input_ids"][:at], ids["input_ids"][at + 1 :]

    def render(
        self, question: str, *said: tuple[str, str], video: str, token: str = "<video>", **how: Any
    ) -> str:
        """Return a conversation as text, with `video` in place of the video's token; see
        `messages`.
        """
        text: str = self.tokenizer.apply_chat_template(
            messages(question, *said), tokenize=False, add_generation_prompt=True, **how
        )
        return text.replace(token, video)

    def encode(self, text: str) -> Tensor:
        return torch.tensor([self.tokenizer.encode(text, add_special_tokens=False)])

    def inputs(
        self, video: Video, question: str, step_seconds: float, words: Sequence[str] = ()
    ) -> TensorDict:
        """Return arguments of the model's forward, in its dtype. Every step of the video has frames
        of one size.

        Steps with `words`, all but the last, part the video into several of equal length, with
        these between them. Those of the last step stand in front of the question, in a line of
        their own.
        """
        found = INPUTS[self.family](
            self, Prompt(video, question, step_seconds, words or [""] * len(video))
        )
        return {
            name: value.to(self.model.dtype) if value.is_floating_point() else value
            for name, value in found.items()
        }

    @torch.no_grad()
    def logits(self, inputs: TensorDict, n_last: int) -> Tensor:
        return self.model(**inputs).logits[0, -n_last:]

    def generate(
        self, inputs: TensorDict, n_tokens: int, **penalties: float
    ) -> tuple[list[int], float]:
        """Continue greedily with the model's own `generate`, past any end of the answer.

        Returns:
            The tokens, and the least difference between the logit of a chosen token and that of the
            next best one, both with their penalties.
        """
        settings = {
            "do_sample": False,
            "eos_token_id": None,
            "max_new_tokens": n_tokens,
            **penalties,
        }
        found = self.model.generate(
            **inputs, **settings, output_scores=True, return_dict_in_generate=True
        )
        first, second = torch.cat(found.scores).topk(2).values.unbind(1)
        return found.sequences[0, inputs["input_ids"].shape[1] :].tolist(), float(
            (first - second).min()
        )


def make_part(kind: type, **parts: Any) -> Any:
    """Return a processor of these parts alone; all of one needs torchvision."""
    processor: Any = object.__new__(kind)
    vars(processor).update(parts)
    return processor


def with_words(expanded: str, mark: str, words: Sequence[str], form: str, marks: int = 1) -> str:
    """Return the text of all steps, each of which ends with the `marks`-th mark, with words behind
    their steps.
    """
    parts = expanded.split(mark)
    for step, said in enumerate(words):
        parts[marks * (step + 1)] = (form.format(said) if said else "") + parts[marks * (step + 1)]
    return mark.join(parts)


def parted(prompt: Prompt) -> list[tuple[int, str]]:
    """Return the steps of each part of a video, and the words behind it; those behind the last are
    the question's.
    """
    ends = [step + 1 for step, said in enumerate(prompt.words[:-1]) if said] + [len(prompt.video)]
    return [
        (end - start, prompt.words[end - 1]) for start, end in zip([0, *ends], ends, strict=False)
    ]


def in_front(prompt: Prompt) -> str:
    """Return the question with the words of the last step in front of it."""
    return f"{prompt.words[-1]}\n{prompt.question}" if prompt.words[-1] else prompt.question


def qwen_vl_inputs(upstream: Upstream, prompt: Prompt) -> TensorDict:
    """Qwen2-VL and Qwen2.5-VL; positions as `get_rope_index` gives them, with the text behind all
    of the video.
    """
    model = upstream.model
    config = upstream.model.config
    raw = json.loads((upstream.folder / "preprocessor_config.json").read_text())
    limits = frame_limits(raw["min_pixels"], raw["max_pixels"], 28)
    pixels, (rows, columns) = qwen_patches(prompt.video, size=limits)
    before, after = upstream.chat(in_front(prompt))
    per_second = getattr(config.vision_config, "tokens_per_second", None)
    interval = 1.0 if per_second is None else per_second * prompt.step_seconds
    parts = parted(prompt)
    grid = torch.tensor([[steps, rows, columns] for steps, _ in parts])
    ids = before
    positions = [torch.arange(len(before)).expand(3, -1)]
    for part, (own, (steps, said)) in enumerate(zip(grid, parts, strict=True), 1):
        behind = f"<|vision_end|>{said}\n<|vision_start|>"
        text = (
            upstream.tokenizer.encode(behind, add_special_tokens=False)
            if part < len(parts)
            else after
        )
        positions.append(
            model.model.get_vision_position_ids(int(positions[-1].max()) + 1, own, 1, 2, interval)
        )
        start = int(positions[-1].max()) + 1
        positions.append(torch.arange(start, start + len(text)).expand(3, -1))
        ids = [*ids, *[config.video_token_id] * (steps * rows * columns // 4), *text]
    return {
        "input_ids": torch.tensor([ids]),
        "pixel_values_videos": pixels,
        "video_grid_thw": grid,
        "position_ids": torch.cat(positions, 1)[:, None],
    }


def frame_limits(least: int, most: int, side: int) -> dict[str, int]:
    """Return the pixels that a frame may have: 128 to 768 tokens, as qwen-vl-utils says, inside
    what the files say.
    """
    fewest = 128 * side**2
    return {
        "shortest_edge": max(least, fewest) if fewest < most else least,
        "longest_edge": min(most, 6 * fewest),
    }


def qwen_patches(video: Video, patch: int = 14, **settings: Any) -> tuple[Tensor, tuple[int, int]]:
    """Return patches of all steps in order, and rows and columns of patches.

    The PIL processor takes still images and repeats each: the second frame of a step replaces the
    copy.
    """
    processor = Qwen2VLImageProcessorPil(patch_size=patch, **settings)
    patches = []
    grid = []
    for images in video:
        frames = [processor(images=[image], **AS_FRAMES) for image in images]
        both = torch.stack(
            [frame["pixel_values"].reshape(-1, 3, 2, patch, patch)[:, :, 0] for frame in frames], 2
        )
        patches.append(both.flatten(1))
        grid = frames[0]["image_grid_thw"][0].tolist()
    return torch.cat(patches), (grid[1], grid[2])


def qwen3_vl_inputs(upstream: Upstream, prompt: Prompt) -> TensorDict:
    """Text by the processor, pixels by the PIL image processor, positions by the model."""
    config = upstream.model.config
    raw = json.loads((upstream.folder / "video_preprocessor_config.json").read_text())
    limits = frame_limits(raw["size"]["shortest_edge"] // 2, raw["size"]["longest_edge"] // 2, 32)
    statistics = {name: raw[name] for name in ("image_mean", "image_std")}
    patches, (rows, columns) = qwen_patches(prompt.video, PATCH, size=limits, **statistics)
    grid = torch.tensor([[len(prompt.video), rows, columns]])
    processor = make_part(
        Qwen3VLProcessor,
        video_token="<|video_pad|>",
        image_token="<|image_pad|>",
        vision_start_token="<|vision_start|>",
        vision_end_token="<|vision_end|>",
        video_processor=SimpleNamespace(merge_size=2, temporal_patch_size=2),
    )
    metadata = SimpleNamespace(
        fps=2 / prompt.step_seconds, frames_indices=list(range(2 * len(prompt.video)))
    )
    expanded = processor.replace_video_token(
        {"video_grid_thw": grid, "video_metadata": [metadata]}, 0
    )
    expanded = with_words(expanded, "<|vision_end|>", prompt.words, "{}\n")
    text = upstream.render(prompt.question, video="<|video_pad|>", token="<|video_pad|>")
    (text,), _ = processor.get_text_with_replacements([text], videos_replacements=[expanded])
    ids = upstream.encode(text)
    return {
        "input_ids": ids,
        "mm_token_type_ids": 2 * (ids == config.video_token_id).int(),
        "pixel_values_videos": patches,
        "video_grid_thw": grid,
    }


def llava_onevision_inputs(upstream: Upstream, prompt: Prompt) -> TensorDict:
    """LLaVA-OneVision; positions are the model's own, and so is the newline behind the video."""
    config = upstream.model.config
    before, after = upstream.chat(in_front(prompt))
    side = -(-(config.vision_config.image_size // config.vision_config.patch_size) // 2)
    frames = torch.cat([llava_frames(upstream.folder, images) for images in prompt.video])
    parts = parted(prompt)
    ids = before
    for part, (steps, said) in enumerate(parts, 1):
        between = part < len(parts)
        text = (
            upstream.tokenizer.encode(f"\n{said}\n", add_special_tokens=False) if between else after
        )
        ids = [*ids, *[config.video_token_id] * (steps * side * side + 1), *text]
    return {
        "input_ids": torch.tensor([ids]),
        "pixel_values_videos": frames.unflatten(0, (len(parts), -1)),
    }


def llava_frames(folder: Path, images: np.ndarray) -> Tensor:
    """Return frames `[F, 3, height, width]`: the first tile of the PIL processor shows the whole
    image.
    """
    raw = json.loads((folder / "processor_config.json").read_text()).get("video_processor")
    # Older folders have a file of still images only.
    raw = raw or json.loads((folder / "preprocessor_config.json").read_text())
    settings = {
        name: raw[name]
        for name in ("size", "resample", "rescale_factor", "image_mean", "image_std")
    }
    processor = LlavaOnevisionImageProcessorPil(**settings)
    return torch.stack(
        [processor(images=[image], **AS_FRAMES)["pixel_values"][0, 0] for image in images]
    )


def gemma4_inputs(upstream: Upstream, prompt: Prompt) -> TensorDict:
    """Text by the processor, pixels by the PIL image processor with the settings for video."""
    config = upstream.model.config
    tokenizer = upstream.tokenizer
    raw = json.loads((upstream.folder / "processor_config.json").read_text())["video_processor"]
    found = Gemma4ImageProcessorPil(**raw)(images=prompt.frames, **AS_FRAMES)
    boi, eoi = tokenizer.convert_ids_to_tokens([config.boi_token_id, config.eoi_token_id])
    processor = make_part(Gemma4Processor, video_token="<|video|>", boi_token=boi, eoi_token=eoi)
    metadata = SimpleNamespace(fps=1 / prompt.step_seconds, timestamps=prompt.times_s)
    counts = found["num_soft_tokens_per_image"].tolist()
    expanded = processor.replace_video_token(
        {"num_soft_tokens_per_video": counts[:1], "video_metadata": [metadata]}, 0
    )
    expanded = with_words(expanded, eoi, prompt.words, "\n{}\n")
    ids = upstream.encode(upstream.render(prompt.question, video=expanded, token="<|video|>"))
    return {
        "input_ids": ids,
        "mm_token_type_ids": 2 * (ids == config.video_token_id).int(),
        "pixel_values_videos": found["pixel_values"].float(),
        "video_position_ids": found["image_position_ids"],
        "num_frames_per_video": torch.tensor([len(prompt.video)]),
    }


CUT = "<cut>"


def smolvlm_text(upstream: Upstream, prompt: Prompt, said: Said = ()) -> str:
    """The whole prompt by the processor, but for its sentence about the length of the video.

    Without frames, `CUT` stands in their place.
    """
    mark = "<fake_token_around_image>"
    processor = make_part(
        SmolVLMProcessor,
        image_token="<image>",
        fake_image_token=mark,
        global_image_token="<global-img>",
        image_seq_len=upstream.model.model.image_seq_len,
    )
    metadata = SimpleNamespace(fps=1 / prompt.step_seconds, timestamps=prompt.times_s, duration=0)
    found = {"pixel_values": torch.zeros(1, len(prompt.video)), "video_metadata": [metadata]}
    intro = "You are provided the following series of frames from a video.\n" + (
        "" if prompt.video else CUT
    )
    with patch.multiple(processing_smolvlm, DEFAULT_VIDEO_INTRO=intro, num2words=str):
        expanded = processor.replace_video_token(found, 0)
    expanded = with_words(expanded, mark, prompt.words, "\n{}", 2)
    template = processing_smolvlm.DEFAULT_CHAT_TEMPLATE
    return upstream.render(prompt.question, *said, chat_template=template, video=expanded)


def smolvlm_inputs(upstream: Upstream, prompt: Prompt) -> TensorDict:
    """Text by the processor, pixels by the PIL image processor, whole and at the size for video."""
    raw = json.loads((upstream.folder / "preprocessor_config.json").read_text())
    settings = raw | {"size": raw["video_sampling"]["video_size"], "do_image_splitting": False}
    found = SmolVLMImageProcessorPil(**settings)(images=prompt.frames, **AS_FRAMES)
    ids = upstream.encode(smolvlm_text(upstream, prompt))
    return {"input_ids": ids, "pixel_values": found["pixel_values"].float().flatten(0, 1)[None]}


def internvl_text(upstream: Upstream, prompt: Prompt, said: Said = ()) -> str:
    """The whole prompt as the processor writes it; without frames, `CUT` stands in their place."""
    processor = make_part(
        InternVLProcessor,
        start_image_token="<img>",
        end_image_token="</img>",
        image_token="<IMG_CONTEXT>",
        image_seq_length=upstream.model.config.image_seq_length,
    )
    lines = processor.replace_video_token(
        {"pixel_values_videos": [torch.zeros(len(prompt.video))]}, 0
    )
    lines = with_words(lines, "</img>", prompt.words, "\n{}")
    return upstream.render(prompt.question, *said, video=lines or CUT)


def internvl_inputs(upstream: Upstream, prompt: Prompt) -> TensorDict:
    """Text by the processor, pixels by the PIL image processor without tiles."""
    raw = json.loads((upstream.folder / "video_preprocessor_config.json").read_text())
    processor = GotOcr2ImageProcessorPil(**raw, crop_to_patches=False)
    found = processor(images=prompt.frames, **AS_FRAMES)
    ids = upstream.encode(internvl_text(upstream, prompt))
    return {"input_ids": ids, "pixel_values": found["pixel_values"]}


# Families of which the processor writes more around the video than the template.
TEXTS: dict[str, Callable[..., str]] = {"smolvlm": smolvlm_text, "internvl": internvl_text}
INPUTS: dict[str, Callable[[Upstream, Prompt], TensorDict]] = {
    **dict.fromkeys(("qwen2_vl", "qwen2_5_vl"), qwen_vl_inputs),
    **dict.fromkeys(("qwen3_vl", "qwen3_vl_moe", "qwen3_5", "qwen3_5_moe"), qwen3_vl_inputs),
    "gemma4": gemma4_inputs,
    "llava_onevision": llava_onevision_inputs,
    "smolvlm": smolvlm_inputs,
    "internvl": internvl_inputs,
}
