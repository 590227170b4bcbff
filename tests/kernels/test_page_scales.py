"""8-bit pages: values are rounded by half a step, scales are of a head, kernels may refuse them."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.append_decode.api import OP as DECODE
from pallas_kernels.append_decode.api import DecodeArgs
from pallas_kernels.harness.registry import KernelOp, select
from pallas_kernels.kv_append.api import OP as APPEND
from pallas_kernels.kv_append.api import KvAppendArgs, kv_append
from pallas_kernels.lib.device import Device, compiling_for
from pallas_kernels.lib.page_scales import BITS, SMALLEST_SCALE, rounded, values_of
from pallas_kernels.lib.shapes import comparable
from pallas_kernels.paged_prefill.api import OP as PREFILL
from pallas_kernels.paged_prefill.api import PrefillArgs
from pallas_kernels.qk_rope_append.api import OP as ROPE
from pallas_kernels.qk_rope_append.api import RopeAppendArgs


def _read(x: jax.Array) -> np.ndarray:
    bits, scales = rounded(x)
    return np.asarray(values_of(bits) * scales[..., None])


def test_values_are_rounded_to_three_bits_of_their_head() -> None:
    """The largest magnitude of a head stays, others are off by half a step, 2^-4, or by half the
    smallest number, 2^-10, of the scale.
    """
    rng = np.random.default_rng(0)
    x = rng.standard_normal((50, 4, 64), np.float32) * rng.uniform(1e-6, 1e6, (50, 4, 1))
    x = x.astype(np.float32)
    largest = np.abs(x).max(-1, keepdims=True)
    bound = np.maximum(np.abs(x) / 16, largest / 448 / 1024) * (1 + 1e-6)
    found = _read(jnp.asarray(x))
    assert (np.abs(found - x) <= bound).all()
    at = np.abs(x).argmax(-1)[..., None]
    kept = (np.take_along_axis(array, at, -1) for array in (found, x))
    np.testing.assert_allclose(*kept, rtol=1e-6)


def test_zeros_and_the_smallest_numbers() -> None:
    bits, scales = rounded(jnp.zeros((2, 8)).at[1, 0].set(1e-38))
    assert (np.asarray(bits) == 0).all() and (np.asarray(scales) == SMALLEST_SCALE).all()
    assert np.isfinite(_read(jnp.full((1, 8), 3e38))).all()


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_what_is_not_finite_stays_in_its_head(value: float) -> None:
    x = jnp.ones((3, 2, 16)).at[1, 0, 5].set(value)
    found = _read(x)
    assert not np.isfinite(found[1, 0, 5])
    clean = np.ones((3, 2), bool)
    clean[1, 0] = False
    assert (found[clean] == 1).all()


def test_an_entry_does_not_depend_on_other_tokens() -> None:
    """The bits of a token's entries are the same in a prompt as alone."""
    rng = np.random.default_rng(1)
    tokens = jnp.asarray(rng.standard_normal((2, 9, 3, 64)), jnp.bfloat16)

    def pools(slots: list[int], which: slice) -> list[np.ndarray]:
        k, v = tokens[:, which]
        pages, scales = jnp.zeros((3, 8, 3, 64), BITS), jnp.zeros((3, 8, 3), jnp.float32)
        own = {"k_pages": pages, "v_pages": pages, "k_scales": scales, "v_scales": scales}
        args = KvAppendArgs(k=k, v=v, **own, slot_mapping=jnp.asarray(slots))
        return [np.asarray(pool).reshape(24, 3, -1) for pool in jax.jit(kv_append)(args)]

    together = pools([*range(8, 17)], slice(None))
    alone = pools([19], slice(4, 5))  # page 0 is that of padding, which is not written
    for one, many in zip(alone, together, strict=True):
        assert np.array_equal(one[19], many[12]) and one[19].any()


@pytest.mark.parametrize(("steps", "is_accepted"), [(0, True), (1, True), (2, False)])
def test_results_may_differ_by_one_step(steps: int, is_accepted: bool) -> None:
    """One of e4m3, however small a value is in its head; in bfloat16 one of the largest, too."""
    x = np.random.default_rng(2).standard_normal((3, 4, 2, 64), np.float32)
    for dtype in ("float32", "bfloat16"):
        bits, scales = map(np.asarray, rounded(jnp.asarray(x, dtype)))
        largest = np.abs(x) > 0.5 * np.abs(x).max(-1, keepdims=True)
        off = bits + (steps * (~largest if dtype == "float32" else largest)).astype(np.uint8)
        off = np.where(off & 127 == 127, bits, off)  # not NaN
        found = [
            comparable(jnp.zeros(1, dtype), (pool, pool, scales, scales))[1] for pool in (off, bits)
        ]
        assert (found[0].errors(found[1]).max() <= 1) == is_accepted


def test_stray_writes_are_differences() -> None:
    empty = np.full((2, 4, 1, 8), 0x7F, np.uint8), np.full((2, 4, 1), np.nan, np.float32)
    for at in (0, 1):
        written = [pool.copy() for pool in empty]
        written[at][1, 2] = 1
        one, none = (
            comparable(jnp.zeros(1), (pages, pages, scales, scales))[1]
            for pages, scales in (written, empty)
        )
        assert none.is_finite() and not (one.errors(none).max() <= 1)


def _call(op: KernelOp, dtype: str, pages: str) -> object:
    """Abstract arguments of Qwen3-4B's shapes."""
    of, rows = jax.ShapeDtypeStruct, 64
    pool, scale = of((50, 16, 8, 128), pages), of((50, 16, 8), jnp.float32)
    pools = {"k_pages": pool, "v_pages": pool}
    if pages == str(BITS):
        pools |= {"k_scales": scale, "v_scales": scale}
    qkv, ints = of((rows, 48, 128), dtype), of((rows,), jnp.int32)
    angles = {"cos": of((rows, 64), jnp.float32), "sin": of((rows, 64), jnp.float32)}
    context = {"page_table": of((rows, 4), jnp.int32), "seq_lens": ints}
    if op is DECODE:
        return DecodeArgs(qkv=qkv, **angles, **pools, **context, scale=0.1, eps=1e-6)
    if op is PREFILL:
        starts = of((rows + 1,), jnp.int32)
        q = of((rows, 32, 128), dtype)
        return PrefillArgs(q=q, **pools, **context, query_start_loc=starts, scale=0.1)
    if op is ROPE:
        return RopeAppendArgs(qkv=qkv, **angles, **pools, slot_mapping=ints, eps=1e-6)
    k = of((rows, 8, 128), dtype)
    return KvAppendArgs(k=k, v=k, **pools, slot_mapping=ints)


OPS = (DECODE, PREFILL, ROPE, APPEND)


@pytest.mark.parametrize("op", OPS, ids=lambda op: op.name)
def test_which_kernel_is_chosen(op: KernelOp) -> None:
    """Triton for 8 bits where the device converts them; the others refuse."""
    args = _call(op, "bfloat16", str(BITS))
    for kind, capability, name in (
        ("NVIDIA H200", "9.0", "triton"),
        ("NVIDIA L4", "8.9", "triton"),
        ("NVIDIA A100", "8.0", "xla"),
    ):
        with compiling_for(Device("gpu", kind, capability)):
            assert select(op, "gpu", (args,), {}).name == name
    assert select(op, "cpu", (_call(op, "float32", str(BITS)),), {}).name == "xla"
    with compiling_for(Device("gpu", "NVIDIA H200", "9.0")):
        plain = select(op, "gpu", (_call(op, "bfloat16", "bfloat16"),), {}).name
    assert plain == ("mosaic" if op in (DECODE, PREFILL) else "triton")


@pytest.mark.parametrize("op", OPS, ids=lambda op: op.name)
def test_the_operands_of_other_pages_are_the_same(op: KernelOp) -> None:
    """Scales are absent, not unused arrays."""
    of_bits, plain = (_call(op, "bfloat16", pages) for pages in (str(BITS), "bfloat16"))
    assert len(jax.tree.leaves(of_bits)) == len(jax.tree.leaves(plain)) + 2


@pytest.mark.parametrize("pages", [BITS, jnp.dtype("bfloat16")])
def test_scales_that_do_not_fit(pages: jnp.dtype) -> None:
    pool, scale = jnp.zeros((2, 4, 3, 8), pages), jnp.zeros((2, 4, 2), jnp.float32)
    k, slots = jnp.zeros((1, 3, 8)), jnp.zeros(1, jnp.int32)
    args = KvAppendArgs(
        k=k, v=k, k_pages=pool, v_pages=pool, slot_mapping=slots, k_scales=scale, v_scales=scale
    )
    with pytest.raises(ValueError, match=r"kv_append: scales .* do not fit pages"):
        kv_append(args)
