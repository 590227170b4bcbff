"""Further decoders that transformers lacks, in NumPy and float64, after vLLM's models of them.

It shares no code with the engine; see ``kit.published_code``.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from kit.bailing import Array, Tensors, rms, sigmoid, silu
from kit.published_code import Config, heads_of, layer_of, linear


def logits(name: str, config: Config, tensors: Tensors, ids: Array) -> Array:  # [T, V]
    """The logits of a sequence, of the tiny model of this name."""
    exact = {key: one.astype(np.float64) for key, one in tensors.items()}
    return MODELS[name](config, exact, ids)


def gated(tensors: Tensors, h: Array, start: str = "mlp.", act: Any = silu) -> Array:
    """A gated network."""
    gate, up = (linear(tensors, f"{start}{name}_proj", h) for name in ("gate", "up"))
    return linear(tensors, f"{start}down_proj", act(gate) * up)


def _gelu_tanh(x: Array) -> Array:
    return x / 2 * (1 + np.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))


def attended(
    q: Array, k: Array, v: Array, seen: Array, scale: float, bias: Array | float = 0.0
) -> Array:  # [T, N * H]
    """Attention of queries [T, N, H] to the keys [S, K, H] that are ``seen`` [T, S]; ``bias``
    [N, T, S] is added to scores.
    """
    k, v = (np.repeat(one, q.shape[1] // one.shape[1], axis=1) for one in (k, v))
    scores = np.where(seen, np.einsum("qnh,knh->nqk", q, k) * scale + bias, -np.inf)
    scores = np.exp(scores - scores.max(-1, keepdims=True))
    return np.einsum("nqk,knh->qnh", scores / scores.sum(-1, keepdims=True), v).reshape(len(q), -1)


def before(length: int, window: int | None = None) -> Array:  # bool[T, T]
    """The tokens that each token sees: itself, and those before it, or so many with a window."""
    distance = np.arange(length)[:, None] - np.arange(length)
    return (distance >= 0) & (distance < (window or length))


def turned(
    x: Array, section: Config, *, factor: float | None = None, adjacent: bool = False
) -> Array:
    """Heads [T, N, H] rotated as a section of ``rope_parameters`` says, with YaRN times ``factor``
    (None: the paper's).
    """
    width = x.shape[-1]
    frequencies = section["rope_theta"] ** (-np.arange(0, width, 2) / width)
    if section["rope_type"] == "yarn":
        original, by = section["original_max_position_embeddings"], section["factor"]
        turns = [section.get("beta_fast", 32), section.get("beta_slow", 1)]
        first, last = (
            width * math.log(original / (one * 2 * math.pi)) / (2 * math.log(section["rope_theta"]))
            for one in turns
        )
        first, last = max(math.floor(first), 0), min(math.ceil(last), width - 1)
        part = np.clip((np.arange(width // 2) - first) / max(last - first, 0.001), 0, 1)
        frequencies = frequencies * (1 - part) + frequencies / by * part
        size = 0.1 * math.log(by) + 1 if factor is None else factor
    else:
        size = 1.0
    at = np.arange(len(x))[:, None] * frequencies
    cos, sin = size * np.cos(at)[:, None], size * np.sin(at)[:, None]
    a, b = (x[..., ::2], x[..., 1::2]) if adjacent else np.split(x, 2, -1)
    return np.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1)


def rnj1(config: Config, t: Tensors, ids: Array) -> Array:
    x, eps = t["model.embed_tokens.weight"][ids] * config["hidden_size"] ** 0.5, 1e-5
    assert config["rms_norm_eps"] == eps
    n, k, size = config["num_attention_heads"], config["num_key_value_heads"], len(ids)
    scale = config["query_pre_attn_scalar"] ** -0.5
    number = np.arange(size) // (config["sliding_window"] // 2)
    near = number[:, None] - number <= 1
    for i, kind in enumerate(config["layer_types"]):
        own = layer_of(t, f"model.layers.{i}.")
        section = config["rope_parameters"].get(kind, config["rope_parameters"])
        h = rms(x, own["input_layernorm.weight"] + 1, eps)
        q, keys, v = (
            heads_of(linear(own, f"self_attn.{name}_proj", h), count)
            for name, count in (("q", n), ("k", k), ("v", k))
        )
        q = turned(rms(q, own["self_attn.q_norm.weight"] + 1, eps), section)
        keys = turned(rms(keys, own["self_attn.k_norm.weight"] + 1, eps), section)
        seen = before(size) & (near | (kind == "full_attention"))
        h = linear(own, "self_attn.o_proj", attended(q, keys, v, seen, scale))
        x = x + rms(h, own["post_attention_layernorm.weight"] + 1, eps)
        h = rms(x, own["pre_feedforward_layernorm.weight"] + 1, eps)
        h = gated(own, h, act=_gelu_tanh)
        x = x + rms(h, own["post_feedforward_layernorm.weight"] + 1, eps)
    x = rms(x, t["model.norm.weight"] + 1, eps)
    made = x @ t.get("lm_head.weight", t["model.embed_tokens.weight"]).T
    cap = config.get("final_logit_softcapping")
    return made if cap is None else cap * np.tanh(made / cap)


def mistral_large3(config: Config, t: Tensors, ids: Array) -> Array:
    x, eps = t["model.embed_tokens.weight"][ids], config["rms_norm_eps"]
    for i in range(config["num_hidden_layers"]):
        own = layer_of(t, f"model.layers.{i}.")
        x = x + _mistral_latent(config, own, rms(x, own["input_layernorm.weight"], eps))
        h = rms(x, own["post_attention_layernorm.weight"], eps)
        if i < config["first_k_dense_replace"]:
            x = x + gated(own, h)
            continue
        out, made = gated(own, h, "mlp.shared_experts."), h @ own["mlp.gate.weight"].T
        made = np.exp(made - made.max(-1, keepdims=True))
        for at, one in enumerate(made / made.sum(-1, keepdims=True)):
            groups = one.reshape(config.get("n_group", 1), -1)
            best = np.argsort(-groups.max(-1))[: config.get("topk_group", 1)]
            kept = np.zeros_like(groups)
            kept[best] = groups[best]
            chosen = np.argsort(-kept.reshape(-1))[: config["num_experts_per_tok"]]
            for expert in chosen:
                weight = config["routed_scaling_factor"] * one[expert] / one[chosen].sum()
                out[at] += weight * gated(own, h[at], f"mlp.experts.{expert}.")
        x = x + out
    return rms(x, t["model.norm.weight"], eps) @ t["lm_head.weight"].T


def _mistral_latent(config: Config, own: Tensors, h: Array) -> Array:
    n, nope, wide, rank = (
        config[key]
        for key in ("num_attention_heads", "qk_nope_head_dim", "qk_rope_head_dim", "kv_lora_rank")
    )
    eps, section = config["rms_norm_eps"], config["rope_parameters"]
    q = linear(own, "self_attn.q_a_proj", h)
    q = rms(q, own["self_attn.q_a_layernorm.weight"], eps)
    q = heads_of(linear(own, "self_attn.q_b_proj", q), n)
    entry = linear(own, "self_attn.kv_a_proj_with_mqa", h)
    both = rms(entry[:, :rank], own["self_attn.kv_a_layernorm.weight"], eps)
    both = heads_of(linear(own, "self_attn.kv_b_proj", both), n)
    scale, quotient = (nope + wide) ** -0.5, 1.0
    if section["rope_type"] == "yarn" and section.get("attention_factor") != 1:
        rates = section.get("mscale", 1), section.get("mscale_all_dim", 0)
        first, second = (0.1 * rate * math.log(section["factor"]) + 1 for rate in rates)
        scale, quotient = scale * second**2, first / second
    keys = turned(entry[:, None, rank:], section, factor=quotient, adjacent=True)
    q_turned = turned(q[..., nope:], section, factor=quotient, adjacent=True)
    keys, q = np.repeat(keys, n, axis=1), np.concatenate([q[..., :nope], q_turned], axis=-1)
    growth = config["llama_4_scaling"]
    at = np.floor(np.arange(len(h)) / growth["original_max_position_embeddings"])
    q = q * (1 + growth["beta"] * np.log(1 + at))[:, None, None]
    keys = np.concatenate([both[..., :nope], keys], axis=-1)
    out = attended(q, keys, both[..., nope:], before(len(h)), scale)
    return linear(own, "self_attn.o_proj", out)


def nemotron_h_puzzle(config: Config, t: Tensors, ids: Array) -> Array:
    x, eps = t["backbone.embeddings.weight"][ids], config.get("layer_norm_epsilon", 1e-5)
    mixers = {"mamba": _mamba2, "attention": _plain, "mlp": _squared, "moe": _squared_experts}
    for i, block in enumerate(config["block_configs"]):
        own = layer_of(t, f"backbone.layers.{i}.")
        h = rms(x, own["norm.weight"], eps)
        x = x + mixers[block["block_type"]]({**config, **block}, layer_of(own, "mixer."), h)
    return rms(x, t["backbone.norm_f.weight"], eps) @ t["lm_head.weight"].T


def _plain(config: Config, own: Tensors, h: Array) -> Array:
    n, k = config["num_attention_heads"], config["num_key_value_heads"]
    q, keys, v = (
        heads_of(linear(own, f"{name}_proj", h), count)
        for name, count in (("q", n), ("k", k), ("v", k))
    )
    seen = before(len(h), config.get("sliding_window"))
    return linear(own, "o_proj", attended(q, keys, v, seen, config["head_dim"] ** -0.5))


def _squared(_: Config, own: Tensors, h: Array, start: str = "") -> Array:
    up = np.maximum(linear(own, f"{start}up_proj", h), 0) ** 2
    return linear(own, f"{start}down_proj", up)


def _squared_experts(config: Config, own: Tensors, h: Array) -> Array:
    scores, latent = sigmoid(h @ own["gate.weight"].T), h
    if config.get("moe_latent_size"):
        latent = linear(own, "fc1_latent_proj", h)
    made = np.zeros_like(latent)
    for at, one in enumerate(scores):
        biased = one + own["gate.e_score_correction_bias"]
        chosen = np.argsort(-biased)[: config["num_experts_per_tok"]]
        for expert in chosen:
            weight = config["routed_scaling_factor"] * one[expert] / one[chosen].sum()
            made[at] += weight * _squared(config, own, latent[at], f"experts.{expert}.")
    if config.get("moe_latent_size"):
        made = linear(own, "fc2_latent_proj", made)
    return made + _squared(config, own, h, "shared_experts.")


def _mamba2(config: Config, own: Tensors, h: Array) -> Array:
    n, size, groups = config["mamba_num_heads"], config["ssm_state_size"], config["n_groups"]
    inner, length = n * config["mamba_head_dim"], len(h)
    z, mixed, steps = np.split(
        linear(own, "in_proj", h), (inner, 2 * (inner + groups * size)), axis=-1
    )
    taps = own["conv1d.weight"][:, 0]  # [C, 4]
    past = np.concatenate([np.zeros((taps.shape[1] - 1, mixed.shape[1])), mixed])
    mixed = sum(past[i : i + length] * taps[:, i] for i in range(taps.shape[1]))
    mixed = silu(mixed + own["conv1d.bias"])
    x, b, c = np.split(mixed, (inner, inner + groups * size), axis=-1)
    x = heads_of(x, n)
    b, c = (np.repeat(heads_of(one, groups), n // groups, axis=1) for one in (b, c))
    steps = np.log1p(np.exp(steps + own["dt_bias"]))  # [T, N]
    decay = np.exp(-steps * np.exp(own["A_log"]))
    state, found = np.zeros((n, config["mamba_head_dim"], size)), list[Array]()
    for at in range(length):
        new = steps[at, :, None, None] * x[at, :, :, None] * b[at, :, None]
        state = decay[at, :, None, None] * state + new
        found.append((state * c[at, :, None]).sum(-1) + own["D"][:, None] * x[at])
    y = (np.stack(found).reshape(length, inner) * silu(z)).reshape(length, groups, -1)
    y = rms(y, 1.0, config.get("layer_norm_epsilon", 1e-5)).reshape(length, inner)
    return linear(own, "out_proj", y * own["norm.weight"])


def longcat_flash_ngram(config: Config, t: Tensors, ids: Array) -> Array:
    x, eps = _ngram_mean(config, t, ids), config["rms_norm_eps"]
    for i in range(config["num_layers"]):
        own, later = layer_of(t, f"model.layers.{i}."), np.zeros_like(x)
        for part in range(2):
            h = rms(x, own[f"input_layernorm.{part}.weight"], eps)
            x = x + _scaled_latent(config, layer_of(own, f"self_attn.{part}."), h)
            h = rms(x, own[f"post_attention_layernorm.{part}.weight"], eps)
            if part == 0:
                later = _or_zero_experts(config, own, h)
            x = x + gated(own, h, f"mlps.{part}.")
        x = x + later
    return rms(x, t["model.norm.weight"], eps) @ t["lm_head.weight"].T


def _ngram_mean(config: Config, t: Tensors, ids: Array) -> Array:
    x, base, each = t["model.embed_tokens.weight"][ids], config["vocab_size"], 0
    end, count = config["eos_token_id"][0], config.get("emb_split_num", 0)
    made = x.copy()
    for longest in range(2, config["emb_neighbor_num"] + 1) if count else ():
        for _ in range(count):
            start = f"model.ngram_embeddings.{{}}.{each}.weight"
            table, back = t[start.format("embedders")], t[start.format("post_projs")]
            assert len(table) == int(config["ngram_vocab_size_ratio"] * base + 2 * each + 1)
            for at in range(len(ids)):
                number = 0
                for past in range(longest):
                    if past > at or past and ids[at - past] == end:
                        break
                    number += int(ids[at - past]) * base**past
                made[at] += back @ table[number % len(table)]
            each += 1
    return made / (1 + each)


def _scaled_latent(config: Config, own: Tensors, h: Array) -> Array:
    n, nope, rank = (config[k] for k in ("num_attention_heads", "qk_nope_head_dim", "kv_lora_rank"))
    width, section = h.shape[1], {"rope_type": "default", "rope_theta": 1e7}
    q = rms(linear(own, "q_a_proj", h), own["q_a_layernorm.weight"], 1e-6)
    q = heads_of(linear(own, "q_b_proj", q), n) * (width / config["q_lora_rank"]) ** 0.5
    entry = linear(own, "kv_a_proj_with_mqa", h)
    both = rms(entry[:, :rank], own["kv_a_layernorm.weight"], 1e-6) * (width / rank) ** 0.5
    both = heads_of(linear(own, "kv_b_proj", both), n)
    keys = np.repeat(turned(entry[:, None, rank:], section, adjacent=True), n, axis=1)
    keys = np.concatenate([both[..., :nope], keys], axis=-1)
    q = np.concatenate([q[..., :nope], turned(q[..., nope:], section, adjacent=True)], axis=-1)
    out = attended(q, keys, both[..., nope:], before(len(h)), q.shape[-1] ** -0.5)
    return linear(own, "o_proj", out)


def _or_zero_experts(config: Config, own: Tensors, h: Array) -> Array:
    made = np.exp(h @ own["mlp.router.classifier.weight"].T)
    out, scores = np.zeros_like(h), made / made.sum(-1, keepdims=True)
    for at, one in enumerate(scores):
        biased = one + own["mlp.router.e_score_correction_bias"]
        for expert in np.argsort(-biased)[: config["moe_topk"]]:
            is_zero = expert >= config["n_routed_experts"]
            own_out = h[at] if is_zero else gated(own, h[at], f"mlp.experts.{expert}.")
            out[at] += config.get("routed_scaling_factor", 6.0) * one[expert] * own_out
    return out


def iquest_loop(config: Config, t: Tensors, ids: Array) -> Array:
    x, eps = t["model.embed_tokens.weight"][ids], config["rms_norm_eps"]
    n, k = config["num_attention_heads"], config["num_key_value_heads"]
    section = {"rope_type": "default", "rope_theta": config["rope_theta"]}
    scale, first = (config["hidden_size"] // n) ** -0.5, list[tuple[Array, Array]]()
    for second in (False, True):
        for i in range(config["num_hidden_layers"]):
            own = layer_of(t, f"model.layers.{i}.")
            h = rms(x, own["input_layernorm.weight"], eps)
            q, keys, v = (
                heads_of(linear(own, f"self_attn.{name}_proj", h), count)
                for name, count in (("q", n), ("k", k), ("v", k))
            )
            q, keys = (turned(one, section) for one in (q, keys))
            if second:
                near = before(len(ids), config["loop_window_size"])
                near, far = (
                    heads_of(attended(q, *pair, seen, scale), n)
                    for pair, seen in (((keys, v), near), (first[i], before(len(ids))))
                )
                start = f"model.gate_projections.{i}."
                gate = np.einsum("tnh,nh->tn", q, t[f"{start}weight"]) + t[f"{start}bias"]
                gate = sigmoid(gate)[..., None]
                out = (gate * far + (1 - gate) * near).reshape(len(ids), -1)
            else:
                first.append((keys, v))
                out = attended(q, keys, v, before(len(ids)), scale)
            x = x + linear(own, "self_attn.o_proj", out)
            x = x + gated(own, rms(x, own["post_attention_layernorm.weight"], eps))
    return rms(x, t["model.norm.weight"], eps) @ t["lm_head.weight"].T


MODELS = {
    "iquest_loop": iquest_loop,
    "longcat_flash_ngram": longcat_flash_ngram,
    "rnj1": rnj1,
    "mistral_large3": mistral_large3,
    "nemotron_h_puzzle": nemotron_h_puzzle,
}
