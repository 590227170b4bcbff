"""The newest decoders that transformers lacks, in NumPy and float64, after their published code.

It shares no code with the engine; see ``kit.published_code``.
"""

from __future__ import annotations

import numpy as np

from kit.bailing import Array, Tensors, rms, rotated, sigmoid, silu
from kit.published_code import Config, heads_of, layer_of, linear
from kit.published_decoders import attended, before, gated


def logits(name: str, config: Config, tensors: Tensors, ids: Array) -> Array:  # [T, V]
    """The logits of a sequence, of the tiny model of this name."""
    exact = {key: one.astype(np.float64) for key, one in tensors.items()}
    return MODELS[name](config, exact, ids)


def step1(config: Config, t: Tensors, ids: Array) -> Array:
    x, eps = t["model.embed_tokens.weight"][ids], config["rms_norm_eps"]
    n, k = config["num_attention_heads"], config["num_attention_groups"]
    nearest = 2 ** int(np.log2(n))
    slopes = [2 ** (-8 * i / nearest) for i in range(1, nearest + 1)]
    slopes += [2 ** (-4 * i / nearest) for i in range(1, 2 * (n - nearest), 2)]
    distance = np.arange(len(ids))[:, None] - np.arange(len(ids))
    bias = -np.sqrt(np.maximum(distance, 0)) * np.array(slopes)[:, None, None]
    for i in range(config["num_hidden_layers"]):
        own = layer_of(t, f"model.layers.{i}.")
        h = rms(x, own["input_layernorm.weight"], eps)
        q, keys, v = (
            heads_of(linear(own, f"self_attn.{name}_proj", h), count)
            for name, count in (("q", n), ("k", k), ("v", k))
        )
        h = attended(q, keys, v, before(len(ids)), q.shape[-1] ** -0.5, bias)
        x = x + linear(own, "self_attn.o_proj", h)
        x = x + gated(own, rms(x, own["post_attention_layernorm.weight"], eps))
    x = rms(x, t["model.norm.weight"], eps)
    return x @ t.get("lm_head.weight", t["model.embed_tokens.weight"]).T


def openpangu_pro(config: Config, t: Tensors, ids: Array) -> Array:
    x, eps = t["model.embed_tokens.weight"][ids], config["rms_norm_eps"]
    for i in range(config["num_hidden_layers"]):
        own = layer_of(t, f"model.layers.{i}.")
        h = _with_key_sinks(config, own, rms(x, own["input_layernorm.weight"], eps))
        second = own["post_attention_layernorm.weight"]
        if config["sandwich_norm"]:
            h, second = rms(h, second, eps), own["pre_mlp_layernorm.weight"]
        x = x + h
        h = rms(x, second, eps)
        h = gated(own, h) if i < config["first_k_dense_replace"] else _experts(config, own, h)
        x = x + (rms(h, own["post_mlp_layernorm.weight"], eps) if config["sandwich_norm"] else h)
    return rms(x, t["model.norm.weight"], eps) @ t["lm_head.weight"].T


def _with_key_sinks(config: Config, own: Tensors, h: Array) -> Array:
    n, k = config["num_attention_heads"], config["num_key_value_heads"]
    wide, eps, count = config["qk_rope_dim"], config["rms_norm_eps"], config["param_sink_number"]
    width, v_width = config["qk_nope_dim"] + wide, config["v_channels"]
    qkv = linear(own, "self_attn.qkv_proj", h)
    q, keys, v = np.split(qkv, (n * width, (n + k) * width), axis=1)
    q, keys, v = heads_of(q, n), heads_of(keys, k), heads_of(v, k)
    norm, size = own["self_attn.k_layernorm.weight"], len(h)
    sinks = rms(own["self_attn.param_sink_key"], norm, eps)  # [S, K, H], at position 0
    sinks = rotated(sinks.reshape(1, -1, width), wide, 1e4, adjacent=True).reshape(sinks.shape)
    q, keys = (rotated(x, wide, 1e4, adjacent=True) for x in (q, rms(keys, norm, eps)))
    if config["param_sink_with_value"]:
        values = own["self_attn.param_sink_value"]
    else:
        values = np.zeros((count, k, v_width))
    keys, v = np.concatenate([sinks, keys]), np.concatenate([values, v])
    seen = np.concatenate([np.ones((size, count), bool), before(size)], axis=1)
    return linear(own, "self_attn.o_proj", attended(q, keys, v, seen, width**-0.5))


def _experts(config: Config, own: Tensors, h: Array) -> Array:
    out = gated(own, h, "mlp.shared_experts.") if config["n_shared_experts"] else np.zeros_like(h)
    scores = sigmoid(h @ own["mlp.gate.weight"].T)
    for at, one in enumerate(scores):
        biased = one + own.get("mlp.e_score_correction_bias", 0.0)
        best = np.argsort(-biased)[: config["num_experts_per_tok"]]
        total = one[best].sum() if config["norm_topk_prob"] else 1.0
        for expert in best:
            weight = config["routed_scaling_factor"] * one[expert] / total
            out[at] += weight * gated(own, h[at], f"mlp.experts.{expert}.")
    return out


def k2_horizon(config: Config, t: Tensors, ids: Array) -> Array:
    x, eps, count = (
        t["model.embed_tokens.weight"][ids],
        config["rms_norm_eps"],
        config["num_experts"],
    )
    groups = config["layernorm_num_groups"]
    for i in range(config["num_hidden_layers"]):
        own, sparse = (
            layer_of(t, f"model.layers.{i}."),
            count and i not in config["mlp_only_layers"],
        )
        h = _group_norm(x, own["input_layernorm.weight"], groups, eps)
        x = x + _value_experts(config, own, h, sparse=sparse)
        h = _group_norm(x, own["post_attention_layernorm.weight"], groups, eps)
        if not sparse:
            x = x + gated(own, h)
            continue
        out = gated(own, h, "mlp.shared_experts.") if config["num_shared_experts"] else 0 * h
        weights = _k2_weights(
            config,
            layer_of(own, "mlp.gate."),
            h,
            config["num_experts_per_tok"],
            renormalised=config["norm_topk_prob"],
        )
        for expert in range(count):
            out = out + weights[:, expert, None] * gated(own, h, f"mlp.experts.{expert}.")
        x = x + out
    return _group_norm(x, t["model.norm.weight"], groups, eps) @ t["lm_head.weight"].T


def _group_norm(x: Array, weight: Array, groups: int, eps: float) -> Array:
    return rms(x.reshape(len(x), groups, -1), 1.0, eps).reshape(x.shape) * weight


def _k2_weights(
    config: Config, router: Tensors, h: Array, chosen: int, *, renormalised: bool
) -> Array:  # [T, E]
    scores = h @ router["weight"].T
    if config["router_score_func"] == "sigmoid":
        scores = sigmoid(scores)
    else:
        scores = np.exp(scores) / np.exp(scores).sum(-1, keepdims=True)
    best = np.argsort(-(scores + router.get("bias", 0.0)), axis=-1)[:, :chosen]
    made = np.zeros_like(scores)
    np.put_along_axis(made, best, np.take_along_axis(scores, best, -1), -1)
    made = made / made.sum(-1, keepdims=True) if renormalised else made
    return made * config["router_scaling_factor"]


def _value_experts(config: Config, own: Tensors, h: Array, *, sparse: bool) -> Array:
    n, k, size = config["num_attention_heads"], config["num_key_value_heads"], len(h)
    q, keys = heads_of(linear(own, "self_attn.q_proj", h), n), linear(own, "self_attn.k_proj", h)
    if sparse and config["mova_num_experts"]:
        chosen, router = config["mova_num_experts_per_tok"], layer_of(own, "self_attn.v_router.")
        weights = _k2_weights(config, router, h, chosen, renormalised=chosen > 1)
        v = np.zeros((size, own["self_attn.v_experts.0.weight"].shape[0]))
        for expert in range(config["mova_num_experts"]):
            made = silu(linear(own, f"self_attn.v_experts.{expert}", h))
            v = v + weights[:, expert, None] * made
    else:
        v = linear(own, "self_attn.v_proj", h)
    keys, v, wide = heads_of(keys, k), heads_of(v, k), config["rope_head_dim"]
    q, keys = (_rotated_in_order(one, wide or one.shape[-1]) for one in (q, keys))
    out = attended(q, keys, v, before(size), q.shape[-1] ** -0.5)
    gate = config["attention_gate_func"]
    if gate is not None:
        own_gates = linear(own, "self_attn.gate_proj", h)
        out = out * (silu(own_gates) if gate == "silu" else np.log2(1 + 2**own_gates))
    return linear(own, "self_attn.o_proj", out)


def _rotated_in_order(x: Array, wide: int) -> Array:
    """Heads whose components i and i + H/2 rotate together, for i below ``wide`` / 2."""
    first, second = np.split(x, 2, -1)
    at = np.arange(len(x))[:, None] * 1e4 ** (-np.arange(0, wide, 2) / wide)
    cos, sin, half = np.cos(at)[:, None], np.sin(at)[:, None], wide // 2
    a, b = first[..., :half], second[..., :half]
    first = np.concatenate([a * cos - b * sin, first[..., half:]], axis=-1)
    return np.concatenate([first, b * cos + a * sin, second[..., half:]], axis=-1)


MODELS = {"k2_horizon": k2_horizon, "openpangu_pro": openpangu_pro, "step1": step1}
