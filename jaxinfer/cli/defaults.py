"""The defaults that ``--help`` shows, read from the config classes and from configs/engine.

Imported only for a help text: the config classes import msgspec.
"""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from dataclasses import fields
from importlib.resources import files
from types import MappingProxyType
from typing import Any

import msgspec

from jaxinfer.core.chat_config import ChatConfig
from jaxinfer.core.config import (
    DEFAULT_GPU_MEMORY_UTILIZATION,
    DEFAULT_PAGE_SIZE,
    EngineConfig,
)
from jaxinfer.core.request import SamplingParams
from jaxinfer.core.server_config import ServerConfig
from jaxinfer.engine.api.vllm_args import RENAMED

# of settings whose default is derived; sizes that depend on the device are in configs/engine
DERIVED: Mapping[str, str] = MappingProxyType(
    {
        "served_model_name": "MODEL as given; of a path the name of its file or folder",
        "hf_overrides": "none",
        "tokenizer": "the model's",
        "cpu_weights": "auto: quantised where the native library is built",
        "quantization": "as the files",
        "pooling": "as the files say, else last",
        "chat_template": "the model's",
        "default_chat_template_kwargs": "none",
        "override_generation_config": "none",
        "max_model_len": "auto: the model's context, as far as the KV cache holds it",
        "max_num_mixed_tokens": "--max-num-batched-tokens on a CPU; on a GPU {gpu}, or more "
        "for a mixture of experts",
        "tensor_parallel_size": "1, or as the bundle",
        "enable_expert_parallel": "off, or as the bundle",
        "gpu_memory_utilization": f"{DEFAULT_GPU_MEMORY_UTILIZATION:g}",
        "kv_cache_memory_bytes": "half the weights on a CPU, 368 MiB to 1 GiB; what "
        "--gpu-memory-utilization leaves on a GPU",
        "num_gpu_blocks_override": "as many as fit, or as all sequences can fill",
        "num_snapshots": "two for each sequence, of models with a state for each",
        "kv_offloading_size": "none",
        "kv_offloading_disk": "none",
        "kv_offloading_disk_size": "none",
        "kv_connector": "none",
        "block_size": f"{DEFAULT_PAGE_SIZE}",
        "prefill_first": "off",
        "tap_points": "none",
        "batch_invariant": "off, or as the bundle",
        "kernels": "the fastest that run here",
        "bundle": "compiled executables are kept in the cache",
        "cache_dir": "$JAXINFER_CACHE_DIR, $XDG_CACHE_HOME/jaxinfer or ~/.cache/jaxinfer",
        "revision": "main",
        "download_dir": "$HF_HUB_CACHE, $HF_HOME/hub or ~/.cache/huggingface/hub",
        "host": "127.0.0.1, this machine alone; 0.0.0.0: every IPv4 address",
        "allowed_hosts": "localhost and addresses if --host is local and no key is set, else any",
        "max_num_queued_reqs": "no limit",
        "max_num_queued_tokens": "no limit",
        "request_timeout": "no limit",
    }
)
OF_THE_MODEL: Mapping[str, str] = MappingProxyType(
    {
        "temperature": "the model's, else 1",
        "top_p": "the model's, else 1",
        "top_k": "the model's, else 0",
        "min_p": "the model's, else 0",
        "repetition_penalty": "the model's, else 1",
    }
)
# of one command, before all others
OF_COMMAND: Mapping[str, Mapping[str, str]] = MappingProxyType(
    {
        "serve": {"seed": "random at each start"},
        "run-batch": {"prefill_first": "on", "seed": "0"},
        "generate": {
            "max_tokens": "256",
            "prefill_first": "on",
            "seed": "one for each prompt, derived from the engine's 0",
            "max_num_seqs": "1 for one prompt, else {cpu} on a CPU, {gpu} on a GPU",
            "max_num_batched_tokens": "256 for one prompt, else {cpu} on a CPU, {gpu} on a GPU",
            "prefill_bucket_start": "256 for one prompt, else {cpu} on a CPU, {gpu} on a GPU",
            **OF_THE_MODEL,
        },
        "chat": {
            "max_tokens": "the rest of the context",
            "seed": "one for each answer, derived from the engine's 0",
            "max_num_seqs": "1",
            "max_num_batched_tokens": "256",
            "prefill_bucket_start": "256",
            "url": "none: an engine in this process",
            **OF_THE_MODEL,
        },
    }
)


def default_text(name: str, command: str) -> str:
    """The default of a setting as text, empty if it has none to show."""
    sizes = {device: _of_device(device).get(name) for device in ("cpu", "gpu")}
    derived = OF_COMMAND.get(command, {}).get(name) or DERIVED.get(name)
    if derived is not None:
        return derived.format(**sizes)
    if all(size is not None for size in sizes.values()):
        auto = "auto: " if name == "dtype" else ""
        return auto + "{cpu} on a CPU, {gpu} on a GPU".format(**sizes)
    found, field = _of_classes(command in ("generate", "chat")), RENAMED.get(name, name)
    return _shown(found[field]) if field in found else ""


def _of_classes(sampling: bool) -> Mapping[str, Any]:
    """The defaults of all fields of the config classes, and of ``SamplingParams`` if wanted."""
    classes = (ChatConfig, ServerConfig, EngineConfig)
    found = {field.name: field.default for one in classes for field in fields(one)}
    return found | (msgspec.structs.asdict(SamplingParams()) if sampling else {})


def _of_device(name: str) -> Mapping[str, Any]:
    return tomllib.loads((files("jaxinfer.configs") / "engine" / f"{name}.toml").read_text())


def _shown(value: Any) -> str:
    if isinstance(value, bool):
        return "on" if value else "off"
    if isinstance(value, tuple):
        value = ", ".join(value)
    return "none" if value in (None, "") else f"{value}"
