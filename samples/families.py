"""Print which families of picture models `protokv.Cache` serves: tiny random models of each.

`python -m samples.families` goes through transformers' own `AutoModelForImageTextToText`. A model
is made from the defaults of its family, with few and small layers of text, and no weights are
loaded. A family is served if the tokens of three steps and of a question, all within the budget,
give the logits of one forward; else the table says why not.
"""

from __future__ import annotations

import warnings
from collections import defaultdict
from typing import Any

import torch
import transformers

import protokv
from protokv.errors import ProtoKVError

SMALL = {
    "hidden_size": 64,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": 256,
    "max_position_embeddings": 4096,
    "moe_intermediate_size": 32,
    "num_experts": 4,
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
}
TOLERANCE = 1e-3


def shrink(config: Any) -> None:
    """Make the text of a config small, where it has such a number."""
    for name, value in SMALL.items():
        if isinstance(getattr(config, name, None), int):
            setattr(config, name, value)
    rope = getattr(config, "rope_parameters", None) or {}
    if "mrope_section" in rope:
        rope["mrope_section"] = [2, 3, 3]
    if getattr(config, "layer_types", None):
        config.layer_types = config.layer_types[-SMALL["num_hidden_layers"] :]


def make(config_class: Any) -> Any:
    """Return a tiny text decoder of a family, if that is a model of its own."""
    torch.manual_seed(0)
    config = config_class().get_text_config(decoder=True)
    shrink(config)
    return transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()


@torch.no_grad()
def try_family(config_class: Any) -> str:
    """Return "served", or the reason why not."""
    try:
        model = make(config_class)
    except Exception as error:
        return f"not tried: no tiny decoder ({type(error).__name__})"
    try:
        ids = torch.randint(8, 200, (1, 40), generator=torch.Generator().manual_seed(1))
        expected = model(input_ids=ids).logits[0, -1]
        cache = protokv.Cache(model, 400)
        for step in ids[:, :30].split(10, 1):
            model(**cache.step({"input_ids": step}))
            cache.commit()
        own = model(**cache.question({"input_ids": ids[:, 30:]})).logits[0, -1]
    except ProtoKVError as error:
        return f"refused: {error.message}"
    except Exception as error:
        return f"not tried: {type(error).__name__} in its forward"
    off = float((own - expected).abs().max() / expected.abs().max())
    return "served" if off < TOLERANCE else f"WRONG: off by {off:.2g}"


def main() -> None:
    """Print the table."""
    warnings.simplefilter("ignore")
    transformers.logging.set_verbosity_error()
    found = defaultdict(list)
    for config_class in transformers.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING:
        found[try_family(config_class)].append(config_class.model_type)
    print("| what a cache does | families |\n|---|---|")
    for what, names in sorted(found.items(), key=lambda one: -len(one[1])):
        print(f"| {what} ({len(names)}) | {', '.join(sorted(names))} |")


if __name__ == "__main__":
    main()
