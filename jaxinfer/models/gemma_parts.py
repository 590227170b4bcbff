"""Parts of several Gemmas: norms around blocks (2, 3 and Rnj-1); inputs of layers, and layers that
use the keys and values of an earlier one (3n and 4).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from jaxinfer.core.errors import ConfigError
from jaxinfer.models import hf_config as hf
from jaxinfer.models.gqa import GQA_IGNORED_TENSORS, NormSources
from jaxinfer.models.linears import Linear, linear_specs
from jaxinfer.models.params import ParamSpec, as_is, plus_one, stack, stack_plus_one
from jaxinfer.models.sources import ArraySpec, Source
from jaxinfer.nn.layer_spec import LayerInputsConfig
from jaxinfer.nn.mixers.shared_spec import SharedAttentionConfig

FULL, SLIDING = "full_attention", "sliding_attention"
AROUND_BLOCKS = NormSources(
    names=(
        "input_layernorm",
        "post_attention_layernorm",
        "pre_feedforward_layernorm",
        "post_feedforward_layernorm",
    ),
    one=plus_one,
    several=stack_plus_one,
)
IGNORED_TENSORS = (
    # layers that use the keys and values of another one may have such tensors as well
    r"model\.layers\.\d+\.self_attn\.(k_proj|v_proj|k_norm|v_norm)\.(weight|bias)",
    *GQA_IGNORED_TENSORS,
    r"model\.(vision_tower|audio_tower|embed_vision|embed_audio|vision_embedder)\..*",
)


def key_layers(config: Mapping[str, Any], windows: tuple[int | None, ...]) -> list[int | None]:
    """The layer whose keys and values each one uses; None for those with their own.

    The last layers have none of their own, and use those of the last of their kind that has.
    """
    shared = hf.layer_index(config, "num_kv_shared_layers", 0)
    last = {window: i for i, window in enumerate(windows[: max(len(windows) - shared, 0)])}
    if missing := {*windows} - {*last}:
        kinds = " and ".join(FULL if window is None else SLIDING for window in missing)
        raise ConfigError(
            f"config key 'num_kv_shared_layers' is {shared}, and no layer of {kinds} has keys and "
            "values of its own; correct it"
        )
    own = len(windows) - shared
    return [None if i < own else last[window] for i, window in enumerate(windows)]


def shared_specs(
    path: str, source: str, mixer: SharedAttentionConfig, width: int, norm_dtype: Any
) -> Iterator[ParamSpec]:
    """The parameters of ``nn.mixers.shared``."""
    own, heads = mixer.attention, mixer.attention.num_heads * mixer.attention.head_dim
    linears = (
        Linear("q", ("self_attn.q_proj",), (width, heads), (None, "heads"), own.qkv_bias),
        Linear("o", ("self_attn.o_proj",), (heads, width), ("heads", None), own.o_bias),
    )
    weights, biases = linear_specs(path, source, linears)
    yield from (*weights, *biases)
    norm = (Source(f"{source}self_attn.q_norm.weight", (own.head_dim,)),)
    array = ArraySpec((1, own.head_dim), (None, None), norm_dtype)
    yield ParamSpec(f"{path}q_norm", array, norm, stack)


def input_specs(inputs: LayerInputsConfig, width: int) -> Iterator[ParamSpec]:
    """The parameters of ``nn.layer_inputs.LayerInputs``."""
    path, columns = "layer_inputs/", inputs.num_layers * inputs.width
    table = Source("model.embed_tokens_per_layer.weight", (inputs.num_tokens, columns))
    array = ArraySpec(table.shape, ("vocab", None))
    yield ParamSpec(f"{path}embed", array, (table,), as_is, matrix="rows")
    tensor, axes = "per_layer_model_projection", (None, None)
    linear = Linear("projection", (tensor,), (width, columns), axes, bias=False)
    weights, _ = linear_specs(path, "model.", (linear,))
    yield from weights
    norm = (Source("model.per_layer_projection_norm.weight", (inputs.width,)),)
    yield ParamSpec(f"{path}norm", ArraySpec((inputs.width,), (None,)), norm, as_is)
