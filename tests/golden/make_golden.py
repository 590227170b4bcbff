"""Makes data/<case>.safetensors: what transformers says for tiny random models of every family.

A tool, run by hand in an environment of its own with torch and transformers (5.23 made the files
that are committed); tests read only its output.

    python make_golden.py [CASE ...]

Without names all cases are made. Those of olmo2, phi3, gemma4, glm, glm4, stablelm, qwen3_5,
qwen3_next, kimi_linear, of mixtures of experts and the names that end in _rope, _acts or _scales
came with 5.24.
Each file holds a checkpoint as Hugging Face writes it (tensors under ``weights/``, its config.json
in the metadata) and what the model says in float32: token_ids [2, T], logits [2, T, V], and
greedy_tokens [2, G], which continue token_ids. ``rope.json`` holds inverse frequencies and the
factor on cosine and sine for each rope scaling.
"""

from __future__ import annotations

import json
import re
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from transformers import (
    AfmoeConfig,
    ApertusConfig,
    ArceeConfig,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    AXK1Config,
    BailingHybridConfig,
    BambaConfig,
    BioGptConfig,
    BitNetConfig,
    BloomConfig,
    CodeGenConfig,
    Cohere2Config,
    Cohere2MoeConfig,
    CohereConfig,
    CTRLConfig,
    CwmConfig,
    DbrxConfig,
    DeepseekV2Config,
    DeepseekV3Config,
    DiffLlamaConfig,
    Dots1Config,
    DynamicCache,
    Ernie4_5_MoeConfig,
    Ernie4_5Config,
    Exaone4_5_Config,
    Exaone4Config,
    ExaoneConfig,
    ExaoneMoeConfig,
    FalconConfig,
    FalconH1Config,
    FalconMambaConfig,
    FlexOlmoConfig,
    Gemma2Config,
    Gemma3Config,
    Gemma3nTextConfig,
    Gemma3TextConfig,
    Gemma4Config,
    Gemma4TextConfig,
    Gemma4UnifiedConfig,
    GemmaConfig,
    Glm4Config,
    Glm4MoeConfig,
    Glm4MoeLiteConfig,
    Glm4vConfig,
    GlmConfig,
    GPT2Config,
    GPTBigCodeConfig,
    GPTJConfig,
    GPTNeoConfig,
    GPTNeoXConfig,
    GptOssConfig,
    GraniteConfig,
    GraniteMoeConfig,
    GraniteMoeHybridConfig,
    GraniteMoeSharedConfig,
    GraniteSWAConfig,
    HeliumConfig,
    HunYuanDenseV1Config,
    HunYuanMoEV1Config,
    HyperCLOVAXConfig,
    HYV3Config,
    InternLM3Config,
    IQuestCoderConfig,
    Jais2Config,
    JambaConfig,
    KimiLinearConfig,
    LagunaConfig,
    Lfm2Config,
    Lfm2MoeConfig,
    Llama4TextConfig,
    LlamaConfig,
    LlavaConfig,
    LongcatFlashConfig,
    Mamba2Config,
    MambaConfig,
    MellumConfig,
    MiMoV2FlashConfig,
    MiniCPM3Config,
    MiniMaxConfig,
    MiniMaxM2Config,
    Ministral3Config,
    MinistralConfig,
    Mistral3Config,
    MistralConfig,
    MixtralConfig,
    MptConfig,
    NanoChatConfig,
    NemotronConfig,
    NemotronHConfig,
    Olmo2Config,
    Olmo3Config,
    OlmoConfig,
    OlmoeConfig,
    OlmoHybridConfig,
    OPTConfig,
    PersimmonConfig,
    Phi3Config,
    PhiConfig,
    PhimoeConfig,
    PreTrainedConfig,
    Qwen2_5_VLConfig,
    Qwen2Config,
    Qwen2MoeConfig,
    Qwen3_5Config,
    Qwen3_5MoeConfig,
    Qwen3_5MoeTextConfig,
    Qwen3_5TextConfig,
    Qwen3Config,
    Qwen3MoeConfig,
    Qwen3NextConfig,
    Qwen3VLConfig,
    SarvamMLAConfig,
    SarvamMoEConfig,
    SeedOssConfig,
    SmolLM3Config,
    SolarOpenConfig,
    StableLmConfig,
    Starcoder2Config,
    VaultGemmaConfig,
    XGLMConfig,
    YoutuConfig,
)
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.models.minimax.modeling_minimax import MiniMaxCache

DATA = Path(__file__).parent / "data"
LENGTH, GENERATED = 24, 8
# transformers computes linear attention in chunks of 64
LENGTHS = {
    "qwen3_5_long": 150,
    "kimi_linear": 80,
    "bailing_hybrid": 70,
    "bamba": 80,
    "mamba2_tied": 80,
    "falcon_mamba": 80,
    "minimax": 80,
}
SEEDS = {  # others have 0; norms of small values magnify rounding by luck of the draw
    "qwen3_5": 9,
    "qwen3_5_tied": 8,
    "qwen3_5_multimodal": 3,
    "qwen3_5_moe": 4,
    "qwen3_5_moe_multimodal": 5,
    "qwen3_next": 8,
    "qwen3_next_sparse_step": 8,
    "kimi_linear": 5,
    "bailing_hybrid": 3,
    "gemma4_layer_inputs": 4,
    "gemma4_all": 4,
    "granite_hybrid": 1,
    "falcon_mamba": 28,
    "olmo_hybrid": 1,
    "olmo_hybrid_rope": 1,
}
FREE_STEPS = (0.0, float("inf"))
RECURRENT = {"linear_attention", "conv"}
ROUNDING = 3e-5  # what chunks and single steps may differ by; tests allow 1e-4
SIZES = {
    "vocab_size": 96,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
}
WITHOUT_KV = {key: size for key, size in SIZES.items() if key != "num_key_value_heads"}
FALCON = {key: size for key, size in WITHOUT_KV.items() if key != "intermediate_size"}
FALCON["ffn_hidden_size"] = 48
MPT = {"vocab_size": 96, "n_layers": 2, "max_seq_len": 64}
EXAONE_VISION = {
    "depth": 1,
    "hidden_size": 8,
    "intermediate_size": 8,
    "num_heads": 2,
    "num_key_value_heads": 2,
    "out_hidden_size": 32,
    "fullatt_block_indexes": [0],
}
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}
YARN_ROPE = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 16,
}
LATENT_ROPE = {**YARN_ROPE, "factor": 40.0, "beta_fast": 4.0}
LINEAR_ROPE = {"rope_type": "linear", "rope_theta": 10000.0, "factor": 2.0}
DYNAMIC_ROPE = {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 2.0}
GPT_OSS_ROPE = {**YARN_ROPE, "beta_fast": 8.0, "beta_slow": 1.0, "truncate": False}
PHI3_ROPE = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "partial_rotary_factor": 0.75,
    "short_factor": [1.0 + i / 8 for i in range(6)],
    "long_factor": [1.0 + i for i in range(6)],
}
GEMMA4_ROPE = {
    "sliding_attention": {"rope_type": "default", "rope_theta": 1000.0},
    "full_attention": {
        "rope_type": "proportional",
        "rope_theta": 10000.0,
        "partial_rotary_factor": 0.5,
        "factor": 2.0,
    },
}
MINISTRAL3_ROPE = {**YARN_ROPE, "llama_4_scaling_beta": 0.3, "mscale": 1.0, "mscale_all_dim": 1.0}
PIXTRAL = {
    "model_type": "pixtral",
    "hidden_size": 8,
    "intermediate_size": 8,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "patch_size": 2,
    "image_size": 4,
}
GLM4_ROPE = {"rope_type": "default", "rope_theta": 1000.0, "partial_rotary_factor": 1.0}
MULTIMODAL_ROPE = {  # the section splits the frequencies among time, height and width
    "rope_type": "default",
    "rope_theta": 10000.0,
    "partial_rotary_factor": 0.5,
    "mrope_interleaved": True,
    "mrope_section": [2, 1, 1],
}
QUARTER_ROTARY = {"partial_rotary_factor": 0.25, "mrope_section": [1, 1, 0]}
LINEAR_ATTENTION = {  # no two products of heads and dimensions are equal
    "head_dim": 16,
    "linear_num_key_heads": 2,
    "linear_key_head_dim": 8,
    "linear_num_value_heads": 4,
    "linear_value_head_dim": 12,
    "rope_parameters": MULTIMODAL_ROPE,
}
LINEAR_EXPERTS = {
    "moe_intermediate_size": 8,
    "shared_expert_intermediate_size": 10,
    "num_experts": 5,
    "num_experts_per_tok": 3,
}
HALF_ROTARY = {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5}
VISION = {
    "depth": 1,
    "hidden_size": 8,
    "intermediate_size": 8,
    "num_heads": 2,
    "patch_size": 2,
    "num_position_embeddings": 4,
    "out_hidden_size": 32,
}
GEMMA4 = {
    **SIZES,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "head_dim": 8,
    "global_head_dim": 16,
    "sliding_window": 7,
    "layer_types": ["sliding_attention", "full_attention"] * 2,
    "hidden_size_per_layer_input": 0,
    "final_logit_softcapping": 10.0,
}
GEMMA3N = {
    "num_hidden_layers": 6,
    "head_dim": 8,
    "sliding_window": 7,
    "layer_types": ["sliding_attention", "full_attention", "sliding_attention"] * 2,
    "num_kv_shared_layers": 3,
    "hidden_size_per_layer_input": 6,
    "vocab_size_per_layer_input": 64,
    "laurel_rank": 5,
    "final_logit_softcapping": 10.0,
}
GEMMA4_KEYS_TOO = {
    "attention_k_eq_v": True,
    "num_global_key_value_heads": 2,
}
GEMMA4_PAIR = ["sliding_attention", "full_attention"]
GEMMA4_EXPERTS = {
    "enable_moe_block": True,
    "num_experts": 5,
    "top_k_experts": 3,
    "moe_intermediate_size": 12,
}
GEMMA4_INPUTS = {
    "hidden_size_per_layer_input": 6,
    "vocab_size_per_layer_input": 64,
    "num_kv_shared_layers": 2,
    "use_double_wide_mlp": True,
}
GEMMA4_VISION = {
    "hidden_size": 8,
    "intermediate_size": 8,
    "num_hidden_layers": 1,
    "num_attention_heads": 1,
    "num_key_value_heads": 1,
    "head_dim": 8,
    "position_embedding_size": 4,
}
# norms multiply by 1 + weight
ZERO_CENTRED = (
    *("qwen3_5_text", "qwen3_5_moe_text", "qwen3_next", "nemotron", "gemma", "gemma2"),
    "vaultgemma",
)
# published files have other names
RENAMED = (
    *("gpt_neox", "gpt_neox_sequential", "nemotron_h", "llava", "qwen2_5_vl", "qwen3_vl"),
    *("gemma3_multimodal", "glm4v", "mistral4", "exaone"),
)
STACKED = (
    "qwen3_5_moe_multimodal",
    "llama4",
    "llama4_plain",
)  # its published files stack the tensors of experts
NO_TOKENS = {"pad_token_id": None, "bos_token_id": None, "eos_token_id": None}
# keys of config.json that transformers derives from those of published files
DERIVED = {
    "kimi_linear": (
        *("layer_types", "mlp_layer_types", "linear_num_heads", "linear_head_dim"),
        *("linear_conv_kernel_dim", "head_dim", "qk_head_dim"),
    ),
    "bailing_hybrid": ("linear_num_heads", "linear_head_dim", "linear_conv_kernel_dim"),
}
# and those that it overwrites, with the widths of other heads
GIVEN = {"bailing_hybrid_kinds": {"head_dim": 16}}
PHIMOE_ROPE = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "short_factor": [1.0 + i / 8 for i in range(4)],
    "long_factor": [1.0 + i for i in range(4)],
    "short_mscale": 1.2,
    "long_mscale": 1.3,
    "original_max_position_embeddings": 48,
}
MINICPM3_ROPE = {key: PHIMOE_ROPE[key] for key in PHIMOE_ROPE if not key.endswith("mscale")}
LLAMA4 = {
    **SIZES,
    "num_hidden_layers": 3,
    "intermediate_size": 24,
    "intermediate_size_mlp": 40,
    "head_dim": 16,
    "num_local_experts": 5,
    "moe_layers": [1, 2],
    "no_rope_layers": [1, 0, 1],
    "floor_scale": 5,
    "attn_scale": 0.3,
    "attention_chunk_size": 40,
}
CLIP = {
    "model_type": "clip_vision_model",
    "hidden_size": 8,
    "intermediate_size": 8,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "image_size": 8,
    "patch_size": 4,
}
QWEN2_VL_ROPE = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 1, 1]}
GLM4V_ROPE = {**QWEN2_VL_ROPE, "partial_rotary_factor": 0.5, "mrope_section": [1, 1, 0]}
OF_EXPERTS = {"num_experts_per_tok", "first_k_dense_replace"}
BIASED_EXPERTS = {
    "n_routed_experts": 5,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 24,
    "routed_scaling_factor": 1.5,
}
COUNTED_EXPERTS = {
    "num_experts": 5,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 24,
    "num_shared_experts": 2,
}
COHERE_EXPERTS = {
    "head_dim": 8,
    "sliding_window": 7,
    "sliding_window_pattern": 2,
    "num_experts": 5,
    "num_experts_per_tok": 2,
    "logit_scale": 0.5,
    **NO_TOKENS,
}
SARVAM_ROPE = {key: value for key, value in LATENT_ROPE.items() if key != "rope_type"}
# transformers loads these with another architecture's module
ARCHITECTURES = {"sarvam_moe": "SarvamMoEForCausalLM", "sarvam_mla": "SarvamMLAForCausalLM"}
MAMBA2 = {"mamba_n_heads": 8, "mamba_n_groups": 2, "mamba_d_state": 16, "mamba_d_conv": 4}
FALCON_FACTORS = {
    "lm_head_multiplier": 0.5,
    "embedding_multiplier": 3.0,
    "mlp_multipliers": [0.7, 1.3],
    "key_multiplier": 0.6,
    "attention_in_multiplier": 1.2,
    "attention_out_multiplier": 0.8,
    "ssm_multipliers": [0.6, 0.7, 1.2, 0.9, 1.1],
    "ssm_in_multiplier": 1.3,
    "ssm_out_multiplier": 0.9,
}
LONGCAT = {
    "vocab_size": 96,
    "hidden_size": 32,
    "num_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 64,
    "ffn_hidden_size": 48,
    "expert_ffn_hidden_size": 24,
    "q_lora_rank": 20,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 12,
    "qk_rope_head_dim": 8,
    "head_dim": 8,
    "v_head_dim": 10,
}
MINIMAX_FACTORS = {
    "full_attn_alpha_factor": 1.2,
    "full_attn_beta_factor": 0.9,
    "linear_attn_alpha_factor": 1.4,
    "linear_attn_beta_factor": 0.8,
    "mlp_alpha_factor": 1.3,
    "mlp_beta_factor": 0.7,
}
GRANITE_FACTORS = {
    "attention_multiplier": 0.3,
    "embedding_multiplier": 3.0,
    "residual_multiplier": 0.5,
    "logits_scaling": 0.5,
}
DEEPSEEK_ROPE = {
    **YARN_ROPE,
    "mscale": 1.0,
    "mscale_all_dim": 0.5,
    "beta_fast": 4.0,
    "truncate": False,
}


# Architectures of published files, for which transformers has the modules of another one.
ARCHITECTURES = {
    "internlm3": "InternLM3ForCausalLM",
    "iquestcoder": "IQuestCoderForCausalLM",
    "exaone": "ExaoneForCausalLM",
}


# Eager attention adds ALiBi of Falcon twice: to the mask, and to the scores.
IMPLEMENTATIONS = {"falcon_alibi": "sdpa"}


def cases() -> dict[str, PreTrainedConfig]:
    """One config per oddity that a family can have."""
    gpt2 = {"n_embd": 32, "n_head": 4, "n_layer": 2, "n_positions": 64, "vocab_size": 96}
    window = {"use_sliding_window": True, "sliding_window": 7, "max_window_layers": 1}
    latent = {
        **SIZES,
        "num_hidden_layers": 3,
        "num_key_value_heads": 4,
        "kv_lora_rank": 16,
        "qk_nope_head_dim": 12,
        "qk_rope_head_dim": 8,
        "v_head_dim": 10,
        "moe_intermediate_size": 24,
        "num_experts_per_tok": 3,
        "first_k_dense_replace": 1,
    }
    own_latent = {
        **{key: latent[key] for key in latent.keys() - {"moe_intermediate_size"} - OF_EXPERTS},
        "q_lora_rank": 20,
    }
    return {
        "llama_tied": LlamaConfig(**SIZES, tie_word_embeddings=True),
        "llama_untied_llama3_rope": LlamaConfig(**SIZES, rope_parameters=LLAMA3_ROPE),
        "llama_bias_head_dim": LlamaConfig(**SIZES, attention_bias=True, head_dim=16),
        "mistral_window": MistralConfig(**SIZES, sliding_window=7),
        "qwen2": Qwen2Config(**SIZES, tie_word_embeddings=True),
        "qwen2_window_yarn": Qwen2Config(**SIZES, **window, rope_parameters=YARN_ROPE),
        "qwen3": Qwen3Config(**SIZES, head_dim=16),
        "gpt2": GPT2Config(**gpt2),
        "llama_dynamic_rope": LlamaConfig(**SIZES, rope_parameters=DYNAMIC_ROPE, hidden_act="gelu"),
        "llama_linear_rope": LlamaConfig(
            **SIZES, rope_parameters=LINEAR_ROPE, mlp_bias=True, attention_bias=True
        ),
        "mistral_acts": MistralConfig(**SIZES, sliding_window=None, hidden_act="quick_gelu"),
        "qwen2_acts": Qwen2Config(**SIZES, hidden_act="relu2"),
        "qwen3_yarn_rope": Qwen3Config(
            **SIZES,
            head_dim=16,
            rope_parameters=DEEPSEEK_ROPE,
            attention_bias=True,
            hidden_act="gelu_pytorch_tanh",
        ),
        "gemma3": Gemma3TextConfig(
            **SIZES | {"num_hidden_layers": 5},
            head_dim=16,
            query_pre_attn_scalar=24,
            sliding_window=7,
            sliding_window_pattern=3,
            rope_scaling={"rope_type": "linear", "factor": 8.0},
        ),
        "gemma3_untied": Gemma3TextConfig(
            **SIZES | {"num_hidden_layers": 4},
            head_dim=8,
            sliding_window=5,
            layer_types=["sliding_attention", "full_attention"] * 2,
            attention_bias=True,
            tie_word_embeddings=False,
        ),
        "gemma4": Gemma4TextConfig(**GEMMA4, **GEMMA4_KEYS_TOO),
        "gemma4_untied": Gemma4TextConfig(
            **GEMMA4
            | {"num_key_value_heads": 2, "final_logit_softcapping": None}
            | {
                "num_hidden_layers": 3,
                "layer_types": ["sliding_attention", *["full_attention"] * 2],
            }
            | {"rope_parameters": GEMMA4_ROPE},
            attention_bias=True,
            tie_word_embeddings=False,
            hidden_activation="silu",
            rms_norm_eps=1e-3,
        ),
        "gemma4_multimodal": Gemma4Config(
            text_config={
                **GEMMA4,
                **GEMMA4_KEYS_TOO,
                "num_hidden_layers": 2,
                "layer_types": GEMMA4_PAIR,
            },
            vision_config=GEMMA4_VISION,
            audio_config=None,
        ),
        "gemma4_experts": Gemma4TextConfig(
            **GEMMA4 | {"num_hidden_layers": 2, "layer_types": GEMMA4_PAIR},
            **GEMMA4_KEYS_TOO,
            **GEMMA4_EXPERTS,
        ),
        "gemma4_layer_inputs": Gemma4TextConfig(  # layers 3 and 4 use the keys of 2 and 1
            **GEMMA4
            | {"num_hidden_layers": 5}
            | {"layer_types": [*GEMMA4_PAIR, "sliding_attention", *GEMMA4_PAIR]}
            | {"vocab_size": 64, "intermediate_size": 16, "num_key_value_heads": 2}
            | GEMMA4_INPUTS,
        ),
        "gemma4_all": Gemma4Config(  # no published model has all parts
            text_config={
                **GEMMA4,
                **GEMMA4_KEYS_TOO,
                **GEMMA4_EXPERTS,
                **GEMMA4_INPUTS,
                "moe_intermediate_size": 4,
                "vocab_size": 64,
                "intermediate_size": 12,
                "attention_bias": True,
            },
            vision_config=None,
            audio_config=None,
        ),
        "gemma4_unified": Gemma4UnifiedConfig(
            text_config={
                **{key: value for key, value in GEMMA4.items() if "per_layer" not in key},
                **GEMMA4_KEYS_TOO,
            },
            vision_config=None,
            audio_config=None,
        ),
        "olmo2": Olmo2Config(**SIZES, rope_parameters=YARN_ROPE, pad_token_id=None),
        "olmo2_bias_tied": Olmo2Config(
            **SIZES, attention_bias=True, tie_word_embeddings=True, pad_token_id=None
        ),
        "phi3": Phi3Config(**SIZES, sliding_window=7, pad_token_id=None),
        "phi3_long_rope": Phi3Config(  # twice the original length, where long_factor counts
            **SIZES | {"hidden_size": 64},
            original_max_position_embeddings=16,
            rope_parameters=PHI3_ROPE,
            tie_word_embeddings=True,
            pad_token_id=None,
        ),
        "glm": GlmConfig(**SIZES, head_dim=16, pad_token_id=None),
        "stablelm": StableLmConfig(**SIZES, use_qkv_bias=True),  # a quarter of each head rotates
        "stablelm_tied": StableLmConfig(
            **SIZES, rope_parameters=GLM4_ROPE, layer_norm_eps=1e-3, tie_word_embeddings=True
        ),
        "glm4": Glm4Config(**SIZES, head_dim=16, pad_token_id=None),
        "glm4_plain": Glm4Config(
            **SIZES, head_dim=8, attention_bias=False, rope_parameters=GLM4_ROPE, pad_token_id=None
        ),
        "granite": GraniteConfig(
            **SIZES,
            attention_multiplier=0.3,
            embedding_multiplier=3.0,
            residual_multiplier=0.5,
            logits_scaling=0.5,
            attention_bias=True,
            mlp_bias=True,
        ),
        "granite_moe": GraniteMoeConfig(
            **SIZES | {"intermediate_size": 24},
            attention_multiplier=0.3,
            embedding_multiplier=3.0,
            residual_multiplier=0.5,
            logits_scaling=0.5,
            num_local_experts=5,
            num_experts_per_tok=2,
            **NO_TOKENS,
        ),
        "gemma2": Gemma2Config(
            **SIZES,
            head_dim=16,
            query_pre_attn_scalar=24,
            sliding_window=7,
            attn_logit_softcapping=3.0,
            final_logit_softcapping=4.0,
        ),
        "gemma2_plain": Gemma2Config(
            **SIZES,
            head_dim=8,
            attn_logit_softcapping=None,
            final_logit_softcapping=None,
            attention_bias=True,
            tie_word_embeddings=False,
        ),
        "ernie4_5_moe": Ernie4_5_MoeConfig(
            **SIZES,
            moe_num_experts=5,
            moe_k=2,
            moe_intermediate_size=24,
            moe_num_shared_experts=1,
            **NO_TOKENS,
        ),
        "smollm3": SmolLM3Config(
            **SIZES | {"num_hidden_layers": 3},
            no_rope_layers=[1, 0, 1],
            use_sliding_window=True,
            sliding_window=7,
            rope_parameters=YARN_ROPE,
            **NO_TOKENS,
        ),
        "cohere": CohereConfig(**SIZES, logit_scale=0.5, **NO_TOKENS),
        "cohere_bias_untied": CohereConfig(
            **SIZES, attention_bias=True, tie_word_embeddings=False, **NO_TOKENS
        ),
        "cohere2": Cohere2Config(
            **SIZES | {"num_hidden_layers": 3},
            logit_scale=0.5,
            sliding_window=7,
            layer_types=["sliding_attention", "full_attention", "sliding_attention"],
            **NO_TOKENS,
        ),
        "gemma": GemmaConfig(**SIZES, head_dim=16, attention_bias=True),
        "ministral": MinistralConfig(
            **SIZES,
            sliding_window=7,
            layer_types=["sliding_attention", "full_attention"],
            head_dim=16,
            **NO_TOKENS,
        ),
        "ministral3": Ministral3Config(
            **SIZES, head_dim=16, rope_parameters=MINISTRAL3_ROPE, **NO_TOKENS
        ),
        "mistral3": Mistral3Config(
            text_config={
                "model_type": "ministral3",
                **SIZES,
                "head_dim": 8,
                "rope_parameters": MINISTRAL3_ROPE,
                "tie_word_embeddings": True,
            },
            vision_config=PIXTRAL,
            tie_word_embeddings=True,
        ),
        "olmo3": Olmo3Config(
            **SIZES,
            sliding_window=7,
            layer_types=["sliding_attention", "full_attention"],
            rope_parameters={
                "full_attention": YARN_ROPE,
                "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
            },
            attention_bias=True,
            **NO_TOKENS,
        ),
        "cwm": CwmConfig(
            **SIZES,
            head_dim=16,
            sliding_window=7,
            layer_types=["full_attention", "sliding_attention"],
            rope_parameters=LLAMA3_ROPE,
            **NO_TOKENS | {"bos_token_id": 1, "eos_token_id": 2},
        ),
        "hunyuan": HunYuanDenseV1Config(
            **SIZES,
            head_dim=16,
            rope_parameters={**DYNAMIC_ROPE, "factor": 1.0, "alpha": 3.0},
            **NO_TOKENS,
        ),
        "hunyuan_bias_tied": HunYuanDenseV1Config(
            **SIZES, head_dim=8, attention_bias=True, tie_word_embeddings=True, **NO_TOKENS
        ),
        "hunyuan_moe": HunYuanMoEV1Config(
            **SIZES, head_dim=16, num_experts=5, moe_topk=[2, 2], **NO_TOKENS
        ),
        "apertus": ApertusConfig(**SIZES, attention_bias=True, **NO_TOKENS),
        "qwen2_moe": Qwen2MoeConfig(
            **SIZES,
            num_experts=5,
            num_experts_per_tok=2,
            moe_intermediate_size=24,
            shared_expert_intermediate_size=20,
            mlp_only_layers=[1],
        ),
        "olmoe": OlmoeConfig(
            **SIZES, num_experts=5, num_experts_per_tok=2, clip_qkv=1.0, **NO_TOKENS
        ),
        "olmoe_renormalised": OlmoeConfig(
            **SIZES | {"intermediate_size": 24},
            num_experts=5,
            num_experts_per_tok=2,
            norm_topk_prob=True,
            attention_bias=True,
            tie_word_embeddings=True,
            **NO_TOKENS,
        ),
        "glm4_moe": Glm4MoeConfig(
            **SIZES | {"num_hidden_layers": 3},
            head_dim=16,
            use_qk_norm=True,
            attention_bias=True,
            n_routed_experts=5,
            num_experts_per_tok=2,
            moe_intermediate_size=24,
            n_shared_experts=2,
            routed_scaling_factor=1.5,
        ),
        "seed_oss": SeedOssConfig(**SIZES, head_dim=16),
        "seed_oss_biases": SeedOssConfig(
            **SIZES,
            head_dim=8,
            attention_bias=False,
            attention_out_bias=True,
            mlp_bias=True,
            tie_word_embeddings=True,
        ),
        "ernie4_5": Ernie4_5Config(**SIZES, head_dim=16),
        "ernie4_5_bias": Ernie4_5Config(
            **SIZES, head_dim=8, use_bias=True, tie_word_embeddings=False
        ),
        "exaone4": Exaone4Config(
            **SIZES | {"num_hidden_layers": 3}, sliding_window=7, sliding_window_pattern=2
        ),
        "exaone4_whole": Exaone4Config(
            **SIZES,
            sliding_window=None,
            layer_types=["full_attention"] * 2,
            tie_word_embeddings=True,
        ),
        "starcoder2": Starcoder2Config(**SIZES, sliding_window=7, **NO_TOKENS),
        "starcoder2_plain": Starcoder2Config(
            **SIZES, use_bias=False, tie_word_embeddings=False, norm_epsilon=1e-3, **NO_TOKENS
        ),
        "olmo": OlmoConfig(**SIZES, clip_qkv=1.0, **NO_TOKENS),
        "olmo_bias_tied": OlmoConfig(
            **SIZES, attention_bias=True, tie_word_embeddings=True, **NO_TOKENS
        ),
        "arcee": ArceeConfig(**SIZES, attention_bias=True, mlp_bias=True, **NO_TOKENS),
        "helium": HeliumConfig(**SIZES, head_dim=8, **NO_TOKENS),
        "nemotron": NemotronConfig(**SIZES, **NO_TOKENS),
        "nemotron_biases": NemotronConfig(
            **SIZES,
            attention_bias=True,
            mlp_bias=True,
            norm_eps=1e-3,
            tie_word_embeddings=True,
            **NO_TOKENS,
        ),
        "jais2": Jais2Config(**SIZES, **NO_TOKENS),
        "gpt_neox": GPTNeoXConfig(**WITHOUT_KV),
        "gpt_neox_sequential": GPTNeoXConfig(
            **WITHOUT_KV,
            use_parallel_residual=False,
            attention_bias=False,
            rope_parameters=HALF_ROTARY,
        ),
        "phi": PhiConfig(**SIZES, **NO_TOKENS),
        "falcon": FalconConfig(
            **FALCON, new_decoder_architecture=True, num_kv_heads=2, **NO_TOKENS
        ),
        "falcon_one_norm": FalconConfig(
            **FALCON,
            new_decoder_architecture=True,
            num_kv_heads=2,
            num_ln_in_parallel_attn=1,
            tie_word_embeddings=False,
            **NO_TOKENS,
        ),
        "falcon_7b": FalconConfig(**FALCON, bias=True, **NO_TOKENS),
        "falcon_sequential": FalconConfig(
            **FALCON, parallel_attn=False, multi_query=False, **NO_TOKENS
        ),
        "gptj": GPTJConfig(**gpt2, rotary_dim=4, **NO_TOKENS),
        "opt": OPTConfig(
            **{key: SIZES[key] for key in FALCON if key in SIZES}, ffn_dim=48, **NO_TOKENS
        ),
        # six heads, which are no power of two
        "bloom": BloomConfig(
            vocab_size=96, hidden_size=48, n_layer=2, n_head=6, layer_norm_epsilon=1e-3, **NO_TOKENS
        ),
        "mpt": MptConfig(
            **MPT, d_model=48, n_heads=6, attn_config={"clip_qkv": 1.0, "softmax_scale": 0.5}
        ),
        "mpt_plain": MptConfig(**MPT, d_model=32, n_heads=4),
        "falcon_alibi": FalconConfig(  # four heads, whose slopes bfloat16 holds
            **FALCON, alibi=True, bias=True, parallel_attn=False, multi_query=False, **NO_TOKENS
        ),
        "internlm3": InternLM3Config(
            **SIZES, head_dim=16, attention_bias=True, mlp_bias=True, **NO_TOKENS
        ),
        "iquestcoder": IQuestCoderConfig(**SIZES, head_dim=16, attention_bias=True, **NO_TOKENS),
        "nanochat": NanoChatConfig(**SIZES, attention_bias=True, **NO_TOKENS),
        "exaone": ExaoneConfig(**SIZES, rope_parameters=LLAMA3_ROPE, **NO_TOKENS),
        "gpt_bigcode": GPTBigCodeConfig(**gpt2, **NO_TOKENS),
        "gpt_bigcode_heads": GPTBigCodeConfig(
            **gpt2, multi_query=False, scale_attn_weights=False, n_inner=40, **NO_TOKENS
        ),
        "gpt_neo": GPTNeoConfig(
            vocab_size=96,
            hidden_size=32,
            num_heads=4,
            num_layers=3,
            attention_types=[[["global", "local"], 1], [["local"], 1]],
            window_size=7,
            max_position_embeddings=64,
            **NO_TOKENS,
        ),
        "codegen": CodeGenConfig(**gpt2 | {"n_head": 8}, rotary_dim=2, **NO_TOKENS),
        "persimmon": PersimmonConfig(**WITHOUT_KV, **NO_TOKENS),
        "stablelm_parallel": StableLmConfig(
            **SIZES,
            use_parallel_residual=True,
            qk_layernorm=True,
            use_qkv_bias=True,
            rope_parameters=HALF_ROTARY,
            **NO_TOKENS,
        ),
        "phi_norms": PhiConfig(**SIZES, qk_layernorm=True, **NO_TOKENS),
        "vaultgemma": VaultGemmaConfig(
            **SIZES | {"num_hidden_layers": 3},
            head_dim=16,
            sliding_window=7,
            query_pre_attn_scalar=9,
            attn_logit_softcapping=2.0,
            final_logit_softcapping=5.0,
            **NO_TOKENS,
        ),
        "bitnet": BitNetConfig(**SIZES, attention_bias=True, **NO_TOKENS),
        "hyperclovax": HyperCLOVAXConfig(
            **SIZES,
            head_dim=16,
            embedding_multiplier=3.0,
            logits_scaling=0.5,
            residual_multiplier=0.7,
            attention_multiplier=0.2,
            attention_bias=True,
            **NO_TOKENS,
        ),
        "hyperclovax_before": HyperCLOVAXConfig(
            **SIZES, use_post_norm=False, residual_multiplier=0.7, mlp_bias=True, **NO_TOKENS
        ),
        "granite_swa": GraniteSWAConfig(
            **SIZES | {"num_hidden_layers": 3},
            sliding_window=7,
            layer_types=["full_attention", "sliding_attention", "sliding_attention"],
            layer_rope_theta=[0, 10000.0, 500.0],
            embedding_multiplier=3.0,
            logits_scaling=2.0,
            residual_multiplier=0.7,
            attention_multiplier=0.2,
            **NO_TOKENS,
        ),
        "biogpt": BioGptConfig(**WITHOUT_KV, **NO_TOKENS),
        "xglm": XGLMConfig(
            vocab_size=96,
            d_model=32,
            ffn_dim=48,
            num_layers=2,
            attention_heads=4,
            max_position_embeddings=64,
            **NO_TOKENS,
        ),
        "ctrl": CTRLConfig(**gpt2, dff=48, **NO_TOKENS),
        "exaone4_5": Exaone4_5_Config(
            text_config={
                **SIZES | {"num_hidden_layers": 3},
                "model_type": "exaone4",
                "sliding_window": 7,
                "sliding_window_pattern": 2,
            },
            vision_config=EXAONE_VISION,
        ),
        "qwen3_moe": Qwen3MoeConfig(
            **SIZES | {"num_hidden_layers": 3},
            head_dim=16,
            moe_intermediate_size=24,
            num_experts=7,
            num_experts_per_tok=3,
            norm_topk_prob=True,
            mlp_only_layers=[1],
        ),
        "qwen3_moe_sparse_step": Qwen3MoeConfig(
            **SIZES,
            head_dim=8,
            moe_intermediate_size=40,
            num_experts=5,
            num_experts_per_tok=5,
            decoder_sparse_step=2,
            attention_bias=True,
            rope_parameters=YARN_ROPE,
            use_sliding_window=True,
            sliding_window=7,
            tie_word_embeddings=True,
        ),
        "mixtral": MixtralConfig(**SIZES, num_local_experts=5, sliding_window=9, head_dim=16),
        "gpt_oss": GptOssConfig(
            **SIZES | {"num_hidden_layers": 3, "intermediate_size": 24},
            head_dim=16,
            num_local_experts=5,
            num_experts_per_tok=3,
            sliding_window=5,
            swiglu_limit=2.0,
            rope_parameters=GPT_OSS_ROPE,
        ),
        "deepseek_v2": DeepseekV2Config(
            **latent,
            q_lora_rank=None,
            n_routed_experts=7,
            n_shared_experts=2,
            routed_scaling_factor=1.5,
            rope_parameters={**LATENT_ROPE, "mscale": 0.707, "mscale_all_dim": 0.707},
        ),
        "deepseek_v2_groups_bias": DeepseekV2Config(
            **latent,
            q_lora_rank=20,
            n_routed_experts=12,
            n_shared_experts=1,
            topk_method="group_limited_greedy",
            n_group=4,
            topk_group=2,
            attention_bias=True,
            mlp_bias=True,
        ),
        "deepseek_v3": DeepseekV3Config(
            **latent,
            q_lora_rank=20,
            n_routed_experts=12,
            n_shared_experts=2,
            n_group=4,
            topk_group=2,
            rope_parameters={**LATENT_ROPE, "mscale": 1.0, "mscale_all_dim": 1.0},
            rms_norm_eps=1e-3,
        ),
        "deepseek_v3_plain_bias": DeepseekV3Config(
            **latent,
            q_lora_rank=None,
            n_routed_experts=5,
            n_group=1,
            topk_group=1,
            norm_topk_prob=False,
            rope_interleave=False,
            attention_bias=True,
            tie_word_embeddings=True,
        ),
        "qwen3_5": Qwen3_5TextConfig(  # linear, linear, full, linear
            **SIZES | {"num_hidden_layers": 4, "intermediate_size": 24},
            **LINEAR_ATTENTION,
            full_attention_interval=3,
        ),
        "qwen3_5_tied": Qwen3_5TextConfig(
            **SIZES | {"num_hidden_layers": 4, "intermediate_size": 24},
            **LINEAR_ATTENTION
            | {"linear_key_head_dim": 4, "linear_num_value_heads": 6, "linear_value_head_dim": 8}
            | {"rope_parameters": {**MULTIMODAL_ROPE, **QUARTER_ROTARY}},
            layer_types=["full_attention", "linear_attention"] * 2,
            attention_bias=True,
            rms_norm_eps=1e-3,
            tie_word_embeddings=True,
        ),
        "qwen3_5_long": Qwen3_5TextConfig(
            **SIZES
            | {"num_hidden_layers": 2, "intermediate_size": 24, "vocab_size": 48}
            | {"max_position_embeddings": 192},
            **LINEAR_ATTENTION,
            full_attention_interval=2,
        ),
        "qwen3_5_multimodal": Qwen3_5Config(
            text_config={
                **SIZES,
                **LINEAR_ATTENTION,
                "full_attention_interval": 2,
                "tie_word_embeddings": True,
            },
            vision_config=VISION,
            tie_word_embeddings=True,
        ),
        "qwen3_5_moe": Qwen3_5MoeTextConfig(
            **SIZES | {"num_hidden_layers": 3},
            **LINEAR_ATTENTION,
            **LINEAR_EXPERTS,
            full_attention_interval=2,
        ),
        "qwen3_5_moe_multimodal": Qwen3_5MoeConfig(
            text_config={
                **SIZES,
                **LINEAR_ATTENTION,
                **LINEAR_EXPERTS,
                "layer_types": ["full_attention", "linear_attention"],
            },
            vision_config=VISION,
        ),
        "qwen3_next": Qwen3NextConfig(
            **SIZES | {"num_hidden_layers": 3},
            **LINEAR_ATTENTION | {"rope_parameters": HALF_ROTARY},
            **LINEAR_EXPERTS,
            full_attention_interval=2,
            mlp_only_layers=[1],
        ),
        "qwen3_next_sparse_step": Qwen3NextConfig(
            **SIZES | {"num_hidden_layers": 3},
            **LINEAR_ATTENTION
            | {"linear_num_key_heads": 3, "linear_num_value_heads": 3}
            | {"rope_parameters": {**HALF_ROTARY, "partial_rotary_factor": 0.25}},
            **LINEAR_EXPERTS,
            layer_types=["full_attention", "linear_attention", "linear_attention"],
            decoder_sparse_step=2,
            norm_topk_prob=False,
            attention_bias=True,
            tie_word_embeddings=True,
        ),
        "kimi_linear": KimiLinearConfig(  # in two chunks
            **latent | {"num_hidden_layers": 4, "vocab_size": 64, "max_position_embeddings": 96},
            num_experts=5,
            num_shared_experts=2,
            **NO_TOKENS,
            linear_attn_config={
                "kda_layers": [1, 2, 4],
                "full_attn_layers": [3],
                "num_heads": 3,
                "head_dim": 8,
                "short_conv_kernel_size": 4,
            },
        ),
        "kimi_linear_groups": KimiLinearConfig(
            **latent | {"num_hidden_layers": 3, "moe_intermediate_size": 8},
            q_lora_rank=20,
            num_experts=12,
            n_group=4,
            topk_group=2,
            n_shared_experts=1,
            norm_topk_prob=False,
            layer_types=["full_attention", "linear_attention", "linear_attention"],
            mlp_layer_types=["sparse", "dense", "sparse"],
            linear_num_heads=2,
            linear_head_dim=16,
            linear_conv_kernel_dim=3,
            **NO_TOKENS,
        ),
        "bailing_hybrid": BailingHybridConfig(  # in two chunks
            **latent | {"vocab_size": 64, "max_position_embeddings": 96},
            head_dim=8,
            layer_group_size=3,
            routed_scaling_factor=1.5,
            num_experts=12,
            n_group=4,
            topk_group=2,
            n_shared_experts=2,
            q_lora_rank=20,
            kda_lower_bound=-0.4,
            rope_theta=1e4,
            **NO_TOKENS,
        ),
        "bailing_hybrid_kinds": BailingHybridConfig(
            **latent,
            head_dim=16,
            num_experts=6,
            n_group=2,
            topk_group=1,
            n_shared_experts=1,
            norm_topk_prob=False,
            kda_safe_gate=False,
            attention_bias=True,
            short_conv_kernel_size=3,
            layer_types=["full_attention", "linear_attention", "linear_attention"],
            mlp_layer_types=["sparse", "dense", "sparse"],
            rope_theta=1e4,
            rope_parameters=DEEPSEEK_ROPE,
            **NO_TOKENS,
        ),
        "gemma3n": Gemma3nTextConfig(
            **SIZES | GEMMA3N | {"intermediate_size": [48, 40, 40, 48, 48, 40]},
            activation_sparsity_pattern=[0.9, 0.0, 0.8, 0.0, 0.0, 0.5],
        ),
        "gemma3n_active": Gemma3nTextConfig(
            **SIZES
            | {key: size for key, size in GEMMA3N.items() if key != "layer_types"}
            | {"num_hidden_layers": 7, "num_kv_shared_layers": 0, "vocab_size_per_layer_input": 96},
            altup_num_inputs=2,
            altup_active_idx=1,
            altup_correct_scale=False,
            attention_bias=True,
            hidden_activation="silu",
        ),
        "dots1": Dots1Config(
            **SIZES | {"num_hidden_layers": 3},
            **BIASED_EXPERTS,
            head_dim=16,
            attention_bias=True,
            n_shared_experts=2,
            norm_topk_prob=True,
            first_k_dense_replace=1,
            sliding_window=7,
            max_window_layers=1,
        ),
        "minimax_m2": MiniMaxM2Config(
            **SIZES,
            head_dim=16,
            rotary_dim=8,
            num_local_experts=5,
            num_experts_per_tok=2,
            **NO_TOKENS,
        ),
        "glm4_moe_lite": Glm4MoeLiteConfig(
            **own_latent, **BIASED_EXPERTS | {"n_routed_experts": 8}, n_group=4, topk_group=2
        ),
        "exaone_moe": ExaoneMoeConfig(
            **SIZES | {"num_hidden_layers": 3},
            **COUNTED_EXPERTS,
            head_dim=16,
            sliding_window=7,
            sliding_window_pattern=2,
            routed_scaling_factor=1.5,
            **NO_TOKENS,
        ),
        "solar_open": SolarOpenConfig(
            **SIZES, **BIASED_EXPERTS, head_dim=16, attention_bias=True, **NO_TOKENS
        ),
        "afmoe": AfmoeConfig(
            **SIZES | {"num_hidden_layers": 3},
            **COUNTED_EXPERTS,
            head_dim=16,
            sliding_window=7,
            global_attn_every_n_layers=2,
            route_scale=1.5,
            mup_enabled=True,
            **NO_TOKENS,
        ),
        "flex_olmo": FlexOlmoConfig(**SIZES, num_experts=5, num_experts_per_tok=2, **NO_TOKENS),
        "cohere2_moe": Cohere2MoeConfig(
            **SIZES | {"num_hidden_layers": 3, "intermediate_size": 24},
            **COHERE_EXPERTS,
            first_k_dense_replace=1,
            prefix_dense_intermediate_size=40,
            num_shared_experts=2,
            expert_selection_fn="sigmoid",
        ),
        "cohere2_moe_rms": Cohere2MoeConfig(
            **SIZES | {"intermediate_size": 24},
            **COHERE_EXPERTS,
            rms_norm_eps=1e-3,
            num_shared_experts=1,
            shared_expert_combination_strategy="sum",
            attention_bias=True,
            tie_word_embeddings=False,
        ),
        "hy_v3": HYV3Config(
            **SIZES, **COUNTED_EXPERTS, head_dim=16, attention_bias=True, **NO_TOKENS
        ),
        "granite_moe_shared": GraniteMoeSharedConfig(
            **SIZES | {"intermediate_size": 24},
            attention_multiplier=0.3,
            embedding_multiplier=3.0,
            residual_multiplier=0.5,
            logits_scaling=0.5,
            num_local_experts=5,
            num_experts_per_tok=2,
            shared_intermediate_size=20,
            **NO_TOKENS,
        ),
        "mistral4": Mistral3Config(
            text_config={
                "model_type": "mistral4",
                **own_latent,
                **BIASED_EXPERTS,
                "n_routed_experts": 8,
                "first_k_dense_replace": 1,
                "n_group": 4,
                "topk_group": 2,
                "rope_parameters": {**MINISTRAL3_ROPE, "beta_fast": 4.0},
                **NO_TOKENS,
            },
            vision_config=PIXTRAL,
            tie_word_embeddings=False,
        ),
        "phimoe": PhimoeConfig(
            **SIZES,
            num_local_experts=5,
            router_jitter_noise=0.2,
            attention_bias=True,
            lm_head_bias=True,
            rope_parameters=PHIMOE_ROPE,
            **NO_TOKENS,
        ),
        "llama4": Llama4TextConfig(**LLAMA4, **NO_TOKENS),
        "llama4_plain": Llama4TextConfig(
            **LLAMA4
            | {"use_qk_norm": False, "attn_temperature_tuning": False, "attention_bias": True}
            | {"moe_layers": [0], "no_rope_layers": [0, 1, 1], "tie_word_embeddings": True},
            **NO_TOKENS,
        ),
        "minicpm3": MiniCPM3Config(
            **own_latent,
            scale_emb=3.0,
            scale_depth=0.7,
            dim_model_base=16,
            rope_parameters=MINICPM3_ROPE,
            **NO_TOKENS,
        ),
        "llava": LlavaConfig(
            text_config={"model_type": "llama", **SIZES, "tie_word_embeddings": True},
            vision_config=CLIP,
            tie_word_embeddings=True,
        ),
        "qwen2_5_vl": Qwen2_5_VLConfig(
            text_config={**SIZES, "rope_parameters": QWEN2_VL_ROPE}, vision_config=VISION
        ),
        "qwen3_vl": Qwen3VLConfig(
            text_config={
                **SIZES,
                "head_dim": 16,
                "rope_parameters": {**QWEN2_VL_ROPE, "mrope_interleaved": True},
                "tie_word_embeddings": True,
            },
            vision_config={**VISION, "deepstack_visual_indexes": [0]},
            tie_word_embeddings=True,
        ),
        "gemma3_multimodal": Gemma3Config(
            text_config={
                **SIZES,
                "num_hidden_layers": 3,
                "head_dim": 16,
                "sliding_window": 7,
                "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
                "query_pre_attn_scalar": 24,
            },
            vision_config={**CLIP, "model_type": "siglip_vision_model"},
        ),
        "glm4v": Glm4vConfig(
            text_config={**SIZES, "rope_parameters": GLM4V_ROPE},
            vision_config={**VISION, "image_size": 4},
        ),
        "sarvam_moe": SarvamMoEConfig(
            **SIZES, **BIASED_EXPERTS, head_dim=16, attention_bias=True, **NO_TOKENS
        ),
        "sarvam_mla": SarvamMLAConfig(
            **{key: size for key, size in latent.items() if key != "num_key_value_heads"}
            | BIASED_EXPERTS,
            rope_scaling={"type": "deepseek_yarn", **SARVAM_ROPE},
            **NO_TOKENS,
        ),
        "youtu": YoutuConfig(**own_latent, attention_bias=True, **NO_TOKENS),
        "mellum": MellumConfig(
            **SIZES | {"num_hidden_layers": 3},
            head_dim=16,
            num_experts=5,
            num_experts_per_tok=3,
            moe_intermediate_size=24,
            sliding_window=7,
            layer_types=["sliding_attention", "full_attention", "sliding_attention"],
            mlp_layer_types=["sparse", "dense", "sparse"],
            rope_parameters={"sliding_attention": LINEAR_ROPE, "full_attention": YARN_ROPE},
            attention_bias=True,
        ),
        "lfm2": Lfm2Config(
            **SIZES | {"num_hidden_layers": 3},
            block_multiple_of=20,
            block_ffn_dim_multiplier=1.1,
            conv_bias=True,
            layer_types=["conv", "full_attention", "conv"],
        ),
        "lfm2_moe": Lfm2MoeConfig(
            **SIZES | {"num_hidden_layers": 3},
            moe_intermediate_size=24,
            num_experts=5,
            num_experts_per_tok=2,
            num_dense_layers=1,
            conv_L_cache=4,
            routed_scaling_factor=1.5,
            layer_types=["conv", "conv", "full_attention"],
            tie_word_embeddings=False,
        ),
        "bamba": BambaConfig(  # in two chunks
            **SIZES | {"num_hidden_layers": 3, "vocab_size": 48, "max_position_embeddings": 96},
            **MAMBA2,
            attn_layer_indices=[1],
            attention_bias=True,
            mlp_bias=True,
            mamba_conv_bias=False,
            mamba_proj_bias=True,
            time_step_limit=(0.3, 0.9),
        ),
        "granite_hybrid": GraniteMoeHybridConfig(
            **SIZES | {"num_hidden_layers": 3, "intermediate_size": 16},
            **MAMBA2,
            **GRANITE_FACTORS,
            layer_types=["linear_attention", "full_attention", "linear_attention"],
            num_local_experts=3,
            shared_intermediate_size=24,
        ),
        "granite_hybrid_rope": GraniteMoeHybridConfig(
            **SIZES,
            **MAMBA2 | {"mamba_n_groups": 1, "mamba_d_head": 16, "mamba_n_heads": 4},
            **GRANITE_FACTORS,
            layer_types=["full_attention", "linear_attention"],
            num_local_experts=0,
            shared_intermediate_size=24,
            position_embedding_type="rope",
            tie_word_embeddings=True,
        ),
        "falcon_h1": FalconH1Config(
            **SIZES,
            **MAMBA2 | FALCON_FACTORS | {"mamba_n_heads": 4},
            mamba_d_ssm=48,
            mamba_rms_norm=True,
            mamba_proj_bias=True,
            projectors_bias=True,
            attention_bias=True,
            mlp_bias=True,
        ),
        "falcon_h1_plain": FalconH1Config(
            **SIZES,
            **MAMBA2 | {"mamba_n_groups": 1, "mamba_d_head": 16, "mamba_n_heads": 4},
            mamba_d_ssm=64,
            tie_word_embeddings=True,
        ),
        "falcon_h1_gate_first": FalconH1Config(
            **SIZES | {"num_hidden_layers": 1},
            **MAMBA2,
            mamba_d_ssm=None,
            mamba_rms_norm=True,
            mamba_norm_before_gate=False,
            head_dim=16,
        ),
        "nemotron_h": NemotronHConfig(
            **{key: size for key, size in SIZES.items() if key != "num_hidden_layers"},
            hybrid_override_pattern="MM-*-M",
            head_dim=16,
            mamba_num_heads=6,
            mamba_head_dim=12,
            ssm_state_size=16,
            n_groups=2,
            conv_kernel=3,
            time_step_min=0.4,
            use_bias=True,
            mlp_bias=True,
        ),
        "mamba2": Mamba2Config(
            vocab_size=96,
            hidden_size=32,
            num_hidden_layers=3,
            num_heads=8,
            head_dim=8,
            state_size=16,
            n_groups=2,
            use_bias=True,
        ),
        "mamba2_tied": Mamba2Config(  # in two chunks
            vocab_size=48,
            hidden_size=32,
            num_hidden_layers=2,
            num_heads=4,
            head_dim=16,
            state_size=24,
            n_groups=1,
            use_conv_bias=False,
            tie_word_embeddings=True,
        ),
        "mamba": MambaConfig(
            vocab_size=48, hidden_size=32, num_hidden_layers=2, state_size=8, use_conv_bias=False
        ),
        "falcon_mamba": FalconMambaConfig(  # in two chunks
            vocab_size=48,
            hidden_size=32,
            num_hidden_layers=2,
            state_size=8,
            conv_kernel=3,
            time_step_rank=5,
            use_bias=True,
            tie_word_embeddings=False,
        ),
        "jamba": JambaConfig(
            **SIZES | {"num_hidden_layers": 3, "intermediate_size": 24},
            num_experts=3,
            mamba_proj_bias=True,
            mamba_d_state=8,
            attn_layer_period=3,
            attn_layer_offset=1,
        ),
        "olmo_hybrid": OlmoHybridConfig(
            **SIZES,
            **NO_TOKENS,
            layer_types=["linear_attention", "full_attention"],
            linear_num_key_heads=2,
            linear_key_head_dim=6,
        ),
        "olmo_hybrid_rope": OlmoHybridConfig(
            **SIZES,
            **NO_TOKENS,
            attention_bias=True,
            layer_types=["full_attention", "linear_attention"],
            rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
            linear_allow_neg_eigval=False,
            tie_word_embeddings=True,
        ),
        "axk1": AXK1Config(
            **latent
            | {key: BIASED_EXPERTS[key] for key in ("n_routed_experts", "routed_scaling_factor")},
            n_group=1,
            topk_group=1,
            q_lora_rank=20,
            rope_parameters=LATENT_ROPE,
        ),
        "axk1_groups": AXK1Config(
            **{**own_latent, "num_hidden_layers": 2},
            moe_intermediate_size=24,
            num_experts_per_tok=3,
            n_routed_experts=8,
            n_group=4,
            topk_group=2,
            mlp_layer_types=["sparse", "dense"],
            rope_interleave=False,
            attention_bias=True,
            norm_topk_prob=False,
        ),
        "dbrx": DbrxConfig(
            d_model=32,
            n_heads=4,
            n_layers=2,
            max_seq_len=64,
            vocab_size=96,
            attn_config={"clip_qkv": 1.5, "kv_n_heads": 2, "rope_theta": 500000.0},
            rope_parameters={"rope_type": "default", "rope_theta": 500000.0},
            ffn_config={"ffn_hidden_size": 24, "moe_num_experts": 5, "moe_top_k": 3},
        ),
        "dbrx_plain": DbrxConfig(
            d_model=32,
            n_heads=4,
            n_layers=1,
            max_seq_len=64,
            vocab_size=96,
            attn_config={"clip_qkv": 9.0, "kv_n_heads": 4, "rope_theta": 10000.0},
            ffn_config={
                "ffn_hidden_size": 24,
                "moe_num_experts": 3,
                "moe_top_k": 2,
                "moe_normalize_expert_weights": None,
            },
        ),
        "laguna": LagunaConfig(
            **SIZES,
            head_dim=16,
            num_attention_heads_per_layer=[4, 6],
            attention_bias=True,
            layer_types=["sliding_attention", "full_attention"],
            mlp_layer_types=["sparse", "dense"],
            sliding_window=7,
            num_experts=5,
            num_experts_per_tok=2,
            moe_intermediate_size=24,
            shared_expert_intermediate_size=20,
            moe_routed_scaling_factor=1.5,
        ),
        "laguna_elements": LagunaConfig(
            **SIZES,
            head_dim=8,
            gating="per-element",
            rope_parameters={
                "full_attention": {"rope_type": "default", "rope_theta": 1000.0},
                "sliding_attention": HALF_ROTARY,
            },
            layer_types=["sliding_attention", "full_attention"],
            sliding_window=5,
            num_experts=3,
            num_experts_per_tok=2,
            moe_intermediate_size=24,
            shared_expert_intermediate_size=20,
            tie_word_embeddings=True,
        ),
        "nemotron_h_experts": NemotronHConfig(
            **{key: size for key, size in SIZES.items() if key != "num_hidden_layers"},
            hybrid_override_pattern="ME*E",
            head_dim=16,
            mamba_num_heads=4,
            mamba_head_dim=8,
            ssm_state_size=16,
            n_groups=2,
            n_routed_experts=8,
            num_experts_per_tok=3,
            n_group=4,
            topk_group=2,
            moe_intermediate_size=24,
            moe_shared_expert_intermediate_size=20,
            routed_scaling_factor=2.5,
        ),
        "nemotron_h_latent": NemotronHConfig(
            **{key: size for key, size in SIZES.items() if key != "num_hidden_layers"},
            layers_block_type=["moe", "full_attention", "linear_attention"],
            head_dim=16,
            mamba_num_heads=4,
            mamba_head_dim=8,
            ssm_state_size=16,
            n_groups=2,
            n_routed_experts=5,
            num_experts_per_tok=2,
            moe_intermediate_size=24,
            moe_latent_size=12,
            moe_shared_expert_intermediate_size=20,
            norm_topk_prob=False,
        ),
        "mimo_v2_flash": MiMoV2FlashConfig(
            **SIZES,
            head_dim=12,
            v_head_dim=8,
            layer_types=["sliding_attention", "full_attention"],
            mlp_layer_types=["sparse", "dense"],
            sliding_window=7,
            n_routed_experts=5,
            num_experts_per_tok=2,
            moe_intermediate_size=24,
            routed_scaling_factor=1.5,
            attention_bias=True,
            rope_parameters={
                "full_attention": {
                    "rope_type": "default",
                    "rope_theta": 10000.0,
                    "partial_rotary_factor": 0.34,
                },
                "sliding_attention": {
                    "rope_type": "default",
                    "rope_theta": 1000.0,
                    "partial_rotary_factor": 0.67,
                },
            },
        ),
        "mimo_v2_flash_groups": MiMoV2FlashConfig(
            **{**SIZES, "num_hidden_layers": 6, "num_key_value_heads": 1},
            head_dim=12,
            v_head_dim=8,
            n_routed_experts=8,
            num_experts_per_tok=3,
            n_group=4,
            topk_group=2,
            moe_intermediate_size=8,
            sliding_window_size=5,
            attention_value_scale=None,
            norm_topk_prob=False,
        ),
        "longcat_flash": LongcatFlashConfig(
            **LONGCAT,
            n_routed_experts=5,
            zero_expert_num=3,
            moe_topk=3,
            routed_scaling_factor=1.5,
        ),
        "longcat_flash_yarn": LongcatFlashConfig(
            **LONGCAT | {"num_layers": 1},
            n_routed_experts=4,
            zero_expert_num=0,
            moe_topk=2,
            rope_parameters=LATENT_ROPE,
            attention_bias=True,
        ),
        "diffllama": DiffLlamaConfig(
            **SIZES | {"num_attention_heads": 8, "num_key_value_heads": 4},
            head_dim=8,
            attention_bias=True,
            rope_parameters=LINEAR_ROPE,
        ),
        "diffllama_pair": DiffLlamaConfig(**SIZES, tie_word_embeddings=True),
        "minimax": MiniMaxConfig(  # in two chunks
            **SIZES | {"num_hidden_layers": 3, "intermediate_size": 24},
            **MINIMAX_FACTORS,
            layer_types=["linear_attention", "full_attention", "linear_attention"],
            num_local_experts=5,
            head_dim=16,
            block_size=32,
        ),
        "minimax_window": MiniMaxConfig(
            **SIZES | {"intermediate_size": 24},
            num_local_experts=3,
            sliding_window=7,
            block_size=16,
            rope_parameters={"rope_type": "default", "rope_theta": 1000.0},
        ),
        "gpt2_scales": GPT2Config(
            **gpt2, n_inner=48, activation_function="relu", scale_attn_by_inverse_layer_idx=True
        ),
    }


def rope_cases() -> dict[str, dict[str, Any]]:
    """Rope sections of real size: Llama 3.1, Qwen with YaRN, linear."""
    llama3 = {**LLAMA3_ROPE, "rope_theta": 5e5, "original_max_position_embeddings": 8192}
    yarn = {**YARN_ROPE, "rope_theta": 1e6, "original_max_position_embeddings": 32768}
    return {
        "linear": {**LINEAR_ROPE, "factor": 4.0},
        "llama3": llama3,
        "yarn": yarn,
        "yarn_attention_factor": {**yarn, "attention_factor": 1.25, "beta_fast": 16.0},
        "yarn_mscale": {**yarn, "mscale": 1.0, "mscale_all_dim": 0.707},
        "yarn_not_truncated": {**yarn, "truncate": False, "finetuned": True},
        "yarn_derived": {key: yarn[key] for key in ("rope_type", "rope_theta", "factor")},
        "yarn_short": {**yarn, "original_max_position_embeddings": 16, "beta_fast": 64.0},
        "dynamic": {**DYNAMIC_ROPE, "factor": 4.0},
        "dynamic_long": {**DYNAMIC_ROPE, "factor": 4.0},
        "longrope": LONG_ROPE,
        "longrope_long": LONG_ROPE,
        "proportional": {
            "rope_type": "proportional",
            "rope_theta": 1e6,
            "factor": 2.0,
            "partial_rotary_factor": 0.25,
        },
    }


LONG_ROPE = {
    "rope_type": "longrope",
    "rope_theta": 1e4,
    "short_factor": [1 + i / 64 for i in range(64)],
    "long_factor": [1 + i / 4 for i in range(64)],
    "original_max_position_embeddings": 4096,
}
POSITIONS, LONG = 131072, 400_000


def randomise(model: torch.nn.Module, generator: torch.Generator) -> None:
    """Weights large enough that every part of the model shows in the logits."""
    zero_centred = model.config.get_text_config().model_type in ZERO_CENTRED
    for name, tensor in model.named_parameters():
        noise = torch.randn(tensor.shape, generator=generator)
        if name.endswith("A_log"):
            noise = noise - 2.0  # slow enough that a state is felt over several chunks
        elif tensor.ndim >= 2 and not name.endswith("bias"):  # of experts 3
            noise = noise * 1.5 / tensor.shape[-1] ** 0.5
        elif "norm" in name or "ln_" in name:
            around_zero = zero_centred and not name.endswith("linear_attn.norm.weight")
            noise = noise * 0.2 + (0.0 if name.endswith("bias") or around_zero else 1.0)
        else:
            noise = noise * 0.5
        tensor.data.copy_(noise)
    for name, tensor in model.named_buffers():
        if name.endswith(("e_score_correction_bias", "expert_bias")):
            tensor.data.copy_(0.5 * torch.randn(tensor.shape, generator=generator))
        if name.endswith("layer_scalar"):
            tensor.data.copy_(0.5 + torch.rand(tensor.shape, generator=generator))


def published(name: str, model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """The tensors as files have them: those of experts are mostly stacked only in memory."""
    if name.startswith("olmo_hybrid"):
        return _olmo_hybrid(model)
    as_published = any(".experts." in key for key in model.state_dict()) or name in RENAMED
    if name in STACKED or not as_published:
        return model.state_dict()
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        tensors = load_file(Path(folder) / "model.safetensors")
    # Kimi Linear's dense layers, which transformers saves under the name of those with experts
    return {re.sub(r"block_sparse_moe\.(\w+_proj)", r"mlp.\1", n): t for n, t in tensors.items()}


def _olmo_hybrid(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """OLMo Hybrid's, of which transformers saves convolutions in three equal parts."""
    made: dict[str, torch.Tensor] = {}
    config, tensors = model.config, model.state_dict()
    keys = config.linear_num_key_heads * config.linear_key_head_dim
    values = config.linear_num_value_heads * config.linear_value_head_dim
    names = {
        "input_layernorm": "attention_layer_norm",
        "post_attention_layernorm": "feedforward_layer_norm",
    }
    for key, tensor in tensors.items():
        start, _, end = key.rpartition("conv1d.weight")
        if not end and start:
            parts = zip("qkv", tensor.split([keys, keys, values]), strict=True)
            made |= {f"{start}{part}_conv1d.weight": own for part, own in parts}
            continue
        layer = re.match(r"model\.layers\.\d+\.", key)
        linear = layer is not None and f"{layer[0]}input_layernorm.weight" in tensors
        for one, other in names.items() if linear else ():
            key = key.replace(one, other)
        made[key] = tensor
    return made


def stepwise_logits(model: torch.nn.Module, token_ids: torch.Tensor) -> torch.Tensor:
    """Logits [N, T, V] of one token a step with a cache, the recurrent form of linear attention."""
    cache, steps = DynamicCache(config=model.config.get_text_config()), []
    if model.config.model_type == "minimax":
        cache = MiniMaxCache()
    for at, token in enumerate(token_ids.split(1, dim=1)):
        # MiniMax's cache counts the keys of the first layer, which may have none
        place = torch.full_like(token, at)
        made = model(token, cache=cache, use_cache=True, position_ids=place)
        steps.append(made.logits)
    return torch.cat(steps, dim=1)


@torch.inference_mode()
def make(name: str, config: PreTrainedConfig) -> None:
    """One file."""
    torch.manual_seed(0)
    text = config.get_text_config()
    auto = AutoModelForCausalLM if text is config else AutoModelForImageTextToText
    attention = IMPLEMENTATIONS.get(name, "eager")
    model = auto.from_config(config, attn_implementation=attention).float().eval()
    generator = torch.Generator().manual_seed(SEEDS.get(name, 0))
    with torch.no_grad():
        randomise(model, generator)
    length = LENGTHS.get(name, LENGTH)
    token_ids = torch.randint(0, text.vocab_size, (2, length), generator=generator)
    logits = model(token_ids).logits
    kinds = getattr(text, "layer_types", None) or ()
    # single tokens of transformers' Mamba-2 ignore these limits
    limited = getattr(text, "time_step_limit", FREE_STEPS) != FREE_STEPS
    limited |= text.model_type == "nemotron_h"  # by time_step_min
    if RECURRENT.intersection(kinds) and not limited:
        difference = (stepwise_logits(model, token_ids) - logits).abs().max()
        assert difference < ROUNDING, f"{name}: chunks and single steps differ by {difference:.1e}"
    sequence = token_ids
    for _ in range(GENERATED):
        best = model(sequence).logits[:, -1].argmax(-1, keepdim=True)
        sequence = torch.cat([sequence, best], dim=1)
    tied = config.tie_word_embeddings
    weights = {
        f"weights/{key}": tensor.contiguous()
        for key, tensor in published(name, model).items()
        if not (tied and key in ("lm_head.weight", "output_projection.weight"))
    }
    outputs = {
        "token_ids": token_ids.int(),
        "logits": logits,
        "greedy_tokens": sequence[:, length:].int().contiguous(),
    }
    architecture = ARCHITECTURES.get(name, type(model).__name__)
    facts = {**config.to_dict(), "architectures": [architecture], **GIVEN.get(name, {})}
    for key in DERIVED.get(name, ()):
        facts.pop(key, None)
    metadata = {"config": json.dumps(facts, sort_keys=True)}
    save_file({**weights, **outputs}, DATA / f"{name}.safetensors", metadata)
    print(name, f"{logits.std():.2f}", (DATA / f"{name}.safetensors").stat().st_size)


def make_rope() -> None:
    """rope.json."""
    out = {}
    for name, section in rope_cases().items():
        length = LONG if name.endswith("_long") else None
        config = LlamaConfig(
            head_dim=128, max_position_embeddings=POSITIONS, rope_parameters={**section}
        )
        init = ROPE_INIT_FUNCTIONS[section["rope_type"]]
        frequencies, scale = init(config, seq_len=length)
        out[name] = {
            "rope_parameters": section,
            "max_position_embeddings": POSITIONS,
            "length": length,
            "head_dim": 128,
            "inverse_frequencies": frequencies.tolist(),
            "attention_scale": scale,
        }
    (DATA / "rope.json").write_text(json.dumps(out, indent=1) + "\n")


if __name__ == "__main__":
    for case, case_config in cases().items():
        if not sys.argv[1:] or case in sys.argv[1:]:
            make(case, case_config)
    make_rope()
