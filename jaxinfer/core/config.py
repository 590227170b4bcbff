"""Settings: ``EngineConfig``, and the cache folders.

Owns: names, defaults and bounds of every setting; the only library module besides ``cli`` that
reads the environment.
"""

from __future__ import annotations

import json
import os
from dataclasses import dataclass, fields
from pathlib import Path
from types import MappingProxyType
from typing import Any, cast

from jaxinfer.core.checks import as_float, as_int
from jaxinfer.core.errors import ConfigError
from jaxinfer.core.hosts import Hosts, checked_hosts
from jaxinfer.core.json_text import parse_json
from jaxinfer.core.kv_events import as_text
from jaxinfer.core.points import canonical
from jaxinfer.core.pooling import KINDS
from jaxinfer.core.structured import DEFAULT_FORM_LIMITS

DEFAULT_MODEL = "smollm2-135m-instruct"
CHOICES = MappingProxyType(
    {
        "dtype": ("auto", "float32", "bfloat16", "float16"),
        "kv_cache_dtype": ("auto", "bfloat16", "fp8"),
        "load_format": ("auto", "safetensors", "gguf", "dummy"),
        "dummy_routing": ("auto", "uniform", "same"),
        "generation_config": ("auto", "vllm"),
        "task": ("auto", "generate", "embed", "score"),
        "pooling": KINDS,
        "preemption": ("recompute", "offload"),
        "cpu_weights": ("auto", "quantised", "float32"),
        # on load, then the methods of quantised files, with vLLM's names for other kernels
        "quantization": (
            *("fp8", "int8", "int4", "gguf", "compressed-tensors", "awq", "awq_marlin"),
            *("gptq", "gptq_marlin", "mxfp4"),
        ),
    }
)
DEFAULT_RECORD_SIZE = 256 << 20
LEAST_RECORD_SIZE = 1 << 20
BUNDLE_MANIFEST = "manifest.json"  # in the folder of a bundle
DEFAULT_PAGE_SIZE = 16
DEFAULT_GPU_MEMORY_UTILIZATION = 0.92
# JAX's variables: the allocator for GPUs, the share of the GPU that it may use (new and old name,
# and the default), and whether it allocates that share at once
ALLOCATOR = "XLA_PYTHON_CLIENT_ALLOCATOR"
ALLOCATOR_SHARES = ("XLA_CLIENT_MEM_FRACTION", "XLA_PYTHON_CLIENT_MEM_FRACTION")
DEFAULT_ALLOCATOR_SHARE = 0.75
ALLOCATOR_PREALLOCATES = "XLA_PYTHON_CLIENT_PREALLOCATE"
NO_LINE_INFO = "TRITON_DISABLE_LINE_INFO"  # Triton's variable
# XLA's variable for the lowest level of messages to show, and the value that JAX sets on import
XLA_LOG, JAXS_XLA_LOG = "TF_CPP_MIN_LOG_LEVEL", "1"


@dataclass(frozen=True, kw_only=True)
class EngineConfig:
    """Everything an engine is built from. Names and meanings follow vLLM's ``EngineArgs``.

    Sizes are tokens unless stated. ``None`` means "derived from the model and the device".
    ``max_num_batched_tokens`` limits the prompt tokens of one step (the chunk of chunked prefill).
    ``max_num_mixed_tokens`` limits those of a step in which rows also decode, to less with very
    many rows (``exec.compile.buckets``); None: on a CPU the same limit, on a GPU 1,024 or what the
    model's experts allow (``exec.compile.mixed_tokens``). Decode rows come in addition and
    wait for the chunk: a larger limit gives waiting requests their first token sooner and running
    ones their next token later.
    ``decode_bucket_start``: decode steps are compiled for 1, start, 2 * start, ... rows.
    ``prefill_bucket_start``: chunks are compiled for start, factor * start, ... tokens, where
    ``prefill_bucket_factor`` is the factor, 2 or more.
    ``mixed_bucket_start``: steps that decode and prefill pad their decode rows to start, 2 * start,
    ... rows.
    ``prefill_first``: if all requests fit at once, all prompts are computed before the first row
    decodes, which suits a batch but stalls a stream. None is True for ``LLM``, False for a server.
    ``num_pages``: of all pools together (``exec.compile.page_pools``), padding pages included.
    ``num_snapshots``: of a model with a state for each sequence (Qwen3.5), the rows in which states
    are saved, so that prompts with the same beginning start from them; each takes the bytes of a
    sequence. None is two a sequence. Answers are saved, too, if there are two a sequence.
    ``kv_offloading_size``: GiB of host memory for pages and states that leave the device's pools,
    from which later requests restore them; None: there is none. ``kv_offloading_disk``: a folder
    behind it for ``kv_offloading_disk_size`` GiB, which later engines of the same model read.
    ``kv_connector``: in place of the folder a store of the user's, "FILE.py:FUNCTION"; the function
    takes the arrays of units and returns a ``core.connector.Connector``.
    ``kv_cache_dtype``: "fp8" keeps keys and values in 8 bits (e4m3), with a scale for each token
    and head (of latents for each 128 components), "bfloat16" in 16 bits; "auto" keeps them in
    ``dtype``.
    ``preemption``: when no page is left, the last request in order gives up its pages. "recompute"
    computes them again, unless a tier happens to have them and is faster; "offload" saves its full
    pages and its last saved state in the tier before, and always restores them.
    ``page_size``: None is 16. ``gpu_memory_utilization``: None is 0.92.
    ``kernels``: pins for measurements, "op=implementation" joined by commas; an op without a pin
    uses the fastest implementation that can run.
    ``batch_invariant``: a request's tokens and logprobs have the same bits whatever else is in its
    steps, however its prompt is divided into chunks, and whether pages were reused or it was
    preempted (``docs/replay.md`` says what it costs and what is refused).
    ``cpu_weights``: on a CPU, "quantised" keeps a quantised checkpoint as it is and multiplies it
    with the native kernel where that runs, "float32" dequantises it. "auto" keeps the matrices that
    the kernel can multiply, if it is installed.
    ``quantization``: "fp8", "int8" or "int4" quantises the linear layers of a model of floats while
    it loads, weights only; for a quantised model it may name the method of its files.
    ``dummy_routing``: with random weights, "uniform" replaces the choices of routers (mixtures of
    experts) by uniform pseudo-random ones, "same" by the first experts for every token. With "auto"
    random routers choose, perhaps few experts.
    ``tap_points``: points of the forward pass whose activations requests may read and steer, "name,
    ...", also "all" and ``layers.*.z``; each shape of a step in which that is possible is compiled
    a second time.
    ``max_form_seconds`` and ``max_form_bytes``: CPU time and memory of one form of structured
    outputs; see ``FormLimits``.
    ``bundle``: a folder that ``jaxinfer compile`` wrote; its sizes replace those that are None.
    ``tensor_parallel_size``: the devices among which every layer is divided; None is 1. Memory
    sizes are those of each device. ``enable_expert_parallel``: a device has whole experts; else a
    part of each expert's columns where kernels can read that (``nn.placement.slices_experts``). It
    is an error for a model without experts.
    ``num_hosts``: machines that share the engine, each with a process, its number ``host_rank`` and
    as many devices; ``tensor_parallel_size`` counts those of all. ``coordinator`` is HOST:PORT of
    host 0, which also uses the next port; all start within ``hosts_timeout`` seconds.
    ``task``: "generate" yields text, "embed" one vector for each text, "score" text, and scores of
    documents. "auto" is "embed" if the model's files describe embeddings, else "generate".
    ``pooling``: "last", "mean" or "cls" (first) makes the vector of those tokens; None: as the
    files say, or "last". ``score_tokens``: the answers that a score compares, for and against.
    ``seed``: of random weights, and of the draws of requests that bring none; None is 0, but for
    the draws of a server (``jaxinfer serve``) a random number, so that no client can know them.
    ``revision``: branch, tag or commit of a model of the hub; None is its main branch.
    ``hf_overrides``: JSON of entries that replace those of the model's config.json, also as a
    mapping; entries of its inner configs are replaced one by one.
    ``download_dir``: where the hub's models are kept; None: where huggingface-hub keeps them.
    ``generation_config``: "auto" takes sampling defaults from the model's file, "vllm" does not.
    ``record``: a file into which the engine writes what it does, for ``jaxinfer replay``;
    ``record_size``: most bytes of it and of the older part next to it. With ``record_redact``
    other ids take the place of tokens; with ``record_digests`` each step has a digest of the
    input of each draw, by which a difference is found at its step.
    ``kv_events_config``: JSON of ``core.kv_events.KVEventsConfig``, also as a mapping.
    Paths may be ``os.PathLike``. Raises ``ConfigError`` naming the setting that is wrong.
    """

    model: str = DEFAULT_MODEL
    revision: str | None = None
    hf_overrides: str | None = None
    tokenizer: str | None = None
    skip_tokenizer_init: bool = False
    load_format: str = "auto"
    dummy_routing: str = "auto"
    dtype: str = "auto"
    cpu_weights: str = "auto"
    quantization: str | None = None
    generation_config: str = "auto"
    task: str = "auto"
    pooling: str | None = None
    score_tokens: str = "yes,no"
    seed: int | None = None
    max_model_len: int | None = None
    max_num_seqs: int | None = None
    max_num_batched_tokens: int | None = None
    max_num_mixed_tokens: int | None = None
    page_size: int | None = None
    decode_bucket_start: int | None = None
    prefill_bucket_start: int | None = None
    prefill_bucket_factor: int | None = None
    mixed_bucket_start: int | None = None
    num_pages: int | None = None
    num_snapshots: int | None = None
    kv_cache_memory_bytes: int | None = None
    gpu_memory_utilization: float | None = None
    kernels: str | None = None
    batch_invariant: bool | None = None
    kv_cache_dtype: str = "auto"
    enable_prefix_caching: bool = True
    kv_offloading_size: float | None = None
    kv_offloading_disk: str | None = None
    kv_offloading_disk_size: float | None = None
    kv_connector: str | None = None
    preemption: str = "recompute"
    prefill_first: bool | None = None
    overlap: bool = True
    tap_points: str | None = None
    tensor_parallel_size: int | None = None
    enable_expert_parallel: bool | None = None
    num_hosts: int = 1
    host_rank: int = 0
    coordinator: str | None = None
    hosts_timeout: float = 60.0
    max_form_seconds: float = DEFAULT_FORM_LIMITS.seconds
    max_form_bytes: int = DEFAULT_FORM_LIMITS.num_bytes
    cache_dir: str | None = None
    download_dir: str | None = None
    bundle: str | None = None
    record: str | None = None
    record_size: int = DEFAULT_RECORD_SIZE
    record_redact: bool = False
    record_digests: bool = False
    kv_events_config: str | None = None

    def __post_init__(self) -> None:
        for item in fields(self):
            value = getattr(self, item.name)
            if value is not None or item.default is not None:
                # for example a str in place of a Path
                object.__setattr__(self, item.name, _checked(item.name, value, str(item.type)))
        if self.hosts is not None and self.bundle is not None:
            raise ConfigError("a bundle is of one host; leave it out, or num_hosts")

    @property
    def hosts(self) -> Hosts | None:
        """The hosts of the engine; None for one. Raises ``ConfigError`` if they do not fit."""
        given = self.num_hosts, self.host_rank, self.coordinator
        return checked_hosts(*given, self.hosts_timeout, self.tensor_parallel_size or 1)

    @property
    def pinned_kernels(self) -> dict[str, str]:
        """``kernels`` as a dict from op to implementation."""
        return {} if self.kernels is None else _parse_pins(self.kernels)


# of whole numbers; 1 for all others
LEAST = MappingProxyType(
    {"prefill_bucket_factor": 2, "host_rank": 0, "record_size": LEAST_RECORD_SIZE}
)
SIZES = tuple(
    item.name for item in fields(EngineConfig) if item.type == "int | None" and item.name != "seed"
)
# settings that a bundle fixes
COMPILED = (
    *("dtype", "dummy_routing", "cpu_weights", "quantization", *SIZES),
    *("gpu_memory_utilization", "kernels", "tap_points", "task", "pooling"),
    *("enable_expert_parallel", "kv_cache_dtype", "batch_invariant"),
)
TRUST_CACHE = "JAXINFER_TRUST_CACHE"


def cache_root(configured: str | None = None) -> Path:
    """The cache folder: the setting, else ``JAXINFER_CACHE_DIR``, else the XDG cache folder.

    Raises ``ConfigError`` if the path begins with the home folder of an unknown user.
    """
    xdg_cache = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    chosen = configured or os.environ.get("JAXINFER_CACHE_DIR") or f"{xdg_cache}/jaxinfer"
    try:
        return Path(chosen).expanduser()
    except RuntimeError as error:
        raise ConfigError(
            f"the cache folder {chosen} is in a home folder that cannot be found; "
            "set JAXINFER_CACHE_DIR to another folder"
        ) from error


def trusts_cache() -> bool:
    """True if the user trusts the cache and bundles, whatever their owners and permissions."""
    return os.environ.get(TRUST_CACHE, "").lower() in ("1", "true", "yes", "on")


def prepare_backend(share: float) -> None:
    """Set the variables that JAX, XLA and Triton read once in a process, before a backend starts.
    Variables that the user has set are kept.

    For GPUs JAX's allocator over virtual memory is chosen and limited to ``share`` of each GPU. The
    default one takes 75 % at once and keeps a table on the host: 4 GB for an H200, which take two
    seconds to fill.

    Triton compiles kernels without line numbers for debuggers, which are half of their size: every
    call of a kernel in an executable holds a copy of it, and its launch copies it again.

    XLA shows only fatal messages; errors are raised as well. The others are for its developers: if
    the memory plan nearly fills a GPU, XLA warns for each executable of a limit that is not the
    allocator's.
    """
    os.environ.setdefault(ALLOCATOR, "vmm")
    if not any(name in os.environ for name in ALLOCATOR_SHARES):
        os.environ[ALLOCATOR_SHARES[0]] = str(share)
    os.environ.setdefault(ALLOCATOR_PREALLOCATES, "false")
    os.environ.setdefault(NO_LINE_INFO, "1")
    if os.environ.get(XLA_LOG, JAXS_XLA_LOG) == JAXS_XLA_LOG:
        os.environ[XLA_LOG] = "3"


def beside_environment() -> dict[str, str]:
    """The environment of a process that opens the same devices beside this one, to compile.

    Its allocator must not take the share of a GPU at once that this process uses.
    """
    return {**os.environ, ALLOCATOR_PREALLOCATES: "false"}


def prepare_mosaic(runtime: Path) -> None:
    """Set the variable by which Mosaic's library finds its runtime, as its Python module does."""
    os.environ["MOSAIC_GPU_RUNTIME_LIB_PATH"] = str(runtime)


def allocator_share() -> float:
    """The share of a GPU that JAX's allocator may use, from the environment."""
    given = (os.environ[name] for name in ALLOCATOR_SHARES if name in os.environ)
    return float(next(given, DEFAULT_ALLOCATOR_SHARE))


def compiler_environment() -> dict[str, str]:
    """Environment variables that change compiled code; part of a bundle's fingerprint."""
    names = ("XLA_FLAGS", "JAX_PLATFORMS", "JAX_DEFAULT_MATMUL_PRECISION", "NVIDIA_TF32_OVERRIDE")
    given = {name: os.environ[name] for name in names if name in os.environ}
    return given | {NO_LINE_INFO: os.environ.get(NO_LINE_INFO, "1")}  # engines set it


def _checked(name: str, value: object, type_name: str) -> object:
    """The value in canonical form; raises ``ConfigError``."""
    if name in CHOICES:
        if not isinstance(value, str) or value not in CHOICES[name]:
            known = ", ".join(CHOICES[name])
            raise ConfigError(f"{name} {value!r} is unknown; use one of {known}")
        return value
    if name == "kv_events_config":
        return as_text(value)
    if name == "hf_overrides":
        return _json_object(name, value)
    if name == "tap_points":
        return ",".join(_point_names(value))
    if name == "kernels":
        return ",".join(f"{op}={impl}" for op, impl in sorted(_parse_pins(value).items()))
    if "bool" in type_name:
        if not isinstance(value, bool):
            raise ConfigError(f"{name} must be True or False, got {value!r}")
        return value
    if "int" in type_name:
        return _whole(name, value)
    if "float" in type_name:
        number, most = as_float(value), _LARGEST.get(name, 3600.0)
        if number is None or not 0.0 < number <= most:
            raise ConfigError(f"{name} must be a number in (0, {most:g}], got {value!r}")
        return number
    path = os.fspath(cast("os.PathLike[str]", value)) if isinstance(value, os.PathLike) else value
    if not isinstance(path, str):
        raise ConfigError(f"{name} must be text or a path, got {value!r}")
    return path


def _json_object(name: str, value: object) -> str:
    """An object, or its JSON, as JSON with sorted keys; raises ``ConfigError``."""
    try:
        made = parse_json(value if isinstance(value, str) else json.dumps(value))
    except (TypeError, ValueError) as error:
        raise ConfigError(f"{name} must be a JSON object ({error})") from error
    if not isinstance(made, dict):
        raise ConfigError(f"{name} must be a JSON object, got {value!r}")
    return json.dumps(made, sort_keys=True)


_LARGEST = MappingProxyType(
    {
        "gpu_memory_utilization": 1.0,
        "kv_offloading_size": float(1 << 20),  # GiB
        "kv_offloading_disk_size": float(1 << 20),
    }
)


def _whole(name: str, value: object) -> int:
    whole = as_int(value)
    if name == "seed":
        if whole is None or not -(2**63) <= whole < 2**63:
            raise ConfigError(f"seed must be a whole number of 64 bits, got {value!r}")
        return whole
    if whole is None:
        raise ConfigError(f"{name} must be a whole number, got {value!r}")
    least = LEAST.get(name, 1)
    if whole < least:
        raise ConfigError(f"{name} must be at least {least}, got {whole}")
    return whole


def _point_names(value: object) -> list[str]:
    given = [value] if isinstance(value, str) else value
    several = list(cast("list[Any]", given)) if isinstance(given, list | tuple) else [None]
    names = [] if None in several else [name for one in several for name in str(one).split(",")]
    if not all(name.strip() for name in names) or not names:
        raise ConfigError(f"tap_points must be names of points, A,B,..., got {value!r}")
    return list(dict.fromkeys(canonical(one.strip()) for one in names))


def _parse_pins(value: object) -> dict[str, str]:
    pairs = [pair.partition("=") for pair in value.split(",")] if isinstance(value, str) else []
    pinned = {op.strip(): impl.strip() for op, _, impl in pairs}
    if not pinned or len(pinned) < len(pairs) or not all((*pinned, *pinned.values())):
        raise ConfigError(f"kernels must be op=implementation,... of different ops, got {value!r}")
    return pinned
