"""The kernels that layers launch on a GPU when serving; they are recorded, not run."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from jaxinfer.models import abstract_params, build_model, forward
from jaxinfer.models.base import hidden_states
from jaxinfer.nn.context import Angles, Pages, Rows, StepContext
from jaxinfer.nn.linear import block_output
from jaxinfer.nn.mixers.attention import QKNorm, attend
from jaxinfer.nn.weight import Dense
from kit import tiny_models
from pallas_kernels.harness import registry
from pallas_kernels.harness.registry import dispatch
from pallas_kernels.lib.device import current_device
from pallas_kernels.route import launch
from pallas_kernels.route.ref import RouteArgs
from pallas_kernels.route.routing import Routing
from pallas_kernels.skinny_gemm import api as skinny_api
from pallas_kernels.skinny_gemm.ref import GemmArgs
from pallas_kernels.swiglu_gemm import api as swiglu_api

if sys.platform != "linux":
    pytest.skip("Triton has no packages for this system", allow_module_level=True)

from kit.triton_shims import Recorder, in_place_of_triton_call
from pallas_kernels.route.triton import route

ROWS, HEADS, KV_HEADS, HEAD_DIM = 8, 32, 8, 128
MODEL = build_model(tiny_models.tiny_config("qwen3"), "bfloat16")


def decode_context(ids: jax.Array, width: int) -> StepContext:
    """A step of decode rows, with ``ids`` as positions."""
    pages = Pages(ids, jnp.zeros((ROWS, width), jnp.int32), ids)
    rows = Rows(ids, ids, ids, ids, ids, ids[:1])
    return StepContext(ids, rows, (pages,), num_decodes=ROWS)


@pytest.mark.parametrize("rotary", [True, False], ids=["rope", "no_rope"])
def test_decode_layer(rotary: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "current_platform", lambda: "gpu")

    def layer(qkv: jax.Array, cos: jax.Array, norms: jax.Array, kv: dict[str, jax.Array]):
        ctx = decode_context(jnp.zeros(ROWS, jnp.int32), 64)
        ctx = replace(ctx, angles=(Angles(cos, cos),) if rotary else ())
        norm = QKNorm(norms, 1e-6)
        return attend(qkv, kv, ctx, num_kv_heads=KV_HEADS, qk_norm=norm, scale=0.1, window=None)

    def array(*shape: int, dtype: type = jnp.bfloat16) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, dtype)

    pool = array(9, 16, KV_HEADS, HEAD_DIM)
    qkv = array(ROWS, HEADS + 2 * KV_HEADS, HEAD_DIM)
    cos = array(ROWS, HEAD_DIM // 2, dtype=jnp.float32)
    with in_place_of_triton_call(recorder := Recorder()):
        out, kv = jax.eval_shape(layer, qkv, cos, array(2, HEAD_DIM), {"k": pool, "v": pool})
    assert [call.kernel.__name__ for call in recorder.calls] == ["_append_and_attend"]
    assert out.shape == (ROWS, HEADS, HEAD_DIM) and kv["k"].shape == pool.shape


def test_every_norm_of_a_served_decoder(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each norm is one launch with the addition before it, and reads a row of the packed norms."""
    monkeypatch.setattr(registry, "current_platform", lambda: "gpu")

    def step(params, kv, ids):
        return hidden_states(MODEL, params, ids, decode_context(ids, 4), kv)

    ids = jax.ShapeDtypeStruct((ROWS,), jnp.int32)
    kv = MODEL.state.abstract((4,), 16, 0)
    with in_place_of_triton_call(recorder := Recorder()):
        traced = jax.make_jaxpr(step)(abstract_params(MODEL), kv, ids)
    norms = [dict(c.constants) for c in recorder.calls if c.kernel.__name__ == "_add_and_norm"]
    assert [(norm["PARTIALS"], norm["ROW"]) for norm in norms] == [(0, 0), (1, 1), (1, 0)]
    assert "rsqrt" not in str(traced)


def test_a_bias_of_a_block_is_added_by_its_gemm(monkeypatch: pytest.MonkeyPatch) -> None:
    """On one device, also where the result is split-K partials."""
    recorded: list[GemmArgs] = []

    def recording_dispatch(op: Any, args: Any, *_: Any) -> jax.Array:
        recorded.append(args[0])
        return jnp.zeros((2, ROWS, 64))  # partials

    monkeypatch.setattr(skinny_api, "dispatch", recording_dispatch)
    x, w, bias = jnp.ones((ROWS, 32)), jnp.ones((32, 64)), jnp.ones(64)
    ctx = decode_context(jnp.zeros(ROWS, jnp.int32), 4)
    traced = jax.make_jaxpr(lambda: block_output(x, Dense(w), ctx, bias=bias))()
    assert [(args.bias is bias, args.split) for args in recorded] == [(True, True)]
    assert " add " not in str(traced)


@pytest.mark.parametrize(
    ("tokens", "dtypes", "kernels"),
    [
        pytest.param(1, ("bfloat16", "bfloat16"), ["_choose"], id="one_token"),
        pytest.param(2, ("bfloat16", "bfloat16"), ["_multiply", "_choose"], id="two"),
        pytest.param(64, ("bfloat16", "bfloat16"), ["_multiply", "_choose"], id="most"),
        pytest.param(65, ("bfloat16", "bfloat16"), ["_choose"], id="more"),
        pytest.param(8, ("bfloat16", "float32"), ["_choose"], id="router_in_float32"),
        pytest.param(8, ("float32", "float32"), ["_choose"], id="float32"),
    ],
)
def test_kernels_of_a_router(tokens: int, dtypes: tuple[str, str], kernels: list[str]) -> None:
    """Up to 64 tokens in 16 bits have two kernels; else XLA multiplies."""
    x, w = jnp.ones((tokens, 48), dtypes[0]), jnp.ones((12, 48), dtypes[1])
    args = RouteArgs(x=x, w=w, routing=Routing(4, renormalised=True, shifted_among=12))
    with in_place_of_triton_call(recorder := Recorder()):
        traced = jax.make_jaxpr(lambda: route(args))()
    assert [call.kernel.__name__ for call in recorder.calls] == kernels
    assert ("dot_general" in str(traced)) == (len(kernels) == 1)


@pytest.mark.parametrize(
    ("size", "experts", "splits"),
    [
        pytest.param((8, 2880), 32, (16, 1, 23), id="gpt_oss"),
        pytest.param((8, 2048), 128, (16, 1, 16), id="qwen3"),
        pytest.param((8, 7168), 256, (32, 4, 14), id="deepseek_v3"),
        pytest.param((8, 2048), 1024, (32, 4, 4), id="most_experts"),
    ],
)
def test_a_router_has_a_cta_for_each_sm(
    size: tuple[int, int], experts: int, splits: tuple[int, int, int]
) -> None:
    x, w = (jax.ShapeDtypeStruct(s, jnp.bfloat16) for s in (size, (experts, size[1])))
    tiles = launch.logit_tiles(RouteArgs(x=x, w=w, routing=Routing(4)))  # type: ignore[arg-type]
    assert tiles is not None and tiles[1:] == splits
    assert -(-experts // tiles.experts) * tiles.splits <= current_device().num_sms


def gemms_of(monkeypatch: pytest.MonkeyPatch, **changes: object) -> set[str]:
    """The GEMM ops of a decode step of a model whose widths kernels support."""
    config = tiny_models.tiny_config("llama") | {"hidden_size": 1024, "intermediate_size": 1024}
    model = build_model(config | changes, "bfloat16")
    monkeypatch.setattr(registry, "current_platform", lambda: "gpu")
    recorded: set[str] = set()

    def recording_dispatch(op: Any, args: Any, static: Any, impl: Any = None) -> Any:
        if op.name in ("skinny_gemm", "swiglu_gemm"):
            recorded.add(op.name)
        return dispatch(op, args, static, impl)

    for module in (skinny_api, swiglu_api):
        monkeypatch.setattr(module, "dispatch", recording_dispatch)

    def step(params, kv, ids):
        return hidden_states(model, params, ids, decode_context(ids, 4), kv)

    ids = jax.ShapeDtypeStruct((ROWS,), jnp.int32)
    with in_place_of_triton_call(Recorder()):
        hidden, _ = jax.eval_shape(
            step, abstract_params(model), model.state.abstract((4,), 16, 0), ids
        )
    assert hidden.shape == (ROWS, 1024) and hidden.dtype == jnp.bfloat16
    return recorded


def test_only_swiglu_without_biases_has_a_fused_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    """Other networks are a plain GEMM, with bias and activation in XLA, on a GPU as on a CPU."""
    assert gemms_of(monkeypatch) == {"skinny_gemm", "swiglu_gemm"}
    for changes in ({"hidden_act": "gelu"}, {"mlp_bias": True}, {"hidden_act": "relu"}):
        assert gemms_of(monkeypatch, **changes) == {"skinny_gemm"}


def test_the_dense_form_launches_no_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernels are not differentiable."""
    monkeypatch.setattr(registry, "current_platform", lambda: "gpu")
    ids = jax.ShapeDtypeStruct((ROWS,), jnp.int32)
    with in_place_of_triton_call(recorder := Recorder()):
        jax.eval_shape(lambda p, x: forward(MODEL, p, x), abstract_params(MODEL), ids)
    assert not recorder.calls


def prompt_context(ids: jax.Array) -> StepContext:
    """A step of one prompt, which is new."""
    zero = ids[:1]
    pages = Pages(ids, jnp.zeros((1, 4), jnp.int32), zero)
    rows = Rows(ids, ids, zero, zero, zero, jnp.zeros(2, jnp.int32))
    return StepContext(ids, rows, (pages,), num_decodes=0)


@pytest.mark.parametrize(
    ("context", "kernels"),
    [
        pytest.param(partial(decode_context, width=4), {"_decode"}, id="decode"),
        pytest.param(prompt_context, {"_convolve", "_chunks", "_scan"}, id="prompt"),
    ],
)
def test_kernels_of_mamba2(
    context: Callable[[jax.Array], StepContext],
    kernels: set[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(registry, "current_platform", lambda: "gpu")
    model = build_model(tiny_models.tiny_config("mamba2"), "bfloat16")

    def step(params, state, ids):
        return hidden_states(model, params, ids, context(ids), state)

    ids = jax.ShapeDtypeStruct((ROWS,), jnp.int32)
    state = model.state.abstract((), 16, ROWS)
    with in_place_of_triton_call(recorder := Recorder()):
        hidden, after = jax.eval_shape(step, abstract_params(model), state, ids)
    names = {call.kernel.__name__ for call in recorder.calls}
    assert names - {"_add_and_norm"} == kernels
    assert jax.tree.map(jnp.shape, after) == jax.tree.map(jnp.shape, state)
