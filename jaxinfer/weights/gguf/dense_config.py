"""Builds the configs of further dense decoders from GGUF metadata.

Source: ``load_arch_hparams`` and the graphs of llama.cpp's
src/models/{granite,smollm3,arcee,ernie4-5,exaone,seed-oss,starcoder,starcoder2}.cpp.
"""

from __future__ import annotations

from typing import Any

from jaxinfer.weights.gguf.decoder import decoder_config
from jaxinfer.weights.gguf.metadata import ArchitectureMetadata

_NO_ROPE_INTERVAL = 4  # llama.cpp's constant for SmolLM3


def granite_config(meta: ArchitectureMetadata) -> dict[str, Any]:
    """Granite; a factor that is not set is 1, and that of scores is the usual one."""
    config = decoder_config(meta, scaled=True)
    scale = meta.number_if_set("attention.scale") or config["head_dim"] ** -0.5
    return _like_llama(meta, config) | {
        "architectures": ["GraniteForCausalLM"],
        "model_type": "granite",
        "attention_multiplier": scale,
        "embedding_multiplier": meta.number_if_set("embedding_scale") or 1.0,
        "residual_multiplier": meta.number_if_set("residual_scale") or 1.0,
        "logits_scaling": meta.number_if_set("logit_scale") or 1.0,
    }


def smollm3_config(meta: ArchitectureMetadata) -> dict[str, Any]:
    """SmolLM3; the file does not say which layers rotate."""
    return _like_llama(meta, decoder_config(meta)) | {
        "architectures": ["SmolLM3ForCausalLM"],
        "model_type": "smollm3",
        "no_rope_layer_interval": _NO_ROPE_INTERVAL,
    }


def arcee_config(meta: ArchitectureMetadata) -> dict[str, Any]:
    """Arcee's AFM, whose activation is llama.cpp's constant."""
    return _like_llama(meta, decoder_config(meta)) | {
        "architectures": ["ArceeForCausalLM"],
        "model_type": "arcee",
        "hidden_act": "relu2",
    }


def ernie4_5_config(meta: ArchitectureMetadata) -> dict[str, Any]:
    """ERNIE 4.5 (dense), whose heads rotate by adjacent components in both formats."""
    meta.only("tensor_data_layout", "reference")
    meta.only("attention.sliding_window", 0)
    return decoder_config(meta) | {
        "architectures": ["Ernie4_5ForCausalLM"],
        "model_type": "ernie4_5",
        "use_bias": meta.has_tensor("blk.0.attn_q.bias"),
    }


def exaone_config(meta: ArchitectureMetadata) -> dict[str, Any]:
    """EXAONE 3 and 3.5, whose heads rotate by halves in both formats."""
    meta.only("tensor_data_layout", "reference")
    return _like_llama(meta, decoder_config(meta)) | {
        "architectures": ["ExaoneForCausalLM"],
        "model_type": "exaone",
    }


def seed_oss_config(meta: ArchitectureMetadata) -> dict[str, Any]:
    """Seed-OSS, whose outputs of attention may have biases of their own."""
    meta.only("tensor_data_layout", "reference")
    return _like_llama(meta, decoder_config(meta)) | {
        "architectures": ["SeedOssForCausalLM"],
        "model_type": "seed_oss",
        "attention_out_bias": meta.has_tensor("blk.0.attn_output.bias"),
    }


def starcoder2_config(meta: ArchitectureMetadata) -> dict[str, Any]:
    """StarCoder2; llama.cpp computes without the window, which files do not have."""
    meta.only("tensor_data_layout", "reference")
    meta.only("attention.sliding_window", 0)
    return decoder_config(meta, eps="norm_epsilon") | {
        "architectures": ["Starcoder2ForCausalLM"],
        "model_type": "starcoder2",
        "hidden_act": "gelu_pytorch_tanh",
        "use_bias": meta.has_tensor("blk.0.attn_q.bias"),
        "sliding_window": None,
    }


def starcoder_config(meta: ArchitectureMetadata) -> dict[str, Any]:
    """StarCoder 1 (GPT-BigCode), with one KV head."""
    heads, width = meta.count("attention.head_count"), meta.count("embedding_length")
    if width % heads:
        meta.refuse("attention.head_count", heads, f"must divide embedding_length, {width}")
    for key in ("attention.key_length", "attention.value_length"):
        meta.only(key, width // heads)
    meta.only("attention.head_count_kv", 1)
    meta.only("attention.scale", 0, (width // heads) ** -0.5)
    meta.only("attention.sliding_window", 0)
    meta.only("hidden_activation", "gelu_new", "gelu_pytorch_tanh")
    meta.only("tensor_data_layout", "reference")
    return {
        "architectures": ["GPTBigCodeForCausalLM"],
        "model_type": "gpt_bigcode",
        "n_embd": width,
        "n_inner": meta.count("feed_forward_length", 4 * width),
        "n_layer": meta.num_layers,
        "n_head": heads,
        "n_positions": meta.count("context_length"),
        "layer_norm_epsilon": meta.number("attention.layer_norm_epsilon"),
        "activation_function": "gelu_pytorch_tanh",
        "multi_query": True,
    }


def _like_llama(meta: ArchitectureMetadata, config: dict[str, Any]) -> dict[str, Any]:
    """The config with Llama's switches of biases."""
    meta.only("tensor_data_layout", "reference", "Meta AI original pth")
    meta.only("attention.sliding_window", 0)
    return config | {
        "attention_bias": meta.has_tensor("blk.0.attn_q.bias"),
        "mlp_bias": meta.has_tensor("blk.0.ffn_up.bias"),
    }
