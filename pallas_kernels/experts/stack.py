"""Stacked weights of experts as the op's arguments, and the activation between their two GEMMs."""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from pallas_kernels.lib.activations import ACTIVATIONS
from pallas_kernels.lib.arrangements import arrangement_of
from pallas_kernels.lib.quantised import Quantised, dequantised

PLAIN = "plain"  # the kind of a stack that is one array of floats
type Stack = jax.Array | Quantised  # [E, O, K], or the arrays of such a stack, [E, ...] each
# Values, scales, zeros, offsets and supers, see ``Quantised.arrays``; of a plain stack only values.
type StackArrays = tuple[Any, Any, Any, Any, Any]


class Activation(NamedTuple):
    """gate * sigmoid(alpha * gate) * (up + shift), of gates up to and ups within the limit.

    With ``gate_limit`` that of gates is another one (Step 3.5).

    The default is SwiGLU (Shazeer 2020, arXiv:2002.05202). gpt-oss has limit 7, alpha 1.702 and
    shift 1 (``GptOssExperts`` of Hugging Face transformers). Of the kind "gelu_tanh" it is
    GELU(gate) * up, with the approximation by tanh, as in Gemma 4; of the kind "relu2" there are no
    gates, and it is the square of ReLU (Nemotron 3). Other kinds are names of activations of gates
    (``lib.activations``), ``GATED`` before "relu2". The other fields do not count then.
    """

    limit: float | None = None
    alpha: float = 1.0
    shift: float = 0.0
    kind: str = "silu"
    gate_limit: float | None = None

    @property
    def limits(self) -> tuple[float, float] | None:
        """The limits of gates and of ups."""
        if self.limit is None:
            return None
        return self.limit if self.gate_limit is None else self.gate_limit, self.limit

    @property
    def halves(self) -> int:
        """Outputs of the first product for each hidden value: a gate and an up, or one."""
        return 1 if self.kind == "relu2" else 2

    def hidden(self, outputs: jax.Array) -> jax.Array:  # [T, 2F] or [T, F] -> [T, F]
        """The hidden values of the outputs of the first product, gates before ups."""
        if self.halves == 1:
            return jnp.square(jax.nn.relu(outputs))
        return self(*jnp.split(outputs, 2, axis=1))

    def __call__(self, gate: jax.Array, up: jax.Array) -> jax.Array:
        """The hidden values of gates and ups of any shape."""
        if self.kind != "silu":
            return ACTIVATIONS[self.kind.removeprefix(GATED)](gate) * up
        if self.limits is not None:
            of_gate, of_up = self.limits
            gate, up = jnp.minimum(gate, of_gate), jnp.clip(up, -of_up, of_up)
        return gate * jax.nn.sigmoid(self.alpha * gate) * (up + self.shift)


GATED = "gated_"
SWIGLU = Activation()
GEGLU = Activation(kind="gelu_tanh")
RELU2 = Activation(kind="relu2")


def kind_of(stack: Stack) -> str:
    """The kind of a stack."""
    return stack.kind if isinstance(stack, Quantised) else PLAIN


def arrays_of(stack: Stack) -> StackArrays:
    """The arrays of a stack."""
    if isinstance(stack, Quantised):
        return stack.arrays  # type: ignore[return-value]
    return stack, None, None, None, None


def size_of(stack: Stack) -> tuple[int, int, int]:
    """Experts, outputs and inputs of a stack."""
    if isinstance(stack, Quantised):
        return stack.values.shape[0], stack.num_outputs, stack.num_inputs
    return stack.shape  # type: ignore[return-value]


def matrix_of(stack: Stack, expert: jax.Array) -> jax.Array:  # [O, K]
    """One expert's matrix, in float32 if it was quantised."""
    own = jax.tree.map(partial(jax.lax.dynamic_index_in_dim, index=expert, keepdims=False), stack)
    if not isinstance(own, Quantised):
        return own
    arrangement = arrangement_of(own.kind)
    return dequantised(own if arrangement is None else arrangement.restore(own))
