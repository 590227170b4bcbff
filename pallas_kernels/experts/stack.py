"""Stacked weights of experts as the op's arguments, and the activation between their two GEMMs."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from pallas_kernels.arrangements import arrangement_of
from pallas_kernels.quantised import Quantised, dequantised

PLAIN = "plain"  # the kind of a stack that is one array of floats
type Stack = jax.Array | Quantised  # [E, O, K], or the arrays of such a stack, [E, ...] each
# Values, scales, zeros, offsets and supers, see ``Quantised.arrays``; of a plain stack only values.
type StackArrays = tuple[Any, Any, Any, Any, Any]


class Activation(NamedTuple):
    """gate * sigmoid(alpha * gate) * (up + shift), of gates up to and ups within the limit.

    The default is SwiGLU (Shazeer 2020, arXiv:2002.05202). gpt-oss has limit 7, alpha 1.702 and
    shift 1 (``GptOssExperts`` of Hugging Face transformers).
    """

    limit: float | None = None
    alpha: float = 1.0
    shift: float = 0.0

    def __call__(self, gate: jax.Array, up: jax.Array) -> jax.Array:
        """The hidden values of gates and ups of any shape."""
        if self.limit is not None:
            gate, up = jnp.minimum(gate, self.limit), jnp.clip(up, -self.limit, self.limit)
        return gate * jax.nn.sigmoid(self.alpha * gate) * (up + self.shift)


SWIGLU = Activation()


def arrays_of(stack: Stack) -> tuple[str, StackArrays]:
    """The kind of a stack and its arrays."""
    if isinstance(stack, Quantised):
        return stack.kind, stack.arrays  # type: ignore[return-value]
    return PLAIN, (stack, None, None, None, None)


def size_of(kind: str, arrays: StackArrays) -> tuple[int, int, int]:
    """Experts, outputs and inputs of a stack."""
    values = arrays[0]
    if kind == PLAIN:
        return values.shape
    w = Quantised(kind, *arrays)
    return values.shape[0], w.num_outputs, w.num_inputs


def matrix_of(kind: str, arrays: StackArrays, expert: jax.Array) -> jax.Array:  # [O, K]
    """One expert's matrix, in float32 if it was quantised."""
    own = [
        None if part is None else jax.lax.dynamic_index_in_dim(part, expert, keepdims=False)
        for part in arrays
    ]
    if kind == PLAIN:
        assert own[0] is not None
        return own[0]
    w, arrangement = Quantised(kind, *own), arrangement_of(kind)
    return dequantised(w if arrangement is None else arrangement.restore(w))
