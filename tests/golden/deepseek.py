"""DeepSeek MoE's tensors from Qwen2-MoE's, which compute the same, and back.

Source: the published ``modeling_deepseek.py``. Qwen2-MoE multiplies the network of all tokens by a
sigmoid, which is a half where its weights are zeros.
"""

from __future__ import annotations

from typing import Any

import torch

_GATE = "shared_expert_gate"


def without_gates(model: torch.nn.Module) -> None:
    """Set the gates of Qwen2-MoE to zeros."""
    for name, tensor in model.named_parameters():
        if _GATE in name:
            tensor.data.zero_()


def renamed(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The tensors under DeepSeek's names."""
    made: dict[str, torch.Tensor] = {}
    for key, tensor in tensors.items():
        if _GATE not in key:
            factor = 0.5 if "shared_expert.down_proj" in key else 1.0
            made[key.replace("shared_expert.", "shared_experts.")] = tensor * factor
    return made


def named_back(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The tensors under Qwen2-MoE's names."""
    made: dict[str, torch.Tensor] = {}
    for key, tensor in tensors.items():
        factor = 2.0 if "shared_experts.down_proj" in key else 1.0
        made[key.replace("shared_experts.", "shared_expert.")] = tensor * factor
        if key.endswith("mlp.gate.weight"):
            made[key.replace("mlp.gate", f"mlp.{_GATE}")] = torch.zeros_like(tensor[:1])
    return made


def facts_of_qwen2_moe(facts: dict[str, Any]) -> dict[str, Any]:
    """The keys of Qwen2-MoE's config with the values of DeepSeek's."""
    return {
        "model_type": "qwen2_moe",
        "num_experts": facts["n_routed_experts"],
        "shared_expert_intermediate_size": facts["n_shared_experts"]
        * facts["moe_intermediate_size"],
        "mlp_only_layers": [*range(facts["first_k_dense_replace"])],
        "qkv_bias": False,
    }
