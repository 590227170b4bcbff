"""Checks shared by ops. Functions that return a str or None return the reason for a refusal."""

from __future__ import annotations

from importlib.util import find_spec

import jax
import jax.numpy as jnp

from pallas_kernels.lib.device import current_device
from pallas_kernels.lib.page_scales import BITS

NOT_INSTALLED = "jax-triton is not installed; install jaxinfer[cuda13] or jaxinfer[cuda12]"
VALUE_DTYPES = ("bfloat16", "float16", "float32")
WIDEST_FLOAT32 = 128
FP8_CAPABILITY = (8, 9)  # of the first GPUs that convert 8-bit floats of ``lib.page_scales``


def check_row_indices(
    op: str,
    query_start_loc: jax.Array,  # int32[R + 1]
    begins: jax.Array,  # int32[R]
    reads: jax.Array,  # int32[R]
    writes: jax.Array,  # int32[R]
) -> None:
    """Raise ValueError when the indices of the rows of prompts have different lengths."""
    rows = begins.shape
    if reads.shape != rows or writes.shape != rows or query_start_loc.shape != (rows[0] + 1,):
        raise ValueError(
            f"{op}: the indices of {rows[0]} rows have different lengths: "
            f"{query_start_loc.shape}, {reads.shape}, {writes.shape}"
        )


def check_paged(
    op: str,
    q: jax.Array | jax.ShapeDtypeStruct,  # [T, N, H]
    k_pages: jax.Array,  # [P, S, K, H]
    v_pages: jax.Array,  # [P, S, K, H]
    page_table: jax.Array,  # int32[R, M]
    seq_lens: jax.Array,  # int32[R]
    window: int | None,
    sinks: jax.Array | None = None,  # [N], with values [T, N]
    slopes: jax.Array | None = None,  # [N]
    sink_values: jax.Array | None = None,  # [T, N, H]
) -> None:
    """Raise ValueError when shapes do not fit together or ``window`` is below 1."""
    if k_pages.shape != v_pages.shape or k_pages.dtype != v_pages.dtype:
        raise ValueError(f"{op}: k_pages {k_pages.shape} and v_pages {v_pages.shape} differ")
    if q.ndim != 3 or k_pages.ndim != 4 or q.shape[2] != k_pages.shape[3]:
        raise ValueError(f"{op}: queries {q.shape} do not fit pages {k_pages.shape}")
    if q.shape[1] % k_pages.shape[2]:
        raise ValueError(
            f"{op}: {q.shape[1]} query heads are not a multiple of {k_pages.shape[2]} kv heads"
        )
    if page_table.ndim != 2 or seq_lens.shape != page_table.shape[:1]:
        raise ValueError(
            f"{op}: page_table {page_table.shape} does not fit seq_lens {seq_lens.shape}"
        )
    if window is not None and window < 1:
        raise ValueError(f"{op}: window must be at least 1, got {window}")
    if sink_values is not None:
        if sinks is None or sinks.shape != q.shape[:2] or sink_values.shape != q.shape:
            raise ValueError(f"{op}: values {sink_values.shape} of sinks need one of each query")
        sinks = None
    for name, one in (("sinks", sinks), ("slopes", slopes)):
        if one is not None and one.shape != (q.shape[1],):
            raise ValueError(f"{op}: {name} {one.shape} are not one for each of {q.shape[1]} heads")


def check_partials(
    op: str,
    x: jax.Array,  # [T, D]
    partials: jax.Array | None,  # [T, D] in x's dtype, or float32[S, T, D]
) -> None:
    """Raise ValueError when split-K partials do not add up to an array of the shape of ``x``."""
    if partials is None:
        return
    dtype = x.dtype if partials.ndim == 2 else jnp.dtype("float32")
    if partials.ndim not in (2, 3) or partials.shape[-2:] != x.shape or not partials.size:
        raise ValueError(f"{op}: partials {partials.shape} do not fit tokens {x.shape}")
    if partials.dtype != dtype:
        raise ValueError(f"{op}: partials {partials.shape} are {partials.dtype}, not {dtype}")


def check_bias(op: str, bias: jax.Array | None, outputs: int, *, alone: bool) -> None:
    """Raise ValueError if the bias of a GEMM has another shape, or the GEMM can have none."""
    if bias is None:
        return
    if bias.shape != (outputs,):
        raise ValueError(f"{op}: the bias {bias.shape} does not fit {outputs} outputs")
    if not alone:
        raise ValueError(f"{op}: results that are split or activated have no bias")


def unfit_norms(x: jax.Array, *weights: jax.Array) -> str | None:
    """Why the norms of a kernel for a GPU cannot have these weights, or None.

    Weights in float32 are those of families whose files hold 1 less (Gemma, Qwen3.5): the sum with
    1 is not rounded to the dtype of ``x``.
    """
    known = dict.fromkeys((str(x.dtype), "float32"))
    unknown = [str(each.dtype) for each in weights if str(each.dtype) not in known]
    return f"norms are {unknown[0]}, not {' or '.join(known)}" if unknown else None


def unfit_for_triton(values: jax.Array, pages: jax.Array) -> str | None:
    """Why no Triton kernel can take these dtypes on this machine, or None. Imports no Triton."""
    value_dtype, page_dtype = str(values.dtype), str(pages.dtype)
    if value_dtype not in VALUE_DTYPES:
        return f"the arguments are {value_dtype}, not one of {', '.join(VALUE_DTYPES)}"
    if pages.dtype == BITS:
        return without_fp8() or without_triton()
    if page_dtype != value_dtype:
        return f"the pages are {page_dtype}, neither {value_dtype} nor 8-bit floats"
    return without_triton()


def unfit_scales(queries: jax.Array, pages: jax.Array) -> str | None:
    """Why no Triton kernel attends to 8-bit pages of these heads, or None."""
    if pages.dtype == BITS and str(queries.dtype) == "float32" and pages.shape[3] > WIDEST_FLOAT32:
        return f"8-bit pages of heads of {pages.shape[3]} as float32 exceed the registers"
    return None


def without_fp8() -> str | None:
    """Why the current device cannot convert 8-bit floats, or None."""
    device = current_device()
    numbers = device.compute_capability.split(".")
    if not numbers[0].isdigit() or tuple(map(int, numbers)) >= FP8_CAPABILITY:
        return None
    return f"{device.kind} has compute capability {device.compute_capability}, below 8.9"


def without_triton() -> str | None:
    """Why no Triton kernel can be compiled on this machine, or None. Imports no Triton."""
    return None if find_spec("jax_triton") and find_spec("triton") else NOT_INSTALLED


def not_hopper() -> str | None:
    """Why kernels for NVIDIA Hopper cannot run on the current device, or None."""
    device = current_device()
    if device.compute_capability.startswith("9."):
        return None
    return f"{device.kind} has compute capability {device.compute_capability}, not 9.x"
