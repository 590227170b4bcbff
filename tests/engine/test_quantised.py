"""A model with every quantised form is served: together, in chunks and from prefix hits as alone.

The tokens are those of the dense form of the same values.
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
from jaxinfer.engine.requests.outputs import RequestOutput
from jaxinfer.exec.compile.build import Executables
from jaxinfer.exec.compile.program import Program
from jaxinfer.exec.run.device_memory import init_state
from jaxinfer.exec.run.executor import Executor
from jaxinfer.models.base import Params, abstract_params, forward
from kit.engines import compiled_for, dense_greedy, engine_of, run, tiny_limits
from kit.quantised_models import quantised_model, quantised_tensors
from pallas_kernels.harness.pins import NO_PINS, Pins
from pallas_kernels.lib.arrangements import LANES
from pallas_kernels.native.library import MISSING, library

# The order of the weights and the pins, by the implementation that multiplies.
KERNELS = {
    "xla": (None, Pins((("quantised_gemm", "xla"),))),
    "native": (LANES.name, NO_PINS),
}
each_kernel = pytest.mark.parametrize(
    "kernel",
    ["xla", pytest.param("native", marks=pytest.mark.skipif(library() is None, reason=MISSING))],
)
PROMPTS = tuple(
    tuple((7 * i * i + first) % 320 for i in range(n)) for first, n in ((1, 40), (5, 3))
)
CACHED = [36, 0]  # tokens of each prompt in whole pages, without the last token
GREEDY = SamplingParams(max_tokens=10, temperature=0, ignore_eos=True)
SERVED = (Bucket(1), Bucket(2), Bucket(2, 16, 2, scores=True), Bucket(0, 16, 2))
WHOLE = (Bucket(1), Bucket(0, 64, 1, scores=True))
LIMITS = replace(
    tiny_limits(max_num_seqs=2, max_num_batched_tokens=64, num_pages=60),
    buckets=tuple(sorted({*SERVED, *WHOLE})),
)


@cache
def executables(kernel: str) -> tuple[Program, Executables]:
    arrangement, pins = KERNELS[kernel]
    model, _ = quantised_model(arrangement)
    program = Program(model, LIMITS, pins=pins)
    return program, compiled_for(program, extras=False)


def engine(kernel: str, *, whole: bool = False) -> Engine:
    """An engine for prompts in chunks of at most 16 tokens; or a plain one for whole prompts,
    without prefix caching and without overlap.
    """
    program, compiled = executables(kernel)
    _, params = quantised_model(program.model.arrangement)
    executor = Executor(program, compiled, params, *init_state(program))
    executor.warm_up()
    limits = replace(program.limits, buckets=SERVED, max_num_batched_tokens=16)
    if whole:
        limits = replace(program.limits, buckets=WHOLE, max_num_seqs=1, enable_prefix_caching=False)
    return engine_of(executor, limits, overlap=not whole)


def tokens(outputs: list[RequestOutput]) -> list[tuple[int, ...]]:
    return [tuple(output.outputs[0].token_ids) for output in outputs]


@cache
def alone(kernel: str) -> list[tuple[int, ...]]:
    """The reference: one request at a time, each prompt in one step."""
    one = engine(kernel, whole=True)
    outputs = run(one, PROMPTS, GREEDY, together=False)
    assert not any(output.num_cached_tokens for output in outputs)
    return tokens(outputs)


def test_the_dense_form_is_differentiable_also_as_kernels_read_the_weights() -> None:
    model = dataclasses.replace(quantised_tensors()[0], arrangement=LANES.name)
    params, ids = abstract_params(model), jnp.arange(4, dtype=jnp.int32)

    def largest(factor: jax.Array, params: Params) -> jax.Array:
        return forward(model, params, ids, edit={"layers.1.resid_post": lambda x: factor * x}).max()

    assert jax.eval_shape(jax.grad(largest), jnp.float32(1), params).shape == ()


@cache
def dense() -> list[tuple[int, ...]]:
    """Tokens of plain XLA, which multiplies matrices that are by rows."""
    return dense_greedy(*quantised_model(), PROMPTS, 10)


@each_kernel
def test_tokens_are_those_of_the_dense_form(kernel: str) -> None:
    """The best logit is at least 8e-4 above the next; the native logits differ by 2e-5."""
    assert alone(kernel) == dense()
    assert len({*dense()[0]}) > 1


@each_kernel
def test_batched_in_chunks_and_from_a_prefix_hit_as_whole_and_alone(kernel: str) -> None:
    served = engine(kernel)
    for cached in ([0, 0], CACHED):  # the second time from the pages of the first
        outputs = run(served, PROMPTS, GREEDY)
        assert tokens(outputs) == alone(kernel)
        assert [output.num_cached_tokens for output in outputs] == cached
