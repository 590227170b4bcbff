"""llama.cpp as a peer, through llama-cpp-python's low-level API, on the GGUF's own weights.

    python llama_cpp_peer.py MODEL.gguf THREADS

The high-level API runs one sequence at a time; here all sequences of a batch share each
``llama_decode``. It computes on the quantised weights and so reads a fifth of the bytes that a
float32 engine reads; its tokens may differ for that reason.
"""

from __future__ import annotations

import sys
from typing import Any

from line_server import Generate, serve

MAX_SEQS = 16
CONTEXT = 256  # tokens per sequence
CHUNK = 512  # tokens of one llama_decode


def load() -> tuple[Generate, dict[str, Any]]:
    """Read the model; raises ``ImportError`` if llama-cpp-python is missing."""
    import llama_cpp as lib
    import numpy as np

    threads = int(sys.argv[2])
    lib.llama_backend_init()
    model = lib.llama_model_load_from_file(sys.argv[1].encode(), lib.llama_model_default_params())
    if not model:
        raise RuntimeError(f"llama.cpp cannot read {sys.argv[1]}")
    params = lib.llama_context_default_params()
    params.n_ctx, params.n_batch, params.n_ubatch = MAX_SEQS * CONTEXT, CHUNK, CHUNK
    params.n_seq_max, params.n_threads, params.n_threads_batch = MAX_SEQS, threads, threads
    context = lib.llama_init_from_model(model, params)
    batch = lib.llama_batch_init(CHUNK, 0, 1)
    vocab_size = lib.llama_vocab_n_tokens(lib.llama_model_get_vocab(model))

    def decode(rows: list[tuple[int, int, int, bool]]) -> list[int]:
        """Run (token, position, sequence, needs logits) rows; return the best tokens."""
        for i, (token, position, sequence, needs_logits) in enumerate(rows):
            batch.token[i], batch.pos[i], batch.logits[i] = token, position, needs_logits
            batch.n_seq_id[i] = 1
            batch.seq_id[i][0] = sequence
        batch.n_tokens = len(rows)
        if status := lib.llama_decode(context, batch):
            raise RuntimeError(f"llama_decode returned {status}")
        rows_with_logits = [i for i, row in enumerate(rows) if row[3]]
        logits = (lib.llama_get_logits_ith(context, i) for i in rows_with_logits)
        return [int(np.ctypeslib.as_array(one, (vocab_size,)).argmax()) for one in logits]

    def prefill(prompts: list[list[int]]) -> list[int]:
        rows = [
            (token, position, sequence, position == len(prompt) - 1)
            for sequence, prompt in enumerate(prompts)
            for position, token in enumerate(prompt)
        ]
        return [t for i in range(0, len(rows), CHUNK) for t in decode(rows[i : i + CHUNK])]

    def generate(prompts: list[list[int]], max_tokens: int) -> list[list[int]]:
        lib.llama_memory_clear(lib.llama_get_memory(context), True)
        answers = [[token] for token in prefill(prompts)]
        for step in range(max_tokens - 1):
            rows = [
                (answer[-1], len(prompt) + step, sequence, True)
                for sequence, (prompt, answer) in enumerate(zip(prompts, answers, strict=True))
            ]
            for answer, token in zip(answers, decode(rows), strict=True):
                answer.append(token)
        return answers

    return generate, {
        "versions": {"llama-cpp-python": lib.__version__},
        "facts": {"weights": "quantised", "system": lib.llama_print_system_info().decode()},
    }


if __name__ == "__main__":
    serve(load)
