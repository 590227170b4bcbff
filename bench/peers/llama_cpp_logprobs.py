"""llama.cpp's greedy answers with the logprobs of their tokens, one sequence at a time.

    python llama_cpp_logprobs.py MODEL.gguf THREADS < {"prompts": [[id]], "max_tokens": [int]}

Writes {"version": str, "answers": [{"tokens": [id], "logprobs": [float]}]}. It runs in an
interpreter that has llama-cpp-python and numpy.
"""

from __future__ import annotations

import json
import os
import sys

import llama_cpp as lib
import numpy as np

CONTEXT = 1024


def main() -> None:
    """Read the prompts, answer them, write the answers."""
    result = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # the library's output must not mix with the result
    work = json.load(sys.stdin)
    lib.llama_backend_init()
    model = lib.llama_model_load_from_file(sys.argv[1].encode(), lib.llama_model_default_params())
    if not model:
        raise SystemExit(f"llama.cpp cannot read {sys.argv[1]}")
    params = lib.llama_context_default_params()
    params.n_ctx = params.n_batch = params.n_ubatch = CONTEXT
    params.n_threads = params.n_threads_batch = int(sys.argv[2])
    context = lib.llama_init_from_model(model, params)
    vocab_size = lib.llama_vocab_n_tokens(lib.llama_model_get_vocab(model))

    def next_logits(tokens: list[int]) -> np.ndarray:  # float64[V]
        array = (lib.llama_token * len(tokens))(*tokens)
        if status := lib.llama_decode(context, lib.llama_batch_get_one(array, len(tokens))):
            raise SystemExit(f"llama_decode returned {status}")
        found = np.ctypeslib.as_array(lib.llama_get_logits_ith(context, -1), (vocab_size,))
        return found.astype(np.float64)

    answers = []
    for prompt, count in zip(work["prompts"], work["max_tokens"], strict=True):
        lib.llama_memory_clear(lib.llama_get_memory(context), True)
        tokens, logprobs, logits = [], [], next_logits(prompt)
        while len(tokens) < count:
            best = int(logits.argmax())
            tokens.append(best)
            logprobs.append(float(-np.log(np.exp(logits - logits[best]).sum())))
            logits = next_logits([best])
        answers.append({"tokens": tokens, "logprobs": logprobs})
    json.dump({"version": lib.__version__, "answers": answers}, result)
    result.close()


if __name__ == "__main__":
    main()
