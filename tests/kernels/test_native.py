"""The native kernels for CPUs: their arithmetic, their variants, calls beside other calls.

The sweep compares attention and rope with their definitions; here is what it cannot see.
"""

from __future__ import annotations

from collections.abc import Iterator

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.arrangements import LANES
from pallas_kernels.native import library
from pallas_kernels.native.attention import _attend, append_decode
from pallas_kernels.quantised import Quantised, dequantised
from pallas_kernels.quantised_gemm import native
from pallas_kernels.quantised_gemm.cases import FORMS, random_matrix

GROUPS = dict(zip(FORMS, (128, 128, 32, 32, 512, 16, 512, 32), strict=True))
VARIANTS = library.variants()
each_form = pytest.mark.parametrize("form", [form for form in FORMS if form != "fp8"])


@pytest.fixture(params=range(len(VARIANTS)), ids=VARIANTS)
def variant(request: pytest.FixtureRequest) -> Iterator[int]:
    found = library.library()
    assert found is not None, library.MISSING
    found.jaxinfer_choose(request.param)
    yield request.param
    found.jaxinfer_choose(0)


def matrix(form: str) -> Quantised:
    return random_matrix(np.random.default_rng(1), form, 96, 512, GROUPS[form])


def tokens(count: int) -> np.ndarray:
    return np.random.default_rng(2).standard_normal((count, 512), np.float32)


def multiplied(x: np.ndarray, w: Quantised, *, swiglu: bool = False) -> np.ndarray:
    w = LANES.arrange(w)
    static = {"kind": w.kind, "swiglu": swiglu, "split": False, "wide": False}
    assert native.supports(jnp.asarray(x), *w.arrays, **static) is None
    run = jax.jit(lambda x, *arrays: native.quantised_gemm(x, *arrays, **static))
    return np.asarray(run(x, *w.arrays))


def rounded(x: np.ndarray) -> np.ndarray:
    """Activations as the kernel rounds them: int8 in blocks of 32."""
    blocks = x.reshape(len(x), -1, 32)
    largest = np.abs(blocks).max(axis=2, keepdims=True)
    whole = np.rint(blocks * (np.float32(127) / largest))
    return (whole * (largest / np.float32(127))).reshape(x.shape)


@each_form
def test_the_product_of_rounded_activations(form: str, variant: int) -> None:
    x, w = tokens(11), matrix(form)
    weights = np.asarray(dequantised(w), np.float64)
    expected = rounded(x).astype(np.float64) @ weights.T
    found = multiplied(x, w)
    np.testing.assert_allclose(found, expected, atol=2e-5)
    exact = x @ weights.T
    assert 0 < np.sqrt(((found - exact) ** 2).mean()) / exact.std() < 0.01


@each_form
def test_a_token_does_not_depend_on_the_others(form: str) -> None:
    x, w = tokens(21), matrix(form)
    together = multiplied(x, w)
    for count in (1, 2, 9):
        np.testing.assert_array_equal(multiplied(x[:count], w), together[:count])


def test_gates_and_ups() -> None:
    x, w = tokens(3), matrix("q4_k")
    gate, up = np.split(multiplied(x, w), 2, axis=1)
    expected = gate / (1 + np.exp(-gate)) * up
    np.testing.assert_allclose(multiplied(x, w, swiglu=True), expected, rtol=1e-5, atol=1e-6)


def test_tokens_of_zeros_and_of_nan() -> None:
    w = matrix("int4")
    x = tokens(2) * 0
    np.testing.assert_array_equal(multiplied(x, w), 0)
    x[1, 3] = np.nan
    found = multiplied(x, w)
    assert not found[0].any() and np.isnan(found[1]).all()


def attention_case() -> tuple[np.ndarray, ...]:
    rng = np.random.default_rng(3)
    q = rng.standard_normal((5, 6, 32), np.float32)
    k, v = (rng.standard_normal((9, 16, 3, 32), np.float32) for _ in range(2))
    table = rng.permutation(8)[None].repeat(2, 0).astype(np.int32) + 1
    lens, starts = np.array([70, 33], np.int32), np.array([0, 3, 5], np.int32)
    return q, k, v, table, lens, starts


def test_attention_of_each_variant_is_the_same(variant: int) -> None:
    library.register()
    arrays = [jnp.asarray(array) for array in attention_case()]
    found = jax.jit(lambda *a: _attend(*a, 0.2, 20))(*arrays)
    assert library.library() is not None
    library.library().jaxinfer_choose(0)  # type: ignore[union-attr]
    np.testing.assert_allclose(found, jax.jit(lambda *a: _attend(*a, 0.2, 20))(*arrays), atol=1e-6)


def test_pools_are_changed_in_place() -> None:
    """A step donates them; a copy of all pages a layer would take longer than the step."""
    q, k, v, table, lens, _ = attention_case()
    qkv = jnp.asarray(np.concatenate([q[:2], q[:2]], axis=1))
    angles = jnp.ones((2, 16), jnp.float32)

    def step(qkv, k, v):
        static = {"scale": 0.2, "eps": 1e-6}
        return append_decode(qkv, angles, angles, None, k, v, table, lens, **static)

    pools = (jnp.asarray(k), jnp.asarray(v))
    compiled = jax.jit(step, donate_argnums=(1, 2)).lower(qkv, *pools).compile()
    assert " copy(" not in compiled.as_text().replace("copy(f32[2,", "")
    memory = compiled.memory_analysis()
    assert memory is not None and memory.temp_size_in_bytes < k.nbytes
