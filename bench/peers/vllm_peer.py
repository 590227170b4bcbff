"""vLLM's CPU build as a peer: ``LLM.generate`` on a Hugging Face folder in bfloat16.

    python vllm_peer.py FOLDER THREADS

THREADS is not used: by default vLLM computes on all cores but one, which it reserves for its
scheduler. The interpreter's environment may have other settings of it (``VLLM_CPU_...``), and the
libraries that its documentation advises (``LD_PRELOAD``); they are reported. Without the prefix
cache, since prompts are repeated.
"""

from __future__ import annotations

import os
import sys
from typing import Any

from line_server import Generate, serve

MAX_SEQS = 16
CONTEXT = 256  # tokens per sequence
SETTINGS = ("VLLM_CPU_", "LD_PRELOAD")


def load() -> tuple[Generate, dict[str, Any]]:
    """Read the model and compile; raises ``ImportError`` if vLLM is missing."""
    os.environ["HF_HUB_OFFLINE"] = "1"
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")  # GiB; else half of the memory
    import vllm  # pyright: ignore[reportMissingImports]

    llm: Any = vllm.LLM(
        sys.argv[1],
        dtype="bfloat16",
        max_model_len=CONTEXT,
        max_num_seqs=MAX_SEQS,
        enable_prefix_caching=False,
    )

    def generate(prompts: list[list[int]], max_tokens: int) -> list[list[int]]:
        sampling = vllm.SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True)
        inputs = [{"prompt_token_ids": prompt} for prompt in prompts]
        outputs = llm.generate(inputs, sampling, use_tqdm=False)
        return [list(output.outputs[0].token_ids) for output in outputs]

    settings = {name: value for name, value in os.environ.items() if name.startswith(SETTINGS)}
    return generate, {
        "versions": {"vllm": vllm.__version__},
        "facts": {"weights": "bfloat16", "environment": settings},
    }


if __name__ == "__main__":
    serve(load)
