"""The shared library that ``setup.py`` builds of ``src``: finding it, registering it, packing."""

from __future__ import annotations

import ctypes
from functools import cache
from pathlib import Path

import jax
import numpy as np

from pallas_kernels.quantised import PACKED, nibble_block

TARGET = "jaxinfer_quantised_gemm"  # the name of the call in executables
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
    """The instruction sets of the kernel that this processor has, the fastest and used one first.

    Empty if the library was not built.
    """
    found = library()
    return () if found is None else tuple(found.jaxinfer_variants().decode().split())


@cache
def register() -> bool:
    """Make the kernel known to XLA, which executables need before they are loaded.

    False if the library was not built.
    """
    found = library()
    if found is None:
        return False
    handler = jax.ffi.pycapsule(found.JaxinferQuantisedGemm)
    jax.ffi.register_ffi_target(TARGET, handler, platform="cpu")
    return True


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
    return tiles
