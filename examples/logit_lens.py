"""Logit lens: which token each layer's residual stream would predict."""

import jax
import jax.numpy as jnp

import jaxinfer

m = jaxinfer.load("smollm2-135m-instruct")
assert m.tokenizer is not None
tokens = jnp.asarray(m.tokenizer.encode("The capital of France is the city of"), jnp.int32)
streams = [f"layers.{i}.resid_post" for i in range(len(m.config.layers))]
logits, found = jax.jit(lambda p: m.forward(tokens, params=p, taps=streams))(m.params)
answer = int(jnp.argmax(logits[-1]))

for i, name in enumerate(streams):
    share = jax.nn.softmax(m.logits(found[name][-1], final_norm=True))
    best, of_answer = m.tokenizer.decode([int(jnp.argmax(share))]), float(share[answer])
    print(f"layer {i:2}: {of_answer:6.1%} {'#' * round(40 * of_answer):40} {best!r}")
