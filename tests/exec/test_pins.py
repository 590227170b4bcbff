"""A step is traced with the pinned kernel of each op."""

from __future__ import annotations

from dataclasses import replace

import pytest

from jaxinfer.core.config import EngineConfig
from jaxinfer.core.errors import ConfigError
from jaxinfer.engine.start.build import plan_engine
from jaxinfer.exec.compile.program import Program
from jaxinfer.models.registry import build_model
from kit.checkpoints import tiny_llama_config
from kit.engines import tiny_limits
from kit.tiny_models import tiny_model
from pallas_kernels.harness.pins import Pins
from pallas_kernels.lib.quantised import Form

LIMITS = tiny_limits(max_num_seqs=2)


@pytest.mark.parametrize(
    ("op", "model", "bucket"),
    [
        ("append_decode", "llama", "d2"),
        ("kv_append", "gpt2", "p32x2"),
        ("qk_rope_append", "llama", "p32x2"),
        ("append_decode", "llama", "d2p32x2"),
        ("paged_prefill", "llama", "p32x2"),
        ("norm_gemm", "llama", "d2"),
        ("residual_norm", "llama", "d2"),
        ("sample", "llama", "d2"),
        ("skinny_gemm", "llama", "d2"),
        ("swiglu_gemm", "llama", "d2"),
    ],
)
def test_every_kernel_of_a_step_can_be_pinned(op: str, model: str, bucket: str) -> None:
    program = Program(tiny_model(model)[0], LIMITS, pins=Pins(((op, "nope"),)))
    with pytest.raises(ConfigError, match=f"{op} has no implementation 'nope'"):
        program.trace(bucket).lower()


@pytest.mark.parametrize(
    ("platform", "name", "tied"),
    [
        ("cpu", "d2", False),
        ("cpu", "d2", True),
        ("cpu", "score32", False),
        ("gpu", "extras2", False),  # on a CPU slots keep logits
    ],
)
def test_the_kernel_of_the_head_can_be_pinned(platform: str, name: str, tied: bool) -> None:
    """No other matrix of this model is quantised."""
    plain = build_model(tiny_llama_config(tie_word_embeddings=tied), "float32")
    head = "model.embed_tokens.weight" if tied else "lm_head.weight"
    model = replace(plain, forms=((head, Form("int8", None, "float32")),))
    pinned = Program(model, LIMITS, platform, pins=Pins((("quantised_gemm", "nope"),)))
    assert name in pinned.names()
    with pytest.raises(ConfigError, match="quantised_gemm has no implementation 'nope'"):
        pinned.trace(name).lower()


@pytest.mark.parametrize(
    ("kernels", "message"),
    [
        ("flash=xla", "kernels 'flash=xla' cannot be used: there is no kernel 'flash'"),
        ("kv_append=triton", "kv_append=triton runs on gpu, not on cpu"),
    ],
)
def test_refused_before_the_model_is_resolved(kernels: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        plan_engine(EngineConfig(model="no such model", kernels=kernels))
