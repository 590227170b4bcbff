"""CodeGen: GPT-J with queries, values and keys in one tensor, group by group of heads.

Source: ``modeling_codegen`` of Hugging Face transformers.
"""

from __future__ import annotations

from functools import partial

from jaxinfer.models.base import ModelFamily
from jaxinfer.models.gptj import NAMES, NORMS, config_from_hf
from jaxinfer.models.gqa import gqa_param_specs

# The four devices that the models were trained on.
_NAMES = NAMES._replace(qkv=("attn.qkv_proj",), groups=4)

FAMILY = ModelFamily(
    name="codegen",
    config_from_hf=config_from_hf,
    param_specs=partial(gqa_param_specs, norms=NORMS, names=_NAMES, interleaved=True),
    ignored_tensors=(r"h\.\d+\.attn\.(bias|masked_bias|causal_mask)", r"lm_head\.weight"),
    optional_prefix="transformer.",
)
