"""What transformers' processors leave beside a model: the preprocessing of video and the chat template.

Both have had several file names; the order here is that of transformers. Knows no family and no arithmetic.
"""

from __future__ import annotations

from typing import Any

from protokv.backbones.identity import find_file, read_json


def read_video_processor(path: str) -> tuple[dict[str, Any], bool]:
    """Settings of the video processor of a folder or hub name; empty where there are none.

    Returns:
        The settings without those that are null, and whether they were written for video: an older folder may have
        those of still images only, which stand in for them.
    """
    nested = read_json(path, "processor_config.json").get("video_processor") or {}
    of_video = nested or read_json(path, "video_preprocessor_config.json")
    raw = of_video or read_json(path, "preprocessor_config.json")
    return {key: value for key, value in raw.items() if value is not None}, bool(of_video)


def read_template(path: str) -> str | None:
    """The chat template that a processor saved in its older form; None where the tokenizer carries the right one.

    A tokenizer reads `chat_template.jinja` by itself, but not the older `chat_template.json`, and then may carry the
    template of the text-only model that it was made from.
    """
    if find_file(path, "chat_template.jinja"):
        return None
    template: str | None = read_json(path, "chat_template.json").get("chat_template")
    return template
