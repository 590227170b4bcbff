"""Builds a Hugging Face config from GGUF metadata.

Owns: one function per GGUF architecture, and the map from metadata keys to the keys of config.json
and generation_config.json.
"""

from __future__ import annotations

from collections.abc import Mapping
from difflib import get_close_matches
from types import MappingProxyType
from typing import Any

import numpy as np

from jaxinfer.core.checks import short
from jaxinfer.core.errors import CheckpointError, TokenizerError, UnknownArchitectureError
from jaxinfer.core.pooling import Pooling
from jaxinfer.text.gguf_special import end_token_ids, special_id
from jaxinfer.weights.gguf.decoder import decoder_config
from jaxinfer.weights.gguf.dense_config import (
    bloom_config,
    gpt2_config,
    mpt_config,
    starcoder_config,
)
from jaxinfer.weights.gguf.dense_families import DENSE_FAMILIES
from jaxinfer.weights.gguf.experts_families import EXPERTS_FAMILIES
from jaxinfer.weights.gguf.gemma3n_config import gemma3n_config
from jaxinfer.weights.gguf.gemma4_config import gemma4_config, with_proportional_rope
from jaxinfer.weights.gguf.header import GGUFHeader
from jaxinfer.weights.gguf.hybrid_config import (
    kimi_linear_config,
    qwen3_5_config,
    qwen3_5_moe_config,
    qwen3_next_config,
)
from jaxinfer.weights.gguf.keys import refuse_unread_keys
from jaxinfer.weights.gguf.latent_config import (
    deepseek2_config,
    minicpm3_config,
    mistral4_config,
)
from jaxinfer.weights.gguf.metadata import ArchitectureMetadata
from jaxinfer.weights.gguf.rope import scaling_with_factors
from jaxinfer.weights.gguf.state_families import STATE_FAMILIES

# The sampling defaults that a file can hold, with their names in generation_config.json. Others of
# llama.cpp (xtc, mirostat, ...) are ignored, as vLLM ignores unknown keys of that file.
_SAMPLING = (
    ("temp", "temperature"),
    ("top_k", "top_k"),
    ("top_p", "top_p"),
    ("min_p", "min_p"),
    ("penalty_repeat", "repetition_penalty"),
)
# llama.cpp's defaults, for what the file does not say (common_params_sampling in common/common.h)
LLAMA_CPP_SAMPLING: Mapping[str, Any] = MappingProxyType(
    {"temperature": 0.8, "top_k": 40, "top_p": 0.95, "min_p": 0.05}
)
# llama.cpp's numbers of the kinds of pooling; 0 is none, 4 a reranker's head
_POOLING: Mapping[Any, str] = MappingProxyType({1: "mean", 2: "cls", 3: "last"})


def known_architectures() -> tuple[str, ...]:
    """The values of ``general.architecture`` that are supported."""
    return tuple(_BUILDERS)


def known_words(architecture: str) -> str:
    """Words of an error that name the known architectures that are nearest to this one."""
    known = known_architectures()
    near = get_close_matches(architecture[:100], known, cutoff=0.0)  # three of them
    return (
        f"known are {', '.join(near)} and {len(known) - len(near)} others, which docs/models.md "
        "lists"
    )


def hf_config_from_gguf(
    header: GGUFHeader,
    factors: Mapping[str, np.ndarray],  # float32[H / 2] each, by the names ``ROPE_TENSORS``
) -> dict[str, Any]:
    """The config.json of the model.

    Raises ``UnknownArchitectureError``, or ``CheckpointError`` for a missing key.
    """
    architecture = header.metadata.get("general.architecture")
    build = _BUILDERS.get(str(architecture))
    if build is None:
        raise UnknownArchitectureError(
            f"{header.path} is a GGUF of architecture {short(architecture)}; "
            f"{known_words(str(architecture))}"
        )
    meta = ArchitectureMetadata(header, str(architecture))
    config = build(meta)
    if count := meta.prediction_layers:
        config["num_nextn_predict_layers"] = count
    refuse_unread_keys(meta)
    if "token_embd.weight" not in header.tensors:
        raise CheckpointError(f"{header.path} has no tensor token_embd.weight; download it again")
    tokens = {f"{role}_token_id": _special_id(header, role) for role in ("bos", "eos")}
    config |= {
        "vocab_size": header.tensors["token_embd.weight"].shape[0],
        "tie_word_embeddings": "output.weight" not in header.tensors,
        **{key: value for key, value in tokens.items() if value is not None},
    }
    if config["model_type"] == "gemma4_text":
        config["rope_parameters"] = with_proportional_rope(header, config, factors)
    elif factors:
        config["rope_scaling"] = scaling_with_factors(header, config, factors)
    return config


def generation_config_from_gguf(header: GGUFHeader) -> dict[str, Any]:
    """The token ids that begin and end a text, and the sampling defaults that the file holds.

    Raises ``CheckpointError`` for an id that the vocabulary does not have.
    """
    bos = _special_id(header, "bos")
    try:
        ends = sorted(end_token_ids(header.metadata))
    except TokenizerError as error:
        raise CheckpointError(f"{header.path}: {error}") from error
    config: dict[str, Any] = {"eos_token_id": ends} if ends else {}
    config |= {} if bos is None else {"bos_token_id": bos}
    for name, key in _SAMPLING:
        value = header.metadata.get(f"general.sampling.{name}")
        if value is not None:
            config[key] = float(str(np.float32(value))) if isinstance(value, float) else value
    return config


def pooling_from_gguf(header: GGUFHeader) -> Pooling | None:
    """How the file's model makes embeddings, with llama.cpp's numbers; None if it does not."""
    architecture = header.metadata.get("general.architecture")
    number = header.metadata.get(f"{architecture}.pooling_type")
    kind = _POOLING.get(number) if isinstance(number, int) else None
    return None if kind is None else Pooling(kind)


def _special_id(header: GGUFHeader, role: str) -> int | None:
    try:
        return special_id(header.metadata, role)
    except TokenizerError as error:
        raise CheckpointError(f"{header.path}: {error}") from error


def _window(meta: ArchitectureMetadata) -> int | None:
    """The attention window of every layer in tokens; None without one."""
    window, pattern = "attention.sliding_window", "attention.sliding_window_pattern"
    if meta.number_if_set(window) is None:
        meta.skip(pattern)
        return None
    if meta.has(pattern):
        value = meta.header.metadata[f"{meta.architecture}.{pattern}"]
        meta.refuse(pattern, value, "is not supported beside a window", "use another model")
    return meta.count(window)


def _llama(meta: ArchitectureMetadata) -> dict[str, Any]:
    # Meta's layout interleaves the two halves of each head: see ``names.undo_interleave``.
    meta.only("tensor_data_layout", "Meta AI original pth")
    if meta.number_if_set("expert_count"):
        return _mixtral(meta)
    window = _window(meta)
    windowed = {"architectures": ["MistralForCausalLM"], "sliding_window": window}
    return decoder_config(meta) | {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        **({} if window is None else windowed),
        "attention_bias": meta.has_tensor("blk.0.attn_q.bias"),
        "mlp_bias": meta.has_tensor("blk.0.ffn_up.bias"),
    }


def _mixtral(meta: ArchitectureMetadata) -> dict[str, Any]:
    """llama.cpp renormalises the weights of the chosen experts."""
    meta.only("expert_gating_func", 0, 1)  # softmax
    meta.only("expert_feed_forward_length", 0, meta.count("feed_forward_length"))
    return decoder_config(meta) | {
        "architectures": ["MixtralForCausalLM"],
        "model_type": "mixtral",
        "num_local_experts": meta.count("expert_count"),
        "num_experts_per_tok": meta.count("expert_used_count"),
        "sliding_window": _window(meta),
    }


def _qwen(meta: ArchitectureMetadata) -> dict[str, Any]:
    """Qwen's config has a switch for the window and names the first layer that has one."""
    meta.only("tensor_data_layout", "reference")
    window = _window(meta)
    windowed = {"use_sliding_window": True, "sliding_window": window, "max_window_layers": 0}
    return decoder_config(meta) | {
        "architectures": [f"{meta.architecture.capitalize()}ForCausalLM"],
        "model_type": meta.architecture,
        **({} if window is None else windowed),
    }


def _qwen3(meta: ArchitectureMetadata) -> dict[str, Any]:
    return _qwen(meta) | {"attention_bias": meta.has_tensor("blk.0.attn_q.bias")}


def _qwen3_moe(meta: ArchitectureMetadata) -> dict[str, Any]:
    """llama.cpp renormalises the weights of the chosen experts, whatever the file says."""
    meta.only("expert_gating_func", 0, 1)  # softmax
    experts = {
        "num_experts": meta.count("expert_count"),
        "num_experts_per_tok": meta.count("expert_used_count"),
        "moe_intermediate_size": meta.count("expert_feed_forward_length"),
    }
    return (
        _qwen3(meta)
        | experts
        | {
            "architectures": ["Qwen3MoeForCausalLM"],
            "model_type": "qwen3_moe",
            "norm_topk_prob": True,
        }
    )


def _gpt_oss(meta: ArchitectureMetadata) -> dict[str, Any]:
    """Limits of SwiGLU are not in the file: llama.cpp and config.json have the same constants."""
    meta.only("expert_gating_func", 0, 3)  # a softmax of the chosen logits
    experts = {
        "intermediate_size": meta.count("expert_feed_forward_length"),
        "num_local_experts": meta.count("expert_count"),
        "num_experts_per_tok": meta.count("expert_used_count"),
        "sliding_window": meta.count("attention.sliding_window"),
    }
    # The first layer has a window, the second has none, and so on.
    alternating = [i % 2 == 0 for i in range(meta.num_layers)]
    meta.only("attention.sliding_window_pattern", 2, alternating)
    config = decoder_config(meta)
    meta.only("rope.freq_base_swa", config["rope_theta"])
    # OpenAI's code does not round the bounds of YaRN's ramp, which llama.cpp does.
    scaling = config["rope_scaling"] or {"rope_type": "default"}
    if scaling["rope_type"] == "yarn":
        scaling |= {"truncate": False}
    config["rope_scaling"] = scaling
    architecture = {"architectures": ["GptOssForCausalLM"], "model_type": "gpt_oss"}
    return config | experts | architecture | {"attention_bias": True}


def _phi3(meta: ArchitectureMetadata) -> dict[str, Any]:
    """Phi-3 to Phi-4; the window is the model's, though llama.cpp computes without it."""
    meta.only("tensor_data_layout", "reference")
    window = _window(meta)
    return decoder_config(meta, partial=True) | {
        "architectures": ["Phi3ForCausalLM"],
        "model_type": "phi3",
        "sliding_window": window,
    }


_BUILDERS = MappingProxyType(
    {
        "llama": _llama,
        "qwen2": _qwen,
        "qwen3": _qwen3,
        "qwen3moe": _qwen3_moe,
        "gpt-oss": _gpt_oss,
        "deepseek2": deepseek2_config,
        "mistral4": mistral4_config,
        "minicpm3": minicpm3_config,
        "phi3": _phi3,
        "gemma3n": gemma3n_config,
        "gemma4": gemma4_config,
        "gpt2": gpt2_config,
        "starcoder": starcoder_config,
        "bloom": bloom_config,
        "mpt": mpt_config,
        "qwen35": qwen3_5_config,
        "qwen35moe": qwen3_5_moe_config,
        "qwen3next": qwen3_next_config,
        "kimi-linear": kimi_linear_config,
        **DENSE_FAMILIES,
        **EXPERTS_FAMILIES,
        **STATE_FAMILIES,
    }
)
