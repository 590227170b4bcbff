"""The newest decoders that transformers lacks, in NumPy and float64, after their published code.

It shares no code with the engine; see ``kit.published_code``.
"""

from __future__ import annotations

import numpy as np

from kit.bailing import Array, Tensors, rms
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


MODELS = {"step1": step1}
