"""Checkpoints whose tensors have the publisher's own names in place of transformers' ones."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any

import pytest

from jaxinfer.models import build_model
from jaxinfer.weights.plan import plan_params
from kit.published_index import zeros
from kit.tiny_models import tiny_config


def _of_pair(name: str) -> Callable[[re.Match[str]], str]:
    return lambda match: f"layers.{int(match[1]) // 2}.{match.expand(name)}"


MISTRAL = {  # of consolidated files
    r"^model\.layers": "layers",
    r"mlp\.experts": "experts",
    r"mlp\.shared_experts": "shared_experts",
    r"mlp\.gate\.weight": "gate.weight",
    r"mlp\.": "feed_forward.",
    "input_layernorm": "attention_norm",
    "post_attention_layernorm": "ffn_norm",
    r"self_attn\.": "attention.",
    "q_a_proj": "wq_a",
    "q_b_proj": "wq_b",
    "q_a_layernorm": "q_a_norm",
    "kv_a_proj_with_mqa": "wkv_a_with_mqa",
    "kv_a_layernorm": "kv_a_norm",
    "kv_b_proj": "wkv_b",
    "o_proj": "wo",
    "gate_proj": "w1",
    "down_proj": "w2",
    "up_proj": "w3",
    r"^model\.norm": "norm",
    r"^model\.embed_tokens": "tok_embeddings",
    "^lm_head": "output",
}


DORY = {  # as transformers saves them, of whose layers each has two blocks
    r"layers\.(\d+)\.mixer\.(q|k|v|g|o)_proj": _of_pair(r"self_attn.\2_proj"),
    r"layers\.(\d+)\.mixer\.(sqk|s_gate)": _of_pair(r"self_attn.\2"),
    r"layers\.(\d+)\.mixer\.": _of_pair("mlp."),
    r"layers\.(\d+)\.attn_alpha": _of_pair("lambda_1"),
    r"layers\.(\d+)\.mlp_alpha": _of_pair("lambda_2"),
}


@pytest.mark.parametrize(
    ("name", "renamed", "sample"),
    [
        ("dory", DORY, "backbone.layers.3.mlp.suv_up"),
        ("mistral_large3", MISTRAL, "layers.1.experts.3.w2.weight"),
        ("nemotron_h_puzzle", {r"^backbone\.": "model."}, "model.layers.1.mixer.gate.weight"),
        (
            "longcat_flash_ngram",
            {r"model\.embed_tokens": "model.ngram_embeddings.word_embeddings"},
            "model.ngram_embeddings.word_embeddings.weight",
        ),
    ],
)
def test_every_tensor_is_read_under_its_other_name(
    name: str, renamed: Mapping[str, Any], sample: str
) -> None:
    model = build_model(tiny_config(name), "float32")
    shapes: dict[str, tuple[int, ...]] = {}
    for source in (source for spec in model.param_specs for source in spec.sources):
        other = source.name
        for pattern, name_there in renamed.items():
            other = re.sub(pattern, name_there, other)
        shapes[other] = source.shape
    assert sample in shapes
    checkpoint = zeros(shapes)
    for planned in plan_params(model, checkpoint):
        planned.whole(checkpoint)
    assert {*checkpoint.reads} == {*shapes}
