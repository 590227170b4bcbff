"""quantised_gemm's native kernel: its arithmetic, its variants, and independence of the batch."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from pallas_kernels.lib.arrangements import LANES
from pallas_kernels.lib.quantised import Quantised, dequantised
from pallas_kernels.native import library
from pallas_kernels.quantised_gemm import native as gemm
from pallas_kernels.quantised_gemm.cases import BLOCK, FORMS, random_matrix
from pallas_kernels.quantised_gemm.ref import QuantisedGemmArgs

pytestmark = pytest.mark.skipif(not library.variants(), reason=library.MISSING)

INNER, OUTER = 512, 96
GROUPS: dict[str, int] = dict(
    zip(FORMS, (128, 128, 32, 32, 512, 32, 32, 16, 512, 32, 128), strict=True)
)
ROUNDED = [form for form in FORMS if "fp8" not in form]  # fp8 multiplies floats as they are
each_form = pytest.mark.parametrize("form", FORMS)


def matrix(form: str, outer: int = OUTER, inner: int = INNER) -> Quantised:
    outer = max(outer, 2 * BLOCK) if form == "fp8_blocks" else outer
    group = min(GROUPS[form], inner)
    return random_matrix(np.random.default_rng(1), form, outer, inner, group)


def normals(tokens: int, inner: int = INNER) -> np.ndarray:
    return np.random.default_rng(2).normal(size=(tokens, inner)).astype(np.float32)


def native(x: np.ndarray, w: Quantised, swiglu: bool = False) -> np.ndarray:
    """The result of rows that are arranged here."""
    args = QuantisedGemmArgs(x=jnp.asarray(x), w=LANES.arrange(w), swiglu=swiglu, wide=True)
    assert gemm.supports(args) is None
    return np.asarray(jax.jit(gemm.quantised_gemm)(args))


def defined(x: np.ndarray, w: Quantised, swiglu: bool = False) -> np.ndarray:
    """The definition, in float64."""
    out = np.asarray(x, np.float64) @ np.asarray(dequantised(w), np.float64).T
    if swiglu:
        gate, up = np.split(out, 2, axis=1)
        out = gate / (1 + np.exp(np.minimum(-gate, 700))) * up
    return out


def rounded(x: np.ndarray, block: int) -> np.ndarray:  # float64[T, K]
    """Activations as the kernel rounds them: 16 bits with a scale for each block."""
    blocks = x.reshape(len(x), -1, block)
    largest = np.abs(blocks).max(axis=2, keepdims=True)
    unit = np.float32(127 * 256)
    whole = np.rint(blocks * (unit / largest))
    whole += whole % 256 == 128  # its low byte would be -128
    return (whole * (largest / unit).astype(np.float64)).reshape(x.shape)


def multiplied(x: np.ndarray, w: Quantised) -> np.ndarray:
    """The activations that the kernel multiplies."""
    return x if w.base == "fp8" else rounded(x, 16 if w.group == 16 else 32)


def rms(x: np.ndarray) -> float:
    return float(np.sqrt(np.mean(np.square(x))))


@pytest.fixture
def chosen_again() -> Iterator[None]:
    yield
    found = library.library()
    assert found is not None
    found.jaxinfer_choose(0)


@pytest.mark.parametrize("tokens", [1, 3, 8, 21])
@pytest.mark.parametrize("swiglu", [False, True])
@each_form
def test_equals_the_definition_with_rounded_activations(
    form: str, swiglu: bool, tokens: int
) -> None:
    w, x = matrix(form), normals(tokens)
    expected = defined(multiplied(x, w), w, swiglu)
    actual = native(x, w, swiglu)
    assert actual.dtype == np.float32
    assert np.abs(actual - expected).max() < 4e-6 * rms(expected)


@pytest.mark.parametrize("form", ROUNDED)
def test_rounding_of_activations_costs_less_than_a_ten_thousandth(form: str) -> None:
    w, x = matrix(form), normals(64)
    expected = defined(x, w)
    assert 1e-6 < rms(native(x, w) - expected) / rms(expected) < 1e-4


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(
    "form", ["int4", "int4_zeros", "int4_offsets", "int8", "int8_offsets", "fp4"]
)
def test_other_dtypes_of_scales(form: str, dtype: str) -> None:
    def cast(part: np.ndarray | None) -> np.ndarray | None:
        return None if part is None else part.astype(ml_dtypes.bfloat16).astype(dtype)

    w = matrix(form)
    w = replace(w, scales=cast(w.scales), offsets=cast(w.offsets))
    x = normals(3)
    expected = defined(rounded(x, 32), w)
    assert np.abs(native(x, w) - expected).max() < 4e-6 * rms(expected)


@pytest.mark.parametrize("form", ["int4_offsets", "fp8"])
@pytest.mark.parametrize(("outer", "inner"), [(16, 32), (48, 96), (576, 1536), (32, 8960)])
def test_other_sizes(outer: int, inner: int, form: str) -> None:
    group = inner if form == "fp8" else 32
    w, x = random_matrix(np.random.default_rng(1), form, outer, inner, group), normals(9, inner)
    expected = defined(multiplied(x, w), w)
    assert np.abs(native(x, w) - expected).max() < 1e-5 * rms(expected)


@each_form
def test_a_token_does_not_depend_on_the_others(form: str) -> None:
    w, x = matrix(form), normals(23)
    together = native(x, w, swiglu=True)
    alone = [native(x[t : t + 1], w, swiglu=True)[0] for t in (0, 7, 8, 16, 22)]
    assert np.array_equal(together[[0, 7, 8, 16, 22]], alone)


@pytest.mark.parametrize("swiglu", [False, True])
@each_form
def test_tokens_of_zeros_are_left_out(form: str, swiglu: bool, chosen_again: None) -> None:
    """Multiplied they would be NaN, as one scale is; the others fill tiles of their own."""
    w, x = matrix(form), normals(23)
    if w.supers is None:
        w.scales[-1, 0] = np.nan
    else:
        w.supers[-1, 0] = np.nan
    x[1, 0] = x[20, :-1] = 0
    zeros = [0, 3, *range(8, 19), 22]
    others = [token for token in range(23) if token not in zeros]
    expected = native(x[others], w, swiglu)
    assert np.isnan(expected).any(axis=1).all()
    x[zeros] = 0
    x[3] = -0.0
    found = library.library()
    assert found is not None
    for index, name in enumerate(library.variants()):
        found.jaxinfer_choose(index)
        actual = native(x, w, swiglu)
        assert np.array_equal(actual[others], expected, equal_nan=True), name
        assert not actual[zeros].any(), name


@pytest.mark.parametrize("swiglu", [False, True])
@each_form
def test_variants_give_the_same_bits(form: str, swiglu: bool, chosen_again: None) -> None:
    w, x = matrix(form), normals(11)
    expected = native(x, w, swiglu)
    found = library.library()
    assert found is not None and library.variants()[-1] == "plain"
    for index, name in enumerate(library.variants()):
        found.jaxinfer_choose(index)
        assert np.array_equal(native(x, w, swiglu), expected), name


def test_every_value_of_fp8_is_exact(chosen_again: None) -> None:
    """Also the seven that are subnormal as float16 and float32, which XLA's threads flush."""
    codes = np.arange(256, dtype=np.uint8)
    codes[codes % 128 == 127] = 0  # NaN
    values = np.resize(codes, (16, 32)).view(ml_dtypes.float8_e4m3fn)
    w = Quantised("fp8", values, np.full((16, 1), 0.75, np.float32))
    found = library.library()
    assert found is not None
    for index, name in enumerate(library.variants()):
        found.jaxinfer_choose(index)
        actual = native(np.eye(32, dtype=np.float32), w)
        assert np.array_equal(actual, values.astype(np.float32).T * 0.75), name


def test_a_weight_that_is_nan_makes_its_output_nan(chosen_again: None) -> None:
    w, x = matrix("fp8_blocks"), normals(3)
    w.values[[5, 17], [7, 300]] = [np.nan, -np.float32(np.nan)]
    assert set(w.values.view(np.uint8)[[5, 17], [7, 300]].tolist()) == {0x7F, 0xFF}
    found = library.library()
    assert found is not None
    for index, name in enumerate(library.variants()):
        found.jaxinfer_choose(index)
        is_nan = np.isnan(native(x, w))
        assert is_nan[:, [5, 17]].all() and is_nan.sum() == 6, name


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"scales": np.ones((2, 4), np.float16)}, "scales of blocks of outputs are float16"),
        ({"scales": np.ones((32, 4), np.float32)}, "scales of 8 outputs are not those of whole"),
        ({"scales": np.ones((256, 64), np.float32)}, "groups of 8 inputs do not fit blocks of 32"),
        ({"zeros": np.zeros((256, 4), np.uint8)}, "fp8 weights have more than scales"),
    ],
)
def test_fp8_that_the_kernel_refuses(change: dict[str, np.ndarray], reason: str) -> None:
    w = replace(matrix("fp8_blocks"), **change)
    w = replace(w, kind="fp8_lanes")
    refusal = gemm.supports(QuantisedGemmArgs(x=jnp.asarray(normals(1)), w=w, wide=True))
    assert refusal is not None and reason in refusal


ONE_THREAD = """
import os, sys
os.sched_setaffinity(0, [min(os.sched_getaffinity(0))])
import numpy as np
from kernels import test_native_gemm as tests
made = {form: tests.native(tests.normals(21), tests.matrix(form), True) for form in sys.argv[2:]}
np.savez(sys.argv[1], **made)
"""


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="only Linux limits processors so")
def test_one_thread_gives_the_same_bits(tmp_path: Path) -> None:
    root = Path(__file__).parents[2]
    environment = os.environ | {"PYTHONPATH": f"{root}:{root / 'tests'}"}
    file, forms = tmp_path / "out.npz", ("q4_k", "fp8_blocks")
    subprocess.run([sys.executable, "-c", ONE_THREAD, file, *forms], env=environment, check=True)
    made = np.load(file)
    for form in forms:
        assert np.array_equal(made[form], native(normals(21), matrix(form), swiglu=True)), form


def test_threads_wait_for_all_activations() -> None:
    """One thread may have rounded its tokens long before the other has."""
    arranged = LANES.arrange(matrix("int4_offsets", 32, 8960))
    run = jax.jit(lambda x, w: gemm.quantised_gemm(QuantisedGemmArgs(x=x, w=w, wide=True)))
    tokens = normals(32, 8960).reshape(2, 16, 8960)
    alone = [[run(x[t : t + 1], arranged)[0] for t in range(16)] for x in tokens]
    for repeat in range(300):  # memory of the last call has other activations
        actual = run(tokens[repeat % 2], arranged)
        assert np.array_equal(actual, alone[repeat % 2]), repeat


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("form", ["q4_k", "fp8"])
def test_tokens_that_are_not_finite(form: str, value: float) -> None:
    w, x = matrix(form), normals(5)
    others = [0, 1, 3, 4]
    expected = native(x, w)[others]
    x[2, 40] = value
    for swiglu in (False, True):
        actual = native(x, w, swiglu)
        # fp8 weights may be zero, and have signs of their own
        assert np.isnan(actual[2]).all() if form == "q4_k" else not np.isfinite(actual[2]).any()
        assert np.isfinite(actual[others]).all()
    assert np.array_equal(native(x, w)[others], expected)


def test_blocks_of_zeros_and_of_negligible_tokens() -> None:
    w, x = matrix("int8"), normals(2)
    x[:, :32] = 0
    expected = native(x, w)
    x[:, :32] = 1e-38
    assert np.array_equal(native(x, w), expected)
    assert np.array_equal(native(np.zeros_like(x), w), np.zeros((2, OUTER)))


def test_swiglu_of_large_gates() -> None:
    w = matrix("int8")
    x = normals(4) * np.asarray([[1e-3], [1], [30], [3000]], np.float32)
    expected = defined(rounded(x, 32), w, swiglu=True)
    actual = native(x, w, swiglu=True)
    for token in range(4):
        assert np.abs(actual[token] - expected[token]).max() < 1e-5 * rms(expected[token])


@each_form
def test_arranged_values_are_placed_without_a_copy(form: str) -> None:
    w = LANES.arrange(matrix(form))
    placed = jax.device_put(w.values, jax.devices("cpu")[0])
    assert placed.unsafe_buffer_pointer() == np.asarray(w.values).ctypes.data
