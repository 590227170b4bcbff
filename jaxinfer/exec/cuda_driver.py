"""What CUDA's driver alone tells or gives of a device.

Owns: the calls of ``libcuda``, by ctypes. Must not know: what its answers are for.
"""

from __future__ import annotations

import ctypes
import math

import numpy as np

from jaxinfer.core.errors import EngineError

PORTABLE, MAPPED = 1, 2  # cuda.h: CU_MEMHOSTALLOC_PORTABLE and CU_MEMHOSTALLOC_DEVICEMAP


def card_bytes(ordinal: int) -> int | None:
    """All memory of a CUDA device; None where there is no driver."""
    if (driver := _driver()) is None:
        return None
    card, size = ctypes.c_int(), ctypes.c_size_t()
    failed = (
        driver.cuInit(0)
        or driver.cuDeviceGet(ctypes.byref(card), ordinal)
        or driver.cuDeviceTotalMem_v2(ctypes.byref(size), card)
    )
    return None if failed else size.value


def shared_zeros(ordinal: int, shape: tuple[int, ...]) -> np.ndarray | None:  # int64[...]
    """Memory of the host at whose address a device writes too; None where there is no driver.

    It is never given back, as a step that nobody waits for may still write there. Raises
    ``EngineError`` when the driver has none.
    """
    if (driver := _driver()) is None:
        return None
    card, context, address = ctypes.c_int(), ctypes.c_void_p(), ctypes.c_void_p()
    size = ctypes.c_size_t(8 * math.prod(shape))
    failed = (
        driver.cuInit(0)
        or driver.cuDeviceGet(ctypes.byref(card), ordinal)
        or driver.cuDevicePrimaryCtxRetain(ctypes.byref(context), card)  # the one that JAX uses
        or driver.cuCtxPushCurrent_v2(context)
    )
    if not failed:
        failed = driver.cuMemHostAlloc(ctypes.byref(address), size, PORTABLE | MAPPED)
        driver.cuCtxPopCurrent_v2(ctypes.byref(context))
    if failed or address.value is None:
        raise EngineError(
            f"CUDA's driver gives no memory that the host and device {ordinal} share (its error "
            f"{failed}); free some of the host's memory, or raise the limit of locked memory"
        )
    memory = (ctypes.c_int64 * math.prod(shape)).from_address(address.value)
    zeros = np.ctypeslib.as_array(memory).reshape(shape)
    zeros[...] = 0
    return zeros


def _driver() -> ctypes.CDLL | None:
    try:
        return ctypes.CDLL("libcuda.so.1")
    except OSError:
        return None
