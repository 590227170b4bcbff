"""Causal tracing: at which layer does the residual stream decide that the answer is Paris?"""

import jax
import jax.numpy as jnp

import jaxinfer
from jaxinfer.models import forward

model, params, tokenizer = jaxinfer.load("smollm2-135m-instruct")
assert tokenizer is not None
france, italy = (
    jnp.asarray(tokenizer.encode(f"The capital of {country} is the city of"), jnp.int32)
    for country in ("France", "Italy")
)
assert france.shape == italy.shape
where = int(jnp.argmax(france != italy))  # the only token that differs
paris, rome = (tokenizer.encode(word)[0] for word in (" Paris", " Rome"))
points = [f"layers.{i}.resid_post" for i in range(len(model.config.layers))]
_, clean = jax.jit(lambda p, t: forward(model, p, t, taps=points))(params, france)


@jax.jit
def preference(p, value, layer):  # -> float32[]: logit of Paris minus that of Rome
    """For the prompt about Italy, with the country's residual stream after one layer replaced."""
    edits = {
        point: lambda x, i=i: jnp.where(layer == i, x.at[where].set(value), x)
        for i, point in enumerate(points)
    }
    logits = forward(model, p, italy, edit=edits)[-1]
    return logits[paris] - logits[rome]


for i, point in enumerate(points):
    score = float(preference(params, clean[point][where], i))
    print(f"layer {i:2}: {score:+6.2f} " + ("#" * round(4 * abs(score)) if score > 0 else ""))
