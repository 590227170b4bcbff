"""A tiny random model for each architecture, as data, so that tests can run over all of them.

Owns: the configs and the random parameters.
"""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from types import MappingProxyType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxinfer.models import Model, Params, abstract_params, build_model
from pallas_kernels.lib.page_scales import BITS

FP8 = "/fp8"  # the end of a name
VOCAB_SIZE = 320
MAX_LEN = 512

_DECODER = MappingProxyType(
    {
        "vocab_size": VOCAB_SIZE,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": MAX_LEN,
        "rms_norm_eps": 1e-5,
    }
)
_GPT2 = MappingProxyType(
    {"vocab_size": VOCAB_SIZE, "n_embd": 32, "n_head": 4, "n_layer": 2, "n_positions": MAX_LEN}
)
_WITHOUT_EPS = MappingProxyType({k: v for k, v in _DECODER.items() if k != "rms_norm_eps"})
_WITHOUT_NETWORK = MappingProxyType(
    {key: value for key, value in _DECODER.items() if key != "intermediate_size"}
)
_WITHOUT_KV_AND_WIDTH = MappingProxyType(
    {key: value for key, value in _WITHOUT_NETWORK.items() if key != "num_key_value_heads"}
)
_LAYER_NORM = MappingProxyType({**_WITHOUT_EPS, "layer_norm_eps": 1e-5})
_OPT = (
    *("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads"),
    "max_position_embeddings",
)
_MAMBA2 = MappingProxyType({"mamba_n_heads": 4, "mamba_n_groups": 2, "mamba_d_state": 16})
_NEMOTRON_H = (
    *("vocab_size", "hidden_size", "intermediate_size", "num_attention_heads"),
    *("num_key_value_heads", "max_position_embeddings"),
)
_FALCON = MappingProxyType({**{key: _DECODER[key] for key in _OPT}, "ffn_hidden_size": 48})
_LLAMA3_ROPE = MappingProxyType(
    {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 16,
    }
)
_WINDOW = MappingProxyType(
    {"use_sliding_window": True, "sliding_window": 7, "max_window_layers": 1}
)

_OWN_SIZES = MappingProxyType(  # under the names of GPT-Neo and XGLM
    {"vocab_size": VOCAB_SIZE, "max_position_embeddings": MAX_LEN, "num_layers": 2}
)

_LATENT = MappingProxyType(
    {
        **_DECODER,
        "num_key_value_heads": 4,
        "kv_lora_rank": 16,
        "qk_nope_head_dim": 12,
        "qk_rope_head_dim": 8,
        "v_head_dim": 10,
        "moe_intermediate_size": 24,
        "n_shared_experts": 2,
        "num_experts_per_tok": 3,
        "rope_scaling": {
            "type": "yarn",
            "factor": 40.0,
            "mscale": 0.707,
            "mscale_all_dim": 0.707,
            "beta_fast": 4.0,
            "original_max_position_embeddings": 64,
        },
    }
)

# 5 of a context's tokens
_INDEXER = MappingProxyType({"index_topk": 5, "index_n_heads": 8, "index_head_dim": 16})
_HYBRID = MappingProxyType(
    {
        **_DECODER,
        "head_dim": 16,
        "num_hidden_layers": 3,
        "layer_types": ["linear_attention", "full_attention", "linear_attention"],
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
        "linear_key_head_dim": 16,
        "linear_value_head_dim": 12,
        "linear_conv_kernel_dim": 4,
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": 10000.0,
            "partial_rotary_factor": 0.5,
            "mrope_section": [2, 1, 1],
            "mrope_interleaved": True,
        },
    }
)
_HYBRID_EXPERTS = MappingProxyType(
    {
        **_HYBRID,
        "num_experts": 7,
        "num_experts_per_tok": 3,
        "moe_intermediate_size": 24,
        "shared_expert_intermediate_size": 20,
    }
)

_KIMI_LINEAR = (  # keys that DeepSeek's configs have, too
    *("vocab_size", "hidden_size", "intermediate_size", "num_attention_heads", "rms_norm_eps"),
    *("num_key_value_heads", "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim"),
    *("v_head_dim", "moe_intermediate_size"),
)

_GEMMA4 = MappingProxyType(
    {
        **_DECODER,
        "num_hidden_layers": 4,
        "num_key_value_heads": 4,
        "head_dim": 8,
        "global_head_dim": 16,
        "sliding_window": 7,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
        "final_logit_softcapping": 30.0,
        "attention_k_eq_v": True,
        "num_global_key_value_heads": 2,
        "hidden_size_per_layer_input": 0,
    }
)

_BIASED_EXPERTS = MappingProxyType(
    {
        "n_routed_experts": 5,
        "n_shared_experts": 1,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 24,
        "routed_scaling_factor": 1.5,
    }
)
_COUNTED_EXPERTS = MappingProxyType(
    {
        "num_experts": 5,
        "num_shared_experts": 1,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 24,
    }
)
_YOUTU = (
    *("vocab_size", "hidden_size", "intermediate_size", "num_attention_heads", "rms_norm_eps"),
    *("num_hidden_layers", "num_key_value_heads", "kv_lora_rank", "qk_nope_head_dim"),
    *("qk_rope_head_dim", "v_head_dim", "max_position_embeddings"),
)

_OF_LAYERS = ("intermediate_size", "num_hidden_layers")
_LATENT_SIZES = (
    *("num_key_value_heads", "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim"),
)
_BAILING = MappingProxyType(
    {
        **_DECODER,
        "head_dim": 16,
        "num_experts": 8,
        "num_shared_experts": 1,
        "num_experts_per_tok": 3,
        "moe_intermediate_size": 24,
        "moe_shared_expert_intermediate_size": 20,
        "n_group": 4,
        "topk_group": 2,
        "routed_scaling_factor": 2.5,
        "first_k_dense_replace": 1,
        "partial_rotary_factor": 0.5,
        "score_function": "sigmoid",
        "router_dtype": "fp32",
        "use_rmsnorm": True,
        "use_bias": False,
    }
)

CONFIGS = MappingProxyType(
    {
        "llama": {
            **_DECODER,
            "architectures": [
                "LlamaForCausalLM",
                "LLaMAForCausalLM",
                "LlavaForConditionalGeneration",
                "LlavaNextForConditionalGeneration",
            ],
            "rope_scaling": _LLAMA3_ROPE,
            "tie_word_embeddings": True,
        },
        "mistral": {**_DECODER, "architectures": ["MistralForCausalLM"], "sliding_window": 7},
        "qwen2": {
            **_DECODER,
            **_WINDOW,
            "architectures": [
                "Qwen2ForCausalLM",
                "InternVLForConditionalGeneration",
                "Qwen2VLForConditionalGeneration",
                "Qwen2_5_VLForConditionalGeneration",
            ],
        },
        "qwen3": {
            **_DECODER,
            "architectures": ["Qwen3ForCausalLM", "Qwen3VLForConditionalGeneration"],
            "head_dim": 16,
        },
        "gemma3": {
            **_DECODER,
            "architectures": ["Gemma3ForCausalLM", "Gemma3ForConditionalGeneration"],
            "head_dim": 16,
            "query_pre_attn_scalar": 24,
            "num_hidden_layers": 5,
            "sliding_window": 7,
            "sliding_window_pattern": 3,
            "rope_scaling": {"rope_type": "linear", "factor": 8.0},
        },
        "gemma4": {
            **_GEMMA4,
            "architectures": ["Gemma4ForCausalLM", "Gemma4ForConditionalGeneration"],
        },
        "gemma4_all": {  # the parts of all published sizes
            **_GEMMA4,
            "architectures": ["Gemma4ForCausalLM"],
            "enable_moe_block": True,
            "num_experts": 7,
            "top_k_experts": 3,
            "moe_intermediate_size": 24,
            "num_kv_shared_layers": 2,
            "use_double_wide_mlp": True,
            "hidden_size_per_layer_input": 6,
            "vocab_size_per_layer_input": VOCAB_SIZE,
        },
        "gemma4_unified": {
            **{key: value for key, value in _GEMMA4.items() if "per_layer" not in key},
            "architectures": ["Gemma4UnifiedForCausalLM", "Gemma4UnifiedForConditionalGeneration"],
            "num_hidden_layers": 2,
            "layer_types": ["sliding_attention", "full_attention"],
        },
        "gemma3n": {
            **_DECODER,
            "architectures": ["Gemma3nForCausalLM", "Gemma3nForConditionalGeneration"],
            "num_hidden_layers": 4,
            "num_attention_heads": 4,
            "num_key_value_heads": 4,
            "head_dim": 8,
            "sliding_window": 7,
            "layer_types": ["sliding_attention", "full_attention"] * 2,
            "num_kv_shared_layers": 2,
            "hidden_size_per_layer_input": 6,
            "vocab_size_per_layer_input": VOCAB_SIZE - 3,
            "altup_num_inputs": 3,
            "laurel_rank": 5,
            "activation_sparsity_pattern": [0.8, 0.0, 0.6, 0.0],
        },
        "olmo2": {**_DECODER, "architectures": ["Olmo2ForCausalLM"]},
        "phi3": {
            **_DECODER,
            "architectures": ["Phi3ForCausalLM"],
            "hidden_size": 64,
            "partial_rotary_factor": 0.75,
            "sliding_window": 7,
            "tie_word_embeddings": True,
        },
        "glm": {**_DECODER, "architectures": ["GlmForCausalLM"], "head_dim": 16},
        "glm4": {
            **_DECODER,
            "architectures": ["Glm4ForCausalLM", "Glm4vForConditionalGeneration"],
            "head_dim": 16,
        },
        "stablelm": {
            **{key: value for key, value in _DECODER.items() if key != "rms_norm_eps"},
            "architectures": ["StableLmForCausalLM"],
            "layer_norm_eps": 1e-5,
            "use_qkv_bias": True,
            "partial_rotary_factor": 0.5,
        },
        "granite": {
            **_DECODER,
            "architectures": ["GraniteForCausalLM"],
            "attention_multiplier": 0.3,
            "embedding_multiplier": 3.0,
            "residual_multiplier": 0.5,
            "logits_scaling": 0.5,
        },
        "granite_moe": {
            **_DECODER,
            "architectures": ["GraniteMoeForCausalLM"],
            "attention_multiplier": 0.3,
            "residual_multiplier": 0.5,
            "num_local_experts": 5,
            "num_experts_per_tok": 2,
        },
        "gemma2": {
            **_DECODER,
            "architectures": ["Gemma2ForCausalLM"],
            "head_dim": 16,
            "query_pre_attn_scalar": 24,
            "sliding_window": 7,
            "attn_logit_softcapping": 3.0,
        },
        "ernie4_5_moe": {
            **_DECODER,
            "architectures": ["Ernie4_5_MoeForCausalLM"],
            "moe_num_experts": 5,
            "moe_k": 2,
            "moe_intermediate_size": 24,
        },
        "smollm3": {
            **_DECODER,
            "architectures": ["SmolLM3ForCausalLM"],
            "no_rope_layer_interval": 2,
        },
        "cohere": {
            **_LAYER_NORM,
            "architectures": ["CohereForCausalLM"],
            "logit_scale": 0.5,
        },
        "cohere2": {
            **_LAYER_NORM,
            "architectures": [
                "Cohere2ForCausalLM",
                "AyaVisionForConditionalGeneration",
                "Cohere2VisionForConditionalGeneration",
            ],
            "num_hidden_layers": 3,
            "logit_scale": 0.5,
            "sliding_window": 7,
            "sliding_window_pattern": 2,
        },
        "gemma": {**_DECODER, "architectures": ["GemmaForCausalLM"], "head_dim": 16},
        "ministral": {
            **_DECODER,
            "architectures": ["MinistralForCausalLM"],
            "layer_types": ["sliding_attention", "full_attention"],
            "sliding_window": 7,
        },
        "ministral3": {
            **_DECODER,
            "architectures": ["Ministral3ForCausalLM", "Mistral3ForConditionalGeneration"],
            "head_dim": 16,
            "rope_parameters": {
                "rope_type": "yarn",
                "factor": 4.0,
                "rope_theta": 10000.0,
                "original_max_position_embeddings": 16,
                "llama_4_scaling_beta": 0.3,
            },
        },
        "olmo3": {
            **_DECODER,
            "architectures": ["Olmo3ForCausalLM"],
            "sliding_window": 7,
            "layer_types": ["sliding_attention", "full_attention"],
            "rope_scaling": {
                "rope_type": "yarn",
                "factor": 4.0,
                "original_max_position_embeddings": 64,
            },
        },
        "cwm": {
            **_DECODER,
            "architectures": ["CwmForCausalLM"],
            "head_dim": 16,
            "sliding_window": 7,
            "rope_scaling": _LLAMA3_ROPE,
        },
        "hunyuan": {
            **_DECODER,
            "architectures": ["HunYuanDenseV1ForCausalLM"],
            "head_dim": 16,
            "rope_scaling": {"rope_type": "dynamic", "alpha": 3.0, "factor": 1.0},
        },
        "hunyuan_moe": {
            **_DECODER,
            "architectures": ["HunYuanMoEV1ForCausalLM"],
            "head_dim": 16,
            "num_experts": 5,
            "moe_topk": [2, 2],
        },
        "apertus": {**_DECODER, "architectures": ["ApertusForCausalLM"], "hidden_act": "xielu"},
        "qwen2_moe": {
            **_DECODER,
            "architectures": ["Qwen2MoeForCausalLM"],
            "num_experts": 5,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 24,
            "shared_expert_intermediate_size": 20,
            "mlp_only_layers": [0],
        },
        "olmoe": {
            **_DECODER,
            "architectures": ["OlmoeForCausalLM"],
            "num_experts": 5,
            "num_experts_per_tok": 2,
            "clip_qkv": 1.0,
        },
        "glm4_moe": {
            **_DECODER,
            "architectures": ["Glm4MoeForCausalLM", "Glm4vMoeForConditionalGeneration"],
            "head_dim": 16,
            "use_qk_norm": True,
            "attention_bias": True,
            "n_routed_experts": 5,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 24,
            "routed_scaling_factor": 1.5,
        },
        "seed_oss": {**_DECODER, "architectures": ["SeedOssForCausalLM"], "head_dim": 16},
        "ernie4_5": {
            **_DECODER,
            "architectures": ["Ernie4_5ForCausalLM", "Ernie4_5_ForCausalLM"],
            "head_dim": 16,
        },
        "exaone4": {
            **_DECODER,
            "architectures": ["Exaone4ForCausalLM", "Exaone4_5_ForConditionalGeneration"],
            "num_hidden_layers": 3,
            "sliding_window": 7,
            "sliding_window_pattern": 2,
        },
        "starcoder2": {
            **_WITHOUT_EPS,
            "architectures": ["Starcoder2ForCausalLM"],
            "sliding_window": 7,
        },
        "olmo": {**_WITHOUT_EPS, "architectures": ["OlmoForCausalLM"], "clip_qkv": 1.0},
        "arcee": {**_DECODER, "architectures": ["ArceeForCausalLM"]},
        "helium": {**_DECODER, "architectures": ["HeliumForCausalLM"], "head_dim": 8},
        "nemotron": {**_WITHOUT_EPS, "architectures": ["NemotronForCausalLM"]},
        "jais2": {**_LAYER_NORM, "architectures": ["Jais2ForCausalLM"]},
        "gpt_neox": {
            **{key: value for key, value in _LAYER_NORM.items() if key != "num_key_value_heads"},
            "architectures": ["GPTNeoXForCausalLM"],
        },
        "phi": {**_LAYER_NORM, "architectures": ["PhiForCausalLM"]},
        "falcon": {
            **_FALCON,
            "architectures": ["FalconForCausalLM"],
            "new_decoder_architecture": True,
            "num_kv_heads": 2,
        },
        "falcon_7b": {**_FALCON, "architectures": ["FalconForCausalLM"], "bias": True},
        "gptj": {**_GPT2, "architectures": ["GPTJForCausalLM"], "rotary_dim": 4},
        "opt": {
            **{key: _DECODER[key] for key in _OPT},
            "architectures": ["OPTForCausalLM"],
            "ffn_dim": 48,
        },
        "opt_350m": {
            **{key: _DECODER[key] for key in _OPT},
            "architectures": ["OPTForCausalLM"],
            "ffn_dim": 48,
            "do_layer_norm_before": False,
            "word_embed_proj_dim": 24,
        },
        "gpt2": {**_GPT2, "architectures": ["GPT2LMHeadModel"]},
        "bloom": {
            "vocab_size": VOCAB_SIZE,
            "architectures": ["BloomForCausalLM"],
            "hidden_size": 48,
            "n_layer": 2,
            "n_head": 6,
            "seq_length": MAX_LEN,
        },
        "mpt": {
            "vocab_size": VOCAB_SIZE,
            "architectures": ["MptForCausalLM", "MPTForCausalLM"],
            "d_model": 32,
            "n_layers": 2,
            "n_heads": 4,
            "max_seq_len": MAX_LEN,
            "attn_config": {"alibi": True, "clip_qkv": 1.0},
        },
        "falcon_alibi": {
            **_FALCON,
            "architectures": ["FalconForCausalLM"],
            "alibi": True,
            "bias": True,
            "parallel_attn": False,
            "multi_query": False,
        },
        "internlm2": {**_DECODER, "architectures": ["InternLM2ForCausalLM"], "bias": True},
        "internlm3": {
            **_DECODER,
            "architectures": ["InternLM3ForCausalLM"],
            "head_dim": 8,
            "qkv_bias": True,
        },
        "iquestcoder": {**_DECODER, "architectures": ["IQuestCoderForCausalLM"]},
        "mimo": {
            **_DECODER,
            "architectures": ["MiMoForCausalLM"],
            "attention_bias": True,
        },
        "minicpm": {
            **_DECODER,
            "architectures": ["MiniCPMForCausalLM"],
            "scale_emb": 3.0,
            "scale_depth": 0.7,
            "dim_model_base": 8,
        },
        "orion": {**_DECODER, "architectures": ["OrionForCausalLM"]},
        "nemotron_nas": {
            **_WITHOUT_KV_AND_WIDTH,
            "architectures": ["DeciLMForCausalLM"],
            "num_hidden_layers": 4,
            "block_configs": [
                {"attention": {"n_heads_in_group": 2}, "ffn": {"intermediate_size": 48}},
                {"attention": {"no_op": True}, "ffn": {"ffn_mult": 1.5}},
                {"attention": {"no_op": True}, "ffn": {"no_op": True}},
                {"attention": {"n_heads_in_group": 4}, "ffn": {"no_op": True}},
            ],
        },
        "nanochat": {**_DECODER, "architectures": ["NanoChatForCausalLM"]},
        "exaone": {
            **{k: v for k, v in _WITHOUT_EPS.items() if k != "num_hidden_layers"},
            "architectures": ["ExaoneForCausalLM"],
            "num_layers": 2,
            "layer_norm_epsilon": 1e-5,
            "activation_function": "silu",
        },
        "gpt_bigcode": {**_GPT2, "architectures": ["GPTBigCodeForCausalLM"]},
        "gpt_neo": {
            **_OWN_SIZES,
            "architectures": ["GPTNeoForCausalLM"],
            "hidden_size": 32,
            "num_heads": 4,
            "attention_types": [[["global", "local"], 1]],
            "window_size": 7,
        },
        "codegen": {**_GPT2, "architectures": ["CodeGenForCausalLM"], "rotary_dim": 4},
        "persimmon": {
            **{key: value for key, value in _LAYER_NORM.items() if key != "num_key_value_heads"},
            "architectures": ["PersimmonForCausalLM"],
        },
        "stablelm_12b": {
            **_LAYER_NORM,
            "architectures": ["StableLmForCausalLM"],
            "use_parallel_residual": True,
            "qk_layernorm": True,
        },
        "vaultgemma": {
            **_DECODER,
            "architectures": ["VaultGemmaForCausalLM"],
            "head_dim": 16,
            "sliding_window": 7,
        },
        "bitnet": {**_DECODER, "architectures": ["BitNetForCausalLM"]},
        "hyperclovax": {
            **_DECODER,
            "architectures": ["HyperCLOVAXForCausalLM"],
            "embedding_multiplier": 3.0,
            "logits_scaling": 0.5,
            "residual_multiplier": 0.7,
            "attention_multiplier": 0.2,
        },
        "granite_swa": {
            **_DECODER,
            "architectures": ["GraniteSWAForCausalLM"],
            "sliding_window": 7,
            "layer_types": ["sliding_attention", "full_attention"],
            "layer_rope_theta": [0, 500.0],
        },
        "granite_moe_swa": {
            **_DECODER,
            "architectures": ["GraniteMoeSWAForCausalLM"],
            "sliding_window": 7,
            "layer_types": ["sliding_attention", "full_attention"],
            "layer_rope_theta": [0, 500.0],
            "num_local_experts": 5,
            "num_experts_per_tok": 2,
            "shared_intermediate_size": 24,
        },
        "lfm3": {
            **_WITHOUT_EPS,
            "architectures": ["Lfm3ForCausalLM"],
            "num_hidden_layers": 3,
            "head_dim": 16,
            "norm_eps": 1e-5,
            "conv_L_cache": 5,
            "sliding_window": 7,
            "layer_types": ["conv", "sliding_attention", "full_attention"],
        },
        "flint": {
            **_DECODER,
            "architectures": ["FlintForCausalLM"],
            "head_dim": 16,
            "sliding_window": 7,
            "layer_types": ["sliding_attention", "full_attention"],
            "mlp_only_layers": [0],
            "num_experts": 5,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 24,
            "shared_expert_intermediate_size": 20,
        },
        "doge": {**_DECODER, "architectures": ["DogeForCausalLM"]},
        "biogpt": {
            **{key: _DECODER[key] for key in (*_OPT, "intermediate_size")},
            "architectures": ["BioGptForCausalLM"],
        },
        "xglm": {
            **_OWN_SIZES,
            "architectures": ["XGLMForCausalLM"],
            "d_model": 32,
            "attention_heads": 4,
            "ffn_dim": 48,
        },
        "ctrl": {**_GPT2, "architectures": ["CTRLLMHeadModel"], "dff": 48},
        "qwen3_moe": {
            **_DECODER,
            "architectures": ["Qwen3MoeForCausalLM"],
            "head_dim": 16,
            "num_experts": 7,
            "num_experts_per_tok": 3,
            "moe_intermediate_size": 24,
            "norm_topk_prob": True,
            "mlp_only_layers": [0],
        },
        "mixtral": {
            **_DECODER,
            "architectures": ["MixtralForCausalLM"],
            "num_hidden_layers": 1,
            "num_local_experts": 5,
            "num_experts_per_tok": 2,
        },
        "gpt_oss": {
            **_DECODER,
            "architectures": ["GptOssForCausalLM"],
            "head_dim": 16,
            "num_local_experts": 7,
            "num_experts_per_tok": 3,
            "sliding_window": 7,
            "rope_scaling": {
                "rope_type": "yarn",
                "factor": 4.0,
                "truncate": False,
                "original_max_position_embeddings": 128,
            },
        },
        "deepseek_v2": {
            **_LATENT,
            "architectures": ["DeepseekV2ForCausalLM"],
            "q_lora_rank": None,
            "first_k_dense_replace": 1,
            "n_routed_experts": 7,
            "routed_scaling_factor": 1.5,
            "topk_method": "greedy",
        },
        "deepseek_v3": {
            **_LATENT,
            "architectures": ["DeepseekV3ForCausalLM", "KimiK25ForConditionalGeneration"],
            "q_lora_rank": 20,
            "first_k_dense_replace": 1,
            "n_routed_experts": 12,
            "n_group": 4,
            "topk_group": 2,
            "norm_topk_prob": True,
            "routed_scaling_factor": 2.5,
        },
        "deepseek_v32": {
            **_LATENT,
            **_INDEXER,
            "architectures": ["DeepseekV32ForCausalLM"],
            "q_lora_rank": 20,
            "first_k_dense_replace": 1,
            "n_routed_experts": 12,
            "n_group": 4,
            "topk_group": 2,
        },
        "glm_moe_dsa": {
            **_LATENT,
            **_INDEXER,
            "architectures": ["GlmMoeDsaForCausalLM"],
            "num_hidden_layers": 3,
            "q_lora_rank": 20,
            "first_k_dense_replace": 1,
            "n_routed_experts": 8,
            "indexer_types": ["full", "shared", "shared"],
        },
        "axk2": {
            **_LATENT,
            **_INDEXER,
            "architectures": ["AXK2ForCausalLM"],
            "q_lora_rank": 20,
            "n_routed_experts": 8,
            "n_group": 4,
            "topk_group": 2,
            "gated_norm_rank": 6,
        },
        "mistral_large4": {
            **_LATENT,
            **_INDEXER,
            "architectures": ["MistralLarge4ForConditionalGeneration"],
            "num_hidden_layers": 4,
            "n_routed_experts": 8,
            "indexer_types": ["full", "full", "full", "shared"],
            "no_rope_layers": [1, 0, 1, 0],
            "kv_source_layers": [0, 1, 0, 1],
        },
        "hy_v4": {
            **_LATENT,
            **_INDEXER,
            "architectures": ["HYV4ForCausalLM"],
            "num_hidden_layers": 3,
            "q_lora_rank": 20,
            "n_routed_experts": 8,
            "hc_mult": 3,
            "swiglu_limit": 1.0,
        },
        "glm5_next": {
            **{key: value for key, value in _LATENT.items() if not key.startswith("rope")},
            **_INDEXER,
            "architectures": ["Glm5NextForCausalLM", "Glm5NextForConditionalGeneration"],
            "model_type": "glm5_next_text",
            "num_hidden_layers": 4,
            "q_lora_rank": 20,
            "qk_rope_head_dim": 0,
            "first_k_dense_replace": 1,
            "n_routed_experts": 8,
            "layer_types": ["linear_attention", *["deepseek_sparse_attention"] * 3],
            "indexer_types": ["full", "full", "shared", "full"],
            "index_topk": 8,
            "index_kpool": 4,
            "linear_attn_config": {"num_heads": 4, "head_dim": 8, "gate_lower_bound": -2.0},
            "hc_mult": 2,
            "hc_sinkhorn_iters": 3,
            "swiglu_limit": 1.0,
        },
        "xlstm": {
            "architectures": ["xLSTMForCausalLM"],
            "vocab_size": VOCAB_SIZE,
            "hidden_size": 32,
            "num_hidden_layers": 2,
            "num_heads": 4,
            "v_dim_factor": 0.5,
            "ffn_proj_factor": 1.5,
            "gate_soft_cap": 3.0,
            "norm_eps": 1e-5,
        },
        "deepseek_v4": {
            "architectures": ["DeepseekV4ForCausalLM"],
            "vocab_size": VOCAB_SIZE,
            "hidden_size": 32,
            "moe_intermediate_size": 24,
            "num_hidden_layers": 4,
            "num_attention_heads": 4,
            "head_dim": 16,
            "q_lora_rank": 20,
            "num_experts_per_tok": 3,
            "n_routed_experts": 8,
            "num_hash_layers": 2,
            "compress_ratios": [0, 4, 128, 4, 0],
            "compress_rate_hca": 8,
            "sliding_window": 12,
            "o_groups": 2,
            "o_lora_rank": 6,
            "index_n_heads": 16,
            "index_head_dim": 12,
            "index_topk": 5,
            "max_position_embeddings": MAX_LEN,
            "qk_rope_head_dim": 8,
            "rms_norm_eps": 1e-5,
            "rope_scaling": {
                "type": "yarn",
                "factor": 4.0,
                "original_max_position_embeddings": 64,
            },
        },
        "qwen3_5": {
            **_HYBRID,
            "architectures": ["Qwen3_5ForCausalLM", "Qwen3_5ForConditionalGeneration"],
        },
        "qwen3_5_moe": {
            **{key: value for key, value in _HYBRID_EXPERTS.items() if key != "intermediate_size"},
            "architectures": ["Qwen3_5MoeForCausalLM", "Qwen3_5MoeForConditionalGeneration"],
        },
        "qwen3_next": {
            **_HYBRID_EXPERTS,
            "architectures": ["Qwen3NextForCausalLM"],
            "mlp_only_layers": [0],
        },
        "kimi_linear": {
            **{key: _LATENT[key] for key in _KIMI_LINEAR},
            "architectures": ["KimiLinearForCausalLM"],
            "num_hidden_layers": 3,
            "model_max_length": MAX_LEN,
            "q_lora_rank": None,
            "mla_use_nope": True,
            "num_experts": 7,
            "num_experts_per_token": 3,
            "num_shared_experts": 2,
            "num_expert_group": 1,
            "topk_group": 1,
            "moe_renormalize": True,
            "moe_router_activation_func": "sigmoid",
            "routed_scaling_factor": 2.446,
            "first_k_dense_replace": 1,
            "linear_attn_config": {
                "kda_layers": [1, 3],
                "full_attn_layers": [2],
                "num_heads": 2,
                "head_dim": 16,
                "short_conv_kernel_size": 4,
            },
        },
        "bailing_hybrid": {
            **{key: _LATENT[key] for key in _KIMI_LINEAR},
            "architectures": ["BailingMoeV3ForCausalLM", "BailingHybridForCausalLM"],
            "num_hidden_layers": 3,
            "max_position_embeddings": MAX_LEN,
            "q_lora_rank": 20,
            "rope_theta": 1e4,
            "head_dim": 16,
            "layer_types": ["linear_attention", "full_attention", "linear_attention"],
            "kda_lower_bound": -2.0,
            "num_experts": 8,
            "num_experts_per_tok": 3,
            "num_shared_experts": 1,
            "n_group": 2,
            "topk_group": 1,
            "first_k_dense_replace": 1,
        },
        "deepseek": {
            **_DECODER,
            **_BIASED_EXPERTS,
            "architectures": ["DeepseekForCausalLM"],
            "n_shared_experts": 2,
            "first_k_dense_replace": 1,
            "routed_scaling_factor": 1.0,
        },
        "dots1": {
            **_DECODER,
            **_BIASED_EXPERTS,
            "architectures": ["Dots1ForCausalLM"],
            "head_dim": 16,
            "sliding_window": 7,
            "max_window_layers": 1,
            "norm_topk_prob": True,
            "first_k_dense_replace": 1,
        },
        "minimax_m2": {
            **_DECODER,
            "architectures": ["MiniMaxM2ForCausalLM"],
            "head_dim": 16,
            "rotary_dim": 8,
            "num_local_experts": 5,
            "num_experts_per_tok": 2,
        },
        "minimax_m3": {
            **_DECODER,
            "architectures": [
                "MiniMaxM3VLForCausalLM",
                "MiniMaxM3SparseForCausalLM",
                "MiniMaxM3SparseForConditionalGeneration",
            ],
            "num_hidden_layers": 3,
            "head_dim": 16,
            "partial_rotary_factor": 0.5,
            "dense_intermediate_size": 40,
            "shared_intermediate_size": 24,
            "num_local_experts": 5,
            "num_experts_per_tok": 2,
            "moe_layer_freq": [0, 1, 1],
            "sparse_attention_config": {  # 6 of a context's tokens
                "sparse_num_index_heads": 2,
                "sparse_index_dim": 12,
                "sparse_block_size": 3,
                "sparse_topk_blocks": 2,
                "sparse_attention_freq": [0, 1, 1],
            },
        },
        "glm4_moe_lite": {
            **_LATENT,
            "architectures": ["Glm4MoeLiteForCausalLM"],
            "q_lora_rank": 20,
            "n_routed_experts": 7,
        },
        "exaone_moe": {
            **_DECODER,
            **_COUNTED_EXPERTS,
            "architectures": ["ExaoneMoeForCausalLM", "ExaoneMoEForCausalLM"],
            "sliding_window": 7,
            "sliding_window_pattern": "LG",
        },
        "solar_open": {
            **{key: value for key, value in _DECODER.items() if key != "intermediate_size"},
            **_BIASED_EXPERTS,
            "architectures": ["SolarOpenForCausalLM"],
            "head_dim": 16,
            "attention_bias": True,
        },
        "afmoe": {
            **_DECODER,
            **_COUNTED_EXPERTS,
            "architectures": ["AfmoeForCausalLM"],
            "head_dim": 16,
            "num_dense_layers": 1,
            "route_scale": 1.5,
            "sliding_window": 7,
            "global_attn_every_n_layers": 2,
            "mup_enabled": True,
        },
        "flex_olmo": {
            **_DECODER,
            "architectures": ["FlexOlmoForCausalLM"],
            "num_experts": 5,
            "num_experts_per_tok": 2,
        },
        "cohere2_moe": {
            **_LAYER_NORM,
            "architectures": ["Cohere2MoeForCausalLM"],
            "num_hidden_layers": 3,
            "head_dim": 8,
            "logit_scale": 0.5,
            "sliding_window": 7,
            "sliding_window_pattern": 2,
            "num_experts": 5,
            "num_experts_per_tok": 2,
            "num_shared_experts": 1,
            "expert_selection_fn": "sigmoid",
            "first_k_dense_replace": 1,
            "prefix_dense_intermediate_size": 40,
        },
        "hy_v3": {
            **_DECODER,
            **_COUNTED_EXPERTS,
            "architectures": ["HYV3ForCausalLM"],
            "head_dim": 16,
        },
        "granite_moe_shared": {
            **_DECODER,
            "architectures": ["GraniteMoeSharedForCausalLM"],
            "residual_multiplier": 0.5,
            "num_local_experts": 5,
            "num_experts_per_tok": 2,
            "shared_intermediate_size": 24,
        },
        "mistral4": {
            **{key: value for key, value in _LATENT.items() if key != "intermediate_size"},
            "architectures": ["Mistral4ForCausalLM"],
            "q_lora_rank": 20,
            "n_routed_experts": 7,
            "rope_scaling": {**_LATENT["rope_scaling"], "llama_4_scaling_beta": 0.3},
        },
        "sarvam_moe": {
            **_DECODER,
            **_COUNTED_EXPERTS,
            "architectures": ["SarvamMoEForCausalLM"],
            "head_dim": 16,
        },
        "sarvam_mla": {
            **_LATENT,
            "architectures": ["SarvamMLAForCausalLM"],
            "head_dim": 24,
            "num_experts": 7,
            "rope_scaling": {**_LATENT["rope_scaling"], "type": "deepseek_yarn"},
        },
        "youtu": {
            **{key: _LATENT[key] for key in _YOUTU},
            "architectures": ["YoutuForCausalLM"],
            "q_lora_rank": 20,
        },
        "phimoe": {
            **_DECODER,
            "architectures": ["PhimoeForCausalLM", "PhiMoEForCausalLM"],
            "num_local_experts": 5,
            "num_experts_per_tok": 2,
            "router_jitter_noise": 0.2,
            "lm_head_bias": True,
            "rope_scaling": {
                "type": "longrope",
                "short_factor": [1.0, 1.5, 2.0, 2.5],
                "long_factor": [1.0, 2.0, 3.0, 4.0],
                "short_mscale": 1.2,
                "long_mscale": 1.3,
                "original_max_position_embeddings": 256,
            },
        },
        "llama4": {
            **_DECODER,
            "architectures": ["Llama4ForCausalLM", "Llama4ForConditionalGeneration"],
            "head_dim": 16,
            "num_local_experts": 5,
            "num_experts_per_tok": 1,
            "interleave_moe_layer_step": 2,
            "no_rope_layer_interval": 2,
            "floor_scale": 5,
            "attention_chunk_size": 24,
        },
        "jetmoe": {
            **{k: v for k, v in _DECODER.items() if k != "num_attention_heads"},
            "architectures": ["JetMoeForCausalLM"],
            "kv_channels": 16,
            "num_local_experts": 5,
            "num_experts_per_tok": 2,
        },
        "minicpm3": {
            **{key: _LATENT[key] for key in _YOUTU},
            "architectures": ["MiniCPM3ForCausalLM"],
            "q_lora_rank": 20,
            "scale_emb": 3,
            "scale_depth": 0.7,
            "dim_model_base": 16,
        },
        "mellum": {
            **_DECODER,
            "architectures": ["MellumForCausalLM"],
            "head_dim": 16,
            "num_experts": 7,
            "num_experts_per_tok": 3,
            "moe_intermediate_size": 24,
            "sliding_window": 7,
            "layer_types": ["sliding_attention", "full_attention"],
            "mlp_layer_types": ["dense", "sparse"],
        },
        "lfm2": {
            **_WITHOUT_EPS,
            "architectures": ["Lfm2ForCausalLM"],
            "num_hidden_layers": 3,
            "intermediate_size": 72,
            "block_multiple_of": 16,
            "norm_eps": 1e-5,
            "conv_bias": True,
            "layer_types": ["conv", "full_attention", "conv"],
        },
        "lfm2_moe": {
            **_WITHOUT_EPS,
            "architectures": ["Lfm2MoeForCausalLM"],
            "num_dense_layers": 1,
            "num_experts": 5,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 24,
            "layer_types": ["conv", "full_attention"],
        },
        "bamba": {
            **_DECODER,
            **_MAMBA2,
            "architectures": ["BambaForCausalLM"],
            "attn_layer_indices": [1],
        },
        "granite_hybrid": {
            **_DECODER,
            **_MAMBA2,
            "architectures": ["GraniteMoeHybridForCausalLM"],
            "layer_types": ["mamba", "attention"],
            "shared_intermediate_size": 24,
            "num_local_experts": 5,
            "num_experts_per_tok": 2,
            "residual_multiplier": 0.5,
        },
        "falcon_h1": {
            **_DECODER,
            **_MAMBA2,
            "architectures": ["FalconH1ForCausalLM"],
            "mamba_d_ssm": 32,
            "mamba_norm_before_gate": False,
            "mamba_rms_norm": True,
            "attention_out_multiplier": 0.5,
            "mlp_multipliers": [0.7, 1.3],
            "ssm_multipliers": [0.6, 0.7, 1.2, 0.9, 1.1],
        },
        "nemotron_h": {
            **{key: _DECODER[key] for key in _NEMOTRON_H},
            "architectures": ["NemotronHForCausalLM"],
            "hybrid_override_pattern": "M-*M-",
            "head_dim": 8,
            "mamba_num_heads": 4,
            "mamba_head_dim": 8,
            "ssm_state_size": 16,
            "n_groups": 2,
        },
        "mamba2": {
            "architectures": ["Mamba2ForCausalLM"],
            "vocab_size": VOCAB_SIZE,
            "hidden_size": 32,
            "num_hidden_layers": 2,
            "num_heads": 4,
            "head_dim": 16,
            "state_size": 16,
            "n_groups": 2,
        },
        "falcon_mamba": {
            "architectures": ["FalconMambaForCausalLM", "MambaForCausalLM"],
            "vocab_size": VOCAB_SIZE,
            "hidden_size": 32,
            "num_hidden_layers": 2,
            "state_size": 8,
            "use_bias": True,
        },
        "jamba": {
            **_DECODER,
            "architectures": ["JambaForCausalLM"],
            "num_hidden_layers": 2,
            "attn_layer_period": 2,
            "attn_layer_offset": 1,
            "num_experts": 5,
            "num_experts_per_tok": 2,
            "mamba_d_state": 8,
        },
        "bailing": {
            **_DECODER,
            **_COUNTED_EXPERTS,
            "architectures": ["BailingMoeForCausalLM"],
            "first_k_dense_replace": 1,
            "use_qkv_bias": True,
            "norm_topk_prob": False,
        },
        "bailing_v2": {**_BAILING, "architectures": ["BailingMoeV2ForCausalLM"]},
        "bailing_linear": {
            **_BAILING,
            "architectures": ["BailingMoeLinearV2ForCausalLM"],
            "num_hidden_layers": 3,
            "layer_group_size": 2,
            "group_norm_size": 2,
        },
        "bailing_v2_5": {
            **_BAILING,
            **{key: _LATENT[key] for key in _LATENT_SIZES},
            "architectures": ["BailingMoeV2_5ForCausalLM"],
            "layer_group_size": 2,
            "group_norm_size": 4,
            "linear_silu": True,
            "q_lora_rank": 20,
        },
        "axk1": {
            **_LATENT,
            "architectures": ["AXK1ForCausalLM"],
            "q_lora_rank": 20,
            "n_routed_experts": 8,
            "n_group": 4,
            "topk_group": 2,
        },
        "dbrx": {
            "architectures": ["DbrxForCausalLM"],
            "vocab_size": VOCAB_SIZE,
            "d_model": 32,
            "n_heads": 4,
            "n_layers": 2,
            "max_seq_len": MAX_LEN,
            "attn_config": {"clip_qkv": 3.0, "kv_n_heads": 2, "rope_theta": 10000.0},
            "ffn_config": {"ffn_hidden_size": 24, "moe_num_experts": 8, "moe_top_k": 3},
        },
        "laguna": {
            **_DECODER,
            "architectures": ["LagunaForCausalLM"],
            "head_dim": 16,
            "num_attention_heads_per_layer": [4, 8],
            "layer_types": ["sliding_attention", "full_attention"],
            "mlp_layer_types": ["sparse", "dense"],
            "sliding_window": 7,
            "num_experts": 8,
            "num_experts_per_tok": 3,
            "moe_intermediate_size": 24,
            "shared_expert_intermediate_size": 20,
        },
        "zaya": {
            **{k: v for k, v in _DECODER.items() if k != "intermediate_size"},
            "architectures": ["ZayaForCausalLM"],
            "head_dim": 16,
            "layer_types": ["hybrid", "hybrid_sliding"],
            "sliding_window": 7,
            "num_experts": 4,
            "moe_intermediate_size": 24,
            "router_hidden_size": 8,
        },
        "chameleon": {
            **_DECODER,
            "architectures": ["ChameleonForConditionalGeneration"],
            "swin_norm": True,
            "vocabulary_map": {"<image>": 3, "IMGIMGA": 5, "IMGIMGB": 6, "IMGIMGC": 9, "a": 10},
        },
        "muse_glimmer": {
            **_DECODER,
            "architectures": ["MuseGlimmerForConditionalGeneration"],
            "head_dim": 16,
            "sliding_window": 7,
            "layer_types": ["sliding_attention", "full_attention"],
            "post_norm_eps": 1e-3,
        },
        "step3p5": {
            **{k: v for k, v in _DECODER.items() if k != "num_key_value_heads"},
            "architectures": ["Step3p5ForCausalLM", "Step3p7ForConditionalGeneration"],
            "head_dim": 16,
            "num_attention_groups": 2,
            "attention_other_setting": {
                "attention_type": "sliding_attention",
                "num_attention_heads": 8,
                "num_attention_groups": 2,
                "head_dim": 16,
                "true_head_dim": 16,
            },
            # with one for a prediction layer
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
            "rope_theta": [10000.0, 1000.0, 10000.0],
            "partial_rotary_factors": [1.0, 0.5, 1.0],
            "rope_scaling": {
                "rope_type": "llama3",
                "factor": 2.0,
                "original_max_position_embeddings": 16,
                "low_freq_factor": 1.0,
                "high_freq_factor": 32.0,
            },
            "yarn_only_types": ["full_attention"],
            "sliding_window": 7,
            "moe_layers_enum": "1",
            "moe_num_experts": 8,
            "moe_top_k": 3,
            "moe_intermediate_size": 24,
            "share_expert_dim": 20,
            "moe_router_scaling_factor": 1.5,
            "swiglu_limits": [0.0, 0.5, 0.0],
            "swiglu_limits_shared": [0.5, 0.7, 0.0],
        },
        "nemotron_h_experts": {
            **{key: _DECODER[key] for key in _NEMOTRON_H},
            "architectures": ["NemotronHForCausalLM"],
            "hybrid_override_pattern": "ME*-E",
            "head_dim": 8,
            "mamba_num_heads": 4,
            "mamba_head_dim": 8,
            "ssm_state_size": 16,
            "n_groups": 4,
            "n_routed_experts": 8,
            "num_experts_per_tok": 3,
            "moe_intermediate_size": 24,
            "moe_latent_size": 16,
            "moe_shared_expert_intermediate_size": 20,
            "routed_scaling_factor": 2.5,
        },
        "mimo_v2_flash": {
            **_WITHOUT_EPS,
            "architectures": ["MiMoV2FlashForCausalLM"],
            "head_dim": 24,
            "v_head_dim": 16,
            "hybrid_layer_pattern": [1, 0],
            "moe_layer_freq": [1, 0],
            "sliding_window_size": 6,
            "swa_num_key_value_heads": 4,
            "swa_rope_theta": 1000.0,
            "layernorm_epsilon": 1e-5,
            "n_routed_experts": 8,
            "num_experts_per_tok": 3,
            "moe_intermediate_size": 24,
            "attention_value_scale": 0.7,
            "scoring_func": "sigmoid",
            "topk_method": "noaux_tc",
        },
        "longcat_flash": {
            **{key: _LATENT[key] for key in _YOUTU if key not in _OF_LAYERS},
            "architectures": ["LongcatFlashForCausalLM"],
            "num_layers": 2,
            "ffn_hidden_size": 48,
            "expert_ffn_hidden_size": 24,
            "q_lora_rank": 20,
            "n_routed_experts": 8,
            "zero_expert_num": 3,
            "moe_topk": 3,
            "zero_expert_type": "identity",
            "attention_method": "MLA",
            "mla_scale_q_lora": True,
        },
        "diffllama": {
            **_DECODER,
            "architectures": ["DiffLlamaForCausalLM"],
            "num_attention_heads": 16,
            "num_key_value_heads": 8,
            "head_dim": 8,
            "attention_bias": True,
        },
        "minimax": {
            **_DECODER,
            "architectures": [
                "MiniMaxText01ForCausalLM",
                "MiniMaxM1ForCausalLM",
                "MiniMaxForCausalLM",
            ],
            "attn_type_list": [0, 1],
            "postnorm": True,
            "rotary_dim": 4,
            "shared_intermediate_size": [0],
            "num_local_experts": 5,
            "num_experts_per_tok": 2,
            "layernorm_linear_attention_alpha": 1.3,
            "layernorm_mlp_beta": 0.7,
        },
        "aria": {
            **_DECODER,
            "architectures": ["AriaTextForCausalLM", "AriaForConditionalGeneration"],
            "moe_num_experts": 5,
            "moe_topk": 2,
            "moe_num_shared_experts": 1,
        },
        "emu3": {
            **_DECODER,
            "architectures": ["Emu3ForCausalLM", "Emu3ForConditionalGeneration"],
        },
        "mllama": {
            **_DECODER,
            "architectures": ["MllamaForCausalLM", "MllamaForConditionalGeneration"],
            "cross_attention_layers": [1],
            "num_hidden_layers": 3,
        },
        "paddleocr_vl": {
            **_DECODER,
            "architectures": ["PaddleOCRVLForConditionalGeneration"],
            "head_dim": 16,
            "use_bias": True,
        },
        "deepseek_ocr2": {
            **_DECODER,
            "architectures": ["DeepseekOcr2ForConditionalGeneration"],
            "moe_intermediate_size": 24,
            "n_routed_experts": 8,
            "num_experts_per_tok": 3,
            "n_shared_experts": 1,
            "mlp_layer_types": ["dense", "sparse"],
        },
        "ernie4_5_vl": {
            **_DECODER,
            "architectures": ["Ernie4_5_VLMoeForConditionalGeneration"],
            "moe_intermediate_size": [24, 12],
            "moe_num_experts": [5, 5],
            "moe_k": 2,
            "moe_num_shared_experts": 1,
            "mlp_layer_types": ["dense", "sparse"],
        },
        "cohere_compass": {
            **_LAYER_NORM,
            "architectures": ["CohereCompassForCausalLM"],
            "sliding_window": 7,
            "layer_types": ["full_attention", "sliding_attention"],
            "rope_parameters": {
                "full_attention": None,
                "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
            },
        },
        "apertus1p5": {**_DECODER, "architectures": ["Apertus1p5TextForCausalLM"]},
        "phi4_multimodal": {
            **_DECODER,
            "architectures": ["Phi4MultimodalForCausalLM"],
        },
        "openai_gpt": {**_GPT2, "architectures": ["OpenAIGPTLMHeadModel"]},
        "gpt_neox_japanese": {
            **{key: _DECODER[key] for key in _OPT},
            "architectures": ["GPTNeoXJapaneseForCausalLM"],
            "intermediate_multiple_size": 2,
            "layer_norm_eps": 1e-5,
            "rotary_pct": 0.5,
        },
        "recurrent_gemma": {
            **{key: _DECODER[key] for key in _NEMOTRON_H[:-1]},
            "architectures": ["RecurrentGemmaForCausalLM"],
            "num_hidden_layers": 3,
            "attention_window_size": 512,
            "lru_width": 48,
        },
        "rwkv": {
            **{key: _DECODER[key] for key in ("vocab_size", "hidden_size", "num_hidden_layers")},
            "architectures": ["RwkvForCausalLM"],
            "attention_hidden_size": 48,
        },
        "kolibri1": {
            **_WITHOUT_NETWORK,
            "architectures": ["Kolibri1ForCausalLM"],
            "num_hidden_layers": 3,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
            "sliding_window": 24,
            "num_experts": 5,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 24,
            "shared_expert_intermediate_size": 16,
        },
        "lara_mini": {
            **_WITHOUT_NETWORK,
            "architectures": ["LaraMiniForCausalLM"],
            "num_hidden_layers": 3,
            "layer_types": ["linear_attention", "sliding_attention", "full_attention"],
            "sliding_window": 24,
            "num_experts": 5,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 24,
            "shared_expert_intermediate_size": 16,
            "linear_num_key_heads": 2,
            "linear_num_value_heads": 4,
            "linear_key_head_dim": 8,
            "linear_value_head_dim": 8,
            "linear_conv_kernel_dim": 4,
        },
        "molmo2": {
            **_DECODER,
            "architectures": ["Molmo2ForConditionalGeneration"],
            "head_dim": 16,
            "norm_after": True,
            "qk_norm_type": "olmo",
            "rope_scaling": {"rope_type": "linear", "factor": 2.0},
            "rope_scaling_layers": [1],
        },
        "zamba": {
            **_DECODER,
            "architectures": ["ZambaForCausalLM"],
            "layers_block_type": ["hybrid", "hybrid"],
            "n_mamba_heads": 4,
            "mamba_d_state": 8,
            "mamba_proj_bias": True,
        },
        "zamba2": {
            **_DECODER,
            "architectures": ["Zamba2ForCausalLM"],
            "num_key_value_heads": 4,
            "layers_block_type": ["hybrid", "hybrid"],
            "use_shared_attention_adapter": True,
            "adapter_rank": 4,
            "use_mem_rope": True,
            "n_mamba_heads": 4,
            "mamba_d_state": 16,
        },
        "modernbert_decoder": {
            **{key: _DECODER[key] for key in (*_OPT, "intermediate_size")},
            "architectures": ["ModernBertDecoderForCausalLM"],
            "num_hidden_layers": 3,
            "local_attention": 14,
            "norm_bias": True,
        },
        "olmo_hybrid": {
            **_DECODER,
            "architectures": ["OlmoHybridForCausalLM"],
            "layer_types": ["linear_attention", "full_attention"],
            "linear_num_key_heads": 2,
            "linear_key_head_dim": 8,
        },
    }
)
NAMES = tuple(CONFIGS)
# Families for tests of research functions, which take 15 s each: together their layers have every
# part. llama, mistral and qwen2 have no part that qwen3, gemma3 (windows) and gpt_oss (biases)
# lack; phi3 and glm4 have them with weights in another order; qwen3_moe and mixtral have gpt_oss's
# experts, deepseek_v2 has deepseek_v3's attention.
# Their parts are those of llama, gpt_oss (biases), qwen3_moe, deepseek_v3, qwen3_5_moe and
# gemma4_all; kimi_linear's are deepseek_v3's but for the decays of channels, which have tests of
# their own.
LIKE_OTHERS = (
    *("mistral", "qwen2", "glm", "glm4", "mixtral", "deepseek_v2", "qwen3_5", "qwen3_next"),
    *("gemma4", "gemma4_unified", "kimi_linear"),
    # Parts that only these have are in the golden files; cohere2 has parallel blocks, layers that
    # do not rotate, and LayerNorm.
    *("granite", "smollm3", "cohere", "gemma", "seed_oss", "ernie4_5", "exaone4", "starcoder2"),
    *("olmo", "arcee", "helium", "nemotron", "jais2", "gpt_neox", "phi", "falcon", "falcon_7b"),
    *(
        "gptj",
        "opt",
        "opt_350m",
        "ministral",
        "ministral3",
        "olmo3",
        "cwm",
        "hunyuan",
        "hunyuan_moe",
    ),
    *("apertus", "qwen2_moe", "olmoe", "glm4_moe", "granite_moe", "gemma2", "ernie4_5_moe"),
    *(
        "bailing_hybrid",
        "deepseek",
        "dots1",
        "minimax_m2",
        "glm4_moe_lite",
        "exaone_moe",
        "solar_open",
        "afmoe",
        "flex_olmo",
    ),
    *("cohere2_moe", "hy_v3", "granite_moe_shared", "mistral4", "sarvam_moe", "sarvam_mla"),
    *("youtu", "mellum", "phimoe", "llama4", "minicpm3"),
    # Of these also through the engine, in test_hybrid.py.
    *("lfm2", "lfm2_moe", "nemotron_h", "bamba", "granite_hybrid", "falcon_h1", "mamba2"),
    *("falcon_mamba", "jamba", "olmo_hybrid", "minimax"),
    *("bailing", "bailing_v2", "bailing_linear", "bailing_v2_5", "axk1", "dbrx"),
    *("laguna", "gemma3n", "step3p5", "muse_glimmer", "chameleon", "zaya"),
    *("nemotron_h_experts",),
    *("mimo_v2_flash",),
    *("longcat_flash",),
    *("jetmoe",),
    *("diffllama",),
    # bloom has ALiBi
    *(
        "bitnet",
        "persimmon",
        "mpt",
        "falcon_alibi",
        "internlm2",
        "internlm3",
        "iquestcoder",
        "mimo",
        "minicpm",
        "orion",
        "nanochat",
        "exaone",
        "gpt_bigcode",
    ),
    *("gpt_neo", "codegen", "stablelm_12b", "vaultgemma", "hyperclovax", "granite_swa", "biogpt"),
    *("xglm", "ctrl", "granite_moe_swa", "lfm3", "flint", "doge"),
    *("aria", "emu3", "mllama", "paddleocr_vl", "deepseek_ocr2", "phi4_multimodal", "openai_gpt"),
    *("gpt_neox_japanese", "recurrent_gemma", "rwkv", "ernie4_5_vl", "cohere_compass"),
    *("apertus1p5", "zamba", "zamba2", "kolibri1", "lara_mini", "molmo2"),
    *("deepseek_v32", "axk2", "mistral_large4", "hy_v4"),  # as glm_moe_dsa
    *("deepseek_v4", "glm5_next", "xlstm"),
)
OF_EACH_KIND = (
    "qwen3",
    "gemma3",
    "olmo2",
    "gpt2",
    "gpt_oss",
    "deepseek_v3",
    "qwen3_5",
    "gemma4_all",
)

# with state for each sequence
WITH_STATE = (
    *("qwen3_5", "qwen3_5_moe", "qwen3_next", "kimi_linear", "lfm2", "lfm2_moe", "bamba"),
    *("granite_hybrid", "falcon_h1", "nemotron_h", "mamba2", "falcon_mamba"),
    *("jamba", "olmo_hybrid", "minimax", "bailing_linear", "bailing_v2_5"),
    *("bailing_hybrid", "nemotron_h_experts", "lfm3", "recurrent_gemma", "rwkv"),
    *("zamba", "zamba2", "lara_mini", "zaya", "deepseek_v4", "glm5_next", "xlstm"),
)

# of Zamba's blocks, without which scores are so large that rounding decides
SMALL = ("to_input", "qkv_a")


@cache
def tiny_model(name: str, dtype: str = "float32") -> tuple[Model, Params]:
    """The model ``name`` of ``CONFIGS``, with the same random parameters every time.

    With "/fp8" behind its name the model has pages of 8 bits.
    """
    model = build_model(CONFIGS[name.removesuffix(FP8)], dtype)
    if name.endswith(FP8):
        decoder = model.config.with_pages(BITS)
        assert decoder is not None
        model = replace(model, config=decoder)
    return model, random_params(model)


def tiny_config(name: str) -> dict[str, Any]:
    """The config.json of ``name``."""
    return dict(CONFIGS[name])


def random_params(model: Model, seed: int = 0) -> Params:
    """Random values so large that every part affects the logits and greedy choices are clear."""
    rng, leaves = np.random.default_rng(seed), abstract_params(model)

    def draw(path: tuple[Any, ...], leaf: jax.ShapeDtypeStruct) -> jax.Array:
        name = path[-1].key
        if name == "expert_table":  # distinct experts of each token
            count = leaves[path[0].key]["router"].shape[0]
            first = rng.integers(count, size=(leaf.shape[0], 1))
            return jnp.asarray((first + np.arange(leaf.shape[1])) % count, leaf.dtype)
        noise = rng.standard_normal(leaf.shape, np.float32)
        if "norm" in name:
            noise = 1.0 + 0.2 * noise
        elif "bias" in name:
            noise = 0.5 * noise
        elif name not in ("embed", "positions"):
            inputs = leaf.shape[-1] if leaf.ndim == 3 else leaf.shape[0]  # of experts: [E, O, I]
            noise = noise * (0.15 if name in SMALL else 1.5) / inputs**0.5
        return jnp.asarray(noise, leaf.dtype)

    return jax.tree_util.tree_map_with_path(draw, leaves)
