"""The tiny random models of ``make_golden.py``: a model type and config keys for each.

A case is a row of ``CASES``: the shapes that it shares with others, then its own keys, which win.
The table needs neither torch nor transformers.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

Keys = Mapping[str, Any]  # no type statement: these files are made with Python 3.11

_KINDS = {
    **{"s": "sliding_attention", "f": "full_attention", "l": "linear_attention", "c": "conv"},
    **{"d": "dense", "e": "sparse", "i": "indexed_attention"},
}


def merged(*shapes: Keys, **keys: Any) -> dict[str, Any]:
    """The keys of all shapes, of which later ones win."""
    return {key: value for shape in (*shapes, keys) for key, value in shape.items()}


def case(model_type: str, *shapes: Keys, **keys: Any) -> tuple[str, dict[str, Any]]:
    """A row of the table."""
    return model_type, merged(*shapes, **keys)


def without(shape: Keys, *names: str) -> dict[str, Any]:
    """The shape without these keys."""
    return {key: value for key, value in shape.items() if key not in names}


def kinds(letters: str) -> list[str]:
    """The kind of each layer by its first letter; of networks d(ense) and e(xperts)."""
    return [_KINDS[letter] for letter in letters]


SIZES = merged(
    vocab_size=96,
    hidden_size=32,
    intermediate_size=48,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=64,
)
NO_TOKENS = merged(pad_token_id=None, bos_token_id=None, eos_token_id=None)
BARE = merged(SIZES, NO_TOKENS)
WITHOUT_KV = without(SIZES, "num_key_value_heads")
FALCON = merged(without(WITHOUT_KV, "intermediate_size"), ffn_hidden_size=48)
GPT2 = merged(n_embd=32, n_head=4, n_layer=2, n_positions=64, vocab_size=96)
MPT = merged(vocab_size=96, n_layers=2, max_seq_len=64)
DBRX = merged(MPT, d_model=32, n_heads=4)
LONGCAT = merged(
    vocab_size=96,
    hidden_size=32,
    num_layers=2,
    num_attention_heads=4,
    max_position_embeddings=64,
    ffn_hidden_size=48,
    expert_ffn_hidden_size=24,
    q_lora_rank=20,
    kv_lora_rank=16,
    qk_nope_head_dim=12,
    qk_rope_head_dim=8,
    head_dim=8,
    v_head_dim=10,
)
LATENT_SIZES = merged(
    SIZES,
    num_hidden_layers=3,
    num_key_value_heads=4,
    kv_lora_rank=16,
    qk_nope_head_dim=12,
    qk_rope_head_dim=8,
    v_head_dim=10,
)
LATENT = merged(
    LATENT_SIZES, moe_intermediate_size=24, num_experts_per_tok=3, first_k_dense_replace=1
)
OWN_LATENT = merged(LATENT_SIZES, q_lora_rank=20)
# 8 of up to 48 tokens; with 8 heads hardly a score is 0, which others could be, too
INDEXER = merged(index_topk=8, index_n_heads=8, index_head_dim=16)

GLM5_NEXT = merged(
    without(OWN_LATENT, "qk_rope_head_dim"),
    NO_TOKENS,
    INDEXER,
    vocab_size=64,
    max_position_embeddings=96,
    moe_intermediate_size=24,
    num_experts_per_tok=3,
    index_kpool=4,
    linear_num_heads=3,
    linear_head_dim=8,
)
GLM5_VISION = merged(
    **{"hidden_size": 8, "intermediate_size": 8, "depth": 1, "num_heads": 2},
    **{"out_hidden_size": 32, "projection_intermediate_size": 8, "patch_size": 4, "image_size": 8},
)

# rope
DEFAULT_ROPE = merged(rope_type="default", rope_theta=10000.0)
HALF_ROTARY = merged(DEFAULT_ROPE, partial_rotary_factor=0.5)
LINEAR_ROPE = merged(rope_type="linear", rope_theta=10000.0, factor=2.0)
DYNAMIC_ROPE = merged(rope_type="dynamic", rope_theta=10000.0, factor=2.0)
LLAMA3_ROPE = merged(
    rope_type="llama3",
    rope_theta=10000.0,
    factor=8.0,
    low_freq_factor=1.0,
    high_freq_factor=4.0,
    original_max_position_embeddings=16,
)
YARN_ROPE = merged(
    rope_type="yarn", rope_theta=10000.0, factor=4.0, original_max_position_embeddings=16
)
DEEPSEEK_ROPE = merged(YARN_ROPE, mscale=1.0, mscale_all_dim=0.5, beta_fast=4.0, truncate=False)
GPT_OSS_ROPE = merged(YARN_ROPE, beta_fast=8.0, beta_slow=1.0, truncate=False)
LATENT_ROPE = merged(YARN_ROPE, factor=40.0, beta_fast=4.0)
SARVAM_ROPE = without(LATENT_ROPE, "rope_type")
MINISTRAL3_ROPE = merged(YARN_ROPE, llama_4_scaling_beta=0.3, mscale=1.0, mscale_all_dim=1.0)
PHI3_ROPE = merged(
    rope_type="longrope",
    rope_theta=10000.0,
    partial_rotary_factor=0.75,
    short_factor=[1.0 + i / 8 for i in range(6)],
    long_factor=[1.0 + i for i in range(6)],
)
PHIMOE_ROPE = merged(
    rope_type="longrope",
    rope_theta=10000.0,
    short_factor=[1.0 + i / 8 for i in range(4)],
    long_factor=[1.0 + i for i in range(4)],
    short_mscale=1.2,
    long_mscale=1.3,
    original_max_position_embeddings=48,
)
MINICPM3_ROPE = without(PHIMOE_ROPE, "short_mscale", "long_mscale")
GEMMA4_ROPE = merged(
    sliding_attention=merged(DEFAULT_ROPE, rope_theta=1000.0),
    full_attention=merged(HALF_ROTARY, rope_type="proportional", factor=2.0),
)
GLM4_ROPE = merged(DEFAULT_ROPE, rope_theta=1000.0, partial_rotary_factor=1.0)
QWEN2_VL_ROPE = merged(DEFAULT_ROPE, mrope_section=[2, 1, 1])
GLM4V_ROPE = merged(HALF_ROTARY, mrope_section=[1, 1, 0])
# the section splits the frequencies among time, height and width
MULTIMODAL_ROPE = merged(HALF_ROTARY, mrope_interleaved=True, mrope_section=[2, 1, 1])
QUARTER_ROTARY = merged(partial_rotary_factor=0.25, mrope_section=[1, 1, 0])

# experts
EXPERTS = merged(num_experts=5, num_experts_per_tok=2)
LOCAL_EXPERTS = merged(num_local_experts=5, num_experts_per_tok=2)
COUNTED_EXPERTS = merged(EXPERTS, moe_intermediate_size=24, num_shared_experts=2)
BIASED_EXPERTS = merged(
    n_routed_experts=5, num_experts_per_tok=2, moe_intermediate_size=24, routed_scaling_factor=1.5
)
COHERE_EXPERTS = merged(
    NO_TOKENS, EXPERTS, head_dim=8, sliding_window=7, sliding_window_pattern=2, logit_scale=0.5
)
LINEAR_EXPERTS = merged(
    moe_intermediate_size=8,
    shared_expert_intermediate_size=10,
    num_experts=5,
    num_experts_per_tok=3,
)
GROUPS = merged(n_group=4, topk_group=2)

# recurrent layers
# no two products of heads and dimensions are equal
LINEAR_ATTENTION = merged(
    head_dim=16,
    linear_num_key_heads=2,
    linear_key_head_dim=8,
    linear_num_value_heads=4,
    linear_value_head_dim=12,
    rope_parameters=MULTIMODAL_ROPE,
)
NGRAMS = merged(  # several texts in each sequence, tables in parts of which the last is smaller
    ple_layer_ids=[2],
    ple_embed_dim=24,
    heads_per_ngram=2,
    ngram_vocab_size_base=40,
    make_ngram_vocab_size_divisible_by=8,
    split_ngram_parts=3,
    eos_token_id=[5, 7],
)
# of more whole blocks than it chooses; torch chooses another one of blocks whose scores are 0,
# which are rare with many heads
POOLED_INDEXER = merged(
    indexer_n_heads=8,
    indexer_kv_heads=1,
    indexer_head_dim=12,
    indexer_budget=12,
    indexer_compress_ratio=4,
    hc_lowrank=6,
)
MAMBA2 = merged(mamba_n_heads=8, mamba_n_groups=2, mamba_d_state=16, mamba_d_conv=4)
MAMBA_HEADS = merged(mamba_n_groups=1, mamba_d_head=16, mamba_n_heads=4)
SMALL_MAMBA = merged(vocab_size=48, hidden_size=32, num_hidden_layers=2)
NEMOTRON_H = merged(
    without(SIZES, "num_hidden_layers"),
    head_dim=16,
    mamba_num_heads=4,
    mamba_head_dim=8,
    ssm_state_size=16,
    n_groups=2,
)

# encoders of images, whose weights are ignored
TOWER = merged(depth=1, hidden_size=8, intermediate_size=8, num_heads=2, out_hidden_size=32)
VISION = merged(TOWER, patch_size=2, num_position_embeddings=4)
EXAONE_VISION = merged(TOWER, num_key_value_heads=2, fullatt_block_indexes=[0])
ENCODER = merged(hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=2)
CHAMELEON = merged(
    vq_config=merged(
        **{"embed_dim": 4, "num_embeddings": 8, "latent_channels": 4, "resolution": 8},
        **{"base_channels": 32, "channel_multiplier": [1], "num_res_blocks": 1},
    )
)
MUSE = merged(
    vision_config=merged(ENCODER, pos_emb_height=2, pos_emb_width=2, patch_size=4),
    out_hidden_size=32,
    projector_hidden_size=8,
)
DOTS3 = merged(
    **{"kv_lora_rank": 16, "qk_nope_head_dim": 12, "qk_rope_head_dim": 8, "v_head_dim": 10},
    **{"q_lora_rank": 20, "num_key_value_heads": 4, "head_dim": 20, "sliding_window": 7},
    **{"swa_num_attention_heads": 4, "swa_num_key_value_heads": 4, "swa_q_lora_rank": 12},
    **{"swa_kv_lora_rank": 24, "swa_head_dim": 20, "swa_qk_nope_head_dim": 16},
    **{"swa_v_head_dim": 8, "index_n_heads": 8, "index_head_dim": 16},
    **{"moe_intermediate_size": 16, "shared_experts_intermediate_size": 24},
)
MUSE_AUDIO = merged(
    audio_config=merged(
        **{"patch_sizes": [2, 2], "hidden_sizes": [4, 8], "depths": [1, 1]},
        **{"num_hidden_layers": 2, "out_hidden_size": 32},
    )
)
MOLMO2_VISION = merged(ENCODER, num_key_value_heads=2, head_dim=4, image_size=[4, 4], patch_size=2)
MOLMO2_ADAPTER = merged(
    hidden_size=8,
    num_attention_heads=2,
    num_key_value_heads=2,
    head_dim=4,
    intermediate_size=8,
    text_hidden_size=32,
    vision_feature_layer=[0],
)
PIXTRAL = merged(ENCODER, model_type="pixtral", patch_size=2, image_size=4)
SAM = merged(
    hidden_size=8,
    output_channels=8,
    num_hidden_layers=1,
    num_attention_heads=2,
    image_size=64,
    patch_size=16,
    global_attn_indexes=[0],
    mlp_dim=8,
    downsample_channels=[8, 8],
)
MLLAMA_VISION = merged(
    hidden_size=16,
    attention_heads=2,
    vision_output_dim=96,
    image_size=28,
    num_hidden_layers=1,
    num_global_layers=1,
    intermediate_layers_indices=[0],
    intermediate_size=8,
)
CLIP = merged(ENCODER, model_type="clip_vision_model", patch_size=4, image_size=8)
GEMMA4_VISION = merged(
    ENCODER, num_attention_heads=1, num_key_value_heads=1, head_dim=8, position_embedding_size=4
)

# single families
GRANITE = merged(
    attention_multiplier=0.3, embedding_multiplier=3.0, residual_multiplier=0.5, logits_scaling=0.5
)
FALCON_FACTORS = merged(
    lm_head_multiplier=0.5,
    embedding_multiplier=3.0,
    mlp_multipliers=[0.7, 1.3],
    key_multiplier=0.6,
    attention_in_multiplier=1.2,
    attention_out_multiplier=0.8,
    ssm_multipliers=[0.6, 0.7, 1.2, 0.9, 1.1],
    ssm_in_multiplier=1.3,
    ssm_out_multiplier=0.9,
)
MINIMAX_FACTORS = merged(
    full_attn_alpha_factor=1.2,
    full_attn_beta_factor=0.9,
    linear_attn_alpha_factor=1.4,
    linear_attn_beta_factor=0.8,
    mlp_alpha_factor=1.3,
    mlp_beta_factor=0.7,
)
JETMOE = merged(
    without(SIZES, "num_attention_heads"),
    num_key_value_heads=2,
    kv_channels=8,
    intermediate_size=24,
)
LLAMA4 = merged(
    SIZES,
    num_hidden_layers=3,
    intermediate_size=24,
    intermediate_size_mlp=40,
    head_dim=16,
    num_local_experts=5,
    moe_layers=[1, 2],
    no_rope_layers=[1, 0, 1],
    floor_scale=5,
    attn_scale=0.3,
    attention_chunk_size=40,
)
GEMMA4 = merged(
    SIZES,
    num_hidden_layers=4,
    num_attention_heads=4,
    num_key_value_heads=4,
    head_dim=8,
    global_head_dim=16,
    sliding_window=7,
    layer_types=kinds("sfsf"),
    hidden_size_per_layer_input=0,
    final_logit_softcapping=10.0,
)
GEMMA3N = merged(
    num_hidden_layers=6,
    head_dim=8,
    sliding_window=7,
    layer_types=kinds("sfs") * 2,
    num_kv_shared_layers=3,
    hidden_size_per_layer_input=6,
    vocab_size_per_layer_input=64,
    laurel_rank=5,
    final_logit_softcapping=10.0,
)
GEMMA4_KEYS_TOO = merged(attention_k_eq_v=True, num_global_key_value_heads=2)
GEMMA4_EXPERTS = merged(
    enable_moe_block=True, num_experts=5, top_k_experts=3, moe_intermediate_size=12
)
GEMMA4_INPUTS = merged(
    hidden_size_per_layer_input=6,
    vocab_size_per_layer_input=64,
    num_kv_shared_layers=2,
    use_double_wide_mlp=True,
)

# A row of the table is a line or a few.
# fmt: off
COMPRESSED = merged(  # more whole windows than the indexer chooses, a window less than the prompt
    NO_TOKENS,
    vocab_size=96,
    hidden_size=32,
    moe_intermediate_size=24,
    num_hidden_layers=4,
    num_attention_heads=4,
    head_dim=16,
    q_lora_rank=20,
    num_experts_per_tok=3,
    n_routed_experts=8,
    layer_types=[
        "sliding_attention",
        "compressed_sparse_attention",
        "heavily_compressed_attention",
        "compressed_sparse_attention",
    ],
    mlp_layer_types=["hash_moe", "hash_moe", "moe", "moe"],
    compress_rates=merged(compressed_sparse_attention=4, heavily_compressed_attention=8),
    sliding_window=7,
    o_groups=2,
    o_lora_rank=6,
    index_n_heads=16,
    index_head_dim=12,
    index_topk=3,
    max_position_embeddings=64,
    compress_rope_theta=100.0,
    partial_rotary_factor=0.5,
    swiglu_limit=2.0,
    rope_parameters=merged(
        rope_type="yarn", factor=4.0, original_max_position_embeddings=16, rope_theta=10000.0
    ),
)

CASES = {
    "llama_tied": case("llama", SIZES, tie_word_embeddings=True),
    "llama_untied_llama3_rope": case("llama", SIZES, rope_parameters=LLAMA3_ROPE),
    "llama_bias_head_dim": case("llama", SIZES, attention_bias=True, head_dim=16),
    "llama_dynamic_rope": case("llama", SIZES, rope_parameters=DYNAMIC_ROPE, hidden_act="gelu"),
    "llama_linear_rope": case("llama", SIZES, rope_parameters=LINEAR_ROPE, mlp_bias=True,
        attention_bias=True),
    "mistral_window": case("mistral", SIZES, sliding_window=7),
    "mistral_acts": case("mistral", SIZES, sliding_window=None, hidden_act="quick_gelu"),
    "qwen2": case("qwen2", SIZES, tie_word_embeddings=True),
    "qwen2_window_yarn": case("qwen2", SIZES, rope_parameters=YARN_ROPE, use_sliding_window=True,
        sliding_window=7, max_window_layers=1),
    "qwen2_acts": case("qwen2", SIZES, hidden_act="relu2"),
    "qwen3": case("qwen3", SIZES, head_dim=16),
    "qwen3_yarn_rope": case("qwen3", SIZES, head_dim=16, rope_parameters=DEEPSEEK_ROPE,
        attention_bias=True, hidden_act="gelu_pytorch_tanh"),
    "gpt2": case("gpt2", GPT2),
    "gpt2_scales": case("gpt2", GPT2, n_inner=48, activation_function="relu",
        scale_attn_by_inverse_layer_idx=True),
    "gemma3": case("gemma3_text", SIZES, num_hidden_layers=5, head_dim=16, query_pre_attn_scalar=24,
        sliding_window=7, sliding_window_pattern=3,
        rope_scaling={"rope_type": "linear", "factor": 8.0}),
    "gemma3_untied": case("gemma3_text", SIZES, num_hidden_layers=4, head_dim=8, sliding_window=5,
        layer_types=kinds("sfsf"), attention_bias=True, tie_word_embeddings=False),
    "gemma3_capped": case("gemma3_text", SIZES, head_dim=8, sliding_window=5,
        layer_types=kinds("sf"), final_logit_softcapping=5.0),
    "gemma4": case("gemma4_text", GEMMA4, GEMMA4_KEYS_TOO),
    "gemma4_untied": case("gemma4_text", GEMMA4, num_key_value_heads=2,
        final_logit_softcapping=None, num_hidden_layers=3, layer_types=kinds("sff"),
        rope_parameters=GEMMA4_ROPE, attention_bias=True, tie_word_embeddings=False,
        hidden_activation="silu", rms_norm_eps=1e-3),
    "gemma4_experts": case("gemma4_text", GEMMA4, GEMMA4_KEYS_TOO, GEMMA4_EXPERTS,
        num_hidden_layers=2, layer_types=kinds("sf")),
    # layers 3 and 4 use the keys of 2 and 1
    "gemma4_layer_inputs": case("gemma4_text", GEMMA4, GEMMA4_INPUTS, num_hidden_layers=5,
        layer_types=kinds("sfssf"), vocab_size=64, intermediate_size=16, num_key_value_heads=2),
    "gemma4_multimodal": case("gemma4",
        text_config=merged(GEMMA4, GEMMA4_KEYS_TOO, num_hidden_layers=2, layer_types=kinds("sf")),
        vision_config=GEMMA4_VISION, audio_config=None),
    # no published model has all of these
    "gemma4_all": case("gemma4", text_config=merged(GEMMA4, GEMMA4_KEYS_TOO, GEMMA4_EXPERTS,
        GEMMA4_INPUTS, moe_intermediate_size=4, vocab_size=64, intermediate_size=12,
        attention_bias=True), vision_config=None, audio_config=None),
    "gemma4_unified": case("gemma4_unified",
        text_config=merged(without(GEMMA4, "hidden_size_per_layer_input"), GEMMA4_KEYS_TOO),
        vision_config=None, audio_config=None),
    "olmo2": case("olmo2", SIZES, rope_parameters=YARN_ROPE, pad_token_id=None),
    "olmo2_bias_tied": case("olmo2", SIZES, attention_bias=True, tie_word_embeddings=True,
        pad_token_id=None),
    "phi3": case("phi3", SIZES, sliding_window=7, pad_token_id=None),
    # twice the original length, where long_factor counts
    "phi3_long_rope": case("phi3", SIZES, hidden_size=64, original_max_position_embeddings=16,
        rope_parameters=PHI3_ROPE, tie_word_embeddings=True, pad_token_id=None),
    "glm": case("glm", SIZES, head_dim=16, pad_token_id=None),
    "glm_odd_rotary": case("glm", SIZES, head_dim=10, pad_token_id=None),
    # a quarter of each head rotates
    "stablelm": case("stablelm", SIZES, use_qkv_bias=True),
    "stablelm_tied": case("stablelm", SIZES, rope_parameters=GLM4_ROPE, layer_norm_eps=1e-3,
        tie_word_embeddings=True),
    "stablelm_parallel": case("stablelm", BARE, use_parallel_residual=True, qk_layernorm=True,
        use_qkv_bias=True, rope_parameters=HALF_ROTARY),
    "glm4": case("glm4", SIZES, head_dim=16, pad_token_id=None),
    "glm4_plain": case("glm4", SIZES, head_dim=8, attention_bias=False, rope_parameters=GLM4_ROPE,
        pad_token_id=None),
    "granite": case("granite", SIZES, GRANITE, attention_bias=True, mlp_bias=True),
    "granite_moe": case("granitemoe", BARE, GRANITE, LOCAL_EXPERTS, intermediate_size=24),
    "gemma2": case("gemma2", SIZES, head_dim=16, query_pre_attn_scalar=24, sliding_window=7,
        attn_logit_softcapping=3.0, final_logit_softcapping=4.0),
    "gemma2_plain": case("gemma2", SIZES, head_dim=8, attn_logit_softcapping=None,
        final_logit_softcapping=None, attention_bias=True, tie_word_embeddings=False),
    "ernie4_5_moe": case("ernie4_5_moe", BARE, moe_num_experts=5, moe_k=2, moe_intermediate_size=24,
        moe_num_shared_experts=1),
    "ernie4_5_moe_bias": case("ernie4_5_moe", BARE, moe_num_experts=4, moe_k=2,
        moe_intermediate_size=12, moe_num_shared_experts=2, use_bias=True, moe_norm_min=0.0),
    "smollm3": case("smollm3", BARE, num_hidden_layers=3, no_rope_layers=[1, 0, 1],
        use_sliding_window=True, sliding_window=7, rope_parameters=YARN_ROPE),
    "cohere": case("cohere", BARE, logit_scale=0.5),
    "cohere_norms": case("cohere", SIZES, NO_TOKENS, use_qk_norm=True),
    "cohere_bias_untied": case("cohere", BARE, attention_bias=True, tie_word_embeddings=False),
    "cohere2": case("cohere2", BARE, num_hidden_layers=3, logit_scale=0.5, sliding_window=7,
        layer_types=kinds("sfs")),
    "gemma": case("gemma", SIZES, head_dim=16, attention_bias=True),
    "ministral": case("ministral", BARE, sliding_window=7, layer_types=kinds("sf"), head_dim=16),
    "ministral3": case("ministral3", BARE, head_dim=16, rope_parameters=MINISTRAL3_ROPE),
    "mistral3": case("mistral3", text_config=merged(SIZES, model_type="ministral3", head_dim=8,
        rope_parameters=MINISTRAL3_ROPE, tie_word_embeddings=True), vision_config=PIXTRAL,
        tie_word_embeddings=True),
    "mistral4": case("mistral3", text_config=merged(OWN_LATENT, NO_TOKENS, BIASED_EXPERTS,
        model_type="mistral4", n_routed_experts=8, first_k_dense_replace=1, n_group=4, topk_group=2,
        rope_parameters=merged(MINISTRAL3_ROPE, beta_fast=4.0)), vision_config=PIXTRAL,
        tie_word_embeddings=False),
    "olmo3": case("olmo3", BARE, sliding_window=7, layer_types=kinds("sf"),
        rope_parameters=merged(full_attention=YARN_ROPE, sliding_attention=DEFAULT_ROPE),
        attention_bias=True),
    "cwm": case("cwm", BARE, head_dim=16, sliding_window=7, layer_types=kinds("fs"),
        rope_parameters=LLAMA3_ROPE, bos_token_id=1, eos_token_id=2),
    "hunyuan": case("hunyuan_v1_dense", BARE, head_dim=16,
        rope_parameters=merged(DYNAMIC_ROPE, factor=1.0, alpha=3.0)),
    "hunyuan_bias_tied": case("hunyuan_v1_dense", BARE, head_dim=8, attention_bias=True,
        tie_word_embeddings=True),
    "hunyuan_moe": case("hunyuan_v1_moe", BARE, head_dim=16, num_experts=5, moe_topk=[2, 2]),
    "hunyuan_moe_chosen": case("hunyuan_v1_moe", BARE, head_dim=8, intermediate_size=12,
        num_experts=4, moe_topk=[1, 4]),
    "apertus": case("apertus", BARE, attention_bias=True),
    "qwen2_moe": case("qwen2_moe", SIZES, EXPERTS, moe_intermediate_size=24,
        shared_expert_intermediate_size=20, mlp_only_layers=[1]),
    "olmoe": case("olmoe", BARE, EXPERTS, clip_qkv=1.0),
    "olmoe_renormalised": case("olmoe", BARE, EXPERTS, intermediate_size=24, norm_topk_prob=True,
        attention_bias=True, tie_word_embeddings=True),
    "glm4_moe": case("glm4_moe", SIZES, BIASED_EXPERTS, num_hidden_layers=3, head_dim=16,
        use_qk_norm=True, attention_bias=True, n_shared_experts=2),
    "seed_oss": case("seed_oss", SIZES, head_dim=16),
    "seed_oss_biases": case("seed_oss", SIZES, head_dim=8, attention_bias=False,
        attention_out_bias=True, mlp_bias=True, tie_word_embeddings=True),
    "ernie4_5": case("ernie4_5", SIZES, head_dim=16),
    "ernie4_5_bias": case("ernie4_5", SIZES, head_dim=8, use_bias=True, tie_word_embeddings=False),
    "exaone4": case("exaone4", SIZES, num_hidden_layers=3, sliding_window=7,
        sliding_window_pattern=2),
    "exaone4_whole": case("exaone4", SIZES, sliding_window=None, layer_types=kinds("ff"),
        tie_word_embeddings=True),
    "starcoder2": case("starcoder2", BARE, sliding_window=7),
    "starcoder2_plain": case("starcoder2", BARE, use_bias=False, tie_word_embeddings=False,
        norm_epsilon=1e-3),
    "olmo": case("olmo", BARE, clip_qkv=1.0),
    "olmo_bias_tied": case("olmo", BARE, attention_bias=True, tie_word_embeddings=True),
    "dory": case("dory", BARE, num_hidden_layers=6, head_dim=8, sliding_window=7, n_input_layers=2,
        n_output_layers=1, n_recurrent_loops=3),
    "dory_one_pass": case("dory", BARE, num_hidden_layers=4, head_dim=16, sliding_window=7,
        n_input_layers=1, n_output_layers=1, n_recurrent_loops=1, ngpt_alpha_init=0.2,
        initializer_range=0.03, layer_types=kinds("fsfs")),
    "cosmos3_edge_multimodal": case("cosmos3_edge", text_config=merged(BARE, head_dim=16,
        rope_parameters=dict(rope_type="default", rope_theta=1e8, mrope_section=[4, 2, 2])),
        vision_config=dict(hidden_size=8, intermediate_size=8, num_hidden_layers=1,
        num_attention_heads=2, patch_size=4, num_patches=4), projector_hidden_size=8),
    "arcee": case("arcee", BARE, attention_bias=True, mlp_bias=True),
    "helium": case("helium", BARE, head_dim=8),
    "nemotron": case("nemotron", BARE),
    "nemotron_biases": case("nemotron", BARE, attention_bias=True, mlp_bias=True, norm_eps=1e-3,
        tie_word_embeddings=True),
    "jais2": case("jais2", BARE),
    "gpt_neox": case("gpt_neox", WITHOUT_KV),
    "gpt_neox_sequential": case("gpt_neox", WITHOUT_KV, use_parallel_residual=False,
        attention_bias=False, rope_parameters=HALF_ROTARY),
    "phi": case("phi", BARE),
    "phi_norms": case("phi", BARE, qk_layernorm=True),
    "falcon": case("falcon", FALCON, NO_TOKENS, new_decoder_architecture=True, num_kv_heads=2),
    "falcon_one_norm": case("falcon", FALCON, NO_TOKENS, new_decoder_architecture=True,
        num_kv_heads=2, num_ln_in_parallel_attn=1, tie_word_embeddings=False),
    "falcon_7b": case("falcon", FALCON, NO_TOKENS, bias=True),
    "falcon_sequential": case("falcon", FALCON, NO_TOKENS, parallel_attn=False, multi_query=False),
    # four heads, whose slopes bfloat16 holds
    "falcon_alibi": case("falcon", FALCON, NO_TOKENS, alibi=True, bias=True, parallel_attn=False,
        multi_query=False),
    "gptj": case("gptj", GPT2, NO_TOKENS, rotary_dim=4),
    "opt_plain_norms": case("opt", WITHOUT_KV, ffn_dim=48, word_embed_proj_dim=32,
        layer_norm_elementwise_affine=False),
    "opt": case("opt", without(SIZES, "num_key_value_heads", "intermediate_size"), NO_TOKENS,
        ffn_dim=48),
    "opt_post": case("opt", WITHOUT_KV, NO_TOKENS, ffn_dim=48, word_embed_proj_dim=24,
        do_layer_norm_before=False),
    "opt_narrow": case("opt", WITHOUT_KV, NO_TOKENS, ffn_dim=48, word_embed_proj_dim=24,
        enable_bias=False, tie_word_embeddings=False),
    # six heads, which are no power of two
    "bloom": case("bloom", NO_TOKENS, vocab_size=96, hidden_size=48, n_layer=2, n_head=6,
        layer_norm_epsilon=1e-3),
    "bloom_post": case("bloom", NO_TOKENS, vocab_size=96, hidden_size=32, n_layer=2, n_head=4,
        apply_residual_connection_post_layernorm=True),
    "mpt": case("mpt", MPT, d_model=48, n_heads=6,
        attn_config=merged(clip_qkv=1.0, softmax_scale=0.5)),
    "mpt_plain": case("mpt", MPT, d_model=32, n_heads=4),
    "internlm2": case("llama", SIZES, attention_bias=True),
    "internlm3": case("internlm3", BARE, head_dim=16, attention_bias=True, mlp_bias=True),
    "mimo": case("qwen2", BARE),
    "minicpm": case("granite", BARE, embedding_multiplier=3.0, residual_multiplier=0.7 / 2**0.5,
        logits_scaling=4.0, attention_multiplier=8**-0.5, rope_parameters=LLAMA3_ROPE),
    "orion": case("stablelm", BARE, partial_rotary_factor=1.0, layer_norm_eps=1e-3),
    "nemotron_nas": case("llama", BARE, num_hidden_layers=5, rope_parameters=LLAMA3_ROPE),
    "iquestcoder": case("iquestcoder", BARE, head_dim=16, attention_bias=True),
    "nanochat": case("nanochat", BARE, attention_bias=True),
    "exaone": case("exaone", BARE, rope_parameters=LLAMA3_ROPE),
    "gpt_bigcode": case("gpt_bigcode", GPT2, NO_TOKENS),
    "gpt_bigcode_heads": case("gpt_bigcode", GPT2, NO_TOKENS, multi_query=False,
        scale_attn_weights=False, n_inner=40),
    "gpt_neo": case("gpt_neo", NO_TOKENS, vocab_size=96, hidden_size=32, num_heads=4, num_layers=3,
        attention_types=[[["global", "local"], 1], [["local"], 1]], window_size=7,
        max_position_embeddings=64),
    "codegen": case("codegen", GPT2, NO_TOKENS, n_head=8, rotary_dim=2),
    "persimmon": case("persimmon", WITHOUT_KV, NO_TOKENS),
    "vaultgemma": case("vaultgemma", BARE, num_hidden_layers=3, head_dim=16, sliding_window=7,
        query_pre_attn_scalar=9, attn_logit_softcapping=2.0, final_logit_softcapping=5.0),
    "bitnet": case("bitnet", BARE, attention_bias=True),
    "hyperclovax": case("hyperclovax", BARE, head_dim=16, embedding_multiplier=3.0,
        logits_scaling=0.5, residual_multiplier=0.7, attention_multiplier=0.2, attention_bias=True),
    "hyperclovax_before": case("hyperclovax", BARE, use_post_norm=False, residual_multiplier=0.7,
        mlp_bias=True),
    "granite_swa": case("granite_swa", BARE, num_hidden_layers=3, sliding_window=7,
        layer_types=kinds("fss"), layer_rope_theta=[0, 10000.0, 500.0], embedding_multiplier=3.0,
        logits_scaling=2.0, residual_multiplier=0.7, attention_multiplier=0.2),
    "granite_moe_swa": case("granitemoe_swa", BARE, GRANITE, LOCAL_EXPERTS, num_hidden_layers=3,
        intermediate_size=24, shared_intermediate_size=20, sliding_window=7,
        layer_rope_theta=[0, 10000.0, 500.0]),
    "biogpt": case("biogpt", WITHOUT_KV, NO_TOKENS),
    "xglm": case("xglm", NO_TOKENS, vocab_size=96, d_model=32, ffn_dim=48, num_layers=2,
        attention_heads=4, max_position_embeddings=64),
    "ctrl": case("ctrl", GPT2, NO_TOKENS, dff=48),
    "exaone4_5": case("exaone4_5", text_config=merged(SIZES, num_hidden_layers=3,
        model_type="exaone4", sliding_window=7, sliding_window_pattern=2),
        vision_config=EXAONE_VISION),
    "qwen3_moe": case("qwen3_moe", SIZES, num_hidden_layers=3, head_dim=16,
        moe_intermediate_size=24, num_experts=7, num_experts_per_tok=3, norm_topk_prob=True,
        mlp_only_layers=[1]),
    "qwen3_moe_sparse_step": case("qwen3_moe", SIZES, head_dim=8, moe_intermediate_size=40,
        num_experts=5, num_experts_per_tok=5, decoder_sparse_step=2, attention_bias=True,
        rope_parameters=YARN_ROPE, use_sliding_window=True, sliding_window=7,
        tie_word_embeddings=True),
    "mixtral_acts": case("mixtral", SIZES, num_local_experts=3, hidden_act="relu2"),
    "mixtral": case("mixtral", SIZES, num_local_experts=5, sliding_window=9, head_dim=16),
    "gpt_oss": case("gpt_oss", SIZES, num_hidden_layers=3, intermediate_size=24, head_dim=16,
        num_local_experts=5, num_experts_per_tok=3, sliding_window=5, swiglu_limit=2.0,
        rope_parameters=GPT_OSS_ROPE),
    "deepseek_v2": case("deepseek_v2", LATENT, q_lora_rank=None, n_routed_experts=7,
        n_shared_experts=2, routed_scaling_factor=1.5,
        rope_parameters=merged(LATENT_ROPE, mscale=0.707, mscale_all_dim=0.707)),
    "deepseek_v2_groups_bias": case("deepseek_v2", LATENT, GROUPS, q_lora_rank=20,
        n_routed_experts=12, n_shared_experts=1, topk_method="group_limited_greedy",
        attention_bias=True, mlp_bias=True),
    "deepseek_v3": case("deepseek_v3", LATENT, GROUPS, q_lora_rank=20, n_routed_experts=12,
        n_shared_experts=2, rope_parameters=merged(LATENT_ROPE, mscale=1.0, mscale_all_dim=1.0),
        rms_norm_eps=1e-3),
    "deepseek_v3_plain_bias": case("deepseek_v3", LATENT, q_lora_rank=None, n_routed_experts=5,
        n_group=1, topk_group=1, norm_topk_prob=False, rope_interleave=False, attention_bias=True,
        tie_word_embeddings=True),
    # linear, linear, full, linear
    "qwen3_5": case("qwen3_5_text", SIZES, LINEAR_ATTENTION, num_hidden_layers=4,
        intermediate_size=24, full_attention_interval=3),
    "qwen3_5_tied": case("qwen3_5_text", SIZES, LINEAR_ATTENTION, num_hidden_layers=4,
        intermediate_size=24, linear_key_head_dim=4, linear_num_value_heads=6,
        linear_value_head_dim=8, rope_parameters=merged(MULTIMODAL_ROPE, QUARTER_ROTARY),
        layer_types=kinds("flfl"), attention_bias=True, rms_norm_eps=1e-3,
        tie_word_embeddings=True),
    "qwen3_5_long": case("qwen3_5_text", SIZES, LINEAR_ATTENTION, num_hidden_layers=2,
        intermediate_size=24, vocab_size=48, max_position_embeddings=192,
        full_attention_interval=2),
    "qwen3_5_multimodal": case("qwen3_5", text_config=merged(SIZES, LINEAR_ATTENTION,
        full_attention_interval=2, tie_word_embeddings=True), vision_config=VISION,
        tie_word_embeddings=True),
    "qwen3_5_moe": case("qwen3_5_moe_text", SIZES, LINEAR_ATTENTION, LINEAR_EXPERTS,
        num_hidden_layers=3, full_attention_interval=2),
    "qwen3_5_moe_multimodal": case("qwen3_5_moe",
        text_config=merged(SIZES, LINEAR_ATTENTION, LINEAR_EXPERTS, layer_types=kinds("fl")),
        vision_config=VISION),
    "qwen4_exp": case("qwen4_exp_text", without(SIZES, "intermediate_size"), LINEAR_ATTENTION,
        LINEAR_EXPERTS, POOLED_INDEXER, NGRAMS, num_hidden_layers=3, vocab_size=32,
        max_position_embeddings=96, layer_types=kinds("lfl"), ple_layer_ids=[3, 1]),
    "qwen4_exp_plain": case("qwen4_exp_text", without(SIZES, "intermediate_size"), LINEAR_ATTENTION,
        LINEAR_EXPERTS, POOLED_INDEXER, num_hidden_layers=3, full_attention_interval=2, hc_count=2,
        indexer_budget=6, indexer_compress_ratio=3, attention_bias=True, norm_topk_prob=False,
        output_gate_type="sigmoid", rms_norm_eps=1e-3, tie_word_embeddings=True,
        rope_parameters=merged(MULTIMODAL_ROPE, QUARTER_ROTARY)),
    "qwen4_exp_multimodal": case("qwen4_exp", text_config=merged(
        without(SIZES, "intermediate_size"), LINEAR_ATTENTION, LINEAR_EXPERTS, POOLED_INDEXER,
        NGRAMS, full_attention_interval=2, ple_layer_ids=[1], ngram_size=4, ple_embed_dim=12,
        heads_per_ngram=1, eos_token_id=3), vision_config=VISION),
    "qwen3_next": case("qwen3_next", SIZES, LINEAR_ATTENTION, LINEAR_EXPERTS, num_hidden_layers=3,
        rope_parameters=HALF_ROTARY, full_attention_interval=2, mlp_only_layers=[1]),
    "qwen3_next_sparse_step": case("qwen3_next", SIZES, LINEAR_ATTENTION, LINEAR_EXPERTS,
        num_hidden_layers=3, linear_num_key_heads=3, linear_num_value_heads=3,
        rope_parameters=merged(HALF_ROTARY, partial_rotary_factor=0.25), layer_types=kinds("fll"),
        decoder_sparse_step=2, norm_topk_prob=False, attention_bias=True, tie_word_embeddings=True),
    # in two chunks
    "kimi_linear": case("kimi_linear", LATENT, NO_TOKENS, num_hidden_layers=4, vocab_size=64,
        max_position_embeddings=96, num_experts=5, num_shared_experts=2,
        linear_attn_config=merged(kda_layers=[1, 2, 4], full_attn_layers=[3], num_heads=3,
        head_dim=8, short_conv_kernel_size=4)),
    "kimi_linear_groups": case("kimi_linear", LATENT, NO_TOKENS, GROUPS, num_hidden_layers=3,
        moe_intermediate_size=8, q_lora_rank=20, num_experts=12, n_shared_experts=1,
        norm_topk_prob=False, layer_types=kinds("fll"), mlp_layer_types=kinds("ede"),
        linear_num_heads=2, linear_head_dim=16, linear_conv_kernel_dim=3),
    "bailing_hybrid": case("bailing_hybrid", LATENT, NO_TOKENS, vocab_size=64,  # in two chunks
        max_position_embeddings=96, head_dim=8, layer_group_size=3, routed_scaling_factor=1.5,
        num_experts=12, n_group=4, topk_group=2, n_shared_experts=2, q_lora_rank=20,
        kda_lower_bound=-0.4, rope_theta=1e4),
    "bailing_hybrid_kinds": case("bailing_hybrid", LATENT, NO_TOKENS, head_dim=16, num_experts=6,
        n_group=2, topk_group=1, n_shared_experts=1, norm_topk_prob=False, kda_safe_gate=False,
        attention_bias=True, short_conv_kernel_size=3, layer_types=kinds("fll"),
        mlp_layer_types=kinds("ede"), rope_theta=1e4, rope_parameters=DEEPSEEK_ROPE),
    "gemma3n": case("gemma3n_text", SIZES, GEMMA3N, intermediate_size=[48, 40, 40, 48, 48, 40],
        activation_sparsity_pattern=[0.9, 0.0, 0.8, 0.0, 0.0, 0.5]),
    "gemma3n_active": case("gemma3n_text", SIZES, without(GEMMA3N, "layer_types"),
        num_hidden_layers=7, num_kv_shared_layers=0, vocab_size_per_layer_input=96,
        altup_num_inputs=2, altup_active_idx=1, altup_correct_scale=False, attention_bias=True,
        hidden_activation="silu"),
    "deepseek": case("qwen2_moe", SIZES, EXPERTS, num_hidden_layers=3, moe_intermediate_size=24,
        shared_expert_intermediate_size=48, mlp_only_layers=[0], qkv_bias=False,
        norm_topk_prob=True),
    "dots1": case("dots1", SIZES, BIASED_EXPERTS, num_hidden_layers=3, head_dim=16,
        attention_bias=True, n_shared_experts=2, norm_topk_prob=True, first_k_dense_replace=1,
        sliding_window=7, max_window_layers=1),
    "minimax_m2": case("minimax_m2", BARE, LOCAL_EXPERTS, head_dim=16, rotary_dim=8),
    # 12 of up to 48 tokens, in three blocks
    "minimax_m3": case("minimax_m3_vl", vision_config=merged(ENCODER, image_size=8, patch_size=4),
        projector_hidden_size=32, text_config=merged(BARE, LOCAL_EXPERTS, num_hidden_layers=3,
        head_dim=16, rotary_dim=8, dense_intermediate_size=40, shared_intermediate_size=24,
        moe_layer_freq=[0, 1, 1], swiglu_limit=1.5, swiglu_alpha=1.3, routed_scaling_factor=1.5,
        rope_parameters=merged(DEFAULT_ROPE, partial_rotary_factor=0.5),
        sparse_attention_config=merged(sparse_num_index_heads=2, sparse_index_dim=12,
        sparse_block_size=4, sparse_topk_blocks=3, sparse_local_block=1,
        sparse_attention_freq=[0, 1, 1]))),
    "minimax_m3_text": case("minimax_m3_vl_text", SIZES, LOCAL_EXPERTS, num_attention_heads=8,
        head_dim=8, rotary_dim=8, dense_intermediate_size=40, shared_intermediate_size=20,
        mlp_layer_types=kinds("ed"), layer_types=["minimax_m3_sparse"] * 2, index_n_heads=2,
        index_head_dim=8, index_block_size=3, index_topk_blocks=5, index_local_blocks=2,
        rms_norm_eps=1e-3, tie_word_embeddings=True, pad_token_id=0, bos_token_id=1,
        eos_token_id=2),
    "glm4_moe_lite": case("glm4_moe_lite", OWN_LATENT, BIASED_EXPERTS, GROUPS, n_routed_experts=8),
    "exaone_moe_acts": case("exaone_moe", BARE, COUNTED_EXPERTS, head_dim=8, hidden_act="gelu",
        mlp_layer_types=kinds("ed"), sliding_window=7),
    "exaone_moe": case("exaone_moe", BARE, COUNTED_EXPERTS, num_hidden_layers=3, head_dim=16,
        sliding_window=7, sliding_window_pattern=2, routed_scaling_factor=1.5),
    "solar_open": case("solar_open", BARE, BIASED_EXPERTS, head_dim=16, attention_bias=True),
    "afmoe": case("afmoe", BARE, COUNTED_EXPERTS, num_hidden_layers=3, head_dim=16,
        sliding_window=7, global_attn_every_n_layers=2, route_scale=1.5, mup_enabled=True),
    "afmoe_bias": case("afmoe", BARE, COUNTED_EXPERTS, head_dim=8, moe_intermediate_size=12,
        num_experts=4, sliding_window=7, attention_bias=True),
    "flex_olmo": case("flex_olmo", BARE, EXPERTS),
    "cohere2_moe": case("cohere2_moe", SIZES, COHERE_EXPERTS, num_hidden_layers=3,
        intermediate_size=24, first_k_dense_replace=1, prefix_dense_intermediate_size=40,
        num_shared_experts=2, expert_selection_fn="sigmoid"),
    "cohere2_moe_rms": case("cohere2_moe", SIZES, COHERE_EXPERTS, intermediate_size=24,
        rms_norm_eps=1e-3, num_shared_experts=1, shared_expert_combination_strategy="sum",
        attention_bias=True, tie_word_embeddings=False),
    "hy_v3": case("hy_v3", BARE, COUNTED_EXPERTS, head_dim=16, attention_bias=True),
    "hy_v3_bias": case("hy_v3", BARE, COUNTED_EXPERTS, head_dim=8, moe_intermediate_size=12,
        num_experts=4, mlp_bias=True),
    "granite_moe_shared": case("granitemoeshared", BARE, GRANITE, LOCAL_EXPERTS,
        intermediate_size=24, shared_intermediate_size=20),
    "phimoe": case("phimoe", BARE, num_local_experts=5, router_jitter_noise=0.2,
        attention_bias=True, lm_head_bias=True, rope_parameters=PHIMOE_ROPE),
    "llama4": case("llama4_text", LLAMA4, NO_TOKENS),
    # prompt and greedy tokens begin three chunks
    "llama4_chunks": case("llama4_text", LLAMA4, NO_TOKENS, num_hidden_layers=4,
        no_rope_layers=[1, 0, 1, 1], moe_layers=[1], attention_chunk_size=12),
    "llama4_plain": case("llama4_text", LLAMA4, NO_TOKENS, use_qk_norm=False,
        attn_temperature_tuning=False, attention_bias=True, moe_layers=[0],
        no_rope_layers=[0, 1, 1], tie_word_embeddings=True),
    "llama4_chosen": case("llama4_text", LLAMA4, NO_TOKENS, num_hidden_layers=2, moe_layers=[1],
        no_rope_layers=[1, 0], intermediate_size=12, num_experts_per_tok=3),
    "minicpm3": case("minicpm3", OWN_LATENT, NO_TOKENS, scale_emb=3.0, scale_depth=0.7,
        dim_model_base=16, rope_parameters=MINICPM3_ROPE),
    "llava": case("llava", text_config=merged(SIZES, model_type="llama", tie_word_embeddings=True),
        vision_config=CLIP, tie_word_embeddings=True),
    "qwen2_5_vl": case("qwen2_5_vl", text_config=merged(SIZES, rope_parameters=QWEN2_VL_ROPE),
        vision_config=VISION),
    "qwen3_vl": case("qwen3_vl", text_config=merged(SIZES, head_dim=16,
        rope_parameters=merged(QWEN2_VL_ROPE, mrope_interleaved=True), tie_word_embeddings=True),
        vision_config=merged(VISION, deepstack_visual_indexes=[0]), tie_word_embeddings=True),
    "gemma3_multimodal": case("gemma3", text_config=merged(SIZES, num_hidden_layers=3, head_dim=16,
        sliding_window=7, layer_types=kinds("sfs"), query_pre_attn_scalar=24),
        vision_config=merged(CLIP, model_type="siglip_vision_model")),
    "glm4v": case("glm4v", text_config=merged(SIZES, rope_parameters=GLM4V_ROPE),
        vision_config=merged(VISION, image_size=4)),
    "sarvam_moe": case("sarvam_moe", BARE, BIASED_EXPERTS, head_dim=16, attention_bias=True),
    "sarvam_mla": case("sarvam_mla", without(LATENT, "num_key_value_heads"), BIASED_EXPERTS,
        NO_TOKENS, rope_scaling=merged(SARVAM_ROPE, type="deepseek_yarn")),
    "youtu": case("youtu", OWN_LATENT, NO_TOKENS, attention_bias=True),
    "mellum": case("mellum", SIZES, num_hidden_layers=3, head_dim=16, num_experts=5,
        num_experts_per_tok=3, moe_intermediate_size=24, sliding_window=7, layer_types=kinds("sfs"),
        mlp_layer_types=kinds("ede"),
        rope_parameters=merged(full_attention=YARN_ROPE, sliding_attention=LINEAR_ROPE),
        attention_bias=True),
    "lfm2": case("lfm2", SIZES, num_hidden_layers=3, block_multiple_of=20,
        block_ffn_dim_multiplier=1.1, conv_bias=True, layer_types=kinds("cfc")),
    "lfm2_moe": case("lfm2_moe", SIZES, EXPERTS, num_hidden_layers=3, moe_intermediate_size=24,
        num_dense_layers=1, conv_L_cache=4, routed_scaling_factor=1.5, layer_types=kinds("ccf"),
        tie_word_embeddings=False),
    "lfm3": case("lfm3", SIZES, NO_TOKENS, num_hidden_layers=4, head_dim=16, sliding_window=5,
        layer_types=kinds("csfc"), attention_bias=True, conv_bias=True),
    "lfm3_plain": case("lfm3", SIZES, NO_TOKENS, num_hidden_layers=3, head_dim=8, conv_L_cache=3,
        use_sandwich_norm=False, use_attention_gate=False, tie_word_embeddings=False,
        rope_parameters=merged(full_attention=LINEAR_ROPE, sliding_attention=DEFAULT_ROPE)),
    "flint": case("flint", BARE, EXPERTS, num_hidden_layers=4, head_dim=16, sliding_window=5,
        moe_intermediate_size=24, shared_expert_intermediate_size=20, attention_bias=True,
        layer_types=kinds("fsfs"), mlp_only_layers=[0]),
    "doge": case("doge", BARE, attention_bias=True, mlp_bias=True),
    "doge_tied": case("doge", SIZES, num_key_value_heads=1, sliding_window=7,
        tie_word_embeddings=True, rope_parameters=LINEAR_ROPE),
    # in two chunks
    "bamba": case("bamba", SIZES, MAMBA2, num_hidden_layers=3, vocab_size=48,
        max_position_embeddings=96, attn_layer_indices=[1], attention_bias=True, mlp_bias=True,
        mamba_conv_bias=False, mamba_proj_bias=True, time_step_limit=(0.3, 0.9)),
    "granite_hybrid": case("granitemoehybrid", SIZES, MAMBA2, GRANITE, num_hidden_layers=3,
        intermediate_size=16, layer_types=kinds("lfl"), num_local_experts=3,
        shared_intermediate_size=24),
    "granite_hybrid_rope": case("granitemoehybrid", SIZES, MAMBA2, GRANITE, MAMBA_HEADS,
        layer_types=kinds("fl"), num_local_experts=0, shared_intermediate_size=24,
        position_embedding_type="rope", tie_word_embeddings=True),
    "falcon_h1": case("falcon_h1", SIZES, MAMBA2, FALCON_FACTORS, mamba_n_heads=4, mamba_d_ssm=48,
        mamba_rms_norm=True, mamba_proj_bias=True, projectors_bias=True, attention_bias=True,
        mlp_bias=True),
    "falcon_h1_plain": case("falcon_h1", SIZES, MAMBA2, MAMBA_HEADS, mamba_d_ssm=64,
        tie_word_embeddings=True),
    "falcon_h1_gate_first": case("falcon_h1", SIZES, MAMBA2, num_hidden_layers=1, mamba_d_ssm=None,
        mamba_rms_norm=True, mamba_norm_before_gate=False, head_dim=16),
    "nemotron_h": case("nemotron_h", without(SIZES, "num_hidden_layers"),
        hybrid_override_pattern="MM-*-M", head_dim=16, mamba_num_heads=6, mamba_head_dim=12,
        ssm_state_size=16, n_groups=2, conv_kernel=3, time_step_min=0.4, use_bias=True,
        mlp_bias=True),
    "nemotron_h_experts": case("nemotron_h", NEMOTRON_H, GROUPS, hybrid_override_pattern="ME*E",
        n_routed_experts=8, num_experts_per_tok=3, moe_intermediate_size=24,
        moe_shared_expert_intermediate_size=20, routed_scaling_factor=2.5),
    "nemotron_h_latent": case("nemotron_h", NEMOTRON_H,
        layers_block_type=["moe", "full_attention", "linear_attention"], n_routed_experts=5,
        num_experts_per_tok=2, moe_intermediate_size=24, moe_latent_size=12,
        moe_shared_expert_intermediate_size=20, norm_topk_prob=False),
    "mamba2": case("mamba2", vocab_size=96, hidden_size=32, num_hidden_layers=3, num_heads=8,
        head_dim=8, state_size=16, n_groups=2, use_bias=True),
    # in two chunks
    "mamba2_tied": case("mamba2", SMALL_MAMBA, num_heads=4, head_dim=16, state_size=24, n_groups=1,
        use_conv_bias=False, tie_word_embeddings=True),
    "mamba": case("mamba", SMALL_MAMBA, state_size=8, use_conv_bias=False),
    # in two chunks
    "falcon_mamba": case("falcon_mamba", SMALL_MAMBA, state_size=8, conv_kernel=3, time_step_rank=5,
        use_bias=True, tie_word_embeddings=False),
    "jamba": case("jamba", SIZES, num_hidden_layers=3, intermediate_size=24, num_experts=3,
        mamba_proj_bias=True, mamba_d_state=8, attn_layer_period=3, attn_layer_offset=1),
    "olmo_hybrid": case("olmo_hybrid", BARE, layer_types=kinds("lf"), linear_num_key_heads=2,
        linear_key_head_dim=6),
    "olmo_hybrid_rope": case("olmo_hybrid", BARE, attention_bias=True, layer_types=kinds("fl"),
        rope_parameters=DEFAULT_ROPE, linear_allow_neg_eigval=False, tie_word_embeddings=True),
    "axk1": case("axk1", LATENT, n_routed_experts=5, routed_scaling_factor=1.5, n_group=1,
        topk_group=1, q_lora_rank=20, rope_parameters=LATENT_ROPE),
    "axk1_groups": case("axk1", OWN_LATENT, GROUPS, num_hidden_layers=2, moe_intermediate_size=24,
        num_experts_per_tok=3, n_routed_experts=8, mlp_layer_types=kinds("ed"),
        rope_interleave=False, attention_bias=True, norm_topk_prob=False),
    "deepseek_v32": case("deepseek_v32", LATENT, GROUPS, INDEXER, q_lora_rank=20,
        n_routed_experts=12, rope_parameters=merged(LATENT_ROPE, mscale=1.0, mscale_all_dim=1.0)),
    "deepseek_v32_bias": case("deepseek_v32", OWN_LATENT, BIASED_EXPERTS, INDEXER, n_group=1,
        topk_group=1, attention_bias=True, norm_topk_prob=False, mlp_layer_types=kinds("ede"),
        n_shared_experts=2, rms_norm_eps=1e-3, tie_word_embeddings=True),
    # with an indexer, with one, following, with one
    "glm_moe_dsa": case("glm_moe_dsa", OWN_LATENT, BIASED_EXPERTS, INDEXER, num_hidden_layers=4,
        n_shared_experts=1, first_k_dense_replace=1, index_topk_freq=2,
        rope_parameters=merged(DEFAULT_ROPE, rope_theta=1000.0)),
    "glm_moe_dsa_groups": case("glm_moe_dsa", OWN_LATENT, BIASED_EXPERTS, GROUPS, INDEXER,
        n_routed_experts=8, index_topk_pattern="FSS", attention_bias=True, qk_nope_head_dim=16,
        v_head_dim=20, mlp_layer_types=kinds("eed")),
    # layers 0 and 2 rotate, the others do not; layers 2 and 3 have the latents of 0 and 1, of
    # which 3 has an indexer, and 2 and 4 choose as the layer before
    "mistral_large4": case("mistral_large4", text_config=merged(LATENT_SIZES, NO_TOKENS,
        BIASED_EXPERTS, GROUPS, INDEXER, num_hidden_layers=5, n_routed_experts=8,
        n_shared_experts=1, first_k_dense_replace=1, no_rope_layers=[1, 0, 1, 0, 0],
        kv_source_layers=[0, 1, 0, 1, 4], index_topk_pattern="FFSFS",
        rope_parameters=merged(LATENT_ROPE, attention_factor=1.0), rms_norm_eps=1e-3),
        vision_config=PIXTRAL, tie_word_embeddings=False),
    "axk2": case("axk2", OWN_LATENT, BIASED_EXPERTS, INDEXER, n_shared_experts=1,
        gated_norm_rank=6, rope_parameters=merged(LATENT_ROPE, mscale=1.0, mscale_all_dim=1.0)),
    "axk2_groups": case("axk2", OWN_LATENT, BIASED_EXPERTS, GROUPS, INDEXER, n_routed_experts=8,
        gated_norm_rank=5, attention_bias=True, moe_layer_freq=2, rms_norm_eps=1e-3),
    # with an indexer, with one, following twice
    "hy_v4": case("hy_v4", OWN_LATENT, NO_TOKENS, BIASED_EXPERTS, INDEXER, num_hidden_layers=4,
        hc_mult=3, hc_magnitude=1.5, swiglu_limit=1.0, rms_norm_eps=1e-3),
    "hy_v4_groups": case("hy_v4", OWN_LATENT, NO_TOKENS, BIASED_EXPERTS, GROUPS, INDEXER,
        n_routed_experts=8, n_shared_experts=2, attention_bias=True, norm_topk_prob=False,
        mlp_layer_types=kinds("ede"), indexer_types=["full", "shared", "full"],
        rope_parameters=merged(LATENT_ROPE, mscale=1.0, mscale_all_dim=1.0), hc_mult=2,
        hc_eps=1e-2, rms_norm_eps=0.5),  # an epsilon by which keys of the indexer differ
    "hy_v4_multimodal": case("hy_v4_vl", text_config=merged(OWN_LATENT, NO_TOKENS, BIASED_EXPERTS,
        INDEXER, num_hidden_layers=2, hc_mult=2, rms_norm_eps=1e-3,
        rope_parameters=merged(DEFAULT_ROPE, mrope_section=[2, 1, 1])),
        vision_config=merged(hidden_size=8, intermediate_size=8, num_hidden_layers=1,
        num_attention_heads=2, out_hidden_size=32, patch_size=4, max_image_size=8)),
    # delta, attention with an indexer, delta, attention, in two chunks of 64
    "glm5_next": case("glm5_next", text_config=merged(GLM5_NEXT, num_hidden_layers=4,
        layer_types=["linear_attention", "indexed_attention"] * 2, mlp_layer_types=kinds("dede"),
        n_routed_experts=5, hc_mult=3, hc_eps=1e-2, swiglu_limit=0.8, rms_norm_eps=1e-3,
        linear_lower_bound=-0.4),
        vision_config=GLM5_VISION),
    # attention whose choices the next layer has, too, and pools of 2; decays without a bound
    "glm5_next_shared": case("glm5_next", text_config=merged(GLM5_NEXT, GROUPS,
        num_hidden_layers=3, layer_types=["indexed_attention"] * 2 + ["linear_attention"],
        indexer_types=["full", "shared", "full"], mlp_layer_types=kinds("ede"),
        n_routed_experts=8, n_shared_experts=2, norm_topk_prob=False, index_kpool=2, hc_mult=2,
        hc_sinkhorn_iters=3, linear_lower_bound=None, linear_conv_kernel_dim=3,
        attention_bias=True),
        vision_config=GLM5_VISION, tie_word_embeddings=True),
    # in a chunk of 64 and single tokens; transformers' cache has multiples of 64 components
    "xlstm": case("xlstm", NO_TOKENS, use_cache=False, vocab_size=64, hidden_size=32,
        num_hidden_layers=2, num_heads=4, norm_eps=1e-3, eps=1e-2, gate_soft_cap=3.0,
        output_logit_soft_cap=2.0, ffn_proj_factor=1.3, ffn_round_up_to_multiple_of=8,
        v_dim_factor=0.75),
    "xlstm_plain": case("xlstm", NO_TOKENS, use_cache=False, vocab_size=64, hidden_size=24,
        num_hidden_layers=1, num_heads=2, qk_dim_factor=1.0),
    "deepseek_v4": case("deepseek_v4", COMPRESSED),
    "deepseek_v4_window": case("deepseek_v4", COMPRESSED, num_hidden_layers=2, hc_mult=3,
        hc_eps=1e-2, rms_norm_eps=1e-2, layer_types=["sliding_attention"] * 2, swiglu_limit=0.8,
        mlp_layer_types=["moe", "hash_moe"], scoring_func="sigmoid", mlp_bias=True,
        routed_scaling_factor=0.7, hc_sinkhorn_iters=2, tie_word_embeddings=True),
    "dbrx": case("dbrx", DBRX, n_layers=2,
        attn_config=merged(clip_qkv=1.5, kv_n_heads=2, rope_theta=500000.0),
        rope_parameters=merged(DEFAULT_ROPE, rope_theta=500000.0),
        ffn_config=merged(ffn_hidden_size=24, moe_num_experts=5, moe_top_k=3)),
    "dbrx_plain": case("dbrx", DBRX, n_layers=1,
        attn_config=merged(clip_qkv=9.0, kv_n_heads=4, rope_theta=10000.0),
        ffn_config=merged(ffn_hidden_size=24, moe_num_experts=3, moe_top_k=2,
        moe_normalize_expert_weights=None)),
    "laguna": case("laguna", SIZES, EXPERTS, head_dim=16, num_attention_heads_per_layer=[4, 6],
        attention_bias=True, layer_types=kinds("sf"), mlp_layer_types=kinds("ed"), sliding_window=7,
        moe_intermediate_size=24, shared_expert_intermediate_size=20,
        moe_routed_scaling_factor=1.5),
    "laguna_elements": case("laguna", SIZES, head_dim=8, gating="per-element",
        rope_parameters=merged(full_attention=merged(DEFAULT_ROPE, rope_theta=1000.0),
        sliding_attention=HALF_ROTARY), layer_types=kinds("sf"), sliding_window=5, num_experts=3,
        num_experts_per_tok=2, moe_intermediate_size=24, shared_expert_intermediate_size=20,
        tie_word_embeddings=True),
    "zaya": case("zaya", without(SIZES, "intermediate_size"), num_hidden_layers=3, head_dim=16,
        num_experts=4, moe_intermediate_size=24, router_hidden_size=8, sliding_window=7,
        layer_types=["hybrid", "hybrid_sliding", "hybrid"], cca_time0=3, lm_head_bias=True,
        tie_word_embeddings=False, pad_token_id=0, rope_parameters=merged(
        hybrid=merged(DEFAULT_ROPE, partial_rotary_factor=0.25), hybrid_sliding=HALF_ROTARY)),
    "zaya_plain": case("zaya", without(SIZES, "intermediate_size"), head_dim=8, num_experts=3,
        moe_intermediate_size=16, router_hidden_size=16),
    "chameleon": case("chameleon", SIZES, CHAMELEON, attention_bias=True, mlp_bias=True,
        rms_norm_eps=1e-2, vocabulary_map={"<image>": 3, "IMGIMGA": 5, "IMGIMGB": 6, "IMGIMGC": 9,
        "a": 10}),
    "chameleon_swin": case("chameleon", SIZES, CHAMELEON, swin_norm=True,
        vocabulary_map={"<image>": 3}, rope_parameters=LINEAR_ROPE),
    "muse_glimmer": case("muse_glimmer", MUSE,
        text_config=merged(BARE, num_hidden_layers=4, head_dim=16, sliding_window=7,
        layer_types=kinds("sfsf"), layer_rope_theta=[0, 10000.0, 10000.0, 0], post_norm_eps=1e-2,
        hidden_activation="gelu_pytorch_tanh", final_logit_softcapping=3.0,
        output_multiplier=0.7, qk_scale_factor=1.5)),
    "muse_glimmer_plain": case("muse_glimmer", MUSE,
        text_config=merged(SIZES, num_hidden_layers=5, head_dim=8, sliding_window=5,
        rope_parameters=LINEAR_ROPE)),
    "dots3_note": case("dots3_note_text", BARE, DOTS3, num_hidden_layers=5, index_topk=12,
        layer_types=kinds("sisif"), mlp_layer_types=kinds("deede"), n_routed_experts=8, n_group=4,
        topk_group=2, num_experts_per_tok=2, routed_scaling_factor=1.5, attention_bias=True),
    "dots3_note_full": case("dots3_note_text", BARE, DOTS3, num_hidden_layers=6, use_dsa=False,
        n_routed_experts=4, num_experts_per_tok=2, norm_topk_prob=False, n_shared_experts=2,
        rope_theta=1000.0, swa_rope_theta=100.0, moe_layer_freq=2, swa_num_attention_heads=2,
        swa_num_key_value_heads=2),
    "muse_spark": case("muse_spark", MUSE, MUSE_AUDIO,
        text_config=merged(BARE, num_hidden_layers=4, head_dim=16, sliding_window=7,
        layer_types=kinds("sfsf"), layer_rope_theta=[0, 10000.0, 10000.0, 0], post_norm_eps=1e-2,
        mlp_layer_types=["dense", "sparse", "sparse", "dense"], num_local_experts=5,
        num_experts_per_tok=2, moe_intermediate_size=24, moe_hidden_size=16,
        routed_scaling_factor=1.5, output_multiplier=0.7, qk_scale_factor=1.5,
        rope_parameters=DEFAULT_ROPE, residual_gate_temperature=0.5)),
    "muse_spark_sparse": case("muse_spark", MUSE, MUSE_AUDIO,
        text_config=merged(SIZES, num_hidden_layers=5, head_dim=8, sliding_window=5,
        num_local_experts=3, num_experts_per_tok=1, moe_intermediate_size=16, moe_hidden_size=24,
        rope_parameters=LINEAR_ROPE)),
    "step3p5": case("step3p7", vision_config=merged(ENCODER, image_size=8, patch_size=4),
        text_config=merged(SIZES, num_hidden_layers=4, head_dim=16, pad_token_id=0,
        num_nextn_predict_layers=1, layer_types=kinds("fssff"), moe_layers_enum="1,2",
        num_sliding_attention_heads=6, sliding_window=7, rope_theta=[1e4, 1e3, 1e3, 1e4, 1e4],
        partial_rotary_factors=[0.5, 1.0, 1.0, 0.5, 0.5], rope_scaling=LLAMA3_ROPE,
        moe_top_k=2, moe_num_experts=5, moe_intermediate_size=24, share_expert_dim=20,
        moe_router_scaling_factor=1.5, swiglu_limits=[0, 0.5, 0, 0, 0],
        swiglu_limits_shared=[0.3, 0, 0.7, 0, 0], query_pre_attn_scalar=11)),
    "step3p5_alike": case("step3p7", vision_config=merged(ENCODER, image_size=8, patch_size=4),
        text_config=merged(SIZES, num_hidden_layers=4, head_dim=8, pad_token_id=0,
        n_routed_experts=3, num_experts_per_tok=2, moe_intermediate_size=8, share_expert_dim=8,
        layer_types=kinds("sfsf"), sliding_window=5, attention_bias=True)),
    "mimo_v2_flash": case("mimo_v2_flash", SIZES, BIASED_EXPERTS, head_dim=12, v_head_dim=8,
        layer_types=kinds("sf"), mlp_layer_types=kinds("ed"), sliding_window=7, attention_bias=True,
        rope_parameters=merged(full_attention=merged(DEFAULT_ROPE, partial_rotary_factor=0.34),
        sliding_attention=merged(DEFAULT_ROPE, rope_theta=1000.0, partial_rotary_factor=0.67))),
    "mimo_v2_flash_groups": case("mimo_v2_flash", SIZES, GROUPS, num_hidden_layers=6,
        num_key_value_heads=1, head_dim=12, v_head_dim=8, n_routed_experts=8, num_experts_per_tok=3,
        moe_intermediate_size=8, sliding_window_size=5, attention_value_scale=None,
        norm_topk_prob=False),
    "longcat_flash": case("longcat_flash", LONGCAT, n_routed_experts=5, zero_expert_num=3,
        moe_topk=3, routed_scaling_factor=1.5),
    "longcat_flash_yarn": case("longcat_flash", LONGCAT, num_layers=1, n_routed_experts=4,
        zero_expert_num=0, moe_topk=2, rope_parameters=LATENT_ROPE, attention_bias=True),
    "jetmoe": case("jetmoe", JETMOE, num_local_experts=5, num_experts_per_tok=3),
    "jetmoe_untied": case("jetmoe", JETMOE, NO_TOKENS, num_key_value_heads=1, num_local_experts=3,
        tie_word_embeddings=False, activation_function="gelu", rope_parameters=LINEAR_ROPE,
        rms_norm_eps=1e-3),
    "diffllama": case("diffllama", SIZES, num_attention_heads=8, num_key_value_heads=4, head_dim=8,
        attention_bias=True, rope_parameters=LINEAR_ROPE),
    "diffllama_pair": case("diffllama", SIZES, tie_word_embeddings=True),
    "aria": case("aria", text_config=merged(SIZES, intermediate_size=24, moe_num_experts=5,
        attention_bias=True), vision_config=merged(ENCODER, image_size=8, patch_size=4)),
    "mllama": case("mllama", text_config=merged(SIZES, num_hidden_layers=4,
        cross_attention_layers=[1], bos_token_id=1, eos_token_id=2, pad_token_id=0),
        vision_config=MLLAMA_VISION),
    "paddleocr_vl": case("paddleocr_vl", text_config=merged(BARE, head_dim=16, use_bias=True,
        rope_parameters=merged(QWEN2_VL_ROPE, mrope_section=[4, 2, 2])),
        vision_config=merged(ENCODER, patch_size=2, image_size=8)),
    "deepseek_ocr2": case("deepseek_ocr2", text_config=merged(BARE, num_hidden_layers=3,
        moe_intermediate_size=24, n_routed_experts=8, num_experts_per_tok=3, n_shared_experts=1,
        mlp_layer_types=kinds("ede"), attention_bias=True, n_group=4, topk_group=2,
        topk_method="group_limited_greedy", routed_scaling_factor=1.5),
        vision_config=merged(sam_config=SAM, encoder_config=merged(ENCODER, vocab_size=8))),
    "ernie4_5_vl": case("ernie4_5_vl_moe", text_config=merged(BARE, num_hidden_layers=3,
        moe_intermediate_size=[24, 12], moe_num_experts=5, moe_k=2, moe_num_shared_experts=1,
        mlp_layer_types=kinds("ede"),
        rope_parameters=merged(DEFAULT_ROPE, mrope_section=[1, 1, 2])),
        vision_config=merged(ENCODER, depth=1, num_heads=2, patch_size=2)),
    "cohere_compass": case("cohere_compass_text", SIZES, num_hidden_layers=3, sliding_window=7,
        logit_scale=0.5, pad_token_id=0, bos_token_id=1, eos_token_id=2, layer_types=kinds("fss"),
        attention_bias=True, rope_parameters=merged(full_attention=None,
        sliding_attention=merged(QWEN2_VL_ROPE, rope_theta=1000.0))),
    "apertus1p5": case("apertus1p5_text", SIZES, pad_token_id=0, bos_token_id=1, eos_token_id=2),
    "paligemma": case("paligemma", text_config=merged(SIZES, model_type="gemma", head_dim=16),
        vision_config=merged(CLIP, model_type="siglip_vision_model"), projection_dim=32),
    "smolvlm": case("smolvlm", text_config=merged(SIZES, NO_TOKENS, model_type="llama"),
        vision_config=merged(ENCODER, image_size=8, patch_size=4)),
    "qwen3_vl_moe": case("qwen3_vl_moe", text_config=merged(SIZES, EXPERTS, head_dim=16,
        moe_intermediate_size=24, rope_parameters=merged(QWEN2_VL_ROPE, mrope_interleaved=True,
        mrope_section=[4, 2, 2])), vision_config=merged(VISION, deepstack_visual_indexes=[0])),
    "openai_gpt": case("openai-gpt", GPT2, n_layer=3),
    "gpt_neox_japanese": case("gpt_neox_japanese", without(WITHOUT_KV, "intermediate_size"),
        NO_TOKENS, intermediate_multiple_size=2, rope_parameters=HALF_ROTARY),
    # in two chunks
    "recurrent_gemma": case("recurrent_gemma", without(SIZES, "max_position_embeddings"),
        intermediate_size=64, num_hidden_layers=4, attention_window_size=7, lru_width=48,
        conv1d_width=3, attention_bias=True, logits_soft_cap=9.0),
    # in two chunks
    "rwkv": case("rwkv", vocab_size=96, hidden_size=32, intermediate_size=80, num_hidden_layers=3),
    # in two chunks
    "zamba2": case("zamba2", BARE, num_hidden_layers=3, vocab_size=48, max_position_embeddings=96,
        layers_block_type=["hybrid"] * 3,
        num_mem_blocks=2, use_shared_attention_adapter=True, adapter_rank=4, use_mem_rope=True,
        num_key_value_heads=4, add_bias_linear=True, mamba_d_state=16, mamba_ngroups=2,
        n_mamba_heads=4, mamba_d_conv=3, time_step_min=0.3,
        rope_parameters=merged(DEFAULT_ROPE, rope_theta=1000.0)),
    "zamba2_plain": case("zamba2", BARE, num_hidden_layers=3, adapter_rank=8,
        layers_block_type=["linear_attention", "hybrid", "hybrid"], n_mamba_heads=8,
        tie_word_embeddings=False),
    "kolibri1": case("kolibri1", BARE, num_hidden_layers=3, head_dim=16, num_experts=5,
        num_experts_per_tok=3, moe_intermediate_size=24, shared_expert_intermediate_size=20,
        layer_types=kinds("sfs"), sliding_window=7, norm_topk_prob=True),
    "kolibri1_tied": case("kolibri1", BARE, num_hidden_layers=5, head_dim=8, num_experts=6,
        num_experts_per_tok=2, moe_intermediate_size=8, shared_expert_intermediate_size=8,
        tie_word_embeddings=True, rope_parameters=LINEAR_ROPE),
    # in two chunks
    "lara_mini": case("lara_mini", BARE, num_hidden_layers=3, head_dim=16, vocab_size=48,
        max_position_embeddings=96, layer_types=kinds("lsf"), sliding_window=7, num_experts=5,
        num_experts_per_tok=3, moe_intermediate_size=24, shared_expert_intermediate_size=20,
        linear_num_key_heads=2, linear_num_value_heads=4, linear_key_head_dim=8,
        linear_value_head_dim=16, attention_bias=True, norm_topk_prob=False),
    "lara_mini_untied": case("lara_mini", BARE, num_hidden_layers=2, head_dim=8,
        layer_types=kinds("sl"), sliding_window=5, num_experts=4, num_experts_per_tok=2,
        moe_intermediate_size=24, shared_expert_intermediate_size=20, linear_num_key_heads=2,
        linear_num_value_heads=2, linear_key_head_dim=16, linear_value_head_dim=8,
        linear_conv_kernel_dim=3, tie_word_embeddings=False, rope_parameters=LINEAR_ROPE),
    # transformers saves the table of tokens in equal halves
    "molmo2": case("molmo2", text_config=merged(SIZES, NO_TOKENS, num_hidden_layers=3, head_dim=16,
        additional_vocab_size=96, attention_bias=True, rope_parameters=LINEAR_ROPE,
        rope_scaling_layers=[0, 2]), vision_config=MOLMO2_VISION, adapter_config=MOLMO2_ADAPTER),
    "molmo2_after": case("molmo2", text_config=merged(SIZES, NO_TOKENS, head_dim=8, norm_after=True,
        additional_vocab_size=96, qk_norm_type="olmo", rms_norm_eps=1e-5),
        vision_config=MOLMO2_VISION, adapter_config=MOLMO2_ADAPTER),
    # in two chunks
    "zamba": case("zamba", BARE, vocab_size=48, max_position_embeddings=96,
        layers_block_type=["hybrid", "hybrid"],
        mamba_d_state=8, mamba_dt_rank=3, mamba_conv_bias=False, mamba_proj_bias=True),
    "zamba_heads": case("zamba", WITHOUT_KV, NO_TOKENS, num_hidden_layers=5, n_mamba_heads=4,
        num_key_value_heads=4, attn_layer_period=2, attn_layer_offset=1, attention_head_dim=12,
        mamba_d_state=4, mamba_d_conv=3, hidden_act="silu", tie_word_embeddings=False),
    "modernbert_decoder": case("modernbert-decoder", WITHOUT_KV, num_hidden_layers=4,
        local_attention=14, pad_token_id=0, bos_token_id=1, eos_token_id=2, cls_token_id=1,
        sep_token_id=2),
    "modernbert_decoder_biases": case("modernbert-decoder", WITHOUT_KV, local_attention=14,
        pad_token_id=0, bos_token_id=1, eos_token_id=2, cls_token_id=1, sep_token_id=2,
        norm_bias=True, attention_bias=True, mlp_bias=True, decoder_bias=False,
        tie_word_embeddings=False, layer_types=kinds("sf"), classifier_activation="silu"),
    # in two chunks
    "minimax": case("minimax", SIZES, MINIMAX_FACTORS, num_hidden_layers=3, intermediate_size=24,
        layer_types=kinds("lfl"), num_local_experts=5, head_dim=16, block_size=32),
    "minimax_window": case("minimax", SIZES, intermediate_size=24, num_local_experts=3,
        sliding_window=7, block_size=16, rope_parameters=merged(DEFAULT_ROPE, rope_theta=1000.0)),
}
# fmt: on


def rope_cases() -> dict[str, dict[str, Any]]:
    """Rope sections of real size: Llama 3.1, Qwen with YaRN, linear."""
    llama3 = merged(LLAMA3_ROPE, rope_theta=5e5, original_max_position_embeddings=8192)
    yarn = merged(YARN_ROPE, rope_theta=1e6, original_max_position_embeddings=32768)
    long = merged(
        rope_type="longrope",
        rope_theta=1e4,
        short_factor=[1 + i / 64 for i in range(64)],
        long_factor=[1 + i / 4 for i in range(64)],
        original_max_position_embeddings=4096,
    )
    proportional = merged(rope_type="proportional", rope_theta=1e6)
    return {
        "linear": merged(LINEAR_ROPE, factor=4.0),
        "llama3": llama3,
        "yarn": yarn,
        "yarn_attention_factor": merged(yarn, attention_factor=1.25, beta_fast=16.0),
        "yarn_mscale": merged(yarn, mscale=1.0, mscale_all_dim=0.707),
        "yarn_not_truncated": merged(yarn, truncate=False, finetuned=True),
        "yarn_derived": without(yarn, "original_max_position_embeddings"),
        "yarn_short": merged(yarn, original_max_position_embeddings=16, beta_fast=64.0),
        "dynamic": merged(DYNAMIC_ROPE, factor=4.0),
        "dynamic_long": merged(DYNAMIC_ROPE, factor=4.0),
        "longrope": long,
        "longrope_long": long,
        "proportional": merged(proportional, factor=2.0, partial_rotary_factor=0.25),
    }
