"""The Triton kernels of all_reduce, all_reduce_norm and all_gather among processes: ``python -m
kit.exchange FILE RANK RANKS [alone]``.

Each process is a device, with TRITON_INTERPRET=1, as ``kit.triton_sweep``, and FILE is the memory
of all of them. Prints one JSON object: for each call the sums of the results' values, and whether
all bits are those of a sum in the order of the ranks, or of the devices' columns, and the norm
close to its definition. With ``alone`` no other device answers, and it prints whether all that
others should have sent is NaN, and the word that says so.
"""

import json
import mmap
import sys
import time
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple
from unittest.mock import patch

import jax.numpy as jnp
import numpy as np

from kit.triton_memory import LaunchMemory
from kit.triton_shims import in_place_of_triton_call, interpreted
from pallas_kernels.all_gather import triton as gather
from pallas_kernels.all_gather.ref import AllGatherArgs
from pallas_kernels.all_reduce import launch
from pallas_kernels.all_reduce import triton as kernel
from pallas_kernels.all_reduce.ref import AllReduceArgs, Peers
from pallas_kernels.all_reduce_norm import triton as fused
from pallas_kernels.all_reduce_norm.ref import AllReduceNormArgs
from pallas_kernels.lib import exchange, exchange_triton
from pallas_kernels.residual_norm.api import OP
from pallas_kernels.residual_norm.ref import NormArgs, residual_norm


class Call(NamedTuple):
    """``partials``: 0 for a result in the dtype, else split-K partials in float32. With ``fused``
    it is one of all_reduce_norm, with ``dropped`` one of all_gather that leaves out so many of the
    last columns.
    """

    tokens: int
    width: int
    partials: int = 0
    fused: bool = False
    dtype: str = "float32"
    dropped: int | None = None


# Calls of all kernels, with few and with several CTAs, alternate. Those of all_reduce and
# all_gather have up to two CTAs here, and so up to three tiles for each.
CALLS = (
    Call(1, 40),
    Call(1, 1500, 2, fused=True),
    Call(5, 700, 3),
    Call(2, 700, dropped=3),
    Call(3, 1024),
    Call(3, 1800, dropped=60),
    Call(3, 2100, fused=True, dtype="bfloat16"),
    Call(1, 40, 2),
    Call(2, 576, fused=True),
    Call(2, 2048),
    Call(1, 64, dropped=0, dtype="bfloat16"),
    Call(8, 3000, 3, fused=True, dtype="bfloat16"),
    Call(64, 1030, 1, fused=True),
    Call(5, 700),
    Call(1, 1500, fused=True, dtype="bfloat16"),
)


def partials_of(call: int, rank: int) -> np.ndarray:
    tokens, width, splits, _, dtype, _ = CALLS[call]
    rng = np.random.default_rng(1000 * call + rank)
    shape = (splits, tokens, width) if splits else (tokens, width)
    return rng.standard_normal(shape).astype("float32" if splits else jnp.dtype(dtype))


def norm_of(call: int) -> NormArgs:
    """The residual stream and the norm of a call, without partials; the same on all devices."""
    one, rng = CALLS[call], np.random.default_rng(1000 * call + 999)
    dtype = jnp.dtype(one.dtype)
    x = rng.standard_normal((one.tokens, one.width)).astype(dtype)
    weights = np.full((2, one.width), np.nan, dtype)
    weights[1] = rng.uniform(0.5, 1.5, one.width)
    return NormArgs(x=jnp.asarray(x), weights=jnp.asarray(weights), row=1, eps=1e-6)


def expected(call: int, ranks: int) -> np.ndarray:
    """The sum of the ranks in order, each of its partials in order, in the partials' dtype; of
    all_gather the columns.
    """
    if (dropped := CALLS[call].dropped) is not None:
        columns = np.concatenate([partials_of(call, rank) for rank in range(ranks)], axis=1)
        return columns[:, : columns.shape[1] - dropped]
    total: Any = None
    for rank in range(ranks):
        given = partials_of(call, rank)
        own = np.zeros(given.shape[-2:], np.float32)
        for partial in given if given.ndim == 3 else given[None]:
            own = own + partial.astype(np.float32)
        total = own if total is None else total + own
    return total.astype(given.dtype)


def results(call: int, peers: Peers) -> list[np.ndarray]:
    """What the kernel of a call returns on this device."""
    given = jnp.asarray(partials_of(call, int(peers.rank[0])))
    on: dict[str, Any] = {"peers": peers, "axis": "tensor"}
    if CALLS[call].fused:
        norm = replace(norm_of(call), partials=given)
        return [*map(np.asarray, fused.all_reduce_norm(AllReduceNormArgs(norm=norm, **on)))]
    if (dropped := CALLS[call].dropped) is not None:
        columns = given.shape[1] * peers.addresses.size // 2 - dropped
        return [np.asarray(gather.all_gather(AllGatherArgs(x=given, columns=columns, **on)))]
    total = kernel.all_reduce(AllReduceArgs(partials=given, **on))
    return [np.asarray(total).reshape(given.shape[-2:])]


def is_right(call: int, ranks: int, found: list[np.ndarray]) -> bool:
    """True if the results are those of the definitions."""
    summed = expected(call, ranks)
    if not CALLS[call].fused:
        return np.array_equal(found[0], summed)
    total, normed = residual_norm(replace(norm_of(call), partials=jnp.asarray(summed[None], "f4")))
    normed, tolerance = np.asarray(normed, np.float32), OP.tolerance[CALLS[call].dtype]
    is_close = np.allclose(found[1].astype(np.float32), normed, rtol=tolerance, atol=tolerance)
    return np.array_equal(found[0], total) and is_close


def main(path: str, rank: int, ranks: int, alone: bool) -> None:
    size = 4 * exchange.words(ranks)
    with Path(path).open("r+b") as file:
        memory = np.frombuffer(mmap.mmap(file.fileno(), size * ranks), np.uint8)
    starts = [memory.ctypes.data + size * peer for peer in range(ranks)]
    peers = Peers(
        rank=jnp.array([rank], jnp.int32),
        addresses=jnp.array(np.array(starts, np.uint64).view(np.int32)),
    )
    found: list[Any] = []
    with (
        patch.object(LaunchMemory, "enforced", lambda self: nullcontext()),
        patch.object(exchange_triton, "MAX_READS", 100 if alone else 10_000_000),
        patch.object(launch, "ctas", lambda values: min(2, values // 1024 + 1)),
        in_place_of_triton_call(interpreted),
    ):
        for call, one in enumerate(CALLS):
            if one.tokens > 8 and ranks < 3:
                continue  # the interpreter takes seconds
            if (call + rank) % 3 == 0:
                time.sleep(0.05)  # now this device is late, now that one
            arrays = results(call, peers)
            if alone:
                own = memory[size * rank : size * (rank + 1)].view(np.int32)
                lost = int(own[exchange.lost_word(ranks)])
                if one.dropped is not None:  # the first columns are its own
                    arrays = [arrays[0][:, one.width :]]
                found.append([all(bool(np.isnan(one).all()) for one in arrays), lost])
            else:
                sums = [float(one.astype(np.float32).sum()) for one in arrays]
                found.append([sums, is_right(call, ranks, arrays)])
    print(json.dumps(found))


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), "alone" in sys.argv)
