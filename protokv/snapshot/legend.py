"""What the tensors of a state are, for whoever opens one without this library: names of their axes, units, meaning.

Looked up by the last one or two parts of a tensor's name. It explains and decides nothing: a tensor that is not listed
is kept all the same, with axes named after itself.
"""

from __future__ import annotations

from typing import Any

# Axes from the left; units where there are any; meaning.
_TOKENS = "layer kv_head token feature"
_LEGEND = {
    "near.keys": (_TOKENS, "", "keys of the recent tokens as the model made them, rotated"),
    "near.values": (_TOKENS, "", "values of the recent tokens as the model made them"),
    "near.positions": ("token component", "rotary position", "position of each recent token in the stream"),
    "near.coordinates": ("token xy", "fraction of the frame", "centre of each recent token in its frame"),
    "near.step": ("token", "step", "step of the stream that each recent token came in"),
    "near.ring": ("field", "", "first slot in use, slots in use, last step"),
    "sink.keys": (_TOKENS, "", "keys of the prompt before the video, rotated"),
    "sink.values": (_TOKENS, "", "values of the prompt before the video"),
    "bank.key_center": ("layer kv_head prototype feature", "", "centre of the absorbed keys, rotation removed"),
    "bank.value_center": ("layer kv_head prototype feature", "", "centre of the absorbed values"),
    "bank.mass": ("layer kv_head prototype", "token", "tokens that a prototype stands for; 0 is a free slot"),
    "bank.mean": ("layer kv_head prototype xy", "fraction of the frame", "mean place in the frame"),
    "bank.covariance": ("layer kv_head prototype xy xy_other", "fraction of the frame squared", "spread of the place"),
    "bank.position": ("layer kv_head prototype component", "rotary position", "position at which it is shown"),
    "bank.last_step": ("layer kv_head prototype", "step", "step that it last took a token in"),
    "bank.opened": ("layer kv_head", "token", "tokens that opened a prototype"),
    "bank.absorbed": ("layer kv_head", "token", "tokens that a prototype absorbed"),
    "bank.merged": ("layer kv_head", "prototype", "prototypes merged into another"),
    "bank.expired": ("layer kv_head", "prototype", "prototypes that decayed away"),
    "bank.recycled": ("layer kv_head", "prototype", "free slots filled from recent tokens"),
    "residual.key_counts": ("layer kv_head prototype subspace codeword", "token", "histogram of key residuals"),
    "residual.value_counts": ("layer kv_head prototype subspace codeword", "token", "histogram of value residuals"),
    "residual.updates": ("layer kv_head prototype", "token", "residuals that were counted"),
    "codebook.keys": ("layer kv_head subspace codeword subfeature", "", "codewords of key residuals"),
    "codebook.values": ("layer kv_head subspace codeword subfeature", "", "codewords of value residuals"),
    "codebook.fitted": ("layer kv_head", "", "whether the codewords are fitted"),
    "warmup.keys": ("layer kv_head residual feature", "", "key residuals gathered for fitting codewords"),
    "warmup.values": ("layer kv_head residual feature", "", "value residuals gathered for fitting codewords"),
    "warmup.owner": ("layer kv_head residual", "", "prototype that each residual belongs to"),
    "warmup.count": ("layer kv_head", "token", "residuals gathered so far"),
    "archive.keys": (_TOKENS, "", "keys of all tokens that left the window"),
    "archive.values": (_TOKENS, "", "values of all tokens that left the window"),
    "archive.positions": ("token component", "rotary position", "position of each archived token in the stream"),
    "archive.block_keys": ("block layer kv_head feature", "", "mean key of each block, by which it is found"),
    "archive.lengths": ("block", "token", "tokens in each block"),
    "archive.count": ("field", "", "tokens and blocks in use"),
    "merge.reference": ("token feature", "", "embeddings that the next step is compared with"),
    "merge.group": ("field", "", "where the group of merged steps stands"),
}


def meaning_of(name: str, axes: int) -> tuple[list[str], dict[str, Any]]:
    """Names of the axes of a tensor with so many, and its attributes: `long_name` and `units` where there are any.

    What stands before the last two parts of the name, as that of a shard, does not matter.
    """
    dimensions, units, meaning = _LEGEND.get(".".join(name.split(".")[-2:]), ("", "", ""))
    names = dimensions.split()
    if len(names) != axes:
        names = [f"{name.rpartition('.')[2]}_{axis}" for axis in range(axes)]
    return names, {key: value for key, value in (("long_name", meaning), ("units", units)) if value}
