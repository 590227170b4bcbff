"""Qwen3.5 to 3.8 (text): the gated delta rule in three of four layers, else gated attention.

Source: ``modeling_qwen3_5`` of Hugging Face transformers. Published are 0.8B to 27B, with parts for
images, which are not used.
"""

from __future__ import annotations

from functools import partial

from jaxinfer.models.base import ModelFamily
from jaxinfer.models.delta import delta_specs
from jaxinfer.models.gqa import gqa_param_specs
from jaxinfer.models.hybrid import HYBRID_IGNORED_TENSORS, NORMS, hybrid_config

FAMILY = ModelFamily(
    name="qwen3_5",
    config_from_hf=hybrid_config,
    param_specs=partial(gqa_param_specs, norms=NORMS, mixers=delta_specs),
    ignored_tensors=HYBRID_IGNORED_TENSORS,
    optional_prefix="model.language_model.",
)
