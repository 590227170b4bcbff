"""Writes a GGUF file of random weights in the mix of forms that llama.cpp calls Q4_K_M.

    .venv/bin/python -m bench.synthetic_gguf CONFIG TOKENIZER OUT.gguf

CONFIG is a config.json of Qwen 2, Llama or Qwen3.5 (dense), TOKENIZER a tokenizer.json with
byte-level BPE (also .gz). Speed and memory depend on the sizes and forms only, so such a file
stands for a published one. Q6_K is used for the embedding (which is the head as well), and for
values and down projections of the layers that llama.cpp's ``use_more_bits`` selects; Q5_K for the
inputs of the delta rule; other matrices are Q4_K.
"""

from __future__ import annotations

import argparse
import gzip
import json
import math
import os
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from gguf.constants import GGML_QUANT_SIZES
from gguf.constants import GGMLQuantizationType as Kind

Q4_K, Q5_K, Q6_K = Kind.Q4_K, Kind.Q5_K, Kind.Q6_K
_DEVIATION = 0.02
ALIGNMENT = 32  # bytes, of a tensor in a file


def random_blocks(rng: np.random.Generator, kind: Kind, outputs: int, inputs: int) -> np.ndarray:
    """Blocks of random weights with deviation 0.02 and mean near 0: uint8[outputs, row bytes]."""
    per_block, nbytes = GGML_QUANT_SIZES[kind]
    blocks = np.frombuffer(rng.bytes(outputs * (inputs // per_block) * nbytes), np.uint8)
    blocks = blocks.reshape(outputs, -1, nbytes).copy()
    if kind is Q6_K:  # weight = d * scale * (q - 32)
        blocks[..., 192:208] = 64
        blocks[..., 208:] = np.float16([_DEVIATION / 18.5 / 64]).view(np.uint8)
    else:  # weight = d * scale * q - dmin * minimum; here scales and minima are 32:
        blocks[..., 4:12], blocks[..., 12:16] = 32 | 32 >> 4 << 6, 0  # 6 bits each, packed
        mean, deviation = (7.5, 4.6) if kind is Q4_K else (15.5, 9.2)  # of q
        factor = _DEVIATION / deviation / 32
        blocks[..., :4] = np.float16([factor, mean * factor]).view(np.uint8)
    return blocks.reshape(outputs, -1)


def uses_more_bits(layer: int, layers: int) -> bool:
    """llama.cpp's choice of layers: the first and last eighth, and every third between."""
    return layer < layers // 8 or layer >= 7 * layers // 8 or (layer - layers // 8) % 3 == 2


class _File:
    """A file to which tensors are added; without ``data`` a hole stands for them."""

    def __init__(self, path: Path, arch: str, *, data: bool) -> None:
        self.writer, self.rng = gguf.GGUFWriter(path, arch), np.random.default_rng(0)
        self.path, self.data, self.hole = path, data, 0

    def matrix(self, name: str, kind: Kind, outputs: int, inputs: int) -> None:
        """Add random weights."""
        name = f"{name}.weight"
        if self.data:
            blocks = random_blocks(self.rng, kind, outputs, inputs)
            return self.writer.add_tensor(name, blocks, raw_dtype=kind)
        per_block, nbytes = GGML_QUANT_SIZES[kind]
        self._absent(name, (outputs, inputs // per_block * nbytes), np.dtype(np.uint8), kind)

    def floats(self, name: str, value: float, *shape: int) -> None:
        """Add equal floats."""
        if self.data:
            return self.writer.add_tensor(name, np.full(shape, value, np.float32))
        self._absent(name, shape, np.dtype(np.float32), None)

    def _absent(
        self, name: str, shape: tuple[int, ...], dtype: np.dtype[Any], kind: Kind | None
    ) -> None:
        nbytes = math.prod(shape) * dtype.itemsize
        self.writer.add_tensor_info(name, shape, dtype, nbytes, raw_dtype=kind)
        self.hole += -(-nbytes // ALIGNMENT) * ALIGNMENT

    def close(self) -> None:
        """Write all."""
        self.writer.write_header_to_file()
        self.writer.write_kv_data_to_file()
        if self.data:
            self.writer.write_tensors_to_file()
        else:
            self.writer.write_ti_data_to_file()
        self.writer.close()
        if not self.data:
            os.truncate(self.path, self.path.stat().st_size + ALIGNMENT + self.hole)


def write(
    config: dict[str, Any], tokenizer: dict[str, Any], path: Path, *, data: bool = True
) -> None:
    """Write the file; without ``data`` its tensors are holes, for ``load_format="dummy"``."""
    config = config.get("text_config", config)
    is_hybrid = "linear_num_key_heads" in config
    arch = "qwen35" if is_hybrid else config["model_type"]
    file = _File(path, arch, data=data)
    d, layers, f = (
        config[key] for key in ("hidden_size", "num_hidden_layers", "intermediate_size")
    )
    _add_config(file.writer, config)
    vocab_size = config["vocab_size"]
    _add_tokenizer(file.writer, tokenizer, vocab_size, "qwen35" if is_hybrid else "qwen2")
    file.matrix("token_embd", Q6_K, vocab_size, d)
    file.floats("output_norm.weight", 1, d)
    for i in range(layers):
        more = Q6_K if uses_more_bits(i, layers) else Q4_K
        if is_hybrid and config["layer_types"][i] == "linear_attention":
            _add_delta(file, f"blk.{i}.", config)
        else:
            _add_attention(file, f"blk.{i}.", config, more)
        file.matrix(f"blk.{i}.ffn_gate", Q4_K, f, d)
        file.matrix(f"blk.{i}.ffn_up", Q4_K, f, d)
        file.matrix(f"blk.{i}.ffn_down", more, d, f)
        for norm in ("attn_norm", "post_attention_norm" if is_hybrid else "ffn_norm"):
            file.floats(f"blk.{i}.{norm}.weight", 1, d)
    file.close()


def _head_dim(config: dict[str, Any]) -> int:
    return config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]


def _add_config(writer: gguf.GGUFWriter, config: dict[str, Any]) -> None:
    rope = config.get("rope_parameters", {})
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_rope_freq_base(rope.get("rope_theta") or config.get("rope_theta", 1e6))
    if "linear_num_key_heads" not in config:
        return
    head_dim, heads = _head_dim(config), config["linear_num_value_heads"]
    writer.add_key_length(head_dim)
    writer.add_value_length(head_dim)
    writer.add_rope_dimension_count(round(head_dim * rope["partial_rotary_factor"]))
    writer.add_rope_dimension_sections([*rope["mrope_section"], 0])
    writer.add_full_attention_interval(config["full_attention_interval"])
    writer.add_ssm_conv_kernel(config["linear_conv_kernel_dim"])
    writer.add_ssm_state_size(config["linear_key_head_dim"])
    writer.add_ssm_group_count(config["linear_num_key_heads"])
    writer.add_ssm_time_step_rank(heads)
    writer.add_ssm_inner_size(heads * config["linear_value_head_dim"])


def _add_attention(file: _File, block: str, config: dict[str, Any], more: Kind) -> None:
    d, head_dim, is_hybrid = config["hidden_size"], _head_dim(config), "layer_types" in config
    q = config["num_attention_heads"] * head_dim
    kv = config["num_key_value_heads"] * head_dim
    rows = 2 * q if is_hybrid else q  # with the gate of the output
    for part, kind, size in (("q", Q4_K, rows), ("k", Q4_K, kv), ("v", more, kv)):
        file.matrix(f"{block}attn_{part}", kind, size, d)
        if config["model_type"] == "qwen2":
            file.floats(f"{block}attn_{part}.bias", 0, size)
        elif is_hybrid and part != "v":
            file.floats(f"{block}attn_{part}_norm.weight", 1, head_dim)
    file.matrix(f"{block}attn_output", Q4_K, d, q)


def _add_delta(file: _File, block: str, config: dict[str, Any]) -> None:
    d, heads, v_dim = (
        config[key] for key in ("hidden_size", "linear_num_value_heads", "linear_value_head_dim")
    )
    values = heads * v_dim
    channels = 2 * config["linear_num_key_heads"] * config["linear_key_head_dim"] + values
    file.matrix(f"{block}attn_qkv", Q5_K, channels, d)
    file.matrix(f"{block}attn_gate", Q4_K, values, d)
    file.matrix(f"{block}ssm_alpha", Q4_K, heads, d)
    file.matrix(f"{block}ssm_beta", Q4_K, heads, d)
    file.matrix(f"{block}ssm_out", Q4_K, d, values)
    file.floats(f"{block}ssm_conv1d.weight", 0.5, channels, config["linear_conv_kernel_dim"])
    file.floats(f"{block}ssm_a", -0.5, heads)
    file.floats(f"{block}ssm_dt.bias", 0, heads)
    file.floats(f"{block}ssm_norm.weight", 1, v_dim)


def _add_tokenizer(
    writer: gguf.GGUFWriter, tokenizer: dict[str, Any], vocab_size: int, pre: str
) -> None:
    words = {number: token for token, number in tokenizer["model"]["vocab"].items()}
    special = {added["id"]: added["content"] for added in tokenizer["added_tokens"]}
    tokens = [special.get(i) or words.get(i) or f"[PAD{i}]" for i in range(vocab_size)]
    normal, control, unused = gguf.TokenType.NORMAL, gguf.TokenType.CONTROL, gguf.TokenType.UNUSED
    kinds = [
        control if i in special else normal if i in words else unused for i in range(vocab_size)
    ]
    merges = tokenizer["model"]["merges"]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre)
    writer.add_token_list(tokens)
    writer.add_token_types(kinds)
    writer.add_token_merges([m if isinstance(m, str) else " ".join(m) for m in merges])
    writer.add_eos_token_id(max(special))


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("config", type=Path)
    parser.add_argument("tokenizer", type=Path)
    parser.add_argument("output", type=Path)
    arguments = parser.parse_args()
    content = arguments.tokenizer.read_bytes()
    if arguments.tokenizer.suffix == ".gz":
        content = gzip.decompress(content)
    config = json.loads(arguments.config.read_text())
    write(config, json.loads(content), arguments.output)


if __name__ == "__main__":
    main()
