"""The served model as a pure function: logits, gradients and residual streams of one prompt."""

import jax
import jax.numpy as jnp

import jaxinfer

m = jaxinfer.load("smollm2-135m-instruct")  # the weights and functions that the server uses
assert m.tokenizer is not None
tokens = jnp.asarray(m.tokenizer.encode("The capital of France is"), jnp.int32)  # [T]

names = [f"layers.{layer}.resid_post" for layer in (9, 19, 29)]
run = jax.jit(lambda params, t: m.forward(t, params=params, taps=names))
logits, taps = run(m.params, tokens)  # float32[T, V], {name: [T, D]}
best = int(jnp.argmax(logits[-1]))
print("next token:", m.tokenizer.decode([best]))


def surprise(embedding: jax.Array) -> jax.Array:  # [V, D] -> float32[]
    """Negative logprob of that token as a function of the embedding table."""
    changed = {**m.params, "embed": embedding}
    return -jax.nn.log_softmax(m.forward(tokens, params=changed)[-1])[best]


gradient = jax.jit(jax.grad(surprise))(m.params["embed"])[tokens]  # [T, D]
for token, row in zip(tokens.tolist(), gradient, strict=True):
    print(f"{m.tokenizer.decode([token])!r:>10}: saliency {float(jnp.linalg.norm(row)):.4f}")

for name in names:  # a logit lens
    guess = int(m.logits(taps[name][-1], final_norm=True).argmax())
    print(f"{name}: {m.tokenizer.decode([guess])!r}")
print("a head's queries:", m.W_Q[9, 2].shape)
