"""A decoder with two residual streams and adapters: its dense form, points and split steps.

``tests/engine/test_contract.py`` serves it.
"""

from __future__ import annotations

import dataclasses
from functools import cache

import jax.numpy as jnp
import numpy as np
from msgspec.structs import replace

from jaxinfer.core.step import Bucket
from jaxinfer.exec.compile.memory_plan import step_bound
from jaxinfer.exec.compile.program import FIRST, MAX_LAUNCHED_TOKENS, Program
from jaxinfer.exec.step.points import points_named
from jaxinfer.models.base import forward, normalised_stream, unembed
from jaxinfer.nn.residual_spec import PlainResidual
from kit.engines import tiny_limits
from kit.mixed_family import D
from kit.stream_family import STREAMS, merged, stream_model

T, KINDS = 9, ("window", "full", "window", "full")
MODEL, PARAMS = stream_model(*KINDS)


@cache
def tapped() -> tuple[np.ndarray, dict[str, np.ndarray]]:
    """Logits and all activations."""
    return forward(MODEL, PARAMS, jnp.arange(T), taps="all")  # type: ignore[no-any-return]


def test_adapters_are_addends_of_their_weights() -> None:
    plain = merged(PARAMS)
    assert plain["layers_0"]["qkv"].shape == PARAMS["layers_0"]["qkv"]["base"].shape
    expected = forward(MODEL, plain, jnp.arange(T))
    np.testing.assert_allclose(tapped()[0], expected, atol=1e-2)
    plain["layers_0"]["qkv"] = PARAMS["layers_0"]["qkv"]["base"]
    assert np.abs(tapped()[0] - forward(MODEL, plain, jnp.arange(T))).max() > 1


def test_points_of_streams_are_as_wide_as_all_of_them() -> None:
    logits, found = tapped()
    for name, width in (("resid_pre", STREAMS * D), ("attn_out", D), ("resid_post", STREAMS * D)):
        assert found[f"layers.1.{name}"].shape == (T, width)
        (point,) = points_named([f"layers.1.{name}"], MODEL.config)
        assert point.width == width
    hidden = normalised_stream(MODEL, PARAMS, found["layers.3.resid_post"])  # a logit lens
    np.testing.assert_allclose(unembed(MODEL, PARAMS, hidden), logits, rtol=1e-5, atol=1e-5)


def test_a_split_step_hands_over_all_streams_and_the_plan_counts_them() -> None:
    limits = tiny_limits(max_num_seqs=2, max_num_batched_tokens=16, groups=MODEL.state.groups)
    bucket = Bucket(0, MAX_LAUNCHED_TOKENS + 16, 2)
    limits = replace(limits, buckets=(bucket,), num_pages=(9,) * len(MODEL.state.bytes_per_entry))
    program = Program(MODEL, limits, platform="gpu")
    *_, stream = program.trace(bucket.name + FIRST).lower().out_info
    *_, given = program.trace(bucket.name).lower().args_info[0]
    assert stream.shape == given.shape == (bucket.num_tokens, STREAMS * D)
    plain = dataclasses.replace(MODEL.config, residual=PlainResidual())  # of the same parameters
    plain = Program(dataclasses.replace(MODEL, config=plain), limits, platform="gpu")
    further = 2 * (STREAMS - 1) * D * 4 * bucket.num_tokens  # before and after a layer
    assert step_bound(program, bucket) == step_bound(plain, bucket) + further
