"""delta_decode: a token of the gated delta rule in each row, with its convolution and norms."""

from __future__ import annotations

import jax

from pallas_kernels.delta_decode import cases, launch, native, ref, xla
from pallas_kernels.delta_decode.ref import DeltaDecodeArgs
from pallas_kernels.harness.registry import Impl, KernelOp, dispatch, imported_when_called

_triton = imported_when_called("pallas_kernels.delta_decode.triton", "delta_decode")

OP = KernelOp(
    name="delta_decode",
    ref=ref.delta_decode,
    impls=(
        Impl("triton", _triton, platforms=("gpu",), supports=launch.supports),
        Impl("native", native.delta_decode, platforms=("cpu",), supports=native.supports),
        Impl("xla", xla.delta_decode),
    ),
    cases=cases.CASES,
    build=cases.build,
    cost=cases.cost,
    tolerance={"float32": 2e-5, "bfloat16": 2e-2, "float16": 3e-3},
    observable=cases.observable,
    donate=(6, 7),
    feeds=((6, 1), (7, 2)),
)


def delta_decode(
    args: DeltaDecodeArgs, impl: str | None = None
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """The outputs [B, V * Dv] of decode rows, and the states and inputs of convolutions with them.

    Of each token: the causal convolution of its channels with SiLU; queries and keys of length 1,
    queries over sqrt(Dk); the delta rule of ``delta_prefill`` with beta = sigmoid(b) times
    ``beta_scale`` and decay exp(-exp(A) softplus(a + bias)); the RMS norm of each head times
    SiLU(z) (Gated DeltaNet: Yang et al. 2024, arXiv:2412.06464; Qwen3-Next), or times sigmoid(z) as
    in Kimi Linear (2025, arXiv:2510.26692), where each component of keys has a decay. In place when
    the caller donates the states. Several padding rows may have the same row of states, which no
    other row reads. ``impl`` pins an implementation. Raises ValueError on arguments that do not fit
    together.
    """
    (rows, channels), (_, heads, key_dim, value_dim) = args.qkv.shape, args.states.shape
    k = args.num_key_heads
    fits = (
        k > 0
        and channels == 2 * k * key_dim + heads * value_dim
        and heads % k == 0
        and args.gates.shape == (rows, *args.decay.shape)
        and args.z.shape == (rows, heads * value_dim)
        and args.decay.shape in ((2 * heads,), (heads + heads * key_dim,))
        and args.norm.shape == (value_dim,)
        and args.convs.shape == (len(args.states), len(args.conv), channels)
        and args.positions.shape == args.rows.shape == (rows,)
    )
    if not fits:
        raise ValueError(
            f"delta_decode: {channels} channels of {rows} rows, gates {args.gates.shape} and "
            f"{args.z.shape}, convolutions {args.conv.shape} and {args.convs.shape}, and states "
            f"{args.states.shape} do not fit together"
        )
    return dispatch(OP, (args,), {}, impl)
