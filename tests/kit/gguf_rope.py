"""Tiny GGUF files with every kind of rope scaling that llama.cpp reads.

Owns: the cases, and the tokens on which they are compared. Run as a program, it writes the files
into a folder for ``golden/make_gguf.py``.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np

from jaxinfer.models.registry import build_model
from kit.checkpoints import (
    random_hf_tensors,
    tiny_llama_config,
    tiny_qwen2_config,
    tiny_qwen3_config,
    write_gguf,
)

TOKEN_IDS = np.random.default_rng(0).integers(3, 95, 200).astype(np.int32)  # int32[200]
_CONFIGS = {
    "llama": tiny_llama_config(),
    "qwen2": tiny_qwen2_config(),
    "qwen3": tiny_qwen3_config(),
}
_YARN = {"scaling.type": "yarn", "scaling.factor": 4.0, "scaling.original_context_length": 64}
# name -> keys below ``<architecture>.rope.``
CASES: dict[str, dict[str, Any]] = {
    "llama/scale_linear": {"scale_linear": 4.0},
    "llama/factor_and_scale_linear": {"scaling.factor": 4.0, "scale_linear": 2.0},
    "llama/none_with_a_factor": {"scaling.type": "none", "scaling.factor": 4.0},
    "llama/yarn_over_the_context": {"scaling.type": "yarn", "scaling.factor": 4.0},
    "llama/yarn_attn_factor": _YARN | {"scaling.attn_factor": 2.0},
    "qwen2/scale_linear": {"scale_linear": 4.0},
    "qwen3/yarn": _YARN,
}


def write_case(folder: Path, name: str) -> Path:
    """The GGUF file of one case, with weights large enough for positions to have an effect."""
    arch = name.split("/")[0]
    config = _CONFIGS[arch]
    tensors = random_hf_tensors(build_model(config, "float32"))
    larger = {key: 3 * value if value.ndim == 2 else value for key, value in tensors.items()}
    metadata = {f"{arch}.rope.{key}": value for key, value in CASES[name].items()}
    path = folder / f"{name.replace('/', '-')}.gguf"
    return write_gguf(path, config, larger, metadata=metadata)


if __name__ == "__main__":
    for case in CASES:
        write_case(Path(sys.argv[1]), case)
    np.save(Path(sys.argv[1]) / "token_ids.npy", TOKEN_IDS)
