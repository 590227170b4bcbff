"""The served model as a pure function: logits, gradients and residual streams of one prompt."""

import jax
import jax.numpy as jnp

import jaxinfer
from jaxinfer.models import forward

# the weights and functions that the server uses, without an engine
model, params, tokenizer = jaxinfer.load("smollm2-135m-instruct")
assert tokenizer is not None
tokens = jnp.asarray(tokenizer.encode("The capital of France is"), jnp.int32)  # [T]

logits = jax.jit(lambda p, t: forward(model, p, t))(params, tokens)  # float32[T, V]
best = int(jnp.argmax(logits[-1]))
print("next token:", tokenizer.decode([best]))


def surprise(embedding: jax.Array) -> jax.Array:  # [V, D] -> float32[]
    """Negative logprob of that token as a function of the embedding table."""
    changed = {**params, "embed": embedding}
    return -jax.nn.log_softmax(forward(model, changed, tokens)[-1])[best]


gradient = jax.grad(surprise)(params["embed"])[tokens]  # [T, D]
for token, row in zip(tokens.tolist(), gradient, strict=True):
    print(f"{tokenizer.decode([token])!r:>10}: saliency {float(jnp.linalg.norm(row)):.4f}")

_, taps = forward(model, params, tokens, taps=("layers.9.resid_post",))
print("residual stream after layer 9:", taps["layers.9.resid_post"].shape)
