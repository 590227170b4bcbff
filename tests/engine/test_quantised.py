"""A model with every quantised form is served: together, alone, in chunks and from prefix hits.

With plain XLA the tokens are those of the dense form of the same values.
"""

from __future__ import annotations

import dataclasses
from functools import cache

import jax
import jax.numpy as jnp
import pytest
from msgspec.structs import replace

from jaxinfer.core.request import SamplingParams
from jaxinfer.core.step import Bucket
from jaxinfer.engine.loop.engine import Engine
from jaxinfer.exec.compile.build import Executables
from jaxinfer.exec.compile.program import Program
from jaxinfer.exec.run.device_memory import init_state
from jaxinfer.exec.run.executor import Executor
from jaxinfer.models.base import Params, abstract_params, forward
from kit.engines import compiled_for, dense_greedy, engine_of, run, tiny_limits
from kit.quantised_models import quantised_model, quantised_tensors
from pallas_kernels.arrangements import LANES
from pallas_kernels.pins import NO_PINS, Pins

PINS = {"xla": Pins((("quantised_gemm", "xla"),)), "default": NO_PINS}
PROMPTS = tuple(
    tuple((7 * i * i + first) % 320 for i in range(n)) for first, n in ((1, 40), (5, 3))
)
GREEDY = SamplingParams(max_tokens=10, temperature=0, ignore_eos=True)
LIMITS = replace(
    tiny_limits(max_num_seqs=2, max_num_batched_tokens=16, num_pages=60),
    buckets=(Bucket(1), Bucket(2), Bucket(2, 16, 2, scores=True), Bucket(0, 16, 2)),
)


@cache
def executables(pins: str) -> tuple[Program, Executables]:
    model, _ = quantised_model()
    program = Program(model, LIMITS, pins=PINS[pins])
    return program, compiled_for(program, extras=False)


def engine(pins: str, *, overlap: bool = True) -> Engine:
    program, compiled = executables(pins)
    executor = Executor(program, compiled, quantised_model()[1], *init_state(program))
    executor.warm_up()
    return engine_of(executor, program.limits, overlap=overlap)


def answers(one: Engine, *, together: bool = True) -> list[tuple[int, ...]]:
    outputs = run(one, PROMPTS, GREEDY, together=together)
    return [tuple(output.outputs[0].token_ids) for output in outputs]


def test_xla_computes_the_dense_form() -> None:
    assert answers(engine("xla")) == dense_greedy(*quantised_model(), PROMPTS, 10)


def test_the_dense_form_is_differentiable_also_as_kernels_read_the_weights() -> None:
    model = dataclasses.replace(quantised_tensors()[0], arrangement=LANES.name)
    params, ids = abstract_params(model), jnp.arange(4, dtype=jnp.int32)

    def largest(factor: jax.Array, params: Params) -> jax.Array:
        return forward(model, params, ids, edit={"layers.1.resid_post": lambda x: factor * x}).max()

    assert jax.eval_shape(jax.grad(largest), jnp.float32(1), params).shape == ()


@pytest.mark.parametrize("pins", PINS)
def test_batched_and_in_chunks_as_alone_and_from_a_prefix_hit(pins: str) -> None:
    alone = answers(engine(pins, overlap=False), together=False)
    served = engine(pins)
    assert answers(served) == alone
    assert answers(served) == alone  # the second time from the pages of the first
    assert len({*alone[0]}) > 1
