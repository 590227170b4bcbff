"""Operands of GPU kernels begin at addresses that the kernels take, in steps of public models."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import pytest
from msgspec.structs import replace

from bench.families import configs
from jaxinfer.core.step import Bucket
from jaxinfer.exec.compile.program import Program
from jaxinfer.models import build_model
from kit.engines import tiny_limits
from kit.operands import misaligned
from pallas_kernels.lib.device import Device, compiling_for

H100 = Device("gpu", "NVIDIA H100 80GB HBM3", "9.0")
BY_DAY = ("kimi-linear-48b-a3b-instruct", "qwen3.5-27b")
SIZES = {"max_num_seqs": 64, "max_num_batched_tokens": 512, "num_pages": 99, "page_size": 64}
BUCKETS = (Bucket(1), Bucket(8, 64, 4))


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=() if name in BY_DAY else (pytest.mark.nightly,))
        for name in configs()
    ],
)
def test_kernels_take_the_addresses_of_their_operands(name: str) -> None:
    found: list[str] = []
    with compiling_for(H100):
        model = build_model(configs()[name], "bfloat16")
        limits = tiny_limits(**SIZES, groups=model.state.groups)
        snapshots = 8 if model.state.bytes_per_slot else 0
        limits = replace(limits, align=model.state.align, num_snapshots=snapshots, buckets=BUCKETS)
        program = Program(model, limits, platform="gpu")
        for bucket in BUCKETS:
            for step in program.names_of(bucket):
                found += misaligned(program.trace(step).jaxpr.jaxpr)
    assert not found


def test_it_finds_a_section_of_a_row() -> None:
    def step(x: jax.Array, *, barrier: bool) -> jax.Array:
        part = jnp.split(x, (32,), axis=1)[1]
        return _kernel(jax.lax.optimization_barrier(part) if barrier else part)

    def lines(rows: int, *, barrier: bool) -> list[str]:
        x: Any = jax.ShapeDtypeStruct((rows, 160), jnp.bfloat16)
        return misaligned(jax.make_jaxpr(lambda x: step(x, barrier=barrier))(x).jaxpr)

    assert len(lines(1, barrier=False)) == 1 and "at 64 bytes" in lines(1, barrier=False)[0]
    assert not lines(2, barrier=False) and not lines(1, barrier=True)


def _kernel(x: jax.Array) -> jax.Array:
    """A call of a kernel, as its primitive alone."""
    primitive = jax.extend.core.Primitive("kernel_call")
    primitive.def_abstract_eval(lambda x: jax.core.ShapedArray(x.shape, x.dtype))
    return primitive.bind(x)
