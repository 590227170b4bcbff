"""The served model as a pure function: logits, gradients and residual streams of one prompt."""

import jax
import jax.numpy as jnp

from jaxinfer.core.config import EngineConfig
from jaxinfer.core.progress import NoProgress
from jaxinfer.engine.start.build import plan_engine
from jaxinfer.models import forward
from jaxinfer.weights.load import load_params

# the very weights and functions that serve, without an engine around them
plan = plan_engine(EngineConfig())
params = load_params(
    plan.model, plan.source, cache_dir=plan.cache_dir, seed=0, progress=NoProgress()
)
assert plan.tokenizer is not None
tokens = jnp.asarray(plan.tokenizer.encode("The capital of France is"), jnp.int32)  # [T]

logits = jax.jit(lambda p, t: forward(plan.model, p, t))(params, tokens)  # float32[T, V]
best = int(jnp.argmax(logits[-1]))
print("next token:", plan.tokenizer.decode([best]))


def surprise(embedding: jax.Array) -> jax.Array:  # [V, D] -> float32[]
    """Negative logprob of that token as a function of the embedding table."""
    changed = {**params, "embed": embedding}
    return -jax.nn.log_softmax(forward(plan.model, changed, tokens)[-1])[best]


gradient = jax.grad(surprise)(params["embed"])[tokens]  # [T, D]
for token, row in zip(tokens.tolist(), gradient, strict=True):
    print(f"{plan.tokenizer.decode([token])!r:>10}: saliency {float(jnp.linalg.norm(row)):.4f}")

_, taps = forward(plan.model, params, tokens, taps=("layers.9.resid_post",))
print("residual stream after layer 9:", taps["layers.9.resid_post"].shape)
