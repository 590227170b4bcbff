"""Every form of a weight multiplies and gives rows as the dense matrix that it stands for does;
what ``linear`` makes of it.
"""

from __future__ import annotations

from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxinfer.core.errors import ArgumentError
from jaxinfer.nn.context import dense_context
from jaxinfer.nn.linear import Norm, Stream, linear, normalised
from jaxinfer.nn.weight import Adapted, Matmul, Parts, matrices, param, stored, tree_of_parts
from pallas_kernels.harness.pins import NO_PINS
from pallas_kernels.lib.quantised import Quantised

RNG = np.random.default_rng(0)
F32 = jnp.dtype(jnp.float32)
T, K, N, R = 5, 32, 12, 3  # tokens, inputs, outputs, rank


def random(*shape: int) -> jax.Array:
    return jnp.asarray(RNG.standard_normal(shape), F32)


def int8(num_outputs: int) -> dict[str, jax.Array]:
    values = RNG.integers(-127, 128, (num_outputs, K))
    scales = RNG.uniform(0.5, 2, (num_outputs, 1)) / 100
    return {"int8": jnp.asarray(values, jnp.int8), "scales": jnp.asarray(scales, F32)}


def adapted(base: Any) -> dict[str, Any]:
    return {"base": base, "a": random(K, R), "b": random(R, N)}


PARTS = tree_of_parts([int8(N - 4), random(K, 4)])
# as a matrix, and as an embedding
MATRICES = {"dense": random(K, N), "int8": int8(N), "parts": PARTS}
MATRICES |= {f"adapted {name}": adapted(base) for name, base in MATRICES.items()}
EMBEDDINGS = {"dense": random(N, K), "int8": int8(N)}
EMBEDDINGS |= {f"adapted {name}": adapted(base) for name, base in EMBEDDINGS.items()}
X, NORM = random(T, K), Norm(1 + random(2, K) / 5, 1, 1e-5)
each_matrix = pytest.mark.parametrize("name", MATRICES)
each_embedding = pytest.mark.parametrize("name", EMBEDDINGS)


def assert_close(found: jax.Array, expected: jax.Array) -> None:
    np.testing.assert_allclose(found, expected, rtol=1e-3, atol=1e-3)  # int8 rounds tokens


@each_matrix
def test_a_matrix_multiplies_as_its_dense_form(name: str) -> None:
    w = stored(MATRICES[name])
    dense = w.dense(F32)
    assert dense.shape == (K, N)
    y = X @ dense
    assert_close(w.matmul(X, Matmul(NO_PINS)), y)
    gate, up = jnp.split(y, 2, axis=1)
    assert_close(w.matmul(X, Matmul(NO_PINS, swiglu=True)), jax.nn.silu(gate) * up)
    assert_close(w.matmul(X[None], Matmul(NO_PINS, wide=True)), y[None])
    stream = Stream(jnp.zeros_like(y), w.matmul(X, Matmul(NO_PINS, split=True)))
    assert_close(stream.total(), y)


@each_embedding
def test_rows_and_logits_of_an_embedding(name: str) -> None:
    w = stored(EMBEDDINGS[name], by_output=True)
    dense = w.dense(F32)
    assert dense.shape == (N, K) and w.num_outputs == N
    ids = jnp.asarray([2, 99, -1], jnp.int32)  # those of padding are clamped
    assert_close(w.take(ids), dense[jnp.asarray([2, N - 1, 0])])
    assert_close(w.matmul(X, Matmul(NO_PINS, wide=True)), X @ dense.T)


def test_logits_are_float32_and_tied_equals_untied() -> None:
    hidden, embed = X.astype(jnp.bfloat16), random(7, K).astype(jnp.bfloat16)
    tied = stored(embed, by_output=True).matmul(hidden, Matmul(NO_PINS, wide=True))
    untied = stored(embed.T).matmul(hidden, Matmul(NO_PINS, wide=True))
    assert tied.dtype == untied.dtype == jnp.float32
    np.testing.assert_allclose(tied, untied, rtol=1e-5, atol=1e-5)


def test_an_addend_is_one_more_of_split_k_partials() -> None:
    class Split(Parts):
        def matmul(self, x: jax.Array, how: Matmul) -> jax.Array:
            assert how.split
            return jnp.stack([x[:, : K // 2] @ W[: K // 2], x[:, K // 2 :] @ W[K // 2 :]])

    W = MATRICES["dense"]
    a, b = random(K, R), random(R, N)
    partials = Adapted(Split(()), a, b).matmul(X, Matmul(NO_PINS, split=True))
    assert partials.shape == (3, T, N)
    assert_close(partials.sum(0), X @ (W + a @ b))


@each_matrix
@pytest.mark.parametrize("swiglu", [False, True])
def test_linear_of_a_norm(name: str, swiglu: bool) -> None:
    w, ctx, stream = stored(MATRICES[name]), dense_context(T), Stream(X, 2 * X)
    after, h = normalised(stream, NORM, ctx)
    bias = random(N // 2 if swiglu else N)
    expected = linear(h, w, ctx, swiglu=swiglu).y + bias
    for keep in (False, True):
        found = linear(stream, w, ctx, norm=NORM, bias=bias, swiglu=swiglu, keep=keep)
        assert_close(found.y, expected)
        np.testing.assert_array_equal(found.stream.x, after.x)
        assert found.stream.delta is None
        assert np.array_equal(found.h, h) if keep else found.h is None


def test_matrices_of_a_params_tree() -> None:
    tree = {"embed": EMBEDDINGS["int8"], "layers_0": {"qkv": adapted(PARTS), "norms": X}}
    found = [w.num_outputs if isinstance(w, Quantised) else w.shape for w in matrices(tree)]
    assert sorted(map(str, found)) == sorted(map(str, [N, (K, R), (R, N), N - 4, (K, 4), (T, K)]))


def test_a_parameter_that_is_missing_is_named() -> None:
    class Outer(nn.Module):
        @nn.compact
        def __call__(self) -> jax.Array:
            return Inner(name="inner")()

    class Inner(nn.Module):
        def __call__(self) -> jax.Array:
            return param(self, "norms")

    params = {"inner": {"norms": X}}
    np.testing.assert_array_equal(Outer().apply({"params": params}), X)
    with pytest.raises(ArgumentError, match="params have no inner/norms; give"):
        Outer().apply({"params": {"inner": {"other": X}}})
