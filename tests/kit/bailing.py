"""Ling's and Ring's models in NumPy and float64, after their published code, token by token.

It shares no code with the engine: names of keys and tensors are those of the published files
(modeling_bailing_moe, _v2, _linear_v2 and _v2_5 of inclusionAI).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np

type Array = np.ndarray
type Tensors = Mapping[str, Array]


def logits(config: Mapping[str, Any], tensors: Tensors, ids: Array) -> Array:  # [T, V]
    """The logits of a sequence."""
    t = {name: one.astype(np.float64) for name, one in tensors.items()}
    x, eps = t["model.word_embeddings.weight"][ids], config["rms_norm_eps"]
    for i in range(config["num_hidden_layers"]):
        own = f"model.layers.{i}."
        layer = {k.removeprefix(own): v for k, v in t.items() if k.startswith(own)}
        mixer = _mixer(config, i)
        x = x + mixer(config, layer, rms(x, layer["input_layernorm.weight"], eps), i)
        x = x + _network(config, layer, rms(x, layer["post_attention_layernorm.weight"], eps), i)
    return rms(x, t["model.norm.weight"], eps) @ t["lm_head.weight"].T


def _mixer(config: Mapping[str, Any], layer: int) -> Any:
    size, count = config.get("layer_group_size"), config["num_hidden_layers"]
    if size is not None and (layer + 1) % size and layer < count // size * size:
        return lightning
    return latent if "kv_lora_rank" in config else attention


def rms(x: Array, weight: Array | float, eps: float) -> Array:
    return x / np.sqrt(np.mean(x * x, axis=-1, keepdims=True) + eps) * weight


def sigmoid(x: Array) -> Array:
    return 1 / (1 + np.exp(-x))


def silu(x: Array) -> Array:
    return x * sigmoid(x)


def rotated(x: Array, width: int, theta: float, *, adjacent: bool = False) -> Array:  # [T, N, H]
    """The first ``width`` components of heads rotated: i with i + width / 2, or adjacent ones."""
    at = np.arange(len(x))[:, None] * theta ** (-np.arange(0, width, 2) / width)
    cos, sin = np.cos(at)[:, None], np.sin(at)[:, None]
    a, b = (x[..., 0:width:2], x[..., 1:width:2]) if adjacent else np.split(x[..., :width], 2, -1)
    return np.concatenate([a * cos - b * sin, b * cos + a * sin, x[..., width:]], axis=-1)


def softmax_attention(q: Array, k: Array, v: Array) -> Array:  # [T, N, H], [T, K, H] -> [T, N * H]
    k, v = (np.repeat(one, q.shape[1] // one.shape[1], axis=1) for one in (k, v))
    scores = np.einsum("qnh,knh->nqk", q, k) / math.sqrt(q.shape[-1])
    seen = np.tril(np.ones(scores.shape[1:], bool))
    scores = np.exp(np.where(seen, scores - scores.max(-1, keepdims=True), -np.inf))
    return np.einsum("nqk,knh->qnh", scores / scores.sum(-1, keepdims=True), v).reshape(len(q), -1)


def _heads(config: Mapping[str, Any], layer: Tensors, h: Array, kv_heads: int) -> list[Array]:
    """Queries, keys and values [T, N, H] after SiLU, norms and rotation."""
    n, width = config["num_attention_heads"], config["head_dim"]
    width = config["hidden_size"] // n if width is None else width
    qkv = h @ layer["attention.query_key_value.weight"].T
    qkv = qkv + layer.get("attention.query_key_value.bias", 0.0)
    if kv_heads == n and config.get("linear_silu"):
        qkv = silu(qkv)
    parts = np.split(qkv.reshape(len(h), -1, width), (n, n + kv_heads), axis=1)
    for i, name in enumerate(("query", "key")):
        weight = layer.get(f"attention.{name}_layernorm.weight")
        parts[i] = parts[i] if weight is None else rms(parts[i], weight, config["rms_norm_eps"])
    turned = int(width * config.get("partial_rotary_factor", 1.0))
    theta = config.get("rope_theta", 10000.0)
    return [rotated(one, turned, theta) for one in parts[:2]] + parts[2:]


def attention(config: Mapping[str, Any], layer: Tensors, h: Array, _: int) -> Array:
    q, k, v = _heads({"head_dim": None} | config, layer, h, config["num_key_value_heads"])
    return softmax_attention(q, k, v) @ layer["attention.dense.weight"].T


def slopes(heads: int) -> Array:
    """build_slope_tensor of the published code."""

    def powers(n: int) -> list[float]:
        start = 2 ** (-(2 ** -(math.log2(n) - 3)))
        return [start * start**i for i in range(n)]

    if math.log2(heads).is_integer():
        return np.array(powers(heads))
    closest = 2 ** math.floor(math.log2(heads))
    return np.concatenate([powers(closest), slopes(2 * closest)[::2][: heads - closest]])


def lightning(config: Mapping[str, Any], layer: Tensors, h: Array, index: int) -> Array:
    n, groups = config["num_attention_heads"], config["group_norm_size"]
    q, k, v = _heads(config, layer, h, n)
    factor = 1 - (index - 1) / (config["num_hidden_layers"] - 1) + 1e-5
    decay, state, out = np.exp(-slopes(n) * factor)[:, None, None], 0.0, []
    for one, key, value in zip(q * q.shape[-1] ** -0.5, k, v, strict=True):
        state = decay * state + key[:, :, None] * value[:, None]
        out.append(np.einsum("nk,nkv->nv", one, state).reshape(groups, -1))
    made = rms(np.stack(out), 1.0, config["rms_norm_eps"]).reshape(len(h), -1)
    gate = sigmoid(h @ layer["attention.g_proj.weight"].T)
    return (made * layer["attention.g_norm.weight"] * gate) @ layer["attention.dense.weight"].T


def latent(config: Mapping[str, Any], layer: Tensors, h: Array, _: int) -> Array:
    n, nope, turned = (
        config[key] for key in ("num_attention_heads", "qk_nope_head_dim", "qk_rope_head_dim")
    )
    q = rms(h @ layer["attention.q_a_proj.weight"].T, layer["attention.q_a_layernorm.weight"], 1e-6)
    q = (q @ layer["attention.q_b_proj.weight"].T).reshape(len(h), n, -1)
    entry = h @ layer["attention.kv_a_proj_with_mqa.weight"].T
    rank, theta = config["kv_lora_rank"], config.get("rope_theta", 10000.0)
    wide = rms(entry[:, :rank], layer["attention.kv_a_layernorm.weight"], 1e-6)
    wide = (wide @ layer["attention.kv_b_proj.weight"].T).reshape(len(h), n, -1)
    shared = rotated(entry[:, None, rank:], turned, theta, adjacent=True)
    q = np.concatenate(
        [q[..., :nope], rotated(q[..., nope:], turned, theta, adjacent=True)], axis=-1
    )
    k = np.concatenate([wide[..., :nope], np.repeat(shared, n, axis=1)], axis=-1)
    return softmax_attention(q, k, wide[..., nope:]) @ layer["attention.dense.weight"].T


def _gated(layer: Tensors, name: str, h: Array) -> Array:
    gate, up, down = (layer[f"{name}{part}_proj.weight"] for part in ("gate", "up", "down"))
    return (silu(h @ gate.T) * (h @ up.T)) @ down.T


def _network(config: Mapping[str, Any], layer: Tensors, h: Array, index: int) -> Array:
    if index < config["first_k_dense_replace"]:
        return _gated(layer, "mlp.", h)
    out = _gated(layer, "mlp.shared_experts.", h)
    for at, (experts, weights) in enumerate(map(lambda one: _choice(config, layer, one), h)):
        for expert, weight in zip(experts, weights, strict=True):
            out[at] += weight * _gated(layer, f"mlp.experts.{expert}.", h[at])
    return out


def _choice(config: Mapping[str, Any], layer: Tensors, h: Array) -> tuple[Array, Array]:
    """The experts of a token, and their weights."""
    made, k = layer["mlp.gate.weight"] @ h, config["num_experts_per_tok"]
    if config.get("score_function") != "sigmoid":
        scores = np.exp(made - made.max())
        scores /= scores.sum()
        best = np.argsort(-scores)[:k]
        return best, scores[best] / (scores[best].sum() if config["norm_topk_prob"] else 1.0)
    scores = sigmoid(made)
    biased = scores + layer["mlp.gate.expert_bias"]
    groups = biased.reshape(config["n_group"], -1)
    good = np.argsort(-np.sort(groups)[:, -2:].sum(1))[: config["topk_group"]]
    kept = np.full_like(groups, -np.inf)
    kept[good] = groups[good]
    best = np.argsort(-kept.reshape(-1))[:k]
    return best, scores[best] / scores[best].sum() * config["routed_scaling_factor"]
