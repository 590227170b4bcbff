"""Calls of the CUDA driver (``libcuda``, by ctypes) for functions that JAX does not offer."""

from __future__ import annotations

import ctypes
import math
from collections.abc import Callable
from typing import Any

import numpy as np

from jaxinfer.core.errors import EngineError

PORTABLE, MAPPED = 1, 2  # cuda.h: CU_MEMHOSTALLOC_PORTABLE and CU_MEMHOSTALLOC_DEVICEMAP
NON_BLOCKING = 1  # cuda.h: CU_STREAM_NON_BLOCKING

type Copy = Callable[..., None]  # takes pairs of a device address and a host array


def card_bytes(ordinal: int) -> int | None:
    """The total memory of a CUDA device; None without a driver."""
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
    """Host memory to which a device can write, at the same address; None without a driver.

    It is never freed, as an abandoned step may still write there. Raises ``EngineError`` if the
    driver cannot allocate it.
    """
    if (driver := _driver()) is None:
        return None
    address, size = ctypes.c_void_p(), ctypes.c_size_t(8 * math.prod(shape))
    allocate = (driver.cuMemHostAlloc, ctypes.byref(address), size, PORTABLE | MAPPED)
    failed = _calls_on(driver, ordinal)(allocate)
    if failed or address.value is None:
        raise EngineError(
            f"CUDA's driver gives no memory that the host and device {ordinal} share (its error "
            f"{failed}); free some of the host's memory, or raise the limit of locked memory"
        )
    memory = (ctypes.c_int64 * math.prod(shape)).from_address(address.value)
    zeros = np.ctypeslib.as_array(memory).reshape(shape)
    zeros[...] = 0
    return zeros


def copies_to(ordinal: int, *, wait: bool) -> Copy | None:
    """A function that copies host arrays to device addresses, one after the other.

    The copies run at the same time as other work of the device. If the function does not ``wait``
    for them, the arrays must be of ``shared_zeros``, and unchanged until they have been copied.
    None without a driver. Raises ``EngineError`` if the driver fails; so does the function.
    """
    if (driver := _driver()) is None:
        return None
    stream, call = ctypes.c_void_p(), _calls_on(driver, ordinal)
    if failed := call((driver.cuStreamCreate, ctypes.byref(stream), NON_BLOCKING)):
        raise EngineError(f"CUDA's driver makes no stream on device {ordinal} (its error {failed})")

    then = [(driver.cuStreamSynchronize, stream)] if wait else []

    def copy(*pairs: tuple[int, np.ndarray]) -> None:
        queue = [
            (
                driver.cuMemcpyHtoDAsync_v2,
                ctypes.c_uint64(address),
                ctypes.c_void_p(array.ctypes.data),
                ctypes.c_size_t(array.nbytes),
                stream,
            )
            for address, array in pairs
        ]
        if failed := call(*queue, *then):
            raise EngineError(f"CUDA's driver copies nothing to device {ordinal} (error {failed})")

    return copy


def _calls_on(driver: ctypes.CDLL, ordinal: int) -> Callable[..., int]:
    """A function that makes calls (function, *arguments) in the context that JAX uses on a device.

    It stops at the first error and returns its number, or 0. The context is never released.
    """
    card, context = ctypes.c_int(), ctypes.c_void_p()
    unknown: int = (
        driver.cuInit(0)
        or driver.cuDeviceGet(ctypes.byref(card), ordinal)
        or driver.cuDevicePrimaryCtxRetain(ctypes.byref(context), card)
    )

    def call(*calls: Any) -> int:
        if failed := unknown or driver.cuCtxPushCurrent_v2(context):
            return failed
        for function, *arguments in calls:
            if failed := function(*arguments):
                break
        driver.cuCtxPopCurrent_v2(ctypes.byref(ctypes.c_void_p()))
        return failed

    return call


def _driver() -> ctypes.CDLL | None:
    try:
        return ctypes.CDLL("libcuda.so.1")
    except OSError:
        return None
