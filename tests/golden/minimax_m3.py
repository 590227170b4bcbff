"""Published names of MiniMax-M3's tensors, which transformers gives only to files with images."""

from __future__ import annotations

import re

import torch

_MOE = "block_sparse_moe"
_NAMES = (
    (r"mlp\.gate\.e_score", f"{_MOE}.e_score"),
    (r"mlp\.(gate|shared_experts)\.", rf"{_MOE}.\1."),
    (r"indexer\.([qk])_", r"index_\1_"),
)


def published_names(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The tensors of the text decoder alone, as files have them."""
    found: dict[str, torch.Tensor] = {}
    for name, tensor in tensors.items():
        for pattern, published in _NAMES:
            name = re.sub(pattern, published, name)
        layer, _, kind = name.partition(".mlp.experts.")
        if kind:
            parts = {"w2": tensor}
            if kind == "gate_up_proj":
                parts = dict(zip(("w1", "w3"), tensor.chunk(2, dim=1), strict=True))
            for part, stack in parts.items():
                for expert, own in enumerate(stack):
                    found[f"{layer}.{_MOE}.experts.{expert}.{part}.weight"] = own.clone()
        elif ".gate_up_proj." in name:
            for part, own in zip(("gate", "up"), tensor.chunk(2), strict=True):
                found[name.replace("gate_up", part)] = own.clone()
        else:
            found[name] = tensor
    return found
