"""Named calls of sandwich_norm on the widths of real models."""

from __future__ import annotations

from dataclasses import dataclass

import jax.numpy as jnp
import numpy as np

from pallas_kernels.harness.registry import Cost, Inputs
from pallas_kernels.lib.shapes import normal
from pallas_kernels.sandwich_norm.ref import NormRow, SandwichArgs


@dataclass(frozen=True)
class SandwichCase:
    """``outputs`` has a number for each one: 1 for [T, D] in the dtype, else that of partials.

    ``normed`` says if they have norms of their own, ``post`` if their sum has one, and ``norms`` is
    the number of norms of the result.
    """

    name: str
    tokens: int
    width: int
    outputs: tuple[int, ...] = (1,)
    normed: bool = False
    post: bool = True
    factor: bool = False
    norms: int = 1
    dtype: str = "float32"
    tags: tuple[str, ...] = ("ci",)
    norm_dtype: str | None = None  # of the norms' weights, if it is another one
    output_eps: float = 1e-6


def _gemma4_26b(tokens: int) -> tuple[SandwichCase, ...]:
    """After attention, and after the dense network and the experts beside it, on a GPU."""
    static = {"dtype": "bfloat16", "tags": ("bench", "gpu")}
    partials = (3, 8) if tokens <= 64 else (1, 1)
    return (
        SandwichCase(f"gemma4_26b_mid_t{tokens}", tokens, 2816, partials[:1], norms=3, **static),
        SandwichCase(
            f"gemma4_26b_end_t{tokens}", tokens, 2816, partials, normed=True, factor=True, **static
        ),
    )


CASES = (
    SandwichCase("gemma3", 3, 640),
    SandwichCase("uneven_parts3", 4, 203, (3,)),
    SandwichCase("gemma4_mid", 2, 704, (3,), norms=3),
    SandwichCase("gemma4_end", 3, 704, (2, 8), normed=True, factor=True),
    SandwichCase("gemma4_layer_input", 3, 96, normed=True, post=False, factor=True),
    SandwichCase("only_the_sum", 2, 96, norms=0),
    SandwichCase("no_norm_of_outputs", 2, 96, (3,), post=False, norms=2),
    SandwichCase("eps_of_outputs", 3, 96, (2, 1), normed=True, output_eps=0.5),
    SandwichCase("gemma3_bf16", 3, 640, (2,), norms=1, dtype="bfloat16", norm_dtype="float32"),
    SandwichCase("gemma4_mid_bf16", 5, 2816, (3,), norms=3, dtype="bfloat16"),
    SandwichCase("gemma4_end_bf16", 3, 2816, (3, 8), True, factor=True, dtype="bfloat16"),
    SandwichCase("gemma4_31b_end_bf16", 2, 5376, (4,), factor=True, dtype="bfloat16"),
    SandwichCase("gemma3_f16", 3, 1152, (1,), dtype="float16"),
    *(case for tokens in (1, 8, 64, 8192) for case in _gemma4_26b(tokens)),
)


def build(case: SandwichCase, seed: int) -> Inputs:
    """Random tokens and outputs; the weights of unused norms are NaN."""
    rng = np.random.default_rng(seed)
    dtype, size = jnp.dtype(case.dtype), (case.tokens, case.width)

    def output(count: int) -> np.ndarray:
        if count == 1:
            return normal(rng, size, dtype)
        return normal(rng, (count, *size), np.dtype(np.float32))

    def norm(row: int) -> NormRow:
        weights = np.full((3, case.width), np.nan, case.norm_dtype or dtype)
        weights[row] = rng.uniform(0.5, 1.5, case.width)
        return NormRow(weights, row)  # type: ignore[arg-type]

    args = SandwichArgs(
        x=normal(rng, size, dtype),  # type: ignore[arg-type]
        outputs=tuple(map(output, case.outputs)),  # type: ignore[arg-type]
        output_norms=tuple([norm(i) if case.normed else None for i, _ in enumerate(case.outputs)]),
        post=norm(2) if case.post else None,
        factor=np.full(1, 0.75, dtype) if case.factor else None,  # type: ignore[arg-type]
        norms=tuple(map(norm, range(case.norms))),
        eps=1e-6,
        output_eps=case.output_eps,
    )
    return Inputs((args,))


def cost(case: SandwichCase) -> Cost:
    """Tokens, outputs and weights read once, the sum and its norms written once."""
    size, item = case.tokens * case.width, jnp.dtype(case.dtype).itemsize
    outputs = sum(item if count == 1 else 4 * count for count in case.outputs)
    norms = case.norms + case.post + case.normed * len(case.outputs)
    moved = size * (outputs + (2 + case.norms) * item) + norms * case.width * item
    return Cost(moved, size * (sum(case.outputs) + 4 * norms))
