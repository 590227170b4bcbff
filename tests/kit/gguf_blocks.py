"""Random blocks of GGUF's quantised types."""

from __future__ import annotations

import numpy as np
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType


def random_rows(kind: GGMLQuantizationType, outputs: int, inputs: int) -> np.ndarray:
    """Random bytes whose float16 factors are finite and not tiny: uint8[O, bytes of a row]."""
    per_block, nbytes = GGML_QUANT_SIZES[kind]
    rng = np.random.default_rng(kind.value)
    blocks = rng.integers(0, 256, (outputs, inputs // per_block, nbytes), np.uint8)
    if kind.name == "MXFP4":
        blocks[..., 0] = rng.integers(100, 150, blocks.shape[:2])
        return blocks.reshape(outputs, -1)
    halves = {"Q6_K": (208,)}.get(kind.name, (0, 2) if kind.name[-2:] in ("_1", "_K") else (0,))
    for at in halves:
        factors = rng.uniform(0.01, 0.1, blocks.shape[:2]).astype(np.float16)
        blocks[..., at : at + 2] = factors[..., None].view(np.uint8)
    return blocks.reshape(outputs, -1)
