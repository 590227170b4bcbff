"""Triton kernels of a traced step, compiled ahead of its lowering."""

from __future__ import annotations

import sys
import threading
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from pallas_kernels.toolchain.find import kernels_in

if sys.platform != "linux":
    pytest.skip("Triton has no packages for this system", allow_module_level=True)

import jax_triton

HAS_CUDA_PLUGIN = find_spec("jax_cuda12_plugin") or find_spec("jax_cuda13_plugin")
KERNELS = ("_append", "_add_and_norm")  # one writes references


def traced(rows: int, *, layers: int = 2) -> jax.stages.Traced:
    """Layers with two kernels each, in a function of their own."""
    from pallas_kernels.kv_append.ref import KvAppendArgs
    from pallas_kernels.kv_append.triton import kv_append
    from pallas_kernels.residual_norm.ref import NormArgs
    from pallas_kernels.residual_norm.triton import residual_norm

    @jax.jit
    def layer(x: jax.Array, pages: jax.Array) -> tuple[jax.Array, jax.Array]:
        heads, slots = x.reshape(rows, 2, 32), jnp.zeros(rows, jnp.int32)
        new, pools = {"k": heads, "v": heads}, {"k_pages": pages, "v_pages": pages}
        pages, _ = kv_append(KvAppendArgs(**new, **pools, slot_mapping=slots))
        norm = NormArgs(x=x, weights=jnp.ones((1, 64), x.dtype), row=0, eps=1e-6)
        return residual_norm(norm)[1], pages

    def step(x: jax.Array, pages: jax.Array) -> tuple[jax.Array, jax.Array]:
        for _ in range(layers):
            x, pages = layer(x, pages)
        return x, pages

    array = partial(jax.ShapeDtypeStruct, dtype=jnp.bfloat16)
    return jax.jit(step).trace(array((rows, 64)), array((4, 16, 2, 32)))


def names(kernels: Any) -> list[str]:
    return [key[0].__name__ for key in kernels]


def test_each_kernel_once_and_the_same_for_every_number_of_rows() -> None:
    few, many = kernels_in(traced(8).jaxpr), kernels_in(traced(64, layers=3).jaxpr)
    assert names(few) == list(KERNELS)
    assert few.keys() == many.keys()


def test_sample_shares_kernels_between_batches_with_the_same_tiles() -> None:
    """Each further kernel costs a quarter to two seconds at a start with nothing cached."""
    from pallas_kernels.sample.cases import MIXED, SampleCase, build
    from pallas_kernels.sample.triton import sample

    def kernels(rows: int) -> set[Any]:
        (one,) = build(SampleCase("one", 151936, MIXED, 1), 0).args
        args = jax.tree.map(lambda x: jax.ShapeDtypeStruct((rows, *x.shape[1:]), x.dtype), one)
        return set(kernels_in(jax.jit(sample).trace(args).jaxpr))

    few, many = kernels(8), kernels(256)
    assert len(few) == len(many) == 7
    assert names(few - many) == names(many - few) == ["_summarize"]


def test_prefill_has_one_kernel_for_all_buckets() -> None:
    from pallas_kernels.paged_prefill.ref import PrefillArgs
    from pallas_kernels.paged_prefill.triton import paged_prefill

    def kernels(tokens: int, rows: int, pages: int) -> set[Any]:
        ints: Any = partial(jax.ShapeDtypeStruct, dtype=jnp.int32)
        queries: Any = jax.ShapeDtypeStruct((tokens, 4, 64), jnp.float32)
        pool = jax.ShapeDtypeStruct((9, 16, 2, 64), jnp.float32)
        context = {"page_table": ints((rows, pages)), "seq_lens": ints((rows,))}
        pools: Any = {"k_pages": pool, "v_pages": pool, "query_start_loc": ints((rows + 1,))}
        args = PrefillArgs(q=queries, **pools, **context, scale=1.0)
        return set(kernels_in(jax.jit(paged_prefill).trace(args).jaxpr))

    assert kernels(16, 1, 128) == kernels(8192, 256, 128) == kernels(64, 4, 2048)


def test_keys_differ_when_the_machine_code_differs() -> None:
    def norm(x: jax.Array, *, row: int, eps: float) -> Any:
        from pallas_kernels.residual_norm.ref import NormArgs
        from pallas_kernels.residual_norm.triton import residual_norm

        return residual_norm(NormArgs(x=x, weights=jnp.ones((2, 64), x.dtype), row=row, eps=eps))

    calls = [("bfloat16", 0, 1e-6), ("float32", 0, 1e-6), ("bfloat16", 1, 1e-6)]
    found = set()
    for dtype, row, eps in calls:
        x = jax.ShapeDtypeStruct((8, 64), dtype)
        found |= kernels_in(jax.jit(partial(norm, row=row, eps=eps)).trace(x).jaxpr).keys()
    assert len(found) == len(calls)


def test_a_step_without_kernels() -> None:
    assert not kernels_in(jax.jit(jnp.sin).trace(1.0).jaxpr)


def test_pytorch_is_not_imported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Triton would import it, if installed. Other threads may import it."""
    (tmp_path / "torch.py").touch()
    monkeypatch.syspath_prepend(tmp_path)
    finders, found = [*sys.meta_path], list[bool]()

    def look() -> None:
        found.append(find_spec("torch") is not None)

    def lower(self: jax.stages.Traced) -> None:
        with pytest.raises(ModuleNotFoundError, match="No module named 'torch'"):
            look()
        other = threading.Thread(target=look)
        other.start()
        other.join()

    monkeypatch.setattr(jax.stages.Traced, "lower", lower)
    for compile_ahead in kernels_in(traced(8).jaxpr).values():
        compile_ahead()
    assert found == [True] * len(KERNELS) and sys.meta_path == finders
    look()
    assert found[-1]


@pytest.mark.skipif(not HAS_CUDA_PLUGIN, reason="jax-triton lowers with JAX's CUDA plugin alone")
def test_lowering_compiles_no_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    compiled: list[str] = []
    compile_kernel = jax_triton.triton_lib.TritonFunction._compile_kernel
    lower = jax.stages.Traced.lower

    def counted(self: Any, *args: Any) -> Any:
        compiled.append(self.name)
        return compile_kernel(self, *args)

    def lower_for_cuda(self: jax.stages.Traced) -> jax.stages.Lowered:
        return lower(self, lowering_platforms=("cuda",))

    monkeypatch.setattr(jax_triton.triton_lib.TritonFunction, "_compile_kernel", counted)
    monkeypatch.setattr(jax.stages.Traced, "lower", lower_for_cuda)
    call = partial(jax_triton.triton_call, compute_capability=90)
    monkeypatch.setattr(jax_triton, "triton_call", call)
    step = traced(9)
    for compile_ahead in kernels_in(step.jaxpr).values():
        compile_ahead()
    assert sorted(compiled) == sorted(KERNELS)
    step.lower()
    assert len(compiled) == len(KERNELS)
