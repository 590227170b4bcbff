"""Qwen3.8-Flash-Next's published config and names, the hash of its n-grams, what is refused."""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxinfer.core.errors import ConfigError
from jaxinfer.models.base import abstract_params
from jaxinfer.models.costs import costs_of
from jaxinfer.models.registry import build_model, text_config
from jaxinfer.nn.layer_spec import TokenIdsConfig
from jaxinfer.nn.mixers.delta_spec import DeltaConfig
from jaxinfer.nn.mixers.pooled_attention_spec import PooledAttentionConfig
from jaxinfer.nn.ngram_hash import ngram_rows
from kit.published_index import check_read_once
from kit.tiny_models import tiny_config

KINDS = ["linear_attention", "linear_attention", "linear_attention", "full_attention"]
TEXT: dict[str, Any] = {  # of Qwen/Qwen3.8-Flash-Next
    "model_type": "qwen4_exp_text",
    **{"vocab_size": 248320, "hidden_size": 2560, "num_hidden_layers": 48},
    **{"max_position_embeddings": 262144, "rms_norm_eps": 1e-6, "tie_word_embeddings": False},
    **{"num_attention_heads": 24, "num_key_value_heads": 2, "head_dim": 256},
    **{"layer_types": KINDS * 12, "full_attention_interval": 4, "attention_bias": False},
    **{"indexer_n_heads": 4, "indexer_kv_heads": 1, "indexer_head_dim": 128},
    **{"indexer_budget": 2048, "indexer_compress_ratio": 4, "mamba_ssm_dtype": "float32"},
    **{"linear_num_key_heads": 16, "linear_num_value_heads": 48, "linear_conv_kernel_dim": 4},
    **{"linear_key_head_dim": 128, "linear_value_head_dim": 128, "output_gate_type": "sigmoid"},
    **{"num_experts": 512, "num_experts_per_tok": 10, "moe_intermediate_size": 640},
    **{"shared_expert_intermediate_size": 640, "hc_count": 4, "hc_lowrank": 320},
    **{"ple_layer_ids": [2], "ple_embed_dim": 2560, "ple_conv_kernel_size": 4, "ngram_size": 3},
    **{"heads_per_ngram": 8, "ngram_vocab_size_base": 20_000_000, "split_ngram_parts": 128},
    **{"make_ngram_vocab_size_divisible_by": 128, "hidden_act": "silu", "seed": 1234},
    **{"bos_token_id": 248044, "eos_token_id": 248044, "mtp_num_hidden_layers": 1},
    "partial_rotary_factor": 0.25,
    "rope_parameters": {
        **{"rope_type": "default", "rope_theta": 10_000_000, "partial_rotary_factor": 0.25},
        **{"mrope_interleaved": True, "mrope_section": [11, 11, 10]},
    },
}
WHOLE = {
    "architectures": ["Qwen4ExpForConditionalGeneration"],
    "model_type": "qwen4_exp",
    "text_config": TEXT,
    "vision_config": {"model_type": "qwen4_exp_vision"},
    "eos_token_id": 248046,  # that of a turn would not be the n-grams'
}
PARTS, ROWS = 128, 2_500_012  # of the published table: tensors, rows of each
SMALL = {  # each size another one
    **{"vocab_size": 80, "hidden_size": 24, "num_hidden_layers": 4, "layer_types": KINDS},
    **{"head_dim": 16, "num_attention_heads": 4, "indexer_head_dim": 10, "indexer_n_heads": 3},
    **{"linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 6},
    **{"linear_value_head_dim": 8, "num_experts": 5, "num_experts_per_tok": 2, "hc_lowrank": 7},
    **{"moe_intermediate_size": 12, "shared_expert_intermediate_size": 14, "eos_token_id": 3},
    **{"ple_embed_dim": 32, "ngram_vocab_size_base": 50, "split_ngram_parts": 4, "hc_count": 2},
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5},
    "partial_rotary_factor": 0.5,
}
UNUSED = r"model\.visual\..*|.*\.ple_embedding\.(layer_multipliers|ngram_heads_\w+)"


def test_the_published_config() -> None:
    model = build_model(text_config(WHOLE), "bfloat16")
    config = model.config
    first, second, *_, last = config.layers
    assert isinstance(last.mixer, PooledAttentionConfig) and last.mixer.rope is not None
    assert (last.mixer.indexer.reach, last.mixer.rope.width) == (2051, 64)
    assert isinstance(first.mixer, DeltaConfig) and first.mixer.gate_act == "sigmoid"
    assert first.start is None and config.layer_inputs == TokenIdsConfig()
    assert (grams := second.start) is not None
    assert (grams.num_rows, len(grams.sizes), grams.boundary) == (PARTS * ROWS, 16, 248044)
    sizes = [leaf.size for leaf in abstract_params(model)["layers_1"]["ngrams"].values()]
    assert sorted(sizes)[-1] == PARTS * ROWS * 160
    costs = costs_of(model)  # a step reads a few rows of the table
    assert 119e9 < costs.expert_bytes / 2 < 122e9
    assert 3.9e9 < costs.weight_bytes / 2 < 4.4e9
    served = config.for_context(2048).layers[-1].mixer.state(config.dtype)
    assert len(served.paged) == 1 and not served.per_slot  # without an indexer


def published_tensors(config: dict[str, Any]) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Names and shapes as in the index of the file, of which the table has four parts."""
    d, n, c = config["hidden_size"], config["hc_count"], config
    start, table = "model.language_model.", build_model(own(c), "float32").config.layers[1].start
    yield f"{start}embed_tokens.weight", (c["vocab_size"], d)
    yield "lm_head.weight", (c["vocab_size"], d)
    yield "model.visual.merger.norm.weight", (2,)

    def streams(name: str, *, writes: bool = True) -> Iterator[tuple[str, tuple[int, ...]]]:
        yield f"{name}.hc_norm.weight", (n * d,)
        yield f"{name}.input_mix_weight_down.weight", (c["hc_lowrank"], n * d)
        yield f"{name}.input_mix_weight_up.weight", (n * d, c["hc_lowrank"])
        if writes:
            yield f"{name}.block_inject_weight.weight", (n, n * d)

    yield from streams(f"{start}hyper_connection_mixer", writes=False)
    for i, kind in enumerate(c["layer_types"]):
        layer = f"{start}layers.{i}."
        yield from streams(f"{layer}attn_hyper_connection")
        yield from streams(f"{layer}mlp_hyper_connection")
        blocks = (network(c), attention(c) if kind == "full_attention" else delta(c))
        yield from ((layer + name, shape) for block in blocks for name, shape in block)
    assert table is not None
    ple, rows = f"{start}layers.1.ple.", table.num_rows // c["split_ngram_parts"]
    for i in range(c["split_ngram_parts"]):
        yield f"{ple}ple_embedding.ngram_embedding.shard_{i}.weight", (rows, 2)
    for name in ("layer_multipliers", "ngram_heads_offsets", "ngram_heads_vocab_sizes"):
        yield f"{ple}ple_embedding.{name}", (3,)
    yield f"{ple}conv1d.weight", (n * d, 1, 4)
    yield from ((f"{ple}norm_{one}.weight", (n * d,)) for one in ("key", "query", "conv"))
    yield from ((f"{ple}{k}_proj.weight", (s, 32)) for k, s in (("key", n * d), ("value", d)))


def network(c: dict[str, Any]) -> Iterator[tuple[str, tuple[int, ...]]]:
    d, e, f = c["hidden_size"], c["num_experts"], c["moe_intermediate_size"]
    s = c["shared_expert_intermediate_size"]
    yield from (("mlp.gate.weight", (e, d)), ("mlp.shared_expert_gate.weight", (1, d)))
    yield from (("mlp.experts.gate_up_proj", (e, 2 * f, d)), ("mlp.experts.down_proj", (e, d, f)))
    for name, shape in (("gate", (s, d)), ("up", (s, d)), ("down", (d, s))):
        yield f"mlp.shared_expert.{name}_proj.weight", shape


def attention(c: dict[str, Any]) -> Iterator[tuple[str, tuple[int, ...]]]:
    d, h, n, k = (c[key] for key in ("hidden_size", "head_dim", "num_attention_heads", _KV))
    for name, outputs in (("q", 2 * n * h), ("k", k * h), ("v", k * h)):
        yield f"self_attn.{name}_proj.weight", (outputs, d)
    yield "self_attn.o_proj.weight", (d, n * h)
    yield from ((f"self_attn.{name}_norm.weight", (h,)) for name in "qk")
    heads, dim = c["indexer_n_heads"], c["indexer_head_dim"]
    yield "self_attn.indexer.index_qk_proj.weight", ((heads + 1) * dim, d)
    yield from ((f"self_attn.indexer.{name}_layernorm.weight", (dim,)) for name in "qk")


_KV = "num_key_value_heads"


def delta(c: dict[str, Any]) -> Iterator[tuple[str, tuple[int, ...]]]:
    d, heads = c["hidden_size"], c["linear_num_value_heads"]
    keys = c["linear_num_key_heads"] * c["linear_key_head_dim"]
    values, mixed = heads * c["linear_value_head_dim"], "linear_attn."
    yield f"{mixed}in_proj_qkv.weight", (2 * keys + values, d)
    yield f"{mixed}in_proj_z.weight", (values, d)
    yield from ((f"{mixed}in_proj_{name}.weight", (heads, d)) for name in "ab")
    yield f"{mixed}conv1d.weight", (2 * keys + values, 1, c["linear_conv_kernel_dim"])
    yield from ((f"{mixed}{name}", (heads,)) for name in ("A_log", "dt_bias"))
    yield f"{mixed}norm.weight", (c["linear_value_head_dim"],)
    yield f"{mixed}out_proj.weight", (d, values)


def own(config: dict[str, Any]) -> dict[str, Any]:
    return {**config, "architectures": ["Qwen4ExpForCausalLM"]}


def test_every_tensor_of_a_published_index_is_read_once() -> None:
    small = {**TEXT, **SMALL}
    config = {**WHOLE, "text_config": small}
    check_read_once(config, dict(published_tensors(small)), 111, UNUSED)


def test_rows_of_n_grams_are_those_of_integers_of_64_bits() -> None:
    """Products up to 2 ** 63, and primes of few and of many bits."""
    rng, bits = np.random.default_rng(0), 1 << 63
    tokens = rng.integers(0, 248320, (3, 200))
    tokens[:, :3] = [[0, 248319, 1], [248319, 0, 1], [248319, 248319, 0]]
    multipliers = [int(x) for x in rng.integers(0, bits // 248320, 3) | 1]
    multipliers[1] = bits // 248320 - 1
    for sizes in ((2, 3, 5, 7), (20_000_003, 20_000_023, 20_000_033, 20_000_047), (2**30 + 3, 5)):
        each, expected, mixed = len(sizes) // 2, [], tokens[0] * multipliers[0]
        for i in (1, 2):
            mixed = mixed ^ (tokens[i] * multipliers[i])
            expected += [mixed % size for size in sizes[(i - 1) * each : i * each]]
        starts = np.cumsum((0, *sizes[:-1]))
        found = jax.jit(partial(ngram_rows, multipliers=multipliers, sizes=sizes))(
            [*jnp.asarray(tokens, jnp.int32)]
        )
        np.testing.assert_array_equal(found, np.stack(expected, axis=1) + starts)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"indexer_budget": 10}, "'indexer_budget' is 10, not a multiple of 'indexer_compress_rat"),
        ({"indexer_head_dim": 6}, "'indexer_head_dim' is 6, less than the 8 components that rotat"),
        ({"indexer_n_heads": None}, "'indexer_n_heads' is missing"),
        ({"indexer_kv_heads": 2}, "'indexer_kv_heads' is 2, and this family supports only 1"),
        ({"output_gate_type": "swish"}, "'swish', and this family supports only 'silu' or 'sigmoi"),
        ({"ple_layer_ids": [0]}, "'ple_layer_ids' must hold numbers from 1 to 3, got [0]"),
        (
            {"ple_embed_dim": 25},
            "'ple_embed_dim' is 25, which is not a multiple of the 4 functions",
        ),
        ({"ngram_vocab_size_base": 2**29}, "more than 32 bits can number"),
        ({"eos_token_id": None}, "'eos_token_id' is None, and the n-grams of this family need a"),
        ({"eos_token_id": 320}, "'eos_token_id' is 320, and the n-grams of this family need a"),
    ],
)
def test_a_wrong_config_is_refused(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(message)):
        build_model({**tiny_config("qwen4_exp"), **change}, "float32")
