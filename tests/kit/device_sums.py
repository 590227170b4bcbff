"""Stand-ins for the kernels that use exchange memory, on devices without any."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple
from unittest.mock import patch

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec as P

from jaxinfer.exec.compile.program import Program
from jaxinfer.exec.run.exchange import Exchange
from jaxinfer.exec.step.batch import PEERS
from jaxinfer.exec.step.engine_shape import EngineShape
from jaxinfer.nn.context import Addends, dense_context
from jaxinfer.nn.linear import Norm, Stream, added, block_output, linear, normalised
from jaxinfer.nn.placement import TENSOR, Placement
from jaxinfer.nn.weight import Dense, stored
from pallas_kernels.all_gather import api as gather_api
from pallas_kernels.all_gather import xla as gather_xla
from pallas_kernels.all_gather.api import AllGatherArgs
from pallas_kernels.all_reduce import api, xla
from pallas_kernels.all_reduce.api import AllReduceArgs, Peers
from pallas_kernels.all_reduce_norm import api as norm_api
from pallas_kernels.all_reduce_norm.ref import AllReduceNormArgs, in_turn
from pallas_kernels.harness.pins import NO_PINS
from pallas_kernels.harness.registry import Impl
from pallas_kernels.residual_norm.xla import residual_norm


class StandInExchange:
    """Addresses of exchange memory that no kernel uses."""

    def __init__(self, words: np.ndarray) -> None:  # int32[2 * N]
        self.words = words

    def put_into(self, batch: np.ndarray) -> None:
        batch[PEERS : PEERS + len(self.words)] = self.words

    def check(self) -> None:
        raise AssertionError("a sum or a gather did not know its rank or the addresses")


class Sums(NamedTuple):
    """The rows of the sums that were traced: alone, and with the next norm; and of gathers."""

    alone: set[int]
    fused: set[int]
    gathered: set[int]


MOST_FUSED = 4  # rows, here


@contextmanager
def exchanged() -> Iterator[Sums]:
    """Within the context, devices add and gather by stand-ins for the kernels that use exchange
    memory.

    A result is NaN if a call does not know its rank or the addresses of the devices. Gathers beside
    the steps have no exchange memory.
    """
    made = Sums(set(), set(), set())

    def words_of(count: int) -> np.ndarray:
        return np.arange(7, 7 + 2 * count, dtype=np.int32)

    def checked(result: jax.Array, peers: Peers | None, axis: str | None) -> jax.Array:
        assert peers is not None and axis is not None
        right = (peers.addresses == words_of(jax.lax.axis_size(axis))).all()
        right &= peers.rank[0] == jax.lax.axis_index(axis)
        return jnp.where(right, result, jnp.nan)

    def summed(args: AllReduceArgs) -> jax.Array:
        return checked(xla.all_reduce(args), args.peers, args.axis)

    def gathered(args: AllGatherArgs) -> jax.Array:
        made.gathered.add(len(args.x))
        return checked(gather_xla.all_gather(args), args.peers, args.axis)

    def gathers(args: AllGatherArgs) -> str | None:
        return None if args.peers else "it is not for this call"

    def alone(args: AllReduceArgs) -> jax.Array:
        made.alone.add(args.partials.shape[-2])
        return summed(args)

    def fused(args: AllReduceNormArgs) -> tuple[jax.Array, jax.Array]:
        made.fused.add(args.partials.shape[-2])
        return in_turn(args, summed, residual_norm)

    def supports(args: AllReduceNormArgs) -> str | None:
        return None if args.peers and len(args.norm.x) <= MOST_FUSED else "it is not for this call"

    def of_program(cls: type, program: Program) -> StandInExchange | None:
        del cls
        return StandInExchange(words_of(program.num_peers)) if program.num_peers else None

    def num_peers(shape: EngineShape) -> int:
        count = shape.placement.num_devices
        return count if count > 1 else 0

    impls = (Impl("triton", fused, supports=supports), *norm_api.OP.impls[1:])
    own = (Impl("triton", gathered, supports=gathers), Impl("xla", gather_xla.all_gather))
    with (
        patch.object(EngineShape, "num_peers", property(num_peers)),
        patch.object(Exchange, "of_program", classmethod(of_program)),
        patch.object(api, "OP", replace(api.OP, impls=(Impl("xla", alone),))),
        patch.object(norm_api, "OP", replace(norm_api.OP, impls=impls)),
        patch.object(gather_api, "OP", replace(gather_api.OP, impls=own)),
    ):
        yield made


def check_sums(placement: Placement) -> None:
    """A block's output is added over the devices with the next norm, or alone for many rows."""
    rng, devices, width = np.random.default_rng(0), placement.num_devices, 24

    def random(*shape: int) -> jax.Array:
        return jnp.asarray(rng.standard_normal(shape), jnp.float32) / shape[0] ** 0.5

    inner = 8 * devices
    x, w, hidden = random(9, width), random(inner, width), random(9, inner)
    norms, a, b = random(1, width), random(inner, 2), random(2, width)
    rows, columns = P(TENSOR, None), P(None, TENSOR)

    def after(rows: int, x: Any, hidden: Any, tree: Any, axis: str | None) -> tuple[Any, Any]:
        peers = None
        if axis is not None:
            rank = jax.lax.axis_index(axis).reshape(1).astype(jnp.int32)
            peers = Peers(rank=rank, addresses=jnp.arange(7, 7 + 2 * devices, dtype=jnp.int32))
        ctx = replace(dense_context(rows), peers=peers, axis=axis, pins=NO_PINS)
        output = block_output(hidden[:rows], stored(tree), ctx)
        assert isinstance(output, Addends) == (axis is not None)
        both = added(output, output)
        stream, h = normalised(Stream(x[:rows], both), Norm(norms, 0, 1e-6), ctx)
        y = linear(Stream(x[:rows], output), Dense(w.T), ctx, norm=Norm(norms, 0, 1e-6)).y
        return (stream.x, h), y

    adapted = ({"base": w, "a": a, "b": b}, {"base": rows, "a": rows, "b": P()})
    for tree, specs in ((w, rows), adapted):
        for count in (1, 3, MOST_FUSED, 9):
            one = after(count, x, hidden, tree, None)
            with exchanged() as made:
                run = jax.shard_map(
                    partial(after, count, axis=TENSOR),
                    mesh=placement.mesh,
                    in_specs=(P(), columns, specs),
                    out_specs=P(),
                    check_vma=False,
                )
                found = jax.jit(run)(x, hidden, tree)
            jax.tree.map(partial(np.testing.assert_allclose, rtol=1e-4, atol=1e-4), found, one)
            rows = ({count}, set()) if count > MOST_FUSED else (set(), {count})
            assert made == (*rows, set())
