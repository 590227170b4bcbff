"""Tiny checkpoints made on the fly: Hugging Face folders, GGUF files, wheels.

The GGUF part takes names and layouts from the ``gguf`` package and from llama.cpp's converter, not
from jaxinfer, so that reading the files is an independent check.
"""

from __future__ import annotations

import base64
import hashlib
import json
import re
import zipfile
from collections.abc import Mapping, Sequence
from itertools import batched
from pathlib import Path
from types import MappingProxyType
from typing import Any

import gguf
import numpy as np
from gguf.quants import quantize
from safetensors.numpy import save_file

from jaxinfer.models.base import Model
from jaxinfer.models.params import by_path
from kit.gguf_layouts import (
    ARCHITECTURES,
    FLOAT32,
    converted,
    rope_factors,
    write_experts_config,
    write_heads_config,
    write_hybrid_config,
)

type Tensors = dict[str, np.ndarray]
type HFConfig = dict[str, Any]


def tiny_llama_config(**changes: Any) -> HFConfig:
    """A two-layer Llama whose rows are multiples of 32, so that every simple GGUF type fits."""
    config: HFConfig = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": 96,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "max_position_embeddings": 256,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "rope_scaling": None,
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": True,
        "bos_token_id": 1,
        "eos_token_id": 2,
    }
    return config | changes


def tiny_qwen2_config(**changes: Any) -> HFConfig:
    """The same sizes with biases of queries, keys and values, and an untied head."""
    return tiny_llama_config(
        architectures=["Qwen2ForCausalLM"], model_type="qwen2", tie_word_embeddings=False
    ) | (changes)


def tiny_qwen3_config(**changes: Any) -> HFConfig:
    """The same sizes with norms of queries and keys."""
    return tiny_llama_config(architectures=["Qwen3ForCausalLM"], model_type="qwen3") | changes


def tiny_qwen3_moe_config(**changes: Any) -> HFConfig:
    """Qwen3 with five experts."""
    experts = {"num_experts": 5, "num_experts_per_tok": 2, "moe_intermediate_size": 64}
    names = {"architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe"}
    return tiny_qwen3_config() | names | experts | {"norm_topk_prob": True} | changes


def tiny_olmo2_config(**changes: Any) -> HFConfig:
    """The same sizes with norms after blocks, and an untied head."""
    return tiny_llama_config(
        architectures=["Olmo2ForCausalLM"], model_type="olmo2", tie_word_embeddings=False
    ) | (changes)


def tiny_phi3_config(**changes: Any) -> HFConfig:
    """The same sizes, with heads that rotate in three quarters by LongRoPE, as in Phi-4-mini."""
    names = {"architectures": ["Phi3ForCausalLM"], "model_type": "phi3"}
    scaling = {
        "rope_type": "longrope",
        "long_factor": [1.0, 1.5, 2.25, 4.0, 8.0, 16.5],
        "short_factor": [1.0, 1.0, 1.125, 1.25, 1.5, 2.0],
        "original_max_position_embeddings": 64,
        "attention_factor": 1.1547005,  # the root of 1 + ln(256 / 64) / ln(64)
    }
    rope = {"partial_rotary_factor": 0.75, "rope_scaling": scaling, "sliding_window": None}
    return tiny_llama_config() | names | rope | changes


def tiny_glm4_config(**changes: Any) -> HFConfig:
    """The same sizes with norms before and after blocks; half of each head rotates, by pairs."""
    names = {"architectures": ["Glm4ForCausalLM"], "model_type": "glm4"}
    more = {"partial_rotary_factor": 0.5, "attention_bias": True, "tie_word_embeddings": False}
    return tiny_llama_config() | names | more | changes


def tiny_granite_config(**changes: Any) -> HFConfig:
    """The same sizes with Granite's factors."""
    factors = {
        "attention_multiplier": 0.25,
        "embedding_multiplier": 3.0,
        "residual_multiplier": 0.5,
        "logits_scaling": 8.0,
    }
    names = {"architectures": ["GraniteForCausalLM"], "model_type": "granite"}
    return tiny_llama_config() | names | factors | changes


def tiny_smollm3_config(**changes: Any) -> HFConfig:
    """Five layers of the same sizes, of which the fourth does not rotate."""
    names = {"architectures": ["SmolLM3ForCausalLM"], "model_type": "smollm3"}
    more = {"num_hidden_layers": 5, "no_rope_layer_interval": 4}
    return tiny_llama_config() | names | more | changes


def tiny_arcee_config(**changes: Any) -> HFConfig:
    """The same sizes with a network without a gate."""
    names = {"architectures": ["ArceeForCausalLM"], "model_type": "arcee"}
    return tiny_llama_config() | names | {"hidden_act": "relu2"} | changes


def tiny_ernie4_5_config(**changes: Any) -> HFConfig:
    """The same sizes; heads rotate by pairs."""
    names = {"architectures": ["Ernie4_5ForCausalLM"], "model_type": "ernie4_5"}
    config = tiny_llama_config() | names | {"use_bias": False} | changes
    return {key: value for key, value in config.items() if key not in _LLAMAS_BIASES}


def tiny_exaone_config(**changes: Any) -> HFConfig:
    """The same sizes under EXAONE's names of tensors."""
    return tiny_llama_config() | _named("ExaoneForCausalLM", "exaone") | changes


def tiny_seed_oss_config(**changes: Any) -> HFConfig:
    """The same sizes; attention's outputs have no biases."""
    names = _named("SeedOssForCausalLM", "seed_oss")
    return tiny_llama_config() | names | {"attention_out_bias": False} | changes


def tiny_starcoder2_config(**changes: Any) -> HFConfig:
    """The same sizes with LayerNorm, biases, and a network without a gate."""
    names = _named("Starcoder2ForCausalLM", "starcoder2")
    own = {"hidden_act": "gelu_pytorch_tanh", "norm_epsilon": 1e-5, "use_bias": True}
    config = tiny_llama_config() | names | own | {"sliding_window": None} | changes
    return {k: v for k, v in config.items() if k not in (*_LLAMAS_BIASES, "rms_norm_eps")}


def tiny_starcoder_config(**changes: Any) -> HFConfig:
    """GPT-2's sizes with one KV head."""
    own = {"activation_function": "gelu_pytorch_tanh", "multi_query": True}
    return tiny_gpt2_config() | _named("GPTBigCodeForCausalLM", "gpt_bigcode") | own | changes


def _named(architecture: str, model_type: str) -> HFConfig:
    return {"architectures": [architecture], "model_type": model_type}


_LLAMAS_BIASES = ("attention_bias", "mlp_bias")


def tiny_gpt2_config(**changes: Any) -> HFConfig:
    """A two-layer GPT-2."""
    config: HFConfig = {
        "architectures": ["GPT2LMHeadModel"],
        "model_type": "gpt2",
        "vocab_size": 96,
        "n_embd": 64,
        "n_inner": 128,
        "n_layer": 2,
        "n_head": 4,
        "n_positions": 128,
        "layer_norm_epsilon": 1e-5,
        "activation_function": "gelu_new",
        "tie_word_embeddings": True,
        "bos_token_id": 1,
        "eos_token_id": 2,
    }
    return config | changes


DENSE_CONFIGS: Mapping[str, HFConfig] = MappingProxyType(
    {
        "llama": tiny_llama_config(),
        "qwen2": tiny_qwen2_config(),
        "qwen3": tiny_qwen3_config(),
        "olmo2": tiny_olmo2_config(),
        "phi3": tiny_phi3_config(),
        "glm4": tiny_glm4_config(),
        "gpt2": tiny_gpt2_config(),
        "granite": tiny_granite_config(),
        "smollm3": tiny_smollm3_config(),
        "arcee": tiny_arcee_config(),
        "exaone": tiny_exaone_config(),
        "seed_oss": tiny_seed_oss_config(),
        "starcoder2": tiny_starcoder2_config(),
        "starcoder": tiny_starcoder_config(),
        "ernie4_5": tiny_ernie4_5_config(),
    }
)


def random_hf_tensors(model: Model, seed: int = 0) -> Tensors:
    """A float32 checkpoint of all of the model's sources, under Hugging Face's names; integers
    are 0 or 1.
    """
    rng, found = np.random.default_rng(seed), dict[str, np.ndarray]()
    for spec in model.param_specs:
        array = model.arrays.get(spec.path)
        for source in spec.sources:
            if array is not None and array.dtype == np.int32 and spec.matrix is None:
                found[source.name] = rng.integers(2, size=source.shape)
            else:
                found[source.name] = rng.normal(0.0, 0.1, source.shape).astype(np.float32)
    return found


def built_arrays(model: Model, tensors: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """The arrays that a model's specs make of a checkpoint, by path."""
    made: dict[str, np.ndarray] = {}
    for spec in model.param_specs:
        whole = ((tensors[source.name], source.part) for source in spec.sources)
        read = [tensor if part is None else tensor[part] for tensor, part in whole]
        if spec.pieces is None:
            arrays = by_path({spec.path: spec.built(read)})
        else:
            each = [
                by_path({spec.path: spec.built(piece, i)})
                for i, piece in enumerate(batched(read, len(read) // spec.pieces))
            ]
            arrays = {path: np.stack([piece[path] for piece in each]) for path in each[0]}
        made |= {path: arrays[path].astype(model.arrays[path].dtype) for path in spec.leaves}
    return made


def unstacked(tensors: Mapping[str, np.ndarray]) -> Tensors:
    """The tensors with those of stacked experts, gate_up_proj [E, 2F, D] and down_proj, apart."""
    found: Tensors = {}
    for name, tensor in tensors.items():
        stack, _, kind = name.rpartition(".")
        if not (stack.endswith(".experts") and tensor.ndim == 3):
            found[name] = tensor
            continue
        for number, expert in enumerate(tensor):
            pair = kind == "gate_up_proj"
            parts = dict(zip(("gate_proj", "up_proj"), np.split(expert, 2), strict=True))
            for own, part in (parts if pair else {"down_proj": expert}).items():
                found[f"{stack}.{number}.{own}.weight"] = part
    return found


def stacked(tensors: Mapping[str, np.ndarray]) -> Tensors:
    """The reverse of ``unstacked``."""
    found: dict[str, list[list[np.ndarray]]] = {}
    others: Tensors = {}
    for name, tensor in tensors.items():
        match = re.fullmatch(r"(.*\.experts)\.(\d+)\.(gate|up|down)_proj\.weight", name)
        if match is None:
            others[name] = tensor
            continue
        kind = "down_proj" if match[3] == "down" else "gate_up_proj"
        experts = found.setdefault(f"{match[1]}.{kind}", [])
        if int(match[2]) == len(experts):
            experts.append([])
        experts[int(match[2])].append(tensor)
    stacks = {n: np.stack([np.concatenate(one) for one in each]) for n, each in found.items()}
    return others | stacks


def write_hf_folder(
    folder: Path,
    config: Mapping[str, Any],
    tensors: Mapping[str, np.ndarray] | None = None,
    *,
    shards: int = 1,
    index: bool = True,
) -> Path:
    """Write ``config.json`` and, if there are tensors, safetensors files; return ``folder``."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config), "utf-8")
    if tensors is None:
        return folder
    if shards == 1:
        save_file(dict(tensors), folder / "model.safetensors")
        return folder
    names = sorted(tensors)
    weight_map: dict[str, str] = {}
    for shard in range(shards):
        file = f"model-{shard + 1:05d}-of-{shards:05d}.safetensors"
        members = names[shard::shards]
        save_file({name: tensors[name] for name in members}, folder / file)
        weight_map |= dict.fromkeys(members, file)
    if index:
        text = json.dumps({"metadata": {}, "weight_map": weight_map})
        (folder / "model.safetensors.index.json").write_text(text, "utf-8")
    return folder


def write_gguf(
    path: Path,
    config: Mapping[str, Any],
    tensors: Mapping[str, np.ndarray],
    *,
    kind: gguf.GGMLQuantizationType = gguf.GGMLQuantizationType.F32,
    metadata: Mapping[str, Any] | None = None,
    extra: Mapping[str, np.ndarray] | None = None,
    blocks: Mapping[str, tuple[np.ndarray, gguf.GGMLQuantizationType]] | None = None,
    special: Mapping[int, str] | None = None,
    older: bool = False,
    part_tensors: int = 0,
) -> Path:
    """Write a GGUF file as llama.cpp's converter does; matrices are stored as ``kind``.

    ``part_tensors``: split it into parts of so many tensors, and return the first part.

    ``older``: as it did for latent attention at first.
    ``metadata`` adds or replaces keys of plain values, ``extra`` adds tensors by GGUF name,
    ``blocks`` has rows of bytes uint8[O, n] and their type by Hugging Face name, in place of these
    tensors' values, ``special`` makes tokens control tokens with that text.
    """
    arch = ARCHITECTURES[config["model_type"]]
    writer = gguf.GGUFWriter(path, gguf.MODEL_ARCH_NAMES[arch], split_max_tensors=part_tensors)
    _write_config(writer, config, older)
    _write_tokenizer(writer, config, special or {})
    for key, value in (metadata or {}).items():
        {
            str: writer.add_string,
            int: writer.add_uint32,
            float: writer.add_float32,
            bool: writer.add_bool,
            list: writer.add_array,
        }[type(value)](key, value)
    names = gguf.get_tensor_name_map(arch, _layers(config))
    for hf_name, stacked in _stacked(tensors).items():
        for name, tensor in converted(hf_name, stacked, config, older):
            gguf_name = names.get_name(name, try_suffixes=(".weight", ".bias"))
            assert gguf_name is not None, name
            if blocks and name in blocks:
                rows, stored = blocks[name]
                writer.add_tensor(gguf_name, rows, raw_dtype=stored)
                continue
            _add_tensor(writer, gguf_name, _as_llama_cpp(arch, name, tensor, config), kind)
    for gguf_name, tensor in {**rope_factors(config), **(extra or {})}.items():
        _add_tensor(writer, gguf_name, tensor, gguf.GGMLQuantizationType.F32)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return min(path.parent.glob(f"{path.stem}-00001-of-*.gguf")) if part_tensors else path


def write_wheel(
    folder: Path,
    package: str,
    version: str,
    files: Mapping[str, bytes],
    *,
    compressed: bool = False,
) -> Path:
    """A wheel that pip accepts, with ``files`` by their path in it."""
    folder.mkdir(parents=True, exist_ok=True)
    info = f"{package}-{version}.dist-info"
    metadata = f"Metadata-Version: 2.1\nName: {package}\nVersion: {version}\n"
    tags = "Wheel-Version: 1.0\nGenerator: kit\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
    members = dict(files) | {
        f"{info}/METADATA": metadata.encode(),
        f"{info}/WHEEL": tags.encode(),
    }
    record = "".join(f"{name},{_record_hash(data)},{len(data)}\n" for name, data in members.items())
    path = folder / f"{package}-{version}-py3-none-any.whl"
    compression = zipfile.ZIP_DEFLATED if compressed else zipfile.ZIP_STORED
    with zipfile.ZipFile(path, "w", compression) as archive:
        for name, data in members.items():
            archive.writestr(name, data)
        archive.writestr(f"{info}/RECORD", record + f"{info}/RECORD,,\n")
    return path


def _record_hash(data: bytes) -> str:
    digest = base64.urlsafe_b64encode(hashlib.sha256(data).digest())
    return "sha256=" + digest.rstrip(b"=").decode()


def _layers(config: Mapping[str, Any]) -> int:
    return config.get("num_hidden_layers") or config["n_layer"]


def _write_config(writer: gguf.GGUFWriter, config: Mapping[str, Any], older: bool) -> None:
    writer.add_block_count(_layers(config))
    if config["model_type"] in ("gpt2", "gpt_bigcode"):
        if config.get("multi_query"):
            writer.add_head_count_kv(1)
        writer.add_embedding_length(config["n_embd"])
        writer.add_feed_forward_length(config["n_inner"])
        writer.add_head_count(config["n_head"])
        writer.add_context_length(config["n_positions"])
        writer.add_layer_norm_eps(config["layer_norm_epsilon"])
        return
    writer.add_embedding_length(config["hidden_size"])
    if "intermediate_size" in config:
        writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    write_heads_config(writer, config, older)
    writer.add_context_length(config["max_position_embeddings"])
    if "norm_epsilon" in config:
        writer.add_layer_norm_eps(config["norm_epsilon"])
    else:
        writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_rope_freq_base(config["rope_theta"])
    if config["model_type"] == "granite":
        writer.add_attention_scale(config["attention_multiplier"])
        writer.add_embedding_scale(config["embedding_multiplier"])
        writer.add_residual_scale(config["residual_multiplier"])
        writer.add_logit_scale(config["logits_scaling"])
    write_experts_config(writer, config)
    if "linear_num_key_heads" in config:
        write_hybrid_config(writer, config)


def _write_tokenizer(
    writer: gguf.GGUFWriter, config: Mapping[str, Any], special: Mapping[int, str]
) -> None:
    last = config["vocab_size"] - 1  # the result of the one merge
    words = [*(chr(ord("!") + i) for i in range(last)), "!!"]
    tokens = [special.get(i, word) for i, word in enumerate(words)]
    normal, control = gguf.TokenType.NORMAL, gguf.TokenType.CONTROL
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(tokens)
    writer.add_token_types([control if i in special else normal for i in range(len(tokens))])
    writer.add_token_merges(["! !"])
    writer.add_bos_token_id(config["bos_token_id"])
    writer.add_eos_token_id(config["eos_token_id"])


def _stacked(tensors: Mapping[str, np.ndarray]) -> Tensors:
    """The tensors with those of all experts of a layer in one, under a name without a number."""
    found: dict[str, list[np.ndarray]] = {}
    for name, tensor in tensors.items():
        found.setdefault(re.sub(r"\.experts\.\d+\.", ".experts.", name), []).append(tensor)
    return {name: parts[0] if name in tensors else np.stack(parts) for name, parts in found.items()}


# whose converters put adjacent pairs of a head's halves together
_PERMUTED = (
    gguf.MODEL_ARCH.LLAMA,
    gguf.MODEL_ARCH.GRANITE,
    gguf.MODEL_ARCH.SMOLLM3,
    gguf.MODEL_ARCH.ARCEE,
)


def _as_llama_cpp(
    arch: gguf.MODEL_ARCH, name: str, tensor: np.ndarray, config: Mapping[str, Any]
) -> np.ndarray:
    """The layout that llama.cpp's converter gives a Hugging Face tensor."""
    stem = name.rsplit(".", 1)[0]
    if arch in _PERMUTED and stem.endswith(("q_proj", "k_proj")):
        key = "num_attention_heads" if stem.endswith("q_proj") else "num_key_value_heads"
        halves = tensor.reshape(config[key], 2, -1, *tensor.shape[1:])
        return halves.swapaxes(1, 2).reshape(tensor.shape)
    conv1d: Sequence[str] = ("c_attn.weight", "c_proj.weight", "c_fc.weight")
    if arch == gguf.MODEL_ARCH.GPT2 and name.endswith(tuple(conv1d)):
        return tensor.T
    return tensor


def _add_tensor(
    writer: gguf.GGUFWriter, name: str, tensor: np.ndarray, kind: gguf.GGMLQuantizationType
) -> None:
    tensor = np.ascontiguousarray(tensor)
    if tensor.ndim == 1 or name.endswith(FLOAT32):  # llama.cpp keeps vectors in float32
        kind = gguf.GGMLQuantizationType.F32
    writer.add_tensor(name, quantize(tensor, kind), raw_dtype=kind)
