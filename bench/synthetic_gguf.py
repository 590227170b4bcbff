"""Writes a GGUF file of random weights in the mix of forms that llama.cpp calls Q4_K_M.

    .venv/bin/python -m bench.synthetic_gguf CONFIG TOKENIZER OUT.gguf

CONFIG is a config.json of Qwen 2 or Llama, TOKENIZER a tokenizer.json with byte-level BPE (also
.gz). Speed and memory depend on the sizes and forms only, so such a file stands for a published
one. Q6_K is used for the embedding (which is the head as well), and for values and down projections
of the layers that llama.cpp's ``use_more_bits`` selects; other matrices are Q4_K.
"""

from __future__ import annotations

import argparse
import gzip
import json
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType

Q4_K, Q6_K = GGMLQuantizationType.Q4_K, GGMLQuantizationType.Q6_K
_DEVIATION = 0.02


def random_blocks(
    rng: np.random.Generator, kind: GGMLQuantizationType, outputs: int, inputs: int
) -> np.ndarray:
    """Blocks of random weights with deviation 0.02 and mean near 0: uint8[outputs, row bytes]."""
    per_block, nbytes = GGML_QUANT_SIZES[kind]
    blocks = np.frombuffer(rng.bytes(outputs * (inputs // per_block) * nbytes), np.uint8)
    blocks = blocks.reshape(outputs, -1, nbytes).copy()
    if kind is Q4_K:  # weight = d * scale * q - dmin * minimum; here scales and minima are 32:
        blocks[..., 4:12], blocks[..., 12:16] = 32 | 32 >> 4 << 6, 0  # 6 bits each, packed
        factors = np.float16([_DEVIATION / 4.6 / 32, 7.5 * _DEVIATION / 4.6 / 32])
        blocks[..., :4] = factors.view(np.uint8)
    else:  # weight = d * scale * (q - 32)
        blocks[..., 192:208] = 64
        blocks[..., 208:] = np.float16([_DEVIATION / 18.5 / 64]).view(np.uint8)
    return blocks.reshape(outputs, -1)


def uses_more_bits(layer: int, layers: int) -> bool:
    """llama.cpp's choice of layers: the first and last eighth, and every third between."""
    return layer < layers // 8 or layer >= 7 * layers // 8 or (layer - layers // 8) % 3 == 2


def write(config: dict[str, Any], tokenizer: dict[str, Any], path: Path) -> None:
    """Write the file."""
    arch, rng = config["model_type"], np.random.default_rng(0)
    writer = gguf.GGUFWriter(path, arch)
    d, layers = config["hidden_size"], config["num_hidden_layers"]
    heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    kv, f = d // heads * kv_heads, config["intermediate_size"]
    writer.add_block_count(layers)
    writer.add_embedding_length(d)
    writer.add_feed_forward_length(f)
    writer.add_head_count(heads)
    writer.add_head_count_kv(kv_heads)
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_rope_freq_base(config.get("rope_theta", 1e6))
    vocab_size = config["vocab_size"]
    _add_tokenizer(writer, tokenizer, vocab_size)

    def matrix(name: str, kind: GGMLQuantizationType, outputs: int, inputs: int) -> None:
        writer.add_tensor(name, random_blocks(rng, kind, outputs, inputs), raw_dtype=kind)

    def vector(name: str, size: int, value: float) -> None:
        writer.add_tensor(name, np.full(size, value, np.float32))

    matrix("token_embd.weight", Q6_K, vocab_size, d)
    vector("output_norm.weight", d, 1)
    for i in range(layers):
        more = Q6_K if uses_more_bits(i, layers) else Q4_K
        matrix(f"blk.{i}.attn_q.weight", Q4_K, d, d)
        matrix(f"blk.{i}.attn_k.weight", Q4_K, kv, d)
        matrix(f"blk.{i}.attn_v.weight", more, kv, d)
        if arch == "qwen2":
            for part, size in (("q", d), ("k", kv), ("v", kv)):
                vector(f"blk.{i}.attn_{part}.bias", size, 0)
        matrix(f"blk.{i}.attn_output.weight", Q4_K, d, d)
        matrix(f"blk.{i}.ffn_gate.weight", Q4_K, f, d)
        matrix(f"blk.{i}.ffn_up.weight", Q4_K, f, d)
        matrix(f"blk.{i}.ffn_down.weight", more, d, f)
        for norm in ("attn_norm", "ffn_norm"):
            vector(f"blk.{i}.{norm}.weight", d, 1)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _add_tokenizer(writer: gguf.GGUFWriter, tokenizer: dict[str, Any], vocab_size: int) -> None:
    words = {number: token for token, number in tokenizer["model"]["vocab"].items()}
    special = {added["id"]: added["content"] for added in tokenizer["added_tokens"]}
    tokens = [special.get(i) or words.get(i) or f"[PAD{i}]" for i in range(vocab_size)]
    normal, control, unused = gguf.TokenType.NORMAL, gguf.TokenType.CONTROL, gguf.TokenType.UNUSED
    kinds = [
        control if i in special else normal if i in words else unused for i in range(vocab_size)
    ]
    merges = tokenizer["model"]["merges"]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("qwen2")
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
