"""Logit lens: which token each layer's residual stream would predict, read by the last norm."""

import jax
import jax.numpy as jnp

import jaxinfer
from jaxinfer.models import forward

model, params, tokenizer = jaxinfer.load("smollm2-135m-instruct")
assert tokenizer is not None
tokens = jnp.asarray(tokenizer.encode("The capital of France is the city of"), jnp.int32)
last = len(model.config.layers) - 1
streams = [f"layers.{i}.resid_post" for i in range(last + 1)]
logits, found = jax.jit(lambda p, t: forward(model, p, t, taps=streams))(params, tokens)
answer = int(jnp.argmax(logits[-1]))


@jax.jit
def read(p, stream):  # [T, D] -> float32[V]: as if this were the last layer's stream
    edits = {streams[last]: lambda _: stream}
    return jax.nn.softmax(forward(model, p, tokens, edit=edits)[-1])


for i, name in enumerate(streams):
    share = read(params, found[name])
    best, of_answer = tokenizer.decode([int(jnp.argmax(share))]), float(share[answer])
    print(f"layer {i:2}: {of_answer:6.1%} {'#' * round(40 * of_answer):40} {best!r}")
