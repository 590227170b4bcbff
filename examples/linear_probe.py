"""A linear probe: from which layer on can a number's parity be read off the residual stream?"""

import jax
import jax.numpy as jnp
import numpy as np

import jaxinfer
from jaxinfer.models import forward

model, params, tokenizer = jaxinfer.load("smollm2-135m-instruct")
assert tokenizer is not None
numbers = np.random.default_rng(0).permutation(np.arange(100, 900))[:240]
prompts = jnp.asarray([tokenizer.encode(f"The number {n} is") for n in numbers], jnp.int32)
labels = jnp.asarray(numbers % 2, jnp.float32)
points = [f"layers.{i}.resid_post" for i in range(0, len(model.config.layers), 3)]


@jax.jit
def last_streams(p, one):  # int32[T] -> [points, D]: of the last token
    found = forward(model, p, one, taps=points)[1]
    return jnp.stack([found[point][-1] for point in points])


# [prompts, points, D]; 60 at once, so that the weights are read 4 times instead of 240
streams = jax.lax.map(lambda one: last_streams(params, one), prompts, batch_size=60)
for i, point in enumerate(points):
    x = streams[:, i] - streams[:, i].mean(0)
    x = jnp.concatenate([x / x.std(), jnp.ones((len(x), 1))], axis=1)
    train, test = slice(0, 160), slice(160, None)
    gram = x[train].T @ x[train] + 10.0 * jnp.eye(x.shape[1])  # ridge regression
    probe = jnp.linalg.solve(gram, x[train].T @ (2 * labels[train] - 1))
    right = float(jnp.mean((x[test] @ probe > 0) == (labels[test] > 0)))
    print(f"{point:22} {right:6.1%} {'#' * round(40 * right)}")
