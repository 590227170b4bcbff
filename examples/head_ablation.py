"""Head ablation and attribution: which heads of a layer the answer depends on, by two methods."""

import jax
import jax.numpy as jnp

import jaxinfer
from jaxinfer.models import forward

model, params, tokenizer = jaxinfer.load("smollm2-135m-instruct")
assert tokenizer is not None
tokens = jnp.asarray(tokenizer.encode("The capital of France is the city of"), jnp.int32)
answer = tokenizer.encode(" Paris")[0]
heads = [layer.mixer.num_heads for layer in model.config.layers]


@jax.jit
def logit(p, scales):  # [layers, N] -> float32[]: of the answer, with each head's output scaled
    edits = {
        f"layers.{i}.z": lambda z, i=i: z * scales[i, :, None].astype(z.dtype)
        for i in range(len(heads))
    }
    return jax.nn.log_softmax(forward(model, p, tokens, edit=edits)[-1])[answer]


whole = jnp.ones((len(heads), heads[0]))
effect = jax.jit(jax.grad(logit, argnums=1))(params, whole)  # attribution: all heads at once
ranked = jnp.argsort(-jnp.abs(effect), axis=None)[:12].tolist()
print("head       attribution  without it")
for layer, head in (divmod(one, heads[0]) for one in ranked):
    ablated = logit(params, whole.at[layer, head].set(0)) - logit(params, whole)
    bar = "#" * round(100 * abs(float(ablated)))
    print(f"{layer:2}.{head}  {-effect[layer, head]:+13.2f} {float(ablated):+11.2f} {bar}")
