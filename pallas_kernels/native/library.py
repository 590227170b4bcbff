"""The shared library that ``setup.py`` builds of ``src``: finding it, registering it, packing."""

from __future__ import annotations

import ctypes
from functools import cache
from pathlib import Path
from types import MappingProxyType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.quantised import PACKED, nibble_block

# The names of the calls in executables, and those of the library's handlers.
GEMM, ATTENTION = "jaxinfer_quantised_gemm", "jaxinfer_attention"
ROPE_APPEND = "jaxinfer_rope_append"
_HANDLERS = MappingProxyType(
    {
        GEMM: "JaxinferQuantisedGemm",
        ATTENTION: "JaxinferAttention",
        ROPE_APPEND: "JaxinferRopeAppend",
    }
)
MISSING = "the native library is not built (reinstall with a C++ compiler or the package ziglang)"


@cache
def library() -> ctypes.CDLL | None:
    """The library; None if it was not built."""
    files = sorted(Path(__file__).parent.glob("_library*.so"))
    if not files:
        return None
    loaded = ctypes.CDLL(str(files[0]))
    loaded.jaxinfer_variants.restype = ctypes.c_char_p
    return loaded


def variants() -> tuple[str, ...]:
    """The instruction sets of the kernels that this processor has, the fastest and used one first.

    Empty if the library was not built.
    """
    found = library()
    return () if found is None else tuple(found.jaxinfer_variants().decode().split())


@cache
def register() -> bool:
    """Make the kernels known to XLA, which executables need before they are loaded.

    False if the library was not built.
    """
    found = library()
    if found is None:
        return False
    for target, handler in _HANDLERS.items():
        jax.ffi.register_ffi_target(target, jax.ffi.pycapsule(getattr(found, handler)), "cpu")
    return True


def call(target: str, results: Any, *arrays: jax.Array | None, **attributes: Any) -> Any:
    """Call a handler in a trace; a missing array is passed as an empty one.

    ``results`` are abstract arrays, ``attributes`` those of the handler, and perhaps
    ``input_output_aliases``.
    """
    register()
    aliases = attributes.pop("input_output_aliases", None)
    function = jax.ffi.ffi_call(target, results, input_output_aliases=aliases)
    given = (jnp.zeros(0, jnp.float32) if array is None else array for array in arrays)
    return function(*given, **attributes)


def pack(kind: str, values: np.ndarray) -> np.ndarray | None:
    """Values by rows in the order of ``arrangements.LANES``; None if the library was not built."""
    found = library()
    if found is None:
        return None
    rows = np.ascontiguousarray(values)
    tiles = np.empty_like(rows)
    sizes = [ctypes.c_int64(size) for size in rows.shape]
    arguments = (ctypes.c_void_p(rows.ctypes.data), ctypes.c_void_p(tiles.ctypes.data), sizes[0])
    if kind in PACKED:
        inputs = 2 * rows.shape[1]
        block = ctypes.c_int64(nibble_block(inputs))
        found.jaxinfer_pack_nibbles(*arguments, ctypes.c_int64(inputs), block)
    else:
        found.jaxinfer_pack_bytes(*arguments, sizes[1])
    return tiles.view(np.uint8)
