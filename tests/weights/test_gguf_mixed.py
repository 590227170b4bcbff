"""A GGUF file with a type for each tensor, as llama.cpp writes mixtures of types: all are kept."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from gguf.constants import GGMLQuantizationType as Type
from gguf.quants import dequantize

from jaxinfer.core.progress import NoProgress
from jaxinfer.models.base import Model, Params, forward
from jaxinfer.models.registry import build_model
from jaxinfer.nn.placement import default_placement
from jaxinfer.weights.load import load_params
from jaxinfer.weights.plan import forms_of
from jaxinfer.weights.sources import ModelSource, resolve_source
from kit.checkpoints import random_hf_tensors, tiny_qwen3_config, write_gguf
from kit.gguf_blocks import random_rows
from kit.memory_checkpoint import InMemory, source_of
from pallas_kernels.lib.arrangements import LANES
from pallas_kernels.lib.quantised import is_matrix
from pallas_kernels.native.library import library

CONFIG = tiny_qwen3_config(
    hidden_size=256, intermediate_size=256, head_dim=64, tie_word_embeddings=False
)
TYPES = {  # q and k are of one type, v of another; gate and up differ, too
    "embed_tokens": Type.Q6_K,
    "lm_head": Type.Q8_0,
    "0.self_attn.q_proj": Type.Q4_K,
    "0.self_attn.k_proj": Type.Q4_K,
    "0.self_attn.v_proj": Type.Q6_K,
    "0.self_attn.o_proj": Type.Q5_K,
    "0.mlp.gate_proj": Type.Q5_1,
    "0.mlp.up_proj": Type.Q4_1,
    "0.mlp.down_proj": Type.Q4_0,
    "1.self_attn.q_proj": Type.Q5_K,
    "1.self_attn.k_proj": Type.Q5_0,
    "1.self_attn.v_proj": Type.F16,
    "1.self_attn.o_proj": Type.Q4_K,
    "1.mlp.gate_proj": Type.Q5_K,
    "1.mlp.up_proj": Type.Q5_K,
    "1.mlp.down_proj": Type.Q6_K,
}


def loaded(model: Model, source: ModelSource, cache: Path) -> Params:
    placed = {"placement": default_placement(), "cache_dir": cache}
    return load_params(model, source, **placed, seed=0, progress=NoProgress())


def test_types_that_differ_by_tensor_are_kept(tmp_path: Path) -> None:
    plain = build_model(CONFIG, "float32")
    floats = random_hf_tensors(plain)
    blocks = {}
    for stem, kind in TYPES.items():
        (name,) = (name for name in floats if name.endswith(f"{stem}.weight"))
        if kind is Type.F16:
            rows = floats[name].astype(np.float16)
            floats[name] = rows.astype(np.float32)
        else:
            rows = random_rows(kind, *floats[name].shape)
            floats[name] = dequantize(rows, kind)
        blocks[name] = (rows, kind)
    cache = tmp_path / "cache"
    path = write_gguf(tmp_path / "m.gguf", CONFIG, floats, blocks=blocks)
    source = resolve_source(str(path), cache_dir=cache, progress=NoProgress())
    assert source.checkpoint is not None
    model = replace(
        build_model(source.hf_config, "float32"),
        forms=forms_of(plain.family, source.checkpoint),
        arrangement=None if library() is None else LANES.name,
    )
    assert {str(form) for _, form in model.forms} == {
        *("int4 g32", "int4 g32 offsets", "int4 g32 offsets supers"),
        *("int8 g32", "int8 g32 offsets", "int8 g32 offsets supers", "int8 g16 supers"),
    }
    params = loaded(model, source, cache)
    parts = params["layers_1"]["qkv"].values()  # of q, k and v
    assert [isinstance(part, dict) and is_matrix(part) for part in parts] == [True, True, False]
    dense = loaded(plain, source_of(InMemory(floats)), cache)
    assert not cache.exists()  # only weights that are dequantised are converted and written there
    logits = jax.jit(forward, static_argnums=0)
    expected = np.asarray(logits(plain, dense, jnp.arange(5)))
    found = logits(model, params, jnp.arange(5))
    # The native kernel rounds activations to 16 bits.
    np.testing.assert_allclose(found, expected, rtol=0, atol=5e-4 * np.abs(expected).max())
