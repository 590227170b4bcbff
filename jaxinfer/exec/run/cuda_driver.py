"""Calls of the CUDA driver (``libcuda``, by ctypes) for functions that JAX does not offer."""

from __future__ import annotations

import ctypes
import itertools
import math
import mmap
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from jaxinfer.core.errors import EngineError

PORTABLE, MAPPED = 1, 2  # cuda.h: CU_MEMHOSTALLOC_PORTABLE and CU_MEMHOSTALLOC_DEVICEMAP
NON_BLOCKING = 1  # cuda.h: CU_STREAM_NON_BLOCKING
HUGE_PAGES, POPULATE_WRITE = 14, 23  # madvise(2): MADV_HUGEPAGE, MADV_POPULATE_WRITE
PEER_ACCESS_ALREADY_ENABLED = 704  # cuda.h: CUDA_ERROR_PEER_ACCESS_ALREADY_ENABLED

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
    if _driver() is None:
        return None
    zeros = locked_memory(ordinal, 8 * math.prod(shape)).view(np.int64).reshape(shape)
    zeros[...] = 0
    return zeros


def locked_memory(ordinal: int, size: int) -> np.ndarray:  # uint8[size]
    """Host memory that stays in place, so that a device can copy from and to it; never freed.

    Raises ``EngineError`` if the driver cannot allocate it, or without a driver.
    """
    driver, address = needed_driver(), ctypes.c_void_p()
    allocate = driver.cuMemHostAlloc, ctypes.byref(address), ctypes.c_size_t(size)
    failed = calls_on(driver, ordinal)((*allocate, PORTABLE | MAPPED))
    if failed or address.value is None:
        raise EngineError(
            f"CUDA's driver gives no memory that the host and device {ordinal} share (its error "
            f"{failed}); free some of the host's memory, or raise the limit of locked memory"
        )
    memory = (ctypes.c_uint8 * size).from_address(address.value)
    return np.ctypeslib.as_array(memory)


def registered_memory(ordinal: int, size: int) -> np.ndarray:  # uint8[size]
    """As ``locked_memory``, for large sizes: the driver is held for the locking alone.

    While the driver allocates memory nothing can be launched: on a virtual machine with an H200,
    16 GiB took 9.7 s. Here the system makes the pages before the driver knows of them, which holds
    neither the driver nor the interpreter.
    """
    system = ctypes.CDLL(None)
    system.mmap.restype = ctypes.c_void_p
    # a page is left unregistered, so that no copy crosses the border of two registrations
    whole, access = ctypes.c_size_t(size + mmap.PAGESIZE), mmap.PROT_READ | mmap.PROT_WRITE
    kind = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
    address = ctypes.c_void_p(system.mmap(None, whole, access, kind, -1, ctypes.c_long(0)))
    length = ctypes.c_size_t(size)
    for advice in (HUGE_PAGES, POPULATE_WRITE):  # an older system makes the pages when they lock
        system.madvise(address, length, advice)
    driver = needed_driver()
    register = driver.cuMemHostRegister_v2, address, length, PORTABLE | MAPPED
    failed = calls_on(driver, ordinal)(register)
    if failed or address.value is None:
        system.munmap(address, whole)
        raise EngineError(
            f"CUDA's driver locks no {size} bytes of the host's memory (its error {failed}); free "
            "some of it, or raise the limit of locked memory"
        )
    return np.ctypeslib.as_array((ctypes.c_uint8 * size).from_address(address.value))


def connect(ordinals: Sequence[int]) -> None:
    """Let every device write to the memory of the others.

    Raises ``EngineError`` if two of them cannot, or without a driver.
    """
    driver = needed_driver()
    contexts = {ordinal: _context(driver, ordinal) for ordinal in ordinals}
    for ordinal, peer in itertools.permutations(ordinals, 2):
        able = ctypes.c_int()
        failed = calls_on(driver, ordinal)(
            (driver.cuDeviceCanAccessPeer, ctypes.byref(able), ordinal, peer)
        )
        if not failed and able.value:
            failed = calls_on(driver, ordinal)(
                (driver.cuCtxEnablePeerAccess, contexts[peer], ctypes.c_uint(0))
            )
        if failed not in (0, PEER_ACCESS_ALREADY_ENABLED) or not able.value:
            raise EngineError(
                f"device {ordinal} cannot write to the memory of device {peer} (CUDA's error "
                f"{failed}); choose devices that are connected, or let NCCL add their results: "
                "kernels={'all_reduce': 'xla'}"
            )


def device_zeros(ordinal: int, size: int) -> int:
    """The address of so many bytes of zeros on a device, which are never freed.

    Raises ``EngineError`` if the device has no memory for them, or without a driver.
    """
    driver, address = needed_driver(), ctypes.c_uint64()
    call = calls_on(driver, ordinal)
    failed = call(
        (driver.cuMemAlloc_v2, ctypes.byref(address), ctypes.c_size_t(size)),
    ) or call((driver.cuMemsetD8_v2, address, ctypes.c_ubyte(0), ctypes.c_size_t(size)))
    if failed:
        raise EngineError(f"device {ordinal} has no {size} bytes of memory (CUDA's error {failed})")
    return address.value


def read_words(ordinal: int, address: int, count: int) -> np.ndarray:  # int32[count]
    """Copy so many words from a device; raises ``EngineError`` if the driver fails."""
    words = np.zeros(count, np.int32)
    driver = needed_driver()
    copy = (
        driver.cuMemcpyDtoH_v2,
        ctypes.c_void_p(words.ctypes.data),
        ctypes.c_uint64(address),
        ctypes.c_size_t(words.nbytes),
    )
    if failed := calls_on(driver, ordinal)(copy):
        raise EngineError(f"device {ordinal} cannot be read (CUDA's error {failed})")
    return words


def copies_to(ordinal: int, *, wait: bool) -> Copy | None:
    """A function that copies host arrays to device addresses, one after the other.

    The copies run at the same time as other work of the device. If the function does not ``wait``
    for them, the arrays must be of ``shared_zeros``, and unchanged until they have been copied.
    None without a driver. Raises ``EngineError`` if the driver fails; so does the function.
    """
    if (driver := _driver()) is None:
        return None
    stream, call = ctypes.c_void_p(), calls_on(driver, ordinal)
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


def calls_on(driver: ctypes.CDLL, ordinal: int) -> Callable[..., int]:
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


def _context(driver: ctypes.CDLL, ordinal: int) -> ctypes.c_void_p:
    """The context that JAX uses on a device."""
    card, context = ctypes.c_int(), ctypes.c_void_p()
    if failed := (
        driver.cuInit(0)
        or driver.cuDeviceGet(ctypes.byref(card), ordinal)
        or driver.cuDevicePrimaryCtxRetain(ctypes.byref(context), card)
    ):
        raise EngineError(f"CUDA's driver does not know device {ordinal} (its error {failed})")
    return context


def needed_driver() -> ctypes.CDLL:
    """The driver; raises ``EngineError`` if there is none."""
    if (driver := _driver()) is None:
        raise EngineError("CUDA's driver (libcuda.so.1) cannot be loaded; install NVIDIA's driver")
    return driver


def _driver() -> ctypes.CDLL | None:
    try:
        return ctypes.CDLL("libcuda.so.1")
    except OSError:
        return None
