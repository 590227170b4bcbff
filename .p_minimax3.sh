#!/bin/bash
# Checks block_topk and sparse_attention on a GPU, times them, and compares an engine with the dense form. One H200, 100 s.
set -x
python -m bench.kernels --op block_topk,sparse_attention,index_topk --check 2>&1 | tee $OUT/check.txt
timeout 60 python -m bench.kernels --op block_topk,sparse_attention --output $OUT/m3_kernels.json 2>&1 | tee $OUT/times.txt
mkdir -p /tmp/m3 && python - <<'P' 2>&1 | tee $OUT/engine.txt
import json, logging, time
logging.basicConfig(level=logging.INFO, format="%(message)s")  # "block_topk(...) is xla"
logging.getLogger("jax").setLevel(logging.WARNING)
import jax, jax.numpy as jnp
from jaxinfer import LLM, SamplingParams
from jaxinfer.models import forward
config = dict(architectures=["MiniMaxM3SparseForCausalLM"], vocab_size=4096, hidden_size=1024, intermediate_size=512,
  dense_intermediate_size=2048, shared_intermediate_size=512, num_hidden_layers=4, num_attention_heads=32,
  num_key_value_heads=2, head_dim=128, partial_rotary_factor=0.5, num_local_experts=16, num_experts_per_tok=4,
  moe_layer_freq=[0, 1, 1, 1], max_position_embeddings=8192, rms_norm_eps=1e-6, rope_theta=5e6,
  sparse_attention_config=dict(sparse_num_index_heads=2, sparse_index_dim=128, sparse_block_size=128,
    sparse_topk_blocks=4, sparse_local_block=1, sparse_attention_freq=[0, 1, 1, 1]))
json.dump(config, open("/tmp/m3/config.json", "w"))
llm = LLM("/tmp/m3", load_format="dummy", dtype="bfloat16", max_model_len=4096, max_num_seqs=8,
          max_num_batched_tokens=1024, gpu_memory_utilization=0.5, skip_tokenizer_init=True)
prompts = [{"prompt_token_ids": [(7 * i * i + s) % 4096 for i in range(n)]} for s, n in ((1, 2500), (2, 900), (3, 40))]
greedy = SamplingParams(temperature=0.0, max_tokens=32, ignore_eos=True, logprobs=1)
for _ in range(2):
    start = time.perf_counter()
    outputs = llm.generate(prompts, greedy)
    print("seconds", time.perf_counter() - start)
for prompt, output in zip(prompts, outputs):
    ids = jnp.asarray([*prompt["prompt_token_ids"], *output.outputs[0].token_ids])
    logits = jax.nn.log_softmax(jax.jit(lambda ids: forward(llm.model.model, llm.model.params, ids))(ids))
    n = len(prompt["prompt_token_ids"])
    own = [step[t].logprob for step, t in zip(output.outputs[0].logprobs, output.outputs[0].token_ids)]
    dense = [float(logits[n - 1 + i, t]) for i, t in enumerate(output.outputs[0].token_ids)]
    print(n, "largest difference of logprobs", max(abs(a - b) for a, b in zip(own, dense)))
P
