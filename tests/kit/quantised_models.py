"""Tiny quantised models: one whose matrices have every form, with its checkpoint in memory, and a
folder of a mixture of experts.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np

from jaxinfer.models.base import Model, Params
from jaxinfer.models.params import nested
from jaxinfer.models.registry import build_model
from jaxinfer.weights.checkpoint import TensorInfo
from jaxinfer.weights.plan import plan_params
from kit.checkpoints import random_hf_tensors, tiny_llama_config, write_hf_folder
from kit.tiny_models import tiny_config
from pallas_kernels.lib.quantised import Form, Quantised, dequantised
from pallas_kernels.quantised_gemm.cases import FORMS, random_matrix

WIDTH = 256  # K forms have blocks of 256
# q, k and v have three forms, gate and up have two, in the first layer; in the second they agree
_OF_STEMS = {
    "embed_tokens": "q6_k",
    "lm_head": "int8",
    "0.self_attn.q_proj": "q4_k",
    "0.self_attn.k_proj": "q4_k",
    "0.self_attn.v_proj": "q6_k",
    "0.self_attn.o_proj": "int4",
    "0.mlp.gate_proj": "int4_zeros",
    "0.mlp.up_proj": "int4_offsets",
    "0.mlp.down_proj": "fp8",
    "1.self_attn.q_proj": "int8_offsets",
    "1.self_attn.k_proj": "int8_offsets",
    "1.self_attn.v_proj": None,
    "1.self_attn.o_proj": "fp4",
    "1.mlp.gate_proj": "fp8_blocks",
    "1.mlp.up_proj": "fp8_blocks",
    "1.mlp.down_proj": "q5_k",
}
_GROUPS = {"q4_k": 32, "q5_k": 32, "q6_k": 16, "fp8": 128, "fp8_blocks": 128}


class QuantisedTensors:
    """A ``Checkpoint`` of quantised matrices and plain arrays."""

    unneeded: frozenset[str] = frozenset()

    def __init__(self, matrices: Mapping[str, Quantised], plain: Mapping[str, np.ndarray]) -> None:
        self._matrices = matrices
        self._plain = plain
        self.forms: Mapping[str, Form] = {name: w.form for name, w in matrices.items()}
        shapes = {name: (w.num_outputs, w.num_inputs) for name, w in matrices.items()}
        shapes |= {name: array.shape for name, array in plain.items()}
        self.tensors = {name: TensorInfo(shape, "any", 1, True) for name, shape in shapes.items()}

    def read(self, name: str, part: int | None = None) -> np.ndarray:
        assert part is None
        if name in self._plain:
            return self._plain[name]
        return np.asarray(dequantised(self._matrices[name]))

    def read_quantised(self, name: str, part: int | None = None) -> Quantised:
        assert part is None
        return self._matrices[name]


@cache
def quantised_tensors() -> tuple[Model, QuantisedTensors]:
    """The model, which keeps every form, and its checkpoint."""
    config = tiny_llama_config(
        vocab_size=320,
        hidden_size=WIDTH,
        intermediate_size=WIDTH,
        head_dim=64,
        tie_word_embeddings=False,
    )
    model = build_model(config, "float32")
    plain = random_hf_tensors(model)
    rng = np.random.default_rng(3)
    matrices: dict[str, Quantised] = {}
    for name in sorted(plain):
        form = next((form for stem, form in _OF_STEMS.items() if f"{stem}.weight" in name), None)
        if form is not None:
            group = _GROUPS.get(form, 64)
            matrices[name] = random_matrix(rng, form, *plain.pop(name).shape, group)
    assert {form for form in _OF_STEMS.values() if form} == {*FORMS}
    checkpoint = QuantisedTensors(matrices, plain)
    return replace(model, forms=tuple(checkpoint.forms.items())), checkpoint


@cache
def quantised_model(arrangement: str | None = None) -> tuple[Model, Params]:
    """The model with its parameters on the device, in the order of an arrangement of this name."""
    model, checkpoint = quantised_tensors()
    model = replace(model, arrangement=arrangement)
    made: dict[str, np.ndarray] = {}
    for planned in plan_params(model, checkpoint):
        made |= planned.whole(checkpoint)
    return model, nested({path: jnp.asarray(array) for path, array in made.items()})


def write_gpt_oss(folder: Path, shards: int = 1, **changes: Any) -> Path:
    """A folder of a small gpt-oss whose experts are in MXFP4, with random values."""
    config = {**tiny_config("gpt_oss"), "intermediate_size": 64, **changes}
    tensors = random_hf_tensors(build_model(config, "float32"))
    rng = np.random.default_rng(0)
    for name in [name for name in tensors if name.endswith(("gate_up_proj", "down_proj"))]:
        experts, inputs, outputs = tensors.pop(name).shape
        blocks = rng.integers(0, 256, (experts, outputs, inputs // 32, 16), np.uint8)
        scales = rng.integers(122, 126, blocks.shape[:-1], np.uint8)
        tensors |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
    for name in [name for name in tensors if "self_attn" in name and name.endswith("weight")]:
        tensors[name] = tensors[name] * 4  # else answers would hardly depend on earlier tokens
    config["quantization_config"] = {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]}
    return write_hf_folder(folder, config, tensors, shards=shards)
