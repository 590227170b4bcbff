"""publish in Triton: one launch, the same machine code for any number of rows."""

from __future__ import annotations

import jax
import jax_triton as jt
import triton
import triton.language as tl

from pallas_kernels.publish.ref import PublishArgs

TILE = 128  # rows of a CTA


@triton.jit
def _publish(
    tokens,  # int32[B]
    place,  # int32[3]
    same,  # int32[B]: the tokens
    rows,  # B
    TILE: tl.constexpr,
):
    row = tl.program_id(0) * TILE + tl.arange(0, TILE)
    inside = row < rows
    token = tl.load(tokens + row, mask=inside, other=0)
    low = tl.load(place).to(tl.uint32).to(tl.uint64)
    high = tl.load(place + 1).to(tl.uint32).to(tl.uint64)
    number = tl.load(place + 2).to(tl.int64)
    address = ((high << 32) | low).to(tl.int64)
    entries = address.to(tl.pointer_type(tl.int64))
    entry = (number << 32) | token.to(tl.uint32).to(tl.int64)
    tl.store(entries + row, entry, mask=inside & (address != 0))
    tl.store(same + row, token, mask=inside)


def publish(args: PublishArgs) -> jax.Array:  # int32[B]
    """See ``publish.api``."""
    (rows,) = args.tokens.shape
    return jt.triton_call(
        args.tokens,
        args.place,
        kernel=_publish,
        out_type=jax.ShapeDtypeStruct(args.tokens.shape, args.tokens.dtype),
        grid=(-(-rows // TILE),),
        num_warps=4,
        num_stages=1,
        rows=rows,
        TILE=TILE,
    )
