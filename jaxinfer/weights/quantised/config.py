"""Reads the ``quantization_config`` of a config.json.

Except in compressed-tensors, the dtypes of tensors say which matrices are quantised. Lists of
modules that are not (``modules_to_not_convert``) mean prefixes, substrings or patterns, depending
on the program that reads them, so they are checked and not used, but for those of MXFP4.

Sources of the keys: transformers 5.23 (utils/quantization_config.py), AutoAWQ 0.2.9, GPTQModel 7.7.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

from jaxinfer.core.errors import ConfigError
from jaxinfer.models.hf_keys import QUANTIZATION_KEYS
from jaxinfer.weights.quantised.compressed_config import compressed_scheme
from jaxinfer.weights.quantised.config_keys import CONFIG, Keys, check_pattern
from jaxinfer.weights.quantised.scheme import PATTERN, Rule, Scheme, WeightScheme

_NOT_HERE = ("gguf",)  # names the kind of file that the weights came from
_EVERY = PATTERN  # the empty pattern
_EXPERT_DTYPE = "expert_dtype"
_EXPERTS = PATTERN + r".*\.experts\.\d+\."
# Keys that say how a checkpoint was made, or which kernel should read it.
_MAKING = frozenset(
    {
        *("meta", "damp_percent", "damp_auto_increment", "true_sequential", "static_groups", "mse"),
        *("act_group_aware", "dataset", "tokenizer", "batch_size", "pad_token_id", "model_seqlen"),
        *("block_name_to_quantize", "module_name_preceding_first_block", "cache_block_outputs"),
        *("modules_in_block_to_quantize", "model_name_or_path", "model_file_base_name"),
        *("max_input_length", "use_cuda_fp16", "use_exllama", "disable_exllama"),
        *("exllama_config", "backend", "quantizer", "lm_head", "version"),
        *("do_fuse", "fuse_max_seq_len", "modules_to_fuse", "config_file_name"),
    }
)


def quantization_scheme(hf_config: Mapping[str, Any]) -> Scheme | None:
    """How a checkpoint is quantised, by its config.json; None if it is not.

    Raises ``ConfigError`` with the key for a format, a value or a key that is not supported.
    """
    config = next((hf_config[name] for name in QUANTIZATION_KEYS if hf_config.get(name)), None)
    if config is None:
        return None
    if (experts := hf_config.get(_EXPERT_DTYPE)) is not None:  # as transformers reads DeepSeek-V4's
        config = {_EXPERT_DTYPE: experts, **config}
    method = Keys(config).take("quant_method")
    if method in _NOT_HERE:
        return None
    if method is None and "config_groups" in config:
        method = "compressed-tensors"
    reader = _METHODS.get(method) if isinstance(method, str) else None
    if reader is None:
        raise ConfigError(
            f"config key '{CONFIG}.quant_method' is {method!r}, which is not supported "
            f"(supported: {', '.join(_METHODS)}); use a checkpoint in one of these formats, "
            "an unquantised one or a GGUF file"
        )
    return reader(Keys(config))


def _fp8(keys: Keys) -> Scheme:
    """Weights in e4m3 with a scale for a matrix, an output or a block; experts may be in MXFP4."""
    keys.take("quant_method")
    keys.choice("fmt", of=("e4m3", "float8_e4m3fn"), default="e4m3")
    keys.choice("scale_fmt", of=("float", "ue8m0"), default="float")  # the tensor's dtype says it
    keys.choice("activation_scheme", of=("dynamic", "static"), default="dynamic")
    experts = keys.choice(_EXPERT_DTYPE, of=("fp8", "fp4"), default="fp8")
    keys.targets("modules_to_not_convert", "ignored_layers")
    outputs, inputs = keys.block("weight_block_size") or (1, None)
    weights = WeightScheme("plain", "fp8", inputs, outputs)
    keys.finish(frozenset({"kv_cache_scheme", "dequantize", "modules_to_convert"}))
    of_experts = [Rule(_EXPERTS, WeightScheme("pairs", "fp4", 32))] if experts == "fp4" else []
    return Scheme("fp8", (*of_experts, Rule(_EVERY, weights)))


def _awq(keys: Keys) -> Scheme:
    """AutoAWQ's GEMM arrangement."""
    keys.choice("quant_method", "method", of=("awq",))
    keys.choice("bits", "w_bit", of=(4,), default=4)
    group = keys.group("group_size", "q_group_size", default=128)
    symmetric = not keys.flag("zero_point", default=True)
    for name in ("version", "format", "checkpoint_format"):
        keys.choice(name, of=("gemm",), default="gemm")
    keys.take("sym", "desc_act")  # GPTQModel writes them; a matrix has no g_idx in this layout
    keys.choice("pack_dtype", of=("int32",), default="int32")
    if keys.take("backend") == "llm-awq":
        raise ConfigError(
            f"config key {keys.path('backend')!r} is 'llm-awq', whose arrangement is not supported "
            "(supported: AutoAWQ's); use another checkpoint of this model"
        )
    keys.targets("modules_to_not_convert")
    keys.finish(_MAKING)
    weights = WeightScheme("awq", "int4", group, symmetric=symmetric)
    return Scheme("awq", (Rule(_EVERY, weights),))


def _gptq(keys: Keys) -> Scheme:
    """AutoGPTQ's and GPTQModel's arrangements, whose zero points differ by 1.

    ``desc_act`` is not read: ``g_idx`` says which order the inputs have.
    """
    keys.choice("quant_method", "method", of=("gptq",))
    own = keys.choice("checkpoint_format", "format", of=("gptq", "gptq_v2"), default="gptq")
    keys.take("format", "desc_act")
    keys.choice("pack_dtype", of=("int32",), default="int32")
    base = _gptq_weights(keys, own, None)
    keys.targets("modules_to_not_convert")
    dynamic = keys.take("dynamic", default={})
    keys.finish(_MAKING)
    rules = [*_gptq_exceptions(Keys(dynamic, keys.path("dynamic")), dynamic, own, base)]
    return Scheme("gptq", (*rules, Rule(_EVERY, base)))


def _gptq_exceptions(
    keys: Keys, dynamic: Mapping[str, Any], own: str, base: WeightScheme
) -> list[Rule]:
    """The rules of ``dynamic``; a pattern with "-:" excludes modules, others replace settings."""
    rules = []
    for pattern in dynamic:
        exclude, plain = pattern.startswith("-:"), pattern.removeprefix("-:").removeprefix("+:")
        check_pattern(plain, f"config key {keys.path(pattern)!r}")
        weights = None
        if not exclude:
            inner = Keys(dynamic[pattern], keys.path(pattern))
            inner.take("desc_act")
            weights = _gptq_weights(inner, own, base)
            inner.finish(_MAKING)
        rules.append(Rule(PATTERN + plain, weights))
    return rules


def _gptq_weights(keys: Keys, own: str, base: WeightScheme | None) -> WeightScheme:
    """The settings of an object; those that it lacks are the base's."""
    bits = None if base is None else {"int4": 4, "int8": 8}[base.kind]
    group = 128 if base is None else base.group or -1
    kind = {4: "int4", 8: "int8"}[keys.choice("bits", of=(4, 8), default=bits)]
    size = keys.group("group_size", default=group)
    symmetric = keys.flag("sym", default=True if base is None else base.symmetric)
    one_less = own == "gptq"
    return WeightScheme(
        "gptq", kind, size, symmetric=symmetric, one_less=one_less, bias_of_zeros=True
    )


def _mxfp4(keys: Keys) -> Scheme:
    """OCP MX formats 1.0: blocks of 32 e2m1 values with a power of 2.

    Here a list of modules that are not quantised has their names, with * for any text.
    """
    keys.take("quant_method")
    ignored = keys.targets("modules_to_not_convert")
    keys.finish(frozenset({"dequantize"}))
    weights = WeightScheme("mxfp4", "fp4", 32)
    ignore = tuple(PATTERN + re.escape(one).replace(r"\*", ".*") + r"(\.|$)" for one in ignored)
    return Scheme("mxfp4", (Rule(_EVERY, weights),), ignore)


_METHODS: Mapping[str, Callable[[Keys], Scheme]] = MappingProxyType(
    {
        "compressed-tensors": compressed_scheme,
        "fp8": _fp8,
        "awq": _awq,
        "gptq": _gptq,
        "mxfp4": _mxfp4,
    }
)
