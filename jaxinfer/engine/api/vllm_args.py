"""vLLM's constructor arguments: which are renamed, accepted without effect, or refused.

Scripts written for vLLM need to change only their import. ``vllm_names`` has the arguments of which
nothing is here.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from types import MappingProxyType
from typing import Any

from jaxinfer.core.config import EngineConfig
from jaxinfer.core.errors import ConfigError
from jaxinfer.core.sampling_checks import MAX_LOGPROBS
from jaxinfer.engine.api.vllm_names import UNSUPPORTED, WITHOUT_EFFECT

RENAMED = MappingProxyType(
    {
        "block_size": "page_size",
        "num_gpu_blocks_override": "num_pages",
        "async_scheduling": "overlap",
        "runner": "task",
    }
)
DTYPE_ALIASES = MappingProxyType({"half": "float16", "float": "float32"})
PAGE_ALIASES = MappingProxyType({"fp8_e4m3": "fp8"})
# the older name of a task, and the runner that newer versions have in its place
TASK_ALIASES = MappingProxyType({"embedding": "embed", "pooling": "embed"})

# accepted with these values only, which describe jaxinfer's own behaviour
FIXED: tuple[tuple[str, tuple[Any, ...], str], ...] = (
    ("pipeline_parallel_size", (1,), "use tensor_parallel_size for several devices"),
    ("data_parallel_size", (1,), "use tensor_parallel_size, or jaxinfer serve, which has it"),
    ("enable_chunked_prefill", (None, True), "prefill is always chunked"),
    ("scheduling_policy", ("fcfs", "priority"), "the order is by priority, then by arrival"),
    ("convert", (None, "auto", "none", "embed"), "embeddings and scores are made by --task"),
    ("enable_lora", (False,), "LoRA is not supported"),
    ("lora_modules", (None,), "LoRA is not supported"),
    ("max_loras", (1,), "LoRA is not supported"),
    ("max_lora_rank", (16,), "LoRA is not supported"),
    ("speculative_config", (None,), "speculative decoding is not supported"),
    ("tokenizer_mode", ("auto",), "tokenizer.json or the GGUF's own tokenizer is used"),
    ("chat_template_content_format", ("auto", "string"), "templates get the content as text"),
    ("max_logprobs", tuple(range(MAX_LOGPROBS + 1)), f"{MAX_LOGPROBS} is the bound"),
    ("otlp_traces_endpoint", (None,), "only a server sends traces (jaxinfer serve)"),
    # removed from vLLM 0.33
    ("best_of", (None, 1), "ask for n completions and choose among them"),
    ("swap_space", (0,), "preempted sequences are computed again, so leave it out"),
    ("num_scheduler_steps", (1,), "planning overlaps with computing anyway, so leave it out"),
    ("disable_log_requests", (), "only enable_log_requests logs them, so leave it out"),
    ("guided_decoding_backend", (None, "auto"), "llguidance is the only backend, so leave it out"),
)
# accepted without effect: jaxinfer has no such mechanism
IGNORED = MappingProxyType(
    {
        "trust_remote_code": "a model folder's code is never run",
        "enable_sleep_mode": "every engine can sleep",
        "enforce_eager": "every step is compiled before the first request",
        "disable_log_stats": "nothing is logged periodically",
        "cpu_offload_gb": "weights stay on the device",
        "disable_custom_all_reduce": "XLA adds what several devices have computed",
        "compilation_config": "every step is compiled before the first request",
        "enable_auto_tool_choice": "models call tools whenever a request has some",
        "enable_request_id_headers": "answers always carry X-Request-Id",
        "collect_detailed_traces": "spans have the times of every phase",
        "hf_token": "set HF_TOKEN, or run `hf auth login`",
        **{name: group.advice for group in WITHOUT_EFFECT for name in group.each},
    }
)
_GROUPS = MappingProxyType({name: group for group in UNSUPPORTED for name in group.each})


def notices(arguments: Mapping[str, Any]) -> list[str]:
    """A sentence about each given argument that has no effect."""
    return [f"{name} has no effect: {IGNORED[name]}" for name in arguments if name in IGNORED]


def engine_config(model: str | None, arguments: Mapping[str, Any]) -> EngineConfig:
    """Settings from keyword arguments; raises ``ConfigError`` naming the invalid one."""
    known = {field.name for field in fields(EngineConfig)}
    settings: dict[str, Any] = {} if model is None else {"model": model}
    for name, value in arguments.items():
        name = RENAMED.get(name, name)
        if name in known:
            if value is not None:  # in vLLM None means "the default"
                settings[name] = value
        elif name not in IGNORED:
            _check_fixed(name, value)
    if isinstance(dtype := settings.get("dtype"), str):
        settings["dtype"] = DTYPE_ALIASES.get(dtype, dtype)
    if isinstance(pages := settings.get("kv_cache_dtype"), str):
        settings["kv_cache_dtype"] = PAGE_ALIASES.get(pages, pages)
    if isinstance(task := settings.get("task"), str):
        settings["task"] = TASK_ALIASES.get(task, task)
    return EngineConfig(**settings)


def _check_fixed(name: str, value: Any) -> None:
    for fixed, allowed, advice in FIXED:
        if name == fixed:
            if value not in allowed:
                raise ConfigError(f"{name}={value!r} is not supported: {advice}")
            return
    if (group := _GROUPS.get(name)) is not None:
        if value and str(value) not in group.values:
            raise ConfigError(f"{name}={value!r} is not supported: {group.advice}")
        return
    raise ConfigError(f"unknown setting {name!r}; see jaxinfer.EngineConfig for the known ones")
