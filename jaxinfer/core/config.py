"""Settings: ``EngineConfig``, the limits derived from it, and the cache folders.

Owns: names, defaults and bounds of every setting; the only library module besides ``cli`` that
reads the environment. Must not know: jax, model weights.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

import msgspec

from jaxinfer.core.errors import ConfigError
from jaxinfer.core.shapes import cdiv
from jaxinfer.core.step import Bucket

DEFAULT_MODEL = "smollm2-135m-instruct"
DTYPES = ("auto", "float32", "bfloat16", "float16")
LOAD_FORMATS = ("auto", "safetensors", "gguf", "dummy")


@dataclass(frozen=True, kw_only=True)
class EngineConfig:
    """Everything an engine is built from. Names and meanings follow vLLM's ``EngineArgs``.

    Sizes are tokens unless said. ``None`` means "derived from the model and the device".
    ``max_num_batched_tokens`` bounds the prompt tokens of one step (the chunk of chunked prefill);
    decoding rows ride along in addition, so a step never stalls them for more than one chunk.
    ``decode_bucket_start``: decode steps are compiled for 1, start, 2 * start, ... rows.
    ``prefill_bucket_start``: chunks are compiled for start, 8 * start, ... tokens.
    """

    model: str = DEFAULT_MODEL
    tokenizer: str | None = None
    skip_tokenizer_init: bool = False
    load_format: str = "auto"
    dtype: str = "auto"
    seed: int = 0
    max_model_len: int | None = None
    max_num_seqs: int | None = None
    max_num_batched_tokens: int | None = None
    page_size: int = 16
    decode_bucket_start: int | None = None
    prefill_bucket_start: int | None = None
    num_pages: int | None = None
    kv_cache_memory_bytes: int | None = None
    gpu_memory_utilization: float = 0.92
    enable_prefix_caching: bool = True
    overlap: bool = True
    cache_dir: str | None = None

    def __post_init__(self) -> None:
        _one_of("dtype", self.dtype, DTYPES)
        _one_of("load_format", self.load_format, LOAD_FORMATS)
        for name in (
            "max_model_len",
            "max_num_seqs",
            "max_num_batched_tokens",
            "page_size",
            "decode_bucket_start",
            "prefill_bucket_start",
            "num_pages",
            "kv_cache_memory_bytes",
        ):
            value = getattr(self, name)
            if value is not None and (isinstance(value, bool) or value < 1):
                raise ConfigError(f"{name} must be at least 1, got {value!r}")
        if not 0.0 < self.gpu_memory_utilization <= 1.0:
            raise ConfigError(
                f"gpu_memory_utilization must be in (0, 1], got {self.gpu_memory_utilization!r}"
            )


class Limits(msgspec.Struct, frozen=True):
    """What the scheduler may use; frozen inside its state. Page 0 is the padding sink."""

    num_pages: int
    page_size: int
    max_num_seqs: int
    max_model_len: int
    max_num_batched_tokens: int
    buckets: tuple[Bucket, ...]
    enable_prefix_caching: bool = True

    @property
    def max_pages_per_seq(self) -> int:
        """M: pages of a sequence that fills the context."""
        return cdiv(self.max_model_len, self.page_size)

    @property
    def num_usable_pages(self) -> int:
        """Pages a sequence can own: all but the padding sink."""
        return self.num_pages - 1


def cache_root(configured: str | None = None) -> Path:
    """The cache folder: the setting, else ``JAXINFER_CACHE_DIR``, else the XDG cache folder."""
    if configured:
        return Path(configured).expanduser()
    if from_env := os.environ.get("JAXINFER_CACHE_DIR"):
        return Path(from_env).expanduser()
    base = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(base).expanduser() / "jaxinfer"


def compiler_environment() -> dict[str, str]:
    """Environment settings that change what the compiler makes; part of a bundle's fingerprint."""
    names = ("XLA_FLAGS", "LIBTPU_INIT_ARGS", "JAX_PLATFORMS", "JAX_DEFAULT_MATMUL_PRECISION")
    return {name: os.environ[name] for name in names if name in os.environ}


def _one_of(name: str, value: str, known: tuple[str, ...]) -> None:
    if value not in known:
        raise ConfigError(f"{name} {value!r} is unknown; use one of {', '.join(known)}")
