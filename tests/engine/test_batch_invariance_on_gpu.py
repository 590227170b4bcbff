"""``batch_invariant`` on a GPU, without one: XLA adds no floats, and what is refused."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax.extend import core
from msgspec.structs import replace

from jaxinfer.bench.plan import DEVICES, plan_on
from jaxinfer.core.config import EngineConfig
from jaxinfer.core.errors import ConfigError
from jaxinfer.exec.compile.program import Program
from jaxinfer.models.registry import build_model
from kit.engines import tiny_limits
from kit.invariance import SIZES
from kit.tiny_models import tiny_config
from pallas_kernels.harness.pins import NO_PINS, Pins, invariant_pins
from pallas_kernels.lib.device import Device, compiling_for

if sys.platform != "linux":
    pytest.skip("Triton has no packages for this system", allow_module_level=True)

ROOT = Path(__file__).parents[2]
FAMILIES = ("llama", "mistral", "gpt2", "qwen3_moe")
# primitives of XLA whose result depends on the order in which floats are added
SUMS = (
    "dot_general",
    "reduce_sum",
    "cumsum",
    "reduce_prod",
    "cumlogsumexp",
    "conv_general_dilated",
)


def _equations(jaxpr: core.Jaxpr) -> Iterator[core.JaxprEqn]:
    for equation in jaxpr.eqns:
        yield equation
        for inner in core.jaxprs_in_params(equation.params):
            yield from _equations(inner)


def _sums(name: str, pins: Pins, most: int | None = None) -> set[str]:
    """The sums of floats that XLA would make in the first executables of an engine for a GPU."""
    jax.clear_caches()
    try:
        with compiling_for(Device("gpu", "NVIDIA H200", "9.0")):
            model = build_model(tiny_config(name) | SIZES[name], "bfloat16")
            limits = tiny_limits(max_num_seqs=8, num_pages=105, page_size=16, max_model_len=192)
            layout = model.state
            limits = replace(
                limits,
                groups=layout.groups,
                align=layout.align,
                num_pages=limits.num_pages[:1] * len(layout.bytes_per_entry),
            )
            program = Program(model, limits, "gpu", pins)
            traced = [program.trace(one).jaxpr.jaxpr for one in program.names()[:most]]
            found = [equation for one in traced for equation in _equations(one)]
    finally:
        jax.clear_caches()
    assert any(equation.primitive.name.startswith("triton") for equation in found)
    return {
        f"{equation.primitive.name} {equation.source_info.name_stack}"
        for equation in found
        if equation.primitive.name in SUMS
        and jnp.issubdtype(equation.outvars[0].aval.dtype, jnp.floating)
    }


@pytest.mark.parametrize("name", FAMILIES)
def test_xla_adds_no_floats(name: str) -> None:
    """All sums over a row are those of kernels with fixed bits."""
    assert _sums(name, invariant_pins("gpu")) == set()


def test_without_the_pins_it_does() -> None:
    """So the test above can find some."""
    assert _sums("llama", NO_PINS, most=1)


@pytest.mark.parametrize(
    ("name", "settings", "message"),
    [
        ("qwen3-4b", {"kernels": "sample=xla"}, "batch_invariant chooses the kernels"),
        ("qwen3-4b", {"kv_cache_dtype": "fp8"}, "pages have 8 bits"),
        ("qwen3-4b", {"tensor_parallel_size": 2}, "2 devices add their results"),
        ("qwen3-4b-fp8", {}, "kernels of quantised weights add in an order"),
        ("deepseek-v2-lite", {}, "heads over latents of 512, which is computed so on CPUs alone"),
        ("qwen3.5-4b", {}, "the gated delta rule, .*, which is computed so on CPUs alone"),
    ],
)
def test_what_is_refused(name: str, settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        plan_on(_config(name, **settings), DEVICES["h100"])


def test_planned() -> None:
    planned = plan_on(_config("qwen3-4b"), DEVICES["h100"])
    assert planned.program.pins == invariant_pins("gpu")


def _config(name: str, **settings: Any) -> EngineConfig:
    return EngineConfig(
        model=str(ROOT / "bench" / "shapes" / name),
        load_format="dummy",
        skip_tokenizer_init=True,
        batch_invariant=True,
        **settings,
    )
