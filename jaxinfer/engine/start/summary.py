"""The lines about a planned engine: what it serves, and what each "auto" became."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import msgspec

from jaxinfer.core.config import EngineConfig
from jaxinfer.core.request import SamplingParams
from jaxinfer.engine.start.plan import EnginePlan
from jaxinfer.exec.compile.memory_plan import shown

DEVICE_SIZES = (
    *("dtype", "max_num_seqs", "max_num_batched_tokens", "max_num_mixed_tokens"),
    *("decode_bucket_start", "prefill_bucket_start", "prefill_bucket_factor"),
    "mixed_bucket_start",
)


def describe_plan(given: EngineConfig, plan: EnginePlan) -> Iterator[str]:
    """The lines that a start logs once an engine is planned. ``given``: the user's settings."""
    model, limits, config = plan.program.model, plan.program.limits, plan.config
    sampling = sampling_text(sampling_defaults(plan))
    if not sampling:
        is_vllm = config.generation_config == "vllm"
        why = "generation_config is vllm" if is_vllm else "the model has no defaults of its own"
        sampling = f"as vLLM, since {why}"
    yield (
        f"model {plan.source.name}: {model.architecture}, context of {model.config.lengths[1]} "
        f"tokens; sampling defaults: {sampling}"
    )
    device = plan.program.placement.device
    open_ = [name for name in DEVICE_SIZES if getattr(given, name) in (None, "auto")]
    source = "the bundle" if plan.bundle else f"configs/engine/{_kind(plan)}.toml"
    values = ", ".join(
        f"{name} {getattr(config, name)}" for name in open_ if getattr(config, name) is not None
    )
    if values:
        yield f"auto on {device.platform} ({device.device_kind}): {values} (from {source})"
    kept = ", ".join(sorted(plan.memory.weights))
    each = on_each(plan.memory.num_devices)
    yield f"weights {shown(plan.memory.weight_bytes)}{each} as {kept}"
    page_source = "default" if given.page_size is None else "given"
    pages = "" if config.kv_cache_dtype == "auto" else f" in {config.kv_cache_dtype}"
    length = "given"
    if given.max_model_len is None:
        whole = limits.max_model_len == model.config.lengths[1]
        length = "auto: the model's" if whole else "auto: what the KV cache holds"
    yield (
        f"max_model_len {limits.max_model_len} ({length}); KV cache "
        f"{shown(plan.memory.kv_bytes)}{each}: "
        f"{limits.num_usable_pages} pages of {limits.page_size} tokens ({page_source}){pages}"
    )


def on_each(devices: int) -> str:
    """Words behind a size of memory, if there are several devices."""
    return f" on each of {devices} devices" if devices > 1 else ""


def _kind(plan: EnginePlan) -> str:
    return "cpu" if plan.program.platform == "cpu" else "gpu"


def sampling_defaults(plan: EnginePlan) -> dict[str, dict[str, Any]]:
    """The sampling defaults that differ from vLLM's, by the place that they are from."""
    own = msgspec.structs.asdict(plan.config_facts.default_sampling)
    others = msgspec.structs.asdict(SamplingParams())
    by_place: dict[str, dict[str, Any]] = {}
    for name, value in own.items():
        if value != others[name]:
            by_place.setdefault(plan.source.place_of_sampling(name), {})[name] = value
    return by_place


def sampling_text(defaults: Mapping[str, Mapping[str, Any]]) -> str:
    """``sampling_defaults`` as text; may be empty."""
    return ", ".join(
        f"{', '.join(f'{name} {value}' for name, value in values.items())} ({place})"
        for place, values in defaults.items()
    )
