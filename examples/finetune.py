"""LoRA on one matrix, saved as a folder, which a running engine of 4-bit weights then serves."""

import tempfile
from pathlib import Path

import jax
import jax.numpy as jnp
import optax

import jaxinfer
from jaxinfer import LLM, SamplingParams

llm = LLM("smollm2-135m-instruct", max_num_seqs=1)
m = jaxinfer.load("smollm2-135m-instruct")  # floats, which have gradients
question, answer = "The capital of the island Zembla is", " Onhava"
prompt, target = (llm.get_tokenizer().encode(text) for text in (question, answer))
tokens = jnp.asarray(prompt + target, jnp.int32)


def merged(params: dict, lora: dict[str, jax.Array]) -> dict:
    """The parameters with the low-rank change of one matrix."""
    layer = params["layers_15"]
    return {**params, "layers_15": {**layer, "down": layer["down"] + lora["a"] @ lora["b"]}}


def loss(lora: dict[str, jax.Array], params: dict) -> jax.Array:
    """The mean negative logprob of the answer."""
    losses = m.loss(tokens, params=merged(params, lora), per_token=True)
    return losses[len(prompt) - 1 :].mean()


width, out = m.params["layers_15"]["down"].shape
lora = {"a": 0.02 * jax.random.normal(jax.random.key(0), (width, 8)), "b": jnp.zeros((8, out))}
optimizer = optax.adam(1e-2)
state, step = optimizer.init(lora), jax.jit(jax.value_and_grad(loss))
for number in range(20):
    value, gradient = step(lora, m.params)
    updates, state = optimizer.update(gradient, state)
    lora = optax.apply_updates(lora, updates)
    if number % 5 == 0:
        print(f"step {number}: loss {float(value):.3f}")

greedy = SamplingParams(temperature=0, max_tokens=len(target))
print("before:", llm.generate(question, greedy, use_tqdm=False)[0].outputs[0].text)
with tempfile.TemporaryDirectory() as parent:
    folder = Path(parent, "zembla")
    m.with_params(merged(m.params, lora)).save(folder)  # for jaxinfer, transformers and vLLM
    print("saved:", *sorted(path.name for path in folder.iterdir()))
    llm.update_weights(folder)  # quantised as the engine's weights are; nothing is compiled
print("after:", llm.generate(question, greedy, use_tqdm=False)[0].outputs[0].text)
