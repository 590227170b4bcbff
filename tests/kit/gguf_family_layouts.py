"""How llama.cpp's converter changes tensors of Hugging Face, for the families of ``gguf_families``.

Source: ``modify_tensors`` in ``conversion/*.py`` of ggml-org/llama.cpp.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np

type Named = Iterator[tuple[str, np.ndarray]]
type HFConfig = Mapping[str, Any]
_HEADS = {"q": "num_attention_heads", "k": "num_key_value_heads"}


def _plus_one(name: str, tensor: np.ndarray, c: HFConfig) -> Named:
    yield name, tensor + 1 if name.endswith("norm.weight") else tensor


def _by_pairs(name: str, tensor: np.ndarray, c: HFConfig) -> Named:
    """Adjacent pairs of a head's halves together."""
    match = re.search(r"([qk])_proj\.(weight|bias)$", name)
    if match:
        halves = tensor.reshape(c[_HEADS[match[1]]], 2, -1, *tensor.shape[1:])
        tensor = halves.swapaxes(1, 2).reshape(tensor.shape)
    yield name, tensor


def _deci(name: str, tensor: np.ndarray, c: HFConfig) -> Named:
    """Pairs as Llama's, of the KV heads of each layer."""
    layer = re.match(r"model\.layers\.(\d+)\.", name)
    if layer and (group := c["block_configs"][int(layer[1])]["attention"].get("n_heads_in_group")):
        c = {**c, "num_key_value_heads": c["num_attention_heads"] // group}
    yield from _by_pairs(name, tensor, c)


def _falcon(name: str, tensor: np.ndarray, c: HFConfig) -> Named:
    """Queries of all KV heads first, then keys, then values."""
    if "query_key_value" in name:
        heads = c["num_attention_heads"]
        kv = c["num_kv_heads"] if c["new_decoder_architecture"] else 1
        grouped = tensor.reshape(kv, heads // kv + 2, -1, *tensor.shape[1:])
        q, k, v = grouped[:, :-2], grouped[:, [-2]], grouped[:, [-1]]
        tensor = np.concatenate([one.reshape(-1, *tensor.shape[1:]) for one in (q, k, v)])
    yield name, tensor


def _each_head(heads: str) -> Callable[[str, np.ndarray, HFConfig], Named]:
    """The same of models with as many KV heads as heads."""

    def convert(name: str, tensor: np.ndarray, c: HFConfig) -> Named:
        if "query_key_value" in name:
            own = tensor.reshape(c[heads], 3, -1, *tensor.shape[1:])
            tensor = own.swapaxes(0, 1).reshape(tensor.shape)
        yield name, tensor

    return convert


def _stablelm(name: str, tensor: np.ndarray, c: HFConfig) -> Named:
    yield name.replace("layernorm.norms.", "layernorm."), tensor


def _bitnet(name: str, tensor: np.ndarray, c: HFConfig) -> Named:
    """The names of older checkpoints, which alone ``gguf`` knows."""
    older = {"self_attn.attn_sub_norm": "self_attn.inner_attn_ln"}
    older |= {"mlp.ffn_sub_norm": "mlp.ffn_layernorm"}
    for own, one in older.items():
        name = name.replace(own, one)
    yield name, tensor


def joined_heads(tensors: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """The tensors with queries, keys and values in one, as in older files of Phi-2 and GLM."""
    made: dict[str, np.ndarray] = {}
    for name, tensor in tensors.items():
        if match := re.match(r"model\.layers\.(\d+)\.self_attn\.q_proj\.(\w+)", name):
            parts = [tensors[name.replace("q_proj", f"{one}_proj")] for one in "qkv"]
            made[f"blk.{match[1]}.attn_qkv.{match[2]}"] = np.concatenate(parts)
        elif not re.search(r"[kv]_proj\.", name):
            made[name] = tensor
    return made


def _prefixed(convert: Callable[..., Named]) -> Callable[[str, np.ndarray, HFConfig], Named]:
    """The same with a prefix that names of checkpoints have."""
    return lambda name, tensor, c: convert(f"transformer.{name}", tensor, c)


def _as_is(name: str, tensor: np.ndarray, c: HFConfig) -> Named:
    yield name, tensor


def _dbrx(name: str, tensor: np.ndarray, c: HFConfig) -> Named:
    """Experts in stacks, of which downs are transposed."""
    if ".experts." not in name:
        yield name, tensor
        return
    stacked = tensor.reshape(c["ffn_config"]["moe_num_experts"], -1, c["d_model"])
    yield f"{name}.weight", stacked.swapaxes(1, 2) if name.endswith("w2") else stacked


def _correction(name: str, tensor: np.ndarray, c: HFConfig) -> Named:
    """Biases of experts' scores, under the name that most files have."""
    match = re.match(r"model\.layers\.(\d+)\..*(correction_bias|expert_bias)$", name)
    if match:
        yield f"blk.{match[1]}.exp_probs_b.bias", tensor.reshape(-1)
        return
    yield name, tensor


def _mimo2(name: str, tensor: np.ndarray, c: HFConfig) -> Named:
    """Sinks, whose name gets an end."""
    end = ".weight" if "attention_sink" in name else ""
    yield from _correction(f"{name}{end}", tensor, c)


def _granite(name: str, tensor: np.ndarray, c: HFConfig) -> Named:
    """Gates and ups apart; a network beside no experts has the names of a dense one."""
    match = re.match(r"model\.layers\.(\d+)\.(\w+)\.(in|out)put_linear\.weight", name)
    if match is None:
        yield from _by_pairs(name, tensor, c)
        return
    block, kind, side = match.groups()
    end = "exps" if kind == "block_sparse_moe" else "shexp" if c.get("num_local_experts") else ""
    end = f"_{end}" if end else ""
    if side == "out":
        yield f"blk.{block}.ffn_down{end}.weight", tensor
        return
    gate, up = np.split(tensor, 2, axis=-2)
    yield f"blk.{block}.ffn_gate{end}.weight", gate
    yield f"blk.{block}.ffn_up{end}.weight", up


def _state(name: str, tensor: np.ndarray, c: HFConfig) -> Named:
    """Mamba and Jamba."""
    if name.endswith("A_log"):
        tensor = -np.exp(tensor)
    elif name.endswith("conv1d.weight"):
        tensor = tensor.squeeze(1)
    yield name, tensor


def _state_2(groups: str) -> Callable[[str, np.ndarray, HFConfig], Named]:
    """Mamba-2; ``groups`` is the key of their number."""

    def convert(name: str, tensor: np.ndarray, c: HFConfig) -> Named:
        if name.endswith("dt_bias"):
            name = name.replace("dt_bias", "dt_proj.bias")
        elif name.endswith(("A_log", ".D")):
            tensor = (-np.exp(tensor) if name.endswith("A_log") else tensor).reshape(-1, 1)
        elif name.endswith("conv1d.weight"):
            tensor = tensor.squeeze(1)
        elif name.endswith(("mamba.norm.weight", "mixer.norm.weight")):
            tensor = tensor.reshape(c[groups], -1)
        yield name, tensor

    return convert


def _nemotron_h_moe(name: str, tensor: np.ndarray, c: HFConfig) -> Named:
    """Stacks of experts have the names of other families."""
    match = re.match(r"backbone\.layers\.(\d+)\.mixer\.(experts|gate\.e_score)", name)
    if match is None:
        yield from _state_2("n_groups")(name, tensor, c)
        return
    if match[2] == "experts":
        kind = "up" if "up_proj" in name else "down"
        yield f"blk.{match[1]}.ffn_{kind}_exps.weight", tensor
    else:
        yield f"blk.{match[1]}.exp_probs_b.bias", tensor


def _granite_hybrid(name: str, tensor: np.ndarray, c: HFConfig) -> Named:
    if ".mamba." in name:
        yield from _state_2("mamba_n_groups")(name, tensor, c)
    else:
        yield from _granite(name, tensor, c)


def _falcon_h1(name: str, tensor: np.ndarray, c: HFConfig) -> Named:
    """Multipliers are in the weights."""
    gate, down = c["mlp_multipliers"]
    into = c["attention_in_multiplier"]
    factors = {
        "down_proj": down,
        "gate_proj": gate,
        "k_proj": c["key_multiplier"] * into,
        "q_proj": into,
        "v_proj": into,
        "o_proj": c["attention_out_multiplier"],
        "out_proj": c["ssm_out_multiplier"],
        "lm_head": c["lm_head_multiplier"],
        "embed_tokens": c["embedding_multiplier"],
    }
    own = math.prod(factor for key, factor in factors.items() if f".{key}." in f".{name}")
    if "in_proj" in name:
        own = c["ssm_in_multiplier"]
    tensor = tensor * np.float32(own)
    yield from _state_2("mamba_n_groups")(name, tensor, c)


def _short_conv(name: str, tensor: np.ndarray, c: HFConfig) -> Named:
    if ".experts." in name:
        name = name.removeprefix("model.")
    yield from _correction(name, tensor.squeeze(1) if ".conv.conv." in name else tensor, c)


def _gemma4(name: str, tensor: np.ndarray, c: HFConfig) -> Named:
    """Gates and ups of experts in one; numbers of a layer that are no weights."""
    match = re.match(r"model\.layers\.(\d+)\.router\.(scale|per_expert_scale)", name)
    if match:
        stem = "ffn_gate_inp" if match[2] == "scale" else "ffn_down_exps"
        yield f"blk.{match[1]}.{stem}.scale", tensor
        return
    bare = name.endswith("layer_scalar") or ".experts." in name
    yield (f"{name}.weight" if bare else name), tensor


def _gemma3n(name: str, tensor: np.ndarray, c: HFConfig) -> Named:
    yield (f"{name}.weight" if name.endswith("_scale") else name), tensor


def _latent(name: str, tensor: np.ndarray, c: HFConfig) -> Named:
    """Keys and values of latent attention apart, and keys transposed."""
    if name.endswith("kv_b_proj.weight"):
        heads = tensor.reshape(c["num_attention_heads"], -1, tensor.shape[-1])
        keys, values = np.split(heads, [c["qk_nope_head_dim"]], axis=1)
        yield name.replace("kv_b_proj", "k_b_proj"), keys.swapaxes(1, 2)
        yield name.replace("kv_b_proj", "v_b_proj"), values
        return
    yield from _correction(name, tensor, c)


def _llama4(name: str, tensor: np.ndarray, c: HFConfig) -> Named:
    """Experts [E, inputs, outputs] become [E, outputs, inputs], and gates and ups are apart."""
    match = re.match(r"model\.layers\.(\d+)\.feed_forward\.experts\.(\w+)_proj", name)
    if match is None:
        yield name, tensor
        return
    tensor = tensor.swapaxes(1, 2)
    parts = {"down": tensor}
    if match[2] == "gate_up":
        parts = dict(zip(("gate", "up"), np.split(tensor, 2, axis=1), strict=True))
    for kind, part in parts.items():
        yield f"blk.{match[1]}.ffn_{kind}_exps.weight", part


def _stacks(name: str, tensor: np.ndarray, c: HFConfig) -> Named:
    """Mistral 4, whose stacks of experts stay as they are."""
    if name.endswith(("experts.gate_up_proj", "experts.down_proj")):
        name = f"{name}.weight"
    yield from _latent(name, tensor, c)


def _bailing(name: str, tensor: np.ndarray, c: HFConfig) -> Named:
    """Ling lite: queries, keys and values apart, of which the first two rotate by pairs."""
    match = re.match(r"model\.layers\.(\d+)\.attention\.query_key_value\.weight", name)
    if not match:
        yield name, tensor
        return
    heads = (c["num_attention_heads"], c["num_key_value_heads"])
    width = len(tensor) // (heads[0] + 2 * heads[1])
    ends = np.cumsum(heads) * width
    for kind, part in zip("qkv", np.split(tensor, ends), strict=True):
        own = part
        if kind != "v":
            own = part.reshape(-1, 2, width // 2, part.shape[1]).swapaxes(1, 2).reshape(part.shape)
        yield f"blk.{match[1]}.attn_{kind}.weight", own


def _internlm2(name: str, tensor: np.ndarray, c: HFConfig) -> Named:
    """InternLM 2: queries, keys and values apart, of which the first two rotate by pairs."""
    if not name.endswith("wqkv.weight"):
        yield name, tensor
        return
    kv = c["num_key_value_heads"]
    own = tensor.reshape(kv, c["num_attention_heads"] // kv + 2, -1, tensor.shape[1])
    for kind, heads in (("q", own[:, :-2]), ("k", own[:, -2:-1]), ("v", own[:, -1:])):
        part = heads.reshape(-1, *own.shape[2:])
        if kind != "v":
            halves = part.reshape(len(part), 2, -1, tensor.shape[1])
            part = halves.swapaxes(1, 2)
        yield name.replace("wqkv", f"w{kind}"), part.reshape(-1, tensor.shape[1])


def _step35(name: str, tensor: np.ndarray, c: HFConfig) -> Named:
    """1 + w of norms, and a bias of the router."""
    name = f"{name}.bias" if name.endswith("router_bias") else name
    yield from _plus_one(name, tensor, c)


_MUSE_NORMS = {
    "input": "attn_norm",
    "post_attention": "post_attention_norm",
    "pre_feedforward": "ffn_norm",
    "post_feedforward": "post_ffw_norm",
}


def _muse_glimmer(name: str, tensor: np.ndarray, c: HFConfig) -> Named:
    """Rows of heads by pairs, 1 + w of norms in layers, and norms of heads for their factor."""
    layer = re.match(r"model\.layers\.(\d+)\.(self_attn|mlp|(\w+)_layernorm)", name)
    if layer is None:
        yield name, tensor
    elif layer[3]:
        yield f"blk.{layer[1]}.{_MUSE_NORMS[layer[3]]}.weight", tensor + 1
    elif "gate_proj" in name and layer[2] == "self_attn":
        yield f"blk.{layer[1]}.attn_gate.weight", tensor
    else:
        if "q_proj" in name:
            factor = np.full(c["head_dim"], c["qk_scale_factor"], np.float32)
            yield f"blk.{layer[1]}.attn_q_norm.weight", factor
            yield f"blk.{layer[1]}.attn_k_norm.weight", np.ones_like(factor)
        yield from _by_pairs(name, tensor, c)


def _minimax_m3(name: str, tensor: np.ndarray, c: HFConfig) -> Named:
    """1 + w of norms, and names of the indexer, of dense networks and of that of all tokens."""
    layer = re.match(r"model\.layers\.(\d+)\.", name)
    network = re.search(r"(mlp|shared_experts)\.(\w+)_proj", name)
    index = re.search(r"index_(\w+)", name)
    for own, values in _plus_one(name, tensor, c):
        if layer and network:
            end = "_shexp" * (network[1] != "mlp")
            yield f"blk.{layer[1]}.ffn_{network[2]}{end}.weight", values
        elif layer and index:
            yield f"blk.{layer[1]}.indexer.{index[1]}.weight", values
        else:
            yield from _correction(own, values, c)


CONVERTERS: Mapping[str, Callable[[str, np.ndarray, HFConfig], Named]] = {
    **dict.fromkeys(("gemma", "gemma2", "gemma3", "nemotron"), _plus_one),
    **dict.fromkeys(("llama", "olmo", "mistral3", "deepseek", "minicpm"), _by_pairs),
    "deci": _deci,
    "falcon": _prefixed(_falcon),
    "mpt": _prefixed(_as_is),
    "dbrx": _dbrx,
    "mimo2": _mimo2,
    "bitnet": _bitnet,
    "gptneox": _each_head("num_attention_heads"),
    "bloom": _each_head("n_head"),
    "stablelm": _stablelm,
    **dict.fromkeys(
        (
            *("glm4moe", "dots1", "ernie4_5-moe", "minimax-m2", "afmoe", "exaone-moe"),
            "bailingmoe2",
        ),
        _correction,
    ),
    "bailingmoe": _bailing,
    "internlm2": _internlm2,
    "step35": _step35,
    "minimax-m3": _minimax_m3,
    "muse-glimmer": _muse_glimmer,
    "deepseek2": _latent,
    "mistral4": _stacks,
    "llama4": _llama4,
    "gemma3n": _gemma3n,
    "gemma4": _gemma4,
    "granitemoe": _granite,
    **dict.fromkeys(("mamba", "jamba"), _state),
    "mamba2": _state_2("n_groups"),
    "nemotron_h": _state_2("n_groups"),
    "nemotron_h_moe": _nemotron_h_moe,
    "falcon-h1": _falcon_h1,
    "granitehybrid": _granite_hybrid,
    **dict.fromkeys(("lfm2", "lfm2moe"), _short_conv),
}
