"""Config keys and tensors that openPangu's mixtures of experts have in common."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

from jaxinfer.models import hf_config as hf
from jaxinfer.models.experts import ExpertTensors, biased_experts, expert_specs, networks_by_layer
from jaxinfer.nn.decoder_config import FeedForwardSpec

NORMS = (
    *("input_layernorm", "post_attention_layernorm"),
    *("pre_mlp_layernorm", "post_mlp_layernorm"),
)
EXPERTS = partial(expert_specs, names=ExpertTensors(choice_bias="mlp.e_score_correction_bias"))


def networks(config: Mapping[str, Any], first: int) -> list[FeedForwardSpec]:
    """The network of each layer; by default the ``first`` ones have no experts."""
    biased = hf.flag(config, "router_enable_expert_bias", False)
    experts = biased_experts(config, choice_bias=biased)
    return networks_by_layer(config, experts, first=first)
