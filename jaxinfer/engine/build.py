"""From settings to a running engine: find the model, plan memory, compile, load.

Owns: the order of start-up (everything is checked before anything slow begins; executables are
compiled before weights are loaded, so that the two peaks of memory do not add up) and the defaults
that depend on the device. Must not know: requests, users.
"""

from __future__ import annotations

import time
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, replace
from importlib.resources import files
from pathlib import Path
from typing import Any, cast

import jax
import jax.numpy as jnp

from jaxinfer.core.config import EngineConfig, Limits, cache_root
from jaxinfer.core.errors import ConfigError, EngineError, RequestError
from jaxinfer.core.progress import NoProgress, Progress
from jaxinfer.core.request import SamplingParams
from jaxinfer.engine.engine import Engine
from jaxinfer.engine.facts import ModelFacts
from jaxinfer.engine.news import EngineStats
from jaxinfer.exec.buckets import bucket_table
from jaxinfer.exec.compile import build_executables
from jaxinfer.exec.executor import Executor
from jaxinfer.exec.memory import MemoryPlan, device_memory_bytes, plan_memory, release_free_heap
from jaxinfer.exec.program import Program
from jaxinfer.models.base import Model
from jaxinfer.models.registry import build_model
from jaxinfer.text.tokenizer import Tokenizer, TokenizerSpec, load_tokenizer
from jaxinfer.weights.load import load_params
from jaxinfer.weights.plan import plan_params
from jaxinfer.weights.sources import ModelSource, resolve_source


@dataclass(frozen=True)
class EnginePlan:
    """Everything decided before weights are read or a step is compiled."""

    config: EngineConfig  # no None left where a default exists
    source: ModelSource
    model: Model
    limits: Limits
    memory: MemoryPlan
    tokenizer_spec: TokenizerSpec | None  # for whoever needs a tokenizer of their own
    tokenizer: Tokenizer | None
    cache_dir: Path


def plan_engine(config: EngineConfig, progress: Progress | None = None) -> EnginePlan:
    """Resolve the model and the sizes; raises a ``JaxinferError`` naming what does not fit."""
    progress = progress or NoProgress()
    cache_dir = cache_root(config.cache_dir)
    config = with_device_defaults(config, _platform())
    source = resolve_source(
        config.model,
        load_format=config.load_format,
        cache_dir=cache_dir,
        progress=progress,
        tokenizer=config.tokenizer,
    )
    model = build_model(source.hf_config, jnp.dtype(config.dtype))
    if source.checkpoint is not None:
        plan_params(model, source.checkpoint)  # names and shapes, before anything slow begins
    spec = None if config.skip_tokenizer_init else source.tokenizer_spec()
    tokenizer = None if spec is None else load_tokenizer(spec)
    max_num_seqs, chunk = config.max_num_seqs, config.max_num_batched_tokens
    decode_start, prefill_start = config.decode_bucket_start, config.prefill_bucket_start
    assert max_num_seqs and chunk and decode_start and prefill_start, "with_device_defaults"
    context = _context(config, model)
    memory = plan_memory(
        config,
        model,
        max_model_len=context,
        max_num_seqs=max_num_seqs,
        device_bytes=device_memory_bytes(),
    )
    if config.max_model_len is None:  # derived: as much of the model's context as fits
        context = min(context, (memory.num_pages - 1) * config.page_size)
    limits = Limits(
        num_pages=memory.num_pages,
        page_size=config.page_size,
        max_num_seqs=max_num_seqs,
        max_model_len=context,
        max_num_batched_tokens=chunk,
        buckets=bucket_table(
            max_num_seqs, chunk, decode_start=decode_start, prefill_start=prefill_start
        ),
        enable_prefix_caching=config.enable_prefix_caching,
    )
    return EnginePlan(config, source, model, limits, memory, spec, tokenizer, cache_dir)


def build_engine(config: EngineConfig, progress: Progress | None = None) -> Engine:
    """A ready engine: every bucket compiled, weights on the device, nothing left to do late."""
    return build_planned(plan_engine(config, progress), progress)


def build_planned(plan: EnginePlan, progress: Progress | None = None) -> Engine:
    """``build_engine``, when the plan is already made."""
    progress = progress or NoProgress()
    facts = model_facts(plan)
    program = Program(plan.model, plan.limits)
    start = time.perf_counter()
    executables = build_executables(
        program, bundle_root=plan.cache_dir / "executables", progress=progress
    )
    compiled = time.perf_counter()
    params = load_params(
        plan.model,
        plan.source,
        cache_dir=plan.cache_dir,
        seed=plan.config.seed,
        progress=progress,
    )
    release_free_heap()
    executor = Executor(program, executables, params)
    executor.warm_up()
    start_stats = EngineStats(
        num_executables=len(program.names()),
        num_compiled=executables.compiled,
        compile_seconds=compiled - start,
        load_seconds=time.perf_counter() - compiled,
    )
    return Engine(
        executor,
        plan.limits,
        facts,
        plan.tokenizer,
        seed=plan.config.seed,
        overlap=plan.config.overlap,
        start=start_stats,
    )


def with_device_defaults(config: EngineConfig, platform: str) -> EngineConfig:
    """The settings with the platform's defaults (configs/engine) where the user gave none."""
    name = "cpu" if platform == "cpu" else "gpu"
    text = files("jaxinfer.configs").joinpath("engine", f"{name}.toml").read_text()
    defaults: dict[str, Any] = tomllib.loads(text)
    if config.dtype != "auto":
        del defaults["dtype"]
    missing = {
        key: value for key, value in defaults.items() if getattr(config, key) in (None, "auto")
    }
    return replace(config, **missing)


def _platform() -> str:
    try:
        return jax.default_backend()
    except Exception as error:  # jax has no class of its own for this
        raise EngineError(
            f"JAX finds no device ({type(error).__name__}: {error}); check JAX_PLATFORMS and see "
            "`jaxinfer doctor`"
        ) from error


def model_facts(plan: EnginePlan) -> ModelFacts:
    """What requests are checked against, from the model's own files."""
    generation = plan.source.generation_config
    eos = generation.get("eos_token_id")
    if eos is None:  # absent, or an explicit null
        eos = plan.source.hf_config.get("eos_token_id")
    listed: list[Any] = cast("list[Any]", eos) if isinstance(eos, list) else [eos]
    eos_ids = [token_id for token_id in listed if token_id is not None]
    if not all(isinstance(token_id, int) for token_id in eos_ids):
        raise ConfigError(f"eos_token_id {eos!r} of the model's configs is no token id or list")
    if plan.tokenizer is not None and plan.tokenizer.eos_token_id is not None:
        eos_ids.append(plan.tokenizer.eos_token_id)
    return ModelFacts(
        name=plan.source.name,
        vocab_size=plan.model.config.vocab_size,
        eos_token_ids=tuple(dict.fromkeys(eos_ids)),
        default_sampling=_default_sampling(
            generation if plan.config.generation_config == "auto" else {}
        ),
    )


def _default_sampling(generation_config: Mapping[str, Any]) -> SamplingParams:
    """vLLM's defaults with the model's own temperature, top_k, top_p and the like."""
    names = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")
    given = {name: generation_config[name] for name in names if generation_config.get(name)}
    try:
        return SamplingParams(**given)
    except RequestError as error:
        raise ConfigError(f"the model's generation_config is unusable: {error}") from error


def _context(config: EngineConfig, model: Model) -> int:
    """The context asked for; a model cannot be asked for more positions than it has."""
    longest = model.config.max_position_embeddings
    if config.max_model_len is None:
        return longest
    if config.max_model_len > longest:
        raise ConfigError(
            f"max_model_len {config.max_model_len} is beyond the model's {longest} positions; "
            f"use {longest} or less"
        )
    return config.max_model_len
