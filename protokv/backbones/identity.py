"""Which model a folder or hub name holds: a hash of its architecture and a cheap digest of its weights.

Two checkpoints of one architecture must not pass for each other, but reading all weights of a large model would take
longer than loading a state. So the digest covers each weight file's header, its size and evenly spaced samples. Owns
finding a model's files, too.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

from protokv.errors import ModelError

SAMPLE_BYTES = 1 << 16
SAMPLES = 16
_VOLATILE = frozenset({"transformers_version", "dtype", "torch_dtype", "_name_or_path", "_attn_implementation"})


def find_file(path: str, filename: str) -> Path | None:
    """A file of a model folder; None where there is none."""
    file = Path(path) / filename
    return file if file.is_file() else None


def read_json(path: str, filename: str) -> dict[str, Any]:
    """A JSON file of a model; an empty dictionary where there is none.

    Raises:
        ModelError: it is no JSON.
    """
    file = find_file(path, filename)
    if file is None:
        return {}
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ModelError(f"{file} is not valid JSON: {error}", hint="download the model again") from error
    return content if isinstance(content, dict) else {}


def hash_config(config: dict[str, Any]) -> str:
    """sha256 of a model's configuration without what does not change its arithmetic."""
    return hashlib.sha256(json.dumps(_stable(config), sort_keys=True).encode()).hexdigest()


def weight_files(path: str) -> list[str]:
    """Names of the safetensors files of a model folder, in order, as its index says; the one name without an index."""
    shards = read_json(path, "model.safetensors.index.json").get("weight_map")
    named = {str(name) for name in shards.values()} if isinstance(shards, dict) else set()
    return sorted(named) or ["model.safetensors"]


def digest_weights(path: str) -> str:
    """sha256 over the header, size and samples of every safetensors file of a model; empty where there is none."""
    digest = hashlib.sha256()
    for name in weight_files(path):
        file = find_file(path, name)
        if file is None:
            return ""
        digest.update(name.encode())
        _sample(file, digest)
    return digest.hexdigest()


def _stable(value: Any) -> Any:
    if isinstance(value, dict):
        return {k: _stable(v) for k, v in value.items() if k not in _VOLATILE}
    return [_stable(v) for v in value] if isinstance(value, list) else value


def _sample(file: Path, digest: Any) -> None:
    size = file.stat().st_size
    digest.update(size.to_bytes(8, "little"))
    with file.open("rb") as stream:
        header = int.from_bytes(stream.read(8), "little")
        digest.update(stream.read(min(header, size)))
        for i in range(SAMPLES):
            stream.seek((size - SAMPLE_BYTES) * i // (SAMPLES - 1) if size > SAMPLE_BYTES else 0)
            digest.update(stream.read(SAMPLE_BYTES))
