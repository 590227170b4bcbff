"""Decoders that transformers lacks, in NumPy and float64, after their published code.

It shares no code with the engine: names of keys and tensors are those of the published files (and
where these cannot be had, those of vLLM's models of them).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from kit.bailing import Array, Tensors, rms, rotated, sigmoid, silu

type Config = Mapping[str, Any]


def logits(name: str, config: Config, tensors: Tensors, ids: Array) -> Array:  # [T, V]
    """The logits of a sequence, of the tiny model of this name."""
    exact = {key: one.astype(np.float64) for key, one in tensors.items()}
    return MODELS[name](config, exact, ids)


def layer_of(tensors: Tensors, start: str) -> Tensors:
    """The tensors whose names begin so, without that."""
    return {k.removeprefix(start): v for k, v in tensors.items() if k.startswith(start)}


def linear(tensors: Tensors, name: str, h: Array) -> Array:
    """A matrix and its bias, if there is one."""
    return h @ tensors[f"{name}.weight"].T + tensors.get(f"{name}.bias", 0.0)


def heads_of(x: Array, count: int) -> Array:  # [T, N * H] -> [T, N, H]
    """The components of each head."""
    return x.reshape(len(x), count, -1)


def attention(q: Array, k: Array, v: Array, window: int | None = None) -> Array:  # [T, N * H]
    """Causal attention; with a window each token sees that many, itself among them."""
    k, v = (np.repeat(one, q.shape[1] // one.shape[1], axis=1) for one in (k, v))
    scores = np.einsum("qnh,knh->nqk", q, k) / math.sqrt(q.shape[-1])
    distance = np.arange(len(q))[:, None] - np.arange(len(q))
    seen = (distance >= 0) & (distance < (window or len(q)))
    scores = np.exp(np.where(seen, scores - scores.max(-1, keepdims=True), -np.inf))
    return np.einsum("nqk,knh->qnh", scores / scores.sum(-1, keepdims=True), v).reshape(len(q), -1)


def _gated(tensors: Tensors, h: Array, start: str = "mlp.") -> Array:
    gate, up = (linear(tensors, f"{start}{name}_proj", h) for name in ("gate", "up"))
    return linear(tensors, f"{start}down_proj", silu(gate) * up)


def chatglm(config: Config, t: Tensors, ids: Array) -> Array:
    x, eps = t["transformer.embedding.word_embeddings.weight"][ids], config["layernorm_epsilon"]
    n, k = config["num_attention_heads"], config["multi_query_group_num"]
    k = k if config["multi_query_attention"] else n
    theta, half = 10000 * config.get("rope_ratio", 1.0), config["kv_channels"] // 2
    for i in range(config["num_layers"]):
        own = layer_of(t, f"transformer.encoder.layers.{i}.")
        h = rms(x, own["input_layernorm.weight"], eps)
        qkv = heads_of(linear(own, "self_attention.query_key_value", h), n + 2 * k)
        turned = rotated(qkv[:, : n + k], half, theta, adjacent=True)
        h = attention(turned[:, :n], turned[:, n:], qkv[:, n + k :])
        x = x + linear(own, "self_attention.dense", h)
        h = rms(x, own["post_attention_layernorm.weight"], eps)
        gate, up = np.split(linear(own, "mlp.dense_h_to_4h", h), 2, axis=-1)
        x = x + linear(own, "mlp.dense_4h_to_h", silu(gate) * up)
    x = rms(x, t["transformer.encoder.final_layernorm.weight"], eps)
    return x @ t["transformer.output_layer.weight"].T


def telechat2(config: Config, t: Tensors, ids: Array) -> Array:
    x, eps = t["transformer.word_embeddings.weight"][ids], config["layer_norm_epsilon"]
    n, k = config["n_head"], config["num_key_value_heads"]
    width = config["hidden_size"] // n
    alpha = 2 ** math.ceil(math.log2(config["training_seqlen"] / config["base_seqlen"]) + 1) - 1
    theta = 10000 * max(alpha, 1) ** (width / (width - 2))
    for i in range(config["n_layer"]):
        own = layer_of(t, f"transformer.h.{i}.")
        h = rms(x, own["input_layernorm.weight"], eps)
        q = heads_of(linear(own, "self_attention.query", h), n)
        keys, v = np.split(heads_of(linear(own, "self_attention.key_value", h), k), 2, axis=-1)
        h = attention(rotated(q, width, theta), rotated(keys, width, theta), v)
        x = x + linear(own, "self_attention.dense", h)
        x = x + _gated(own, rms(x, own["post_attention_layernorm.weight"], eps))
    return rms(x, t["transformer.ln_f.weight"], eps) @ t["lm_head.weight"].T


def _llama(
    config: Config,
    t: Tensors,
    ids: Array,
    factor: float = 1.0,
    before: Callable[[int, Array], Array] = lambda _, x: x,
) -> Array:
    x, eps = factor * t["model.embed_tokens.weight"][ids], config["rms_norm_eps"]
    n, k = config["num_attention_heads"], config["num_key_value_heads"]
    for i in range(config["num_hidden_layers"]):
        x, own = before(i, x), layer_of(t, f"model.layers.{i}.")
        h, theta = rms(x, own["input_layernorm.weight"], eps), config.get("rope_theta", 10000.0)
        q, keys, v = (
            heads_of(linear(own, f"self_attn.{name}_proj", h), count)
            for name, count in (("q", n), ("k", k), ("v", k))
        )
        q, keys = (rotated(one, one.shape[-1], theta) for one in (q, keys))
        made = attention(q, keys, v, config.get("sliding_window"))
        x = x + linear(own, "self_attn.o_proj", made)
        x = x + _gated(own, rms(x, own["post_attention_layernorm.weight"], eps))
    return rms(x, t["model.norm.weight"], eps) @ t["lm_head.weight"].T


def solar(config: Config, t: Tensors, ids: Array) -> Array:
    kept, share = dict[str, Array](), config["bskcn_tv"][1]

    def before(i: int, x: Array) -> Array:
        for key in ("bskcn_1", "bskcn_2"):
            if i in config[key]:
                kept[key] = x
        for key, other in (("bskcn_3", "bskcn_1"), ("bskcn_4", "bskcn_2")):
            if i in config[key]:
                x = kept[other] * share + x * (1 - share)
        return x

    return config.get("logit_scale", 1.0) * _llama(config, t, ids, before=before)


def teleflm(config: Config, t: Tensors, ids: Array) -> Array:
    if not config["use_mup"]:
        return _llama(config, t, ids)
    made = _llama(config, t, ids, config["input_mult"])
    return made * config["output_mult"] / config["mup_scale_factor"]


def plamo3(config: Config, t: Tensors, ids: Array) -> Array:
    x, eps = t["model.embed_tokens.weight"][ids], config["rms_norm_eps"]
    if config.get("scale_embedding"):
        x = x * config["hidden_size"] ** 0.5
    n, k, width = (
        config[key] for key in ("num_attention_heads", "num_key_value_heads", "head_dim")
    )
    for i in range(config["num_hidden_layers"]):
        own = layer_of(t, f"model.layers.layers.{i}.")
        full = (i + 1) % config["sliding_window_pattern"] == 0
        theta = config["rope_theta" if full else "rope_local_theta"]
        h = rms(x, own["pre_mixer_norm.weight"] + 1, eps)
        q, keys, v = np.split(heads_of(linear(own, "mixer.qkv_proj", h), n + 2 * k), (n, n + k), 1)
        q = rotated(rms(q, own["mixer.q_norm.weight"] + 1, eps), width, theta)
        keys = rotated(rms(keys, own["mixer.k_norm.weight"] + 1, eps), width, theta)
        h = attention(q, keys, v, None if full else config["window_size"])
        x = x + rms(linear(own, "mixer.o_proj", h), own["post_mixer_norm.weight"] + 0.2, eps)
        h = rms(x, own["pre_mlp_norm.weight"] + 1, eps)
        gate, up = np.split(linear(own, "mlp.gate_up_proj", h), 2, axis=-1)
        h = linear(own, "mlp.down_proj", silu(gate) * up)
        x = x + rms(h, own["post_mlp_norm.weight"] + 5**-1.5, eps)
    x = rms(x, t["model.norm.weight"] + 1, eps)
    return x @ t.get("lm_head.weight", t["model.embed_tokens.weight"]).T


def _sigmoid_experts(
    own: Tensors, h: Array, chosen: int, bias: Array | float, scale: float, *, renormalised: bool
) -> Array:
    out = _gated(own, h, "mlp.shared_experts.")
    scores = sigmoid(h @ own["mlp.gate.weight"].T)
    for at, (one, biased) in enumerate(zip(scores, scores + bias, strict=True)):
        best = np.argsort(-biased)[:chosen]
        weights = one[best] / (one[best].sum() if renormalised else 1.0) * scale
        for expert, weight in zip(best, weights, strict=True):
            out[at] += weight * _gated(own, h[at], f"mlp.experts.{expert}.")
    return out


def openpangu_ultra(config: Config, t: Tensors, ids: Array) -> Array:
    x, eps = t["model.embed_tokens.weight"][ids], config["rms_norm_eps"]
    for i in range(config["num_hidden_layers"]):
        own = layer_of(t, f"model.layers.{i}.")
        h = rms(x, own["input_layernorm.weight"], eps)
        h, second = _latent(config, own, h), own["post_attention_layernorm.weight"]
        if config["sandwich_norm"]:
            h, second = rms(h, second, eps), own["pre_mlp_layernorm.weight"]
        x = x + h
        h = rms(x, second, eps)
        if i < config["first_k_dense_replace"]:
            h = _gated(own, h)
        else:
            bias = own.get("mlp.e_score_correction_bias", 0.0)
            chosen, scale = config["num_experts_per_tok"], config["routed_scaling_factor"]
            norm = config["norm_topk_prob"]
            h = _sigmoid_experts(own, h, chosen, bias, scale, renormalised=norm)
        x = x + (rms(h, own["post_mlp_layernorm.weight"], eps) if config["sandwich_norm"] else h)
    return rms(x, t["model.norm.weight"], eps) @ t["lm_head.weight"].T


def _latent(config: Config, own: Tensors, h: Array) -> Array:
    n, nope, turned, rank = (
        config[key]
        for key in ("num_attention_heads", "qk_nope_head_dim", "qk_rope_head_dim", "kv_lora_rank")
    )
    eps, theta = config["rms_norm_eps"], config.get("rope_theta", 10000.0)
    q = linear(own, "self_attn.q_a_proj", h)
    q = rms(q, own["self_attn.q_a_layernorm.weight"], eps)
    q = heads_of(linear(own, "self_attn.q_b_proj", q), n)
    entry = linear(own, "self_attn.kv_a_proj_with_mqa", h)
    wide = rms(entry[:, :rank], own["self_attn.kv_a_layernorm.weight"], eps)
    wide = heads_of(linear(own, "self_attn.kv_b_proj", wide), n)
    shared = np.repeat(rotated(entry[:, None, rank:], turned, theta, adjacent=True), n, axis=1)
    own_part = rotated(q[..., nope:], turned, theta, adjacent=True)
    q = np.concatenate([q[..., :nope], own_part], axis=-1)
    k = np.concatenate([wide[..., :nope], shared], axis=-1)
    return linear(own, "self_attn.o_proj", attention(q, k, wide[..., nope:]))


def param2moe(config: Config, t: Tensors, ids: Array) -> Array:
    x, eps = t["model.word_embeddings.weight"][ids], config["rms_norm_eps"]
    n, k, width = (
        config[key] for key in ("num_attention_heads", "num_key_value_heads", "head_dim")
    )
    turned, theta = int(width * config["partial_rotary_factor"]), config["rope_theta"]
    for i in range(config["num_hidden_layers"]):
        own = layer_of(t, f"model.layers.{i}.")
        h = rms(x, own["input_layernorm.weight"], eps)
        qkv = heads_of(linear(own, "attention.query_key_value", h), n + 2 * k)
        q, keys, v = np.split(qkv, (n, n + k), axis=1)
        if config["use_qk_norm"]:
            q = rms(q, own["attention.query_layernorm.weight"], eps)
            keys = rms(keys, own["attention.key_layernorm.weight"], eps)
        h = attention(rotated(q, turned, theta), rotated(keys, turned, theta), v)
        x = x + linear(own, "attention.dense", h)
        h = rms(x, own["post_attention_layernorm.weight"], eps)
        if i < config["first_k_dense_replace"]:
            x = x + _gated(own, h)
            continue
        bias = own["mlp.gate.expert_bias"]
        chosen, scale = config["num_experts_per_tok"], config["routed_scaling_factor"]
        made = (own, h, chosen, bias - bias.mean(), scale)
        x = x + _sigmoid_experts(*made, renormalised=config["norm_topk_prob"])
    return rms(x, t["model.norm.weight"], eps) @ t["lm_head.weight"].T


def step3(config: Config, t: Tensors, ids: Array) -> Array:
    x, eps = t["model.embed_tokens.weight"][ids], config["rms_norm_eps"]
    sparse = {int(one) for one in config["moe_layers_enum"].split(",")}
    width, theta = config["head_dim"], config.get("rope_theta", 500000.0)
    for i in range(config["num_hidden_layers"]):
        own = layer_of(t, f"model.layers.{i}.")
        h = rms(x, own["input_layernorm.weight"], eps)
        q = rms(linear(own, "self_attn.q_proj", h), own["self_attn.inter_norm.weight"], eps)
        q = heads_of(linear(own, "self_attn.wq", q), config["num_attention_heads"])
        k, v = (heads_of(linear(own, f"self_attn.{name}_proj", h), 1) for name in "kv")
        h = attention(rotated(q, width, theta), rotated(k, width, theta), v)
        x = x + linear(own, "self_attn.o_proj", h)
        h = rms(x, own["post_attention_layernorm.weight"], eps)
        if i not in sparse:
            x = x + _gated(own, h)
            continue
        out, made = _gated(own, h, "share_expert."), h @ own["moe.gate.weight"].T
        for at, one in enumerate(np.exp(made - made.max(-1, keepdims=True))):
            best = np.argsort(-one)[: config["moe_top_k"]]
            total = one[best].sum() if config.get("norm_expert_weight") else one.sum()
            for expert in best:
                gate, up, down = (
                    own[f"moe.{name}_proj.weight"][expert] for name in ("gate", "up", "down")
                )
                out[at] += one[expert] / total * ((silu(gate @ h[at]) * (up @ h[at])) @ down.T)
        x = x + out
    return rms(x, t["model.norm.weight"], eps) @ t["lm_head.weight"].T


MODELS: Mapping[str, Callable[[Config, Tensors, Array], Array]] = {
    "chatglm": chatglm,
    "telechat2": telechat2,
    "telechat3": _llama,
    "teleflm": teleflm,
    "openpangu": _llama,
    "openpangu_ultra": openpangu_ultra,
    "plamo3": plamo3,
    "param2moe": param2moe,
    "step3": step3,
    "solar": solar,
}
