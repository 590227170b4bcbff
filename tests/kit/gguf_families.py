"""GGUF files of many families, as llama.cpp's converter writes them.

Owns: the cases, with the config.json of each, the keys and layouts of its file, and the tokens on
which it is compared with llama.cpp. The configs are those of the golden files, with the changes
that a file cannot express. Names of keys and layouts are those of ``conversion/*.py`` of
ggml-org/llama.cpp, names of tensors are those of the ``gguf`` package. Run as a program, it writes
the files into a folder for ``golden/make_gguf.py``.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import gguf
import numpy as np
from gguf.quants import quantize
from safetensors import safe_open

from golden.cases import kinds
from jaxinfer.models.registry import build_model
from kit.checkpoints import HFConfig, Tensors, random_hf_tensors, stacked
from kit.gguf_family_layouts import CONVERTERS, Named, joined_heads
from kit.tiny_models import tiny_config

TOKEN_IDS = np.random.default_rng(0).integers(3, 47, 40).astype(np.int32)  # int32[40]
F32 = gguf.GGMLQuantizationType.F32
GOLDEN = Path(__file__).parents[1] / "golden" / "data"
# Never quantised by llama.cpp's converter, besides vectors.
_FLOATS = (
    *("_norm.weight", "conv1d.weight", "shortconv.conv.weight", "ffn_gate_inp.weight"),
    "shexp_gate.weight",
)


class Case(NamedTuple):
    """One file: its architecture, the golden file whose config it has, and changes of that."""

    arch: str
    golden: str
    changes: Mapping[str, Any] = {}
    keys: Mapping[str, Any] = {}  # of the file, besides those that ``_keys`` derives
    names: str = ""  # an architecture with these tensors that ``gguf`` knows, if not this one


def _head_dim(c: HFConfig) -> int:
    return c.get("head_dim") or c["hidden_size"] // c["num_attention_heads"]


def _experts(count: int, used: int, width: int | None = None, **more: Any) -> dict[str, Any]:
    """The keys of a mixture of experts."""
    named = {"count": count, "used_count": used, "feed_forward_length": width, **more}
    return {f"expert_{key}": value for key, value in named.items() if value is not None}


_BIASED = {"gating_func": 2, "weights_norm": True, "weights_scale": 1.5}
_FIVE = {"num_hidden_layers": 5, "layer_types": kinds("sssfs")}
_YARN = {
    "rope.scaling.type": "yarn",
    "rope.scaling.factor": 4.0,
    "rope.scaling.original_context_length": 16,
}
_MLA = {
    "attention.head_count_kv": 1,
    "attention.q_lora_rank": 20,
    "attention.kv_lora_rank": 16,
    "attention.key_length": 24,
    "attention.value_length": 16,
    "attention.key_length_mla": 20,
    "attention.value_length_mla": 10,
    "rope.dimension_count": 8,
}
_DECI = [
    {"attention": {"n_heads_in_group": 2}, "ffn": {"intermediate_size": 48}},
    {"attention": {"no_op": True}, "ffn": {"intermediate_size": 40}},
    {"attention": {"no_op": True}, "ffn": {"no_op": True}},
    {"attention": {"n_heads_in_group": 4}, "ffn": {"intermediate_size": 32}},
]
_PLAIN_ROPE = {"rope_type": "default", "rope_theta": 10000.0}
_SOFT_CAPS = {
    "attn_logit_softcapping": 3.0,
    "final_logit_softcapping": 4.0,
    "attention.sliding_window": 7,
}
_IMAGES = {"rope.dimension_sections": [3, 3, 2, 0], "n_deepstack_layers": 3}
_NO_BIAS = {"attention_bias": False}
_GEMMA4 = {
    "attention.key_length": 16,
    "attention.value_length": 16,
    "attention.key_length_swa": 8,
    "attention.value_length_swa": 8,
    "attention.shared_kv_layers": 0,
    "attention.sliding_window": 7,
    "embedding_length_per_layer_input": 0,
    "final_logit_softcapping": 10.0,
    "rope.freq_base": 1e6,
    "rope.freq_base_swa": 10000.0,
    "rope.dimension_count": 16,
    "rope.dimension_count_swa": 8,
}
# A row of the table is a line or a few.
# fmt: off
CASES: dict[str, Case] = {
    "gemma": Case("gemma", "gemma", _NO_BIAS),
    "gemma2": Case("gemma2", "gemma2", {"query_pre_attn_scalar": 16}, _SOFT_CAPS),
    # known by its number of layers; 32 / 4 instead of the width of a head
    "gemma2_27b": Case("gemma2", "gemma2",
        {"num_hidden_layers": 46, "layer_types": kinds("sf" * 23), "query_pre_attn_scalar": 8},
        _SOFT_CAPS),
    "gemma3": Case("gemma3", "gemma3", {"query_pre_attn_scalar": 16, "num_hidden_layers": 7,
        "layer_types": kinds("sssssfs"), "sliding_window_pattern": 6},
        {"attention.sliding_window": 7, "rope.freq_base": 1e6, "rope.scaling.type": "linear",
        "rope.scaling.factor": 8.0}),
    "gemma3_27b": Case("gemma3", "gemma3", {"query_pre_attn_scalar": 8, "num_hidden_layers": 62,
        "layer_types": kinds("sssssf" * 10 + "ss"), "sliding_window_pattern": 6,
        "rope_parameters": {"full_attention": {"rope_type": "default", "rope_theta": 1e6},
        "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0}}},
        {"attention.sliding_window": 7, "rope.freq_base": 1e6}),
    "gemma3n": Case("gemma3n", "gemma3n", keys={"attention.sliding_window": 7,
        "attention.sliding_window_pattern": [True, False, True] * 2,
        "attention.shared_kv_layers": 3, "embedding_length_per_layer_input": 6,
        "altup.num_inputs": 4, "altup.active_idx": 0, "final_logit_softcapping": 10.0,
        "rope.freq_base": 1e6, "rope.freq_base_swa": 1e4, "activation_sparsity_scale":
        [1.2815516, float("-inf"), 0.8416212, float("-inf"), float("-inf"), 0.0]}),
    "gemma4": Case("gemma4", "gemma4", keys={**_GEMMA4, "attention.head_count_kv": [4, 2, 4, 2],
        "attention.sliding_window_pattern": [True, False, True, False]}),
    "gemma4_experts": Case("gemma4", "gemma4_experts", keys={**_GEMMA4, **_experts(5, 3, 12),
        "attention.head_count_kv": [4, 2], "attention.sliding_window_pattern": [True, False]}),
    "gemma4_layer_inputs": Case("gemma4", "gemma4_layer_inputs", {"num_hidden_layers": 6,
        "layer_types": kinds("sfsfsf"),
        "per_layer_config": {str(i): {"head_dim": 16} for i in (1, 3, 5)}}, {**_GEMMA4,
        "attention.sliding_window_pattern": [True, False] * 3, "attention.shared_kv_layers": 2,
        "embedding_length_per_layer_input": 6, "feed_forward_length": [16, 16, 16, 16, 32, 32]}),
    "command_r": Case("command-r", "cohere", keys={"rope.scaling.type": "none"}),
    "command_r_plus": Case("command-r", "cohere_norms", keys={"rope.scaling.type": "none"}),
    "cohere2": Case("cohere2", "cohere2", _FIVE,
        {"attention.sliding_window": 7, "rope.dimension_count": 8, "rope.scaling.type": "none"}),
    "phi2": Case("phi2", "phi", {"num_key_value_heads": 4}, {"rope.dimension_count": 4}),
    "phi2_older": Case("phi2", "phi", {"num_key_value_heads": 4}, {"rope.dimension_count": 4}),
    "falcon": Case("falcon", "falcon", keys={"tensor_data_layout": "jploski"}),
    "falcon_7b": Case("falcon", "falcon_7b", {"bias": False}, {"attention.head_count_kv": 1}),
    "stablelm": Case("stablelm", "stablelm",
        keys={"rope.dimension_count": 2, "use_parallel_residual": True}),
    "stablelm_parallel": Case("stablelm", "stablelm_parallel",
        keys={"rope.dimension_count": 4, "use_parallel_residual": True}),
    "gpt_neox": Case("gptneox", "gpt_neox",
        keys={"rope.dimension_count": 2, "use_parallel_residual": True}),
    "gpt_neox_sequential": Case("gptneox", "gpt_neox_sequential", {"attention_bias": True},
        {"rope.dimension_count": 4, "use_parallel_residual": False}),
    "nemotron": Case("nemotron", "nemotron",
        keys={"rope.dimension_count": 4, "rope.scaling.type": "none"}),
    "olmo": Case("olmo", "olmo", keys={"attention.clamp_kqv": 1.0}),
    "olmo3": Case("olmo2", "olmo3", {**_FIVE, "attention_bias": False},
        {**_YARN, "attention.sliding_window": 7}),
    "hunyuan_dense": Case("hunyuan-dense", "hunyuan",
        {"rope_parameters": {"rope_theta": 35097.926, "rope_type": "default"}},
        {"rope.scaling.type": "none"}),
    "apertus": Case("apertus", "apertus", {"attention_bias": False,
        "rope_parameters": {"rope_theta": 10000.0, "rope_type": "default"}}),
    "bloom": Case("bloom", "bloom", {"seq_length": 64}),
    "mpt": Case("mpt", "mpt_plain",
        {"attn_config": {"alibi": True, "alibi_bias_max": 16, "clip_qkv": 1.0}},
        {"attention.max_alibi_bias": 16.0, "attention.clamp_kqv": 1.0}),
    "dbrx": Case("dbrx", "dbrx", keys={**_experts(5, 3), "feed_forward_length": 24,
        "attention.head_count_kv": 2, "attention.clamp_kqv": 1.5}),
    # of windows llama.cpp leaves out the last token, which the model has
    "mimo2": Case("mimo2", "mimo_v2_flash", {"attention_bias": False, "sliding_window": 65,
        "routed_scaling_factor": 1.0,
        "rope_parameters": {kind: {"rope_type": "default", "rope_theta": theta,
        "partial_rotary_factor": 0.34} for kind, theta in (("full_attention", 10000.0),
        ("sliding_attention", 1000.0))}}, {**_experts(5, 2, 24, gating_func=2),
        "attention.key_length": 12, "attention.value_length": 8, "attention.head_count_kv": [4, 2],
        "attention.sliding_window": 64, "attention.sliding_window_pattern": [1, 0],
        "attention.value_scale": 0.707, "rope.dimension_count": 4, "rope.freq_base": 10000.0,
        "rope.freq_base_swa": 1000.0}),
    "jais2": Case("jais2", "jais2", {"num_key_value_heads": 4}),
    "chatglm": Case("chatglm", "glm", {"head_dim": 8}, {"rope.dimension_count": 4}),
    "chatglm_older": Case("chatglm", "glm", {"head_dim": 8}, {"rope.dimension_count": 4}),
    "qwen2vl": Case("qwen2vl", "qwen2", {"head_dim": 8}, {"rope.dimension_sections": [2, 1, 1, 0]}),
    "qwen3vl": Case("qwen3vl", "qwen3", keys=_IMAGES),
    "qwen3vlmoe": Case("qwen3vlmoe", "qwen3_moe", {"mlp_only_layers": []},
        {**_IMAGES, **_experts(7, 3, 24)}),
    "ministral3": Case("mistral3", "ministral3", keys={**_YARN, "attention.temperature_scale": 0.3,
        "rope.scaling.yarn_log_multiplier": 1.0}),
    # llama.cpp takes it for a model with windows if it has 64 layers
    "exaone4": Case("exaone4", "exaone4",
        {"num_hidden_layers": 64, "layer_types": kinds("sssf" * 16), "sliding_window_pattern": 4},
        {"attention.sliding_window": 7,
        "attention.sliding_window_pattern": [True, True, True, False] * 16}),
    "exaone4_whole": Case("exaone4", "exaone4_whole"),
    "bitnet": Case("bitnet", "bitnet",
        {**_NO_BIAS, "hidden_act": "silu", "tie_word_embeddings": True}),
    "qwen2_moe": Case("qwen2moe", "qwen2_moe", {"mlp_only_layers": []},
        _experts(5, 2, 24, shared_feed_forward_length=20)),
    "olmoe": Case("olmoe", "olmoe", {"clip_qkv": None, "num_key_value_heads": 4}, _experts(5, 2)),
    "granite_moe": Case("granitemoe", "granite_moe", keys=_experts(5, 2)),
    "granite_moe_shared": Case("granitemoe", "granite_moe_shared",
        keys=_experts(5, 2, shared_feed_forward_length=20)),
    "glm4_moe": Case("glm4moe", "glm4_moe", {"num_nextn_predict_layers": 0},
        {**_experts(5, 2, 24, shared_count=2, group_count=1, group_used_count=1, **_BIASED),
        "rope.dimension_count": 8, "leading_dense_block_count": 1}),
    "glm4_moe_lite": Case("deepseek2", "glm4_moe_lite", keys={**_MLA,
        **_experts(8, 2, 24, shared_count=1, group_count=4, group_used_count=2, **_BIASED),
        "leading_dense_block_count": 1}),
    "muse_glimmer": Case("muse-glimmer", "muse_glimmer", {"layer_rope_theta": [10000.0, 0] * 2,
        "post_norm_eps": 1e-8, "hidden_activation": "silu"}, {"attention.key_length": 16,
        "attention.value_length": 16, "attention.sliding_window": 7, "logit_scale": 0.7,
        "attention.sliding_window_pattern": [True, False, True, False],
        "final_logit_softcapping": 3.0}, names="llama"),
    "step35": Case("step35", "step3p5", {"rope_parameters": {"full_attention":
        {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5},
        "sliding_attention": {"rope_type": "default", "rope_theta": 1000.0}},
        "swiglu_limits": [0.0, 0.5, 0.0, 0.0], "swiglu_limits_shared": [0.0, 0.0, 0.75, 0.0],
        "num_nextn_predict_layers": 0, "query_pre_attn_scalar": 16},
        {**_experts(5, 2, 24, shared_feed_forward_length=20, weights_norm=True, weights_scale=1.5),
        "attention.head_count": [4, 6, 6, 4], "attention.head_count_kv": [2] * 4,
        "attention.sliding_window": 7, "rope.freq_base": 10000.0, "rope.freq_base_swa": 1000.0,
        "attention.sliding_window_pattern": [False, True, True, False],
        "rope.dimension_count": 16, "leading_dense_block_count": 1, "moe_every_n_layers": 1,
        "swiglu_clamp_exp": [0.0, 0.5, 0.0, 0.0], "swiglu_clamp_shexp": [0.0, 0.0, 0.75, 0.0]}),
    "deci": Case("deci", "nemotron_nas",
        {"block_configs": _DECI, "num_hidden_layers": 4, "rope_parameters": _PLAIN_ROPE},
        {"attention.head_count": [4, 0, 0, 4], "attention.head_count_kv": [2, 0, 0, 1],
        "feed_forward_length": [48, 40, 0, 32]}),
    "minicpm": Case("minicpm", "minicpm", {"rope_parameters": _PLAIN_ROPE},
        {"embedding_scale": 3.0, "residual_scale": 0.7 / 2**0.5, "logit_scale": 4.0}),
    "orion": Case("orion", "orion", keys={"attention.layer_norm_epsilon": 1e-3}),
    "internlm2": Case("internlm2", "internlm2", {"bias": False}),
    "internlm3": Case("llama", "internlm3",
        {"rope_parameters": {"rope_theta": 10000.0, "rope_type": "default"}}),
    "mistral4": Case("mistral4", "mistral4", {"n_group": 1, "topk_group": 1}, {**_YARN, **_MLA,
        **_experts(8, 2, 24, shared_count=1, weights_norm=True, weights_scale=1.5, gating_func=1),
        "attention.temperature_scale": 0.3, "attention.temperature_length": 16,
        "rope.scaling.yarn_log_multiplier": 0.1, "rope.scaling.yarn_beta_fast": 4.0,
        "leading_dense_block_count": 1}),
    "llama4": Case("llama4", "llama4", {"num_hidden_layers": 5, "attention_chunk_size": 8192,
        "attn_scale": 0.1, "floor_scale": 8192, "no_rope_layers": None, "layer_types": None,
        "moe_layers": None, "interleave_moe_layer_step": 2, "max_position_embeddings": 64},
        {**_experts(5, 1, 24), "feed_forward_length": 40, "interleave_moe_layer_step": 2}),
    "exaone_moe": Case("exaone-moe", "exaone_moe",
        {**_FIVE, "sliding_window_pattern": 4, "mlp_layer_types": kinds("deeee")},
        {**_experts(5, 2, 24, shared_count=2, shared_feed_forward_length=48, **_BIASED),
        "attention.sliding_window": 7, "rope.scaling.type": "none",
        "leading_dense_block_count": 1}),
    # above 256 tokens llama.cpp takes the other factors
    "minicpm3": Case("minicpm3", "minicpm3", {"scale_emb": 12, "scale_depth": 1.4,
        "dim_model_base": 256, "rope_parameters": {"rope_type": "longrope", "rope_theta": 10000.0,
        "long_factor": [1.0, 2.0, 3.0, 4.0], "short_factor": [1.0, 1.125, 1.25, 1.375],
        "original_max_position_embeddings": 256, "attention_factor": 1.0}},
        {"attention.q_lora_rank": 20, "attention.kv_lora_rank": 16, "attention.key_length": 20,
        "attention.value_length": 10, "rope.dimension_count": 8,
        "rope.scaling.original_context_length": 256}),
    "cohere2_moe": Case("cohere2moe", "cohere2_moe", {**_FIVE, "mlp_layer_types": kinds("deeee")},
        {**_experts(5, 2, 24, shared_count=2, shared_feed_forward_length=48, weights_norm=True,
        gating_func=2), "attention.sliding_window": 7,
        "attention.sliding_window_pattern": [True, True, True, False, True],
        "feed_forward_length": 40, "rope.dimension_count": 8, "rope.scaling.type": "none",
        "leading_dense_block_count": 1}, names="dots1"),
    "mellum": Case("mellum", "mellum", {**_FIVE, "attention_bias": False,
        "mlp_layer_types": kinds("eeeee"),
        "rope_parameters": {"full_attention": {"rope_type": "yarn", "factor": 4.0,
        "original_max_position_embeddings": 16, "rope_theta": 10000.0},
        "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0}}}, {**_YARN,
        **_experts(5, 3, 24), "attention.sliding_window": 7,
        "attention.sliding_window_pattern": [True, True, True, False, True],
        "rope.freq_base": 10000.0}, names="qwen3moe"),
    "hy_v3": Case("hy_v3", "hy_v3", {"attention_bias": False}, {**_experts(5, 2, 24, shared_count=2,
        shared_feed_forward_length=48, weights_norm=True, weights_scale=2.826, gating_func=2),
        "leading_dense_block_count": 1}, names="dots1"),
    "solar_open": Case("glm4moe", "solar_open", {"attention_bias": False},
        {**_experts(5, 2, 24, shared_count=1, **_BIASED), "rope.dimension_count": 16,
        "rope.freq_base": 1e6, "leading_dense_block_count": 0}),
    "deepseek": Case("deepseek", "deepseek", {"attention_bias": False, "norm_topk_prob": False},
        {**_experts(5, 2, 24, shared_count=2, weights_scale=1.0), "leading_dense_block_count": 1,
        "rope.dimension_count": 8}),
    "dots1": Case("dots1", "dots1", {"attention_bias": False, "num_key_value_heads": 4,
        "sliding_window": None, "layer_types": kinds("fff")},
        {**_experts(5, 2, 24, shared_count=2, **_BIASED), "leading_dense_block_count": 1}),
    "ernie4_5_moe": Case("ernie4_5-moe", "ernie4_5_moe",
        keys={**_experts(5, 2, 24, shared_count=1, shared_feed_forward_length=24),
        "interleave_moe_layer_step": 1, "leading_dense_block_count": 1}),
    "hunyuan_moe": Case("hunyuan-moe", "hunyuan_moe",
        keys=_experts(5, 2, 48, shared_feed_forward_length=48, shared_count=1)),
    "minimax_m2": Case("minimax-m2", "minimax_m2", keys={**_experts(5, 2, 48, gating_func=2),
        "rope.dimension_count": 8, "rope.freq_base": 5e6}),
    # swiglu_limit and swiglu_alpha are llama.cpp's
    "minimax_m3": Case("minimax-m3", "minimax_m3", {"swiglu_limit": 7.0, "swiglu_alpha": 1.702,
        "shared_intermediate_size": 48, "intermediate_size": 48},
        {**_experts(5, 2, 48, shared_count=1, **_BIASED), "rope.dimension_count": 8,
        "leading_dense_block_count": 1, "feed_forward_length": 40,
        "attention.indexer.head_count": 2, "attention.indexer.key_length": 12,
        "attention.indexer.top_k": 3, "attention.indexer.block_size": 4,
        "attention.indexer.local_blocks": 1}, names="minimax-m2"),
    "phimoe": Case("phimoe", "phimoe", {"router_jitter_noise": 0.01,
        "sliding_window": 60, "rope_parameters": {
        "rope_type": "longrope", "rope_theta": 10000.0, "original_max_position_embeddings": 48,
        "long_factor": [1.0, 2.0, 3.0, 4.0], "short_factor": [1.0, 1.125, 1.25, 1.375],
        "attention_factor": 1.25}}, {**_experts(5, 2), "rope.dimension_count": 8,
        "rope.scaling.original_context_length": 48, "rope.scaling.attn_factor": 1.25,
        "attention.sliding_window": 60}),
    "bailing": Case("bailingmoe", "", {"first_k_dense_replace": 0, "use_qkv_bias": False,
        "norm_topk_prob": True, "num_shared_experts": 2}, {**_experts(5, 2, 24, shared_count=2,
        weights_norm=True, weights_scale=1.0), "rope.dimension_count": 8,
        "leading_dense_block_count": 0}),
    "bailing_v2": Case("bailingmoe2", "", keys={**_experts(8, 3, 24, shared_count=1,
        shared_feed_forward_length=20, group_count=4, group_used_count=2, gating_func=2,
        weights_norm=True, weights_scale=2.5), "rope.dimension_count": 8,
        "leading_dense_block_count": 1}),
    "afmoe": Case("afmoe", "afmoe", {**_FIVE, "global_attn_every_n_layers": 4},
        {**_experts(5, 2, 24, shared_count=2, **_BIASED), "attention.sliding_window": 7,
        "leading_dense_block_count": 1}),
    "mamba": Case("mamba", "mamba", {"use_conv_bias": True}, {"ssm.dt_b_c_rms": False}),
    "falcon_mamba": Case("mamba", "falcon_mamba",
        {"use_bias": False, "mixer_rms_eps": 1e-5, "conv_kernel": 4}, {"ssm.dt_b_c_rms": True}),
    "mamba2": Case("mamba2", "mamba2", {"use_bias": False}),
    "falcon_h1": Case("falcon-h1", "falcon_h1_gate_first", {"mamba_d_ssm": 64}),
    "falcon_h1_plain": Case("falcon-h1", "falcon_h1_plain"),
    "granite_hybrid": Case("granitehybrid", "granite_hybrid",
        keys={**_experts(3, 2, shared_feed_forward_length=24), "rope.scaling.finetuned": False,
        "attention.head_count_kv": [0, 2, 0]}),
    "granite_hybrid_rope": Case("granitehybrid", "granite_hybrid_rope", {"intermediate_size": 24},
        {"rope.scaling.finetuned": True, "attention.head_count_kv": [2, 0],
        "expert_shared_feed_forward_length": 24}),
    "nemotron_h": Case("nemotron_h", "nemotron_h",
        {"use_bias": False, "time_step_min": 0.001, "conv_kernel": 4},
        {"attention.head_count_kv": [0, 0, 0, 2, 0, 0], "feed_forward_length": [0, 0, 48, 0, 48, 0],
        "attention.layer_norm_epsilon": 1e-5, "rope.scaling.finetuned": False}),
    "nemotron_h_moe": Case("nemotron_h_moe", "nemotron_h_experts",
        {"use_bias": False, "time_step_min": 0.001, "mlp_bias": False},
        {**_experts(8, 3, 24, shared_count=1, shared_feed_forward_length=20, group_count=4,
        group_used_count=2, weights_norm=True, weights_scale=2.5),
        "attention.head_count_kv": [0, 0, 2, 0], "feed_forward_length": [0, 24, 0, 24],
        "attention.layer_norm_epsilon": 1e-5, "rope.scaling.finetuned": False}),
    "nemotron_h_latent": Case("nemotron_h_moe", "nemotron_h_latent",
        {"use_bias": False, "time_step_min": 0.001, "mlp_bias": False},
        {**_experts(5, 2, 24, shared_count=1, shared_feed_forward_length=20,
        weights_norm=False, weights_scale=1.0), "moe_latent_size": 12,
        "attention.head_count_kv": [0, 2, 0], "feed_forward_length": [24, 0, 0],
        "attention.layer_norm_epsilon": 1e-5, "rope.scaling.finetuned": False}),
    "jamba": Case("jamba", "jamba", {"mamba_proj_bias": False},
        {**_experts(3, 2), "attention.head_count_kv": [0, 2, 0]}),
    "lfm2": Case("lfm2", "lfm2", {"conv_bias": False}, {"attention.head_count_kv": [0, 2, 0],
        "feed_forward_length": 40, "rope.freq_base": 1e6}),
    "lfm2_moe": Case("lfm2moe", "lfm2_moe",
        {"tie_word_embeddings": True, "routed_scaling_factor": 1.0},
        {**_experts(5, 2, 24, gating_func=2), "attention.head_count_kv": [0, 0, 2],
        "rope.freq_base": 1e6, "leading_dense_block_count": 1}),
}
# fmt: on

# Files of these were not run by llama.cpp; of Phi-3.5-MoE it computes another routing.
NOT_COMPARED = (
    "gemma3n",
    "phimoe",
    "minimax_m3",
    *("bailing", "bailing_v2"),
    "nemotron_h_moe",
    "nemotron_h_latent",
    "command_r_plus",
)
# ggml's GELU is a table of float16, whose errors grow over many layers: with the other scale the
# logits of these two differ by 2.4 and 12, with theirs by 0.01 and 0.4.
COMPARED = tuple(name for name in CASES if not name.endswith("_27b") and name not in NOT_COMPARED)
_DECODERS = {
    "mistral4": "Mistral4ForCausalLM",
    "muse_glimmer": "MuseGlimmerForConditionalGeneration",
    "step3p5": "Step3p5ForCausalLM",
    "minimax_m3": "MiniMaxM3SparseForCausalLM",
}  # of models with images


def config_of(name: str) -> HFConfig:
    """The config.json of a case."""
    case = CASES[name]
    if not case.golden:  # it is not in transformers
        return {**tiny_config(name), **case.changes, "model_type": name}
    with safe_open(GOLDEN / f"{case.golden}.safetensors", "numpy") as file:
        config = json.loads(file.metadata()["config"])
    if case.golden in _DECODERS:
        config = {**config["text_config"], "architectures": [_DECODERS[case.golden]]}
    return {**config, **case.changes, "bos_token_id": 1, "eos_token_id": 2}


def tensors_of(config: HFConfig) -> Tensors:
    """Weights that are large enough for every part to have an effect."""
    tensors = random_hf_tensors(build_model(config, "float32"))
    return {key: _larger(key, value) for key, value in tensors.items()}


def _larger(key: str, value: np.ndarray) -> np.ndarray:
    if key.endswith(("act_fn.beta", "act_fn.eps")):
        return np.full_like(value, 0.5 if key.endswith("beta") else -1e-6)  # as published
    if key.endswith(("norm.weight", "layer_scalar", "scale")) or "norm" in key and value.ndim == 1:
        return value if key.endswith("bias") else 1 + value
    return 3 * value if value.ndim > 1 and not key.endswith("A_log") else value


def write_family(
    path: Path,
    name: str,
    tensors: Tensors | None = None,
    *,
    kind: gguf.GGMLQuantizationType = F32,
    more: Mapping[str, Any] | None = None,
) -> Path:
    """Write the file of a case; ``more`` replaces keys of the architecture."""
    case, config = CASES[name], config_of(name)
    arch = next(a for a, own in gguf.MODEL_ARCH_NAMES.items() if own == (case.names or case.arch))
    writer = gguf.GGUFWriter(path, case.arch)
    for key, value in {**_keys(config), **case.keys, **(more or {})}.items():
        _add(writer, f"{case.arch}.{key}", value)
    weights = tensors_of(config) if tensors is None else tensors
    if config.get("hidden_act") == "xielu":
        for number in ("alpha_n", "alpha_p", "beta", "eps"):
            each = (
                weights[f"model.layers.{i}.mlp.act_fn.{number}"] for i in range(_layers(config))
            )
            writer.add_array(f"xielu.{number}", [float(one.item()) for one in each])
    if case.arch in ("gemma4", "mistral4"):
        weights = stacked(weights)
    for one in ("long", "short") if case.arch in ("minicpm3", "phimoe") else ():
        values = np.array(config["rope_parameters"][f"{one}_factor"], np.float32)
        writer.add_tensor(f"rope_factors_{one}.weight", values)
    if case.arch == "gemma4":
        # a quarter of the larger heads rotates
        factors = np.array([1.0] * 2 + [1e30] * 6, np.float32)
        writer.add_tensor("rope_freqs.weight", factors)
    _write_tokenizer(writer, config)
    names = gguf.get_tensor_name_map(arch, _layers(config))
    convert = CONVERTERS.get(case.arch)
    if name.endswith("_older"):
        weights = joined_heads(weights)
    for gguf_name, tensor in _converted(weights, config, convert, names):
        tensor = np.ascontiguousarray(tensor, np.float32)
        own = F32 if tensor.ndim == 1 or gguf_name.endswith(_FLOATS) else kind
        if tensor.shape[-1] % 32:
            own = F32
        writer.add_tensor(gguf_name, quantize(tensor, own), raw_dtype=own)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _converted(
    tensors: Tensors,
    config: HFConfig,
    convert: Callable[[str, np.ndarray, HFConfig], Named] | None,
    names: gguf.TensorNameMap,
) -> Named:
    """The tensors of the file, with its names."""
    stacks: dict[str, list[np.ndarray]] = {}
    for name, tensor in tensors.items():
        if ".act_fn." in name:
            continue
        merged = re.sub(r"(experts|norms|altup_(?:unembed_)?projections)\.\d+\.", r"\1.", name)
        if merged != name:
            stacks.setdefault(merged, []).append(tensor)
            continue
        yield from _named(name, tensor, config, convert, names)
    for name, parts in stacks.items():
        yield from _named(name, np.stack(parts), config, convert, names)


def _named(
    name: str,
    tensor: np.ndarray,
    config: HFConfig,
    convert: Callable[[str, np.ndarray, HFConfig], Named] | None,
    names: gguf.TensorNameMap,
) -> Iterator[tuple[str, np.ndarray]]:
    for own, values in [(name, tensor)] if convert is None else convert(name, tensor, config):
        found = own
        if not own.startswith("blk."):
            found = names.get_name(own, try_suffixes=(".weight", ".bias"))
        assert found is not None, own
        yield found, values


def _layers(c: HFConfig) -> int:
    kinds = c.get("layers_block_type")
    names = ("num_hidden_layers", "n_layer", "n_layers")
    return len(kinds) if kinds else next(c[key] for key in names if key in c)


def _keys(c: HFConfig) -> dict[str, Any]:
    """The keys that files of most families have."""
    width = c.get("hidden_size") or c.get("d_model")
    heads = c.get("num_attention_heads") or c.get("n_head") or c.get("n_heads") or 0
    made: dict[str, Any] = {
        "block_count": _layers(c),
        "context_length": c.get("max_position_embeddings") or c.get("max_seq_len") or 64,
        "embedding_length": width,
        "attention.head_count": heads,
    }
    ffn = c.get("ffn_hidden_size") or c.get("intermediate_size") or 4 * width
    is_alone = "state_size" in c and not heads
    made["feed_forward_length"] = 0 if is_alone else ffn
    for key in ("num_key_value_heads", "num_kv_heads"):
        if key in c:
            made["attention.head_count_kv"] = c[key]
    if c.get("head_dim") and not is_alone:
        made |= {f"attention.{one}_length": c["head_dim"] for one in ("key", "value")}
    eps = ("layer_norm_eps", "layer_norm_epsilon", "norm_eps")
    given = next((c[key] for key in eps if key in c), 1e-5)
    rms = c.get("rms_norm_eps", given)
    has_layer_norm = c["model_type"] in _LAYER_NORM
    kind = "layer_norm" if has_layer_norm else "layer_norm_rms"
    made[f"attention.{kind}_epsilon"] = given if has_layer_norm else rms
    theta = (c.get("rope_parameters") or {}).get("rope_theta")
    if theta is not None:
        made["rope.freq_base"] = theta
    if "logit_scale" in c and c["logit_scale"]:
        made["logit_scale"] = c["logit_scale"]
    if "residual_multiplier" in c:
        made |= {
            "attention.scale": c["attention_multiplier"],
            "embedding_scale": c["embedding_multiplier"],
            "residual_scale": c["residual_multiplier"],
            "logit_scale": c["logits_scaling"],
        }
    if "conv_L_cache" in c:
        made["shortconv.l_cache"] = c["conv_L_cache"]
    return made | _state_keys(c, width)


_LAYER_NORM = (
    *("cohere", "cohere2", "phi", "falcon", "stablelm", "gpt_neox", "nemotron", "olmo", "bloom"),
    *("mpt", "jais2", "cohere2_moe", "dbrx", "orion"),
)


def _state_keys(c: HFConfig, width: int) -> dict[str, Any]:
    """The keys of state spaces."""
    if c["model_type"] in ("mamba", "falcon_mamba", "jamba"):
        is_jamba = c["model_type"] == "jamba"
        return {
            "ssm.conv_kernel": c["mamba_d_conv" if is_jamba else "conv_kernel"],
            "ssm.inner_size": 2 * width,
            "ssm.state_size": c["mamba_d_state" if is_jamba else "state_size"],
            "ssm.time_step_rank": c["mamba_dt_rank" if is_jamba else "time_step_rank"],
        }
    first = {
        "mamba2": ("num_heads", "head_dim", "state_size", "n_groups", "conv_kernel"),
        "nemotron_h": (
            *("mamba_num_heads", "mamba_head_dim", "ssm_state_size", "n_groups", "conv_kernel"),
        ),
    }
    hybrid = ("mamba_n_heads", "mamba_d_head", "mamba_d_state", "mamba_n_groups", "mamba_d_conv")
    own = first.get(c["model_type"], hybrid)
    if own[0] not in c:
        return {}
    heads, head_dim, state, groups, taps = (c[key] for key in own)
    return {
        "ssm.conv_kernel": taps,
        "ssm.inner_size": heads * head_dim,
        "ssm.state_size": state,
        "ssm.time_step_rank": heads,
        "ssm.group_count": groups,
    }


def _add(writer: gguf.GGUFWriter, key: str, value: Any) -> None:
    add = {
        str: writer.add_string,
        int: writer.add_uint32,
        float: writer.add_float32,
        bool: writer.add_bool,
        list: writer.add_array,
    }
    add[type(value)](key, value)


def _write_tokenizer(writer: gguf.GGUFWriter, config: HFConfig) -> None:
    """Tokens of one letter, which no test reads."""
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    last = config["vocab_size"] - 1
    writer.add_token_list([*(chr(ord("!") + i) for i in range(last)), "!!"])
    writer.add_token_types([gguf.TokenType.NORMAL] * (last + 1))
    writer.add_token_merges(["! !"])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)


if __name__ == "__main__":
    for case_name in COMPARED:
        write_family(Path(sys.argv[1]) / f"{case_name}.gguf", case_name)
    np.save(Path(sys.argv[1]) / "token_ids.npy", TOKEN_IDS)
