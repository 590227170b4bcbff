"""Hugging Face transformers as a peer: ``model.generate`` on the GGUF's weights in float32.

    python transformers_peer.py MODEL.gguf THREADS

It decodes greedily, with its KV cache and its default attention. The end-of-sequence token is
removed from the generation config instead of being suppressed step by step, so the work is the same
as ours.
"""

from __future__ import annotations

import os
import sys
from typing import Any

from line_server import Generate, serve


def load() -> tuple[Generate, dict[str, Any]]:
    """Read the model; raises ``ImportError`` if torch, transformers or gguf are missing."""
    import gguf  # noqa: F401  (transformers needs it, and says so much later)
    import torch
    import transformers

    folder, name = os.path.split(os.path.abspath(sys.argv[1]))
    torch.set_num_threads(int(sys.argv[2]))
    model = transformers.AutoModelForCausalLM.from_pretrained(
        folder, gguf_file=name, dtype=torch.float32
    ).eval()
    model.generation_config.eos_token_id = None

    def generate(prompts: list[list[int]], max_tokens: int) -> list[list[int]]:
        ids = torch.tensor(prompts)
        with torch.inference_mode():
            out = model.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                do_sample=False,
                max_new_tokens=max_tokens,
                pad_token_id=0,
            )
        return out[:, ids.shape[1] :].tolist()

    return generate, {
        "versions": {"torch": torch.__version__, "transformers": transformers.__version__},
        "facts": {"attention": model.config._attn_implementation, "weights": "float32"},
    }


if __name__ == "__main__":
    serve(load)
