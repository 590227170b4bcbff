"""Lightning attention: chunks, single tokens and a plain recurrence in float64 agree."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxinfer.nn.mixers.recurrent import PromptRows, whole_sequence
from jaxinfer.nn.positions import Alibi
from pallas_kernels.ssd_decode.ref import SsdDecodeArgs
from pallas_kernels.ssd_decode.xla import ssd_decode
from pallas_kernels.ssd_prefill.ref import SsdPrefillArgs
from pallas_kernels.ssd_prefill.xla import ssd_prefill

TOKENS, HEADS, WIDTH = 4096, 4, 8
# of the first layer, and of the last one, whose states hardly decay
SLOPES = {"first": Alibi(HEADS).slopes(), "last": Alibi(HEADS, 1e-5).slopes()}


def recurrence(
    q: np.ndarray, k: np.ndarray, v: np.ndarray, slopes: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:  # [T, H, P], [H, P, P]
    """S = exp(-slope) S + v k^T, and S q (arXiv:2401.04658, equation 2), in float64."""
    state = np.zeros((HEADS, WIDTH, WIDTH))
    decays, outputs = np.exp(-slopes.astype(np.float64))[:, None, None], []
    for at in range(len(q)):
        state = decays * state + v[at][:, :, None] * k[at][:, None]
        outputs.append(np.einsum("hvk,hk->hv", state, q[at]))
    return np.stack(outputs), state


@pytest.mark.parametrize("layer", SLOPES)
def test_chunks_equal_single_tokens_over_4096_tokens(layer: str) -> None:
    slopes, rng = SLOPES[layer], np.random.default_rng(0)
    # so that outputs stay of order 1 where nothing decays
    q, k, v = (rng.standard_normal((TOKENS, HEADS, WIDTH), np.float32) / 4 for _ in range(3))
    expected, last = recurrence(q, k, v, slopes)
    mixed = jnp.asarray(np.concatenate([one.reshape(TOKENS, -1) for one in (v, k, q)], axis=1))
    decay = jnp.stack((jnp.log(slopes), jnp.zeros(HEADS), jnp.zeros(HEADS)))
    empty, first = jnp.zeros((1, HEADS, WIDTH, WIDTH)), jnp.zeros(1, jnp.int32)
    indices = PromptRows.of(whole_sequence(TOKENS))._asdict()
    args = SsdPrefillArgs(mixed=mixed, steps=None, decay=decay, states=empty, **indices)
    chunked, state = ssd_prefill(args)

    def step(states: jax.Array, at: jax.Array) -> tuple[jax.Array, jax.Array]:
        own = SsdDecodeArgs(
            mixed=mixed[at][None],
            steps=None,
            decay=decay,
            states=states,
            positions=at[None],
            rows=first,
        )
        out, states, _ = ssd_decode(own)
        return states, out[0]

    single, each = jax.lax.scan(step, empty, jnp.arange(TOKENS))
    for out, found in ((chunked, state), (each, single)):
        np.testing.assert_allclose(out, expected, atol=1e-4, rtol=0)
        np.testing.assert_allclose(found[0], last, atol=1e-4, rtol=0)


def test_slopes_of_any_number_of_heads() -> None:
    assert Alibi(8).slopes().tolist() == Alibi(8, geometric=True).slopes().tolist()
    expected = 2.0 ** (-8 * np.arange(1, 7) / 6)
    np.testing.assert_allclose(Alibi(6, geometric=True).slopes(), expected, rtol=1e-6)
    np.testing.assert_allclose(Alibi(6).slopes()[4:], 2.0 ** np.array([-1.0, -3.0]), rtol=1e-6)
