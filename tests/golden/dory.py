"""Published names of Dory's tensors, of which transformers' reading has no inverse."""

from __future__ import annotations

import re
from typing import Any

_BLOCKS = {"self_attn": (0, "mixer"), "mlp": (1, "mixer")}
_BLOCKS |= {"lambda_1": (0, "attn_alpha"), "lambda_2": (1, "mlp_alpha")}


def published_names(tensors: dict[str, Any]) -> dict[str, Any]:
    """Each block is a layer of the file."""

    def own(match: re.Match[str]) -> str:
        place, name = _BLOCKS[match[2]]
        return f"backbone.layers.{2 * int(match[1]) + place}.{name}"

    found = {}
    for name, tensor in tensors.items():
        name = name.replace("model.embed_tokens", "backbone.embeddings")
        name = name.replace("self_attn.gate_proj", "self_attn.g_proj")
        found[re.sub(r"^model\.layers\.(\d+)\.(\w+)", own, name)] = tensor
    return found
