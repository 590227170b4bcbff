"""vLLM's constructor arguments, for scripts that only change their import.

Owns: which of vLLM's names mean something here, which are neutral, which are refused with advice.
Must not know: what the settings do.
"""

from __future__ import annotations

from dataclasses import fields
from types import MappingProxyType
from typing import Any

from jaxinfer.core.config import EngineConfig
from jaxinfer.core.errors import ConfigError
from jaxinfer.core.request import MAX_LOGPROBS

RENAMED = MappingProxyType(
    {
        "block_size": "page_size",
        "num_gpu_blocks_override": "num_pages",
        "async_scheduling": "overlap",
    }
)
DTYPE_ALIASES = MappingProxyType({"half": "float16", "float": "float32"})

# accepted with these values only, because that is what jaxinfer does anyway
FIXED: tuple[tuple[str, tuple[Any, ...], str], ...] = (
    ("tensor_parallel_size", (1,), "one device is used"),
    ("pipeline_parallel_size", (1,), "one device is used"),
    ("data_parallel_size", (1,), "one device is used"),
    ("quantization", (None, "gguf"), "give a GGUF file for quantised weights"),
    ("kv_cache_dtype", ("auto",), "the cache has the model's dtype"),
    ("enable_chunked_prefill", (None, True), "prefill is always chunked"),
    ("enable_lora", (False,), "LoRA is not supported"),
    ("speculative_config", (None,), "speculative decoding is not supported"),
    ("tokenizer_mode", ("auto",), "tokenizer.json or the GGUF's own tokenizer is used"),
    ("revision", (None,), "give the folder of the revision you want"),
    ("max_logprobs", tuple(range(MAX_LOGPROBS + 1)), f"{MAX_LOGPROBS} is the bound"),
)
# accepted and without effect: they tune what does not exist here
IGNORED = (
    "trust_remote_code",
    "enforce_eager",
    "disable_log_stats",
    "swap_space",
    "cpu_offload_gb",
    "disable_custom_all_reduce",
    "compilation_config",
    "hf_token",
    "download_dir",
)


def engine_config(model: str | None, arguments: dict[str, Any]) -> EngineConfig:
    """The settings that keyword arguments ask for; raises ``ConfigError`` naming the wrong one."""
    known = {field.name for field in fields(EngineConfig)}
    settings: dict[str, Any] = {} if model is None else {"model": model}
    for name, value in arguments.items():
        name = RENAMED.get(name, name)
        if name in known:
            if value is not None:  # vLLM's word for "the default"
                settings[name] = value
        elif name not in IGNORED:
            _check_fixed(name, value)
    if isinstance(dtype := settings.get("dtype"), str):
        settings["dtype"] = DTYPE_ALIASES.get(dtype, dtype)
    return EngineConfig(**settings)


def _check_fixed(name: str, value: Any) -> None:
    for fixed, allowed, advice in FIXED:
        if name == fixed:
            if value not in allowed:
                raise ConfigError(f"{name}={value!r} is not supported: {advice}")
            return
    raise ConfigError(f"unknown setting {name!r}; see jaxinfer.EngineConfig for the known ones")
