"""Our own `LLM` as a peer, in a process of its own: the baseline for a server.

    python jaxinfer_peer.py MODEL [ARGUMENTS]

ARGUMENTS is a JSON object of `LLM`'s arguments. It decodes greedily, beyond any end-of-sequence
token, without the prefix cache, which would contain repeated prompts.
"""

from __future__ import annotations

import json
import sys
from typing import Any

from line_server import Generate, serve


def load() -> tuple[Generate, dict[str, Any]]:
    """Read the model and compile."""
    import jax

    from jaxinfer import LLM, SamplingParams
    from jaxinfer.core.progress import NoProgress

    arguments = json.loads(sys.argv[2]) if len(sys.argv) > 2 else {}
    llm = LLM(sys.argv[1], progress=NoProgress(), enable_prefix_caching=False, **arguments)

    def generate(prompts: list[list[int]], max_tokens: int) -> list[list[int]]:
        params = SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True)
        inputs = [{"prompt_token_ids": prompt} for prompt in prompts]
        outputs = llm.generate(inputs, params, use_tqdm=False)
        return [list(output.outputs[0].token_ids) for output in outputs]

    return generate, {"versions": {"jax": jax.__version__}, "facts": {"config": str(llm.config)}}


if __name__ == "__main__":
    serve(load)
