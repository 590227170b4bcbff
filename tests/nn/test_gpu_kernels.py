"""What a layer launches on a GPU: which kernels serving reaches, without running them."""

from __future__ import annotations

import sys

import jax
import jax.numpy as jnp
import pytest

from jaxinfer.nn.attention import AttentionBatch, PagedAttend, Rotary
from jaxinfer.nn.kv import LayerKV
from pallas_kernels import registry

if sys.platform != "linux":
    pytest.skip("Triton has no packages for this system", allow_module_level=True)

from kit.triton_shims import Recorder, in_place_of_triton_call

ROWS, HEADS, KV_HEADS, HEAD_DIM = 8, 32, 8, 128


@pytest.mark.parametrize("rotary", [True, False], ids=["rope", "no_rope"])
def test_decode_layer(rotary: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "current_platform", lambda: "gpu")

    def layer(qkv: jax.Array, cos: jax.Array, norms: jax.Array, kv: LayerKV):
        ids = jnp.zeros(ROWS, jnp.int32)
        batch = AttentionBatch(ids, jnp.zeros((ROWS, 64), jnp.int32), ids, ids[:1])
        turn = Rotary(cos, cos, norms, 1e-6) if rotary else None
        attend = PagedAttend(batch, ROWS)
        return attend(qkv, kv, num_kv_heads=KV_HEADS, rotary=turn, scale=0.1, window=None)

    def array(*shape: int, dtype: type = jnp.bfloat16) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, dtype)

    pool = array(9, 16, KV_HEADS, HEAD_DIM)
    qkv = array(ROWS, HEADS + 2 * KV_HEADS, HEAD_DIM)
    cos = array(ROWS, HEAD_DIM // 2, dtype=jnp.float32)
    with in_place_of_triton_call(recorder := Recorder()):
        out, kv = jax.eval_shape(layer, qkv, cos, array(2, HEAD_DIM), LayerKV(pool, pool))
    assert [call.kernel.__name__ for call in recorder.calls] == ["_append_and_attend"]
    assert out.shape == (ROWS, HEADS, HEAD_DIM) and kv.k_pages.shape == pool.shape
