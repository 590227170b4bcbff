"""vLLM's ``LLM.generate`` in a child process: ``python -c TEXT MODEL ARGUMENTS``.

ARGUMENTS is a JSON object of ``LLM``'s. The child writes a JSON object a line: its version once it
is ready, then for each ``{"prompts", "sampling"}`` that it reads (token ids or texts, and fields of
``SamplingParams`` for each) the ``seconds`` of one call and the ``counts`` of prompt and output
tokens. It runs in vLLM's interpreter: nothing else is imported.
"""

from __future__ import annotations

import json
import os
import sys
import time
from typing import Any


def main() -> None:
    """Load once, then answer until stdin ends."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # a library's output must not mix with the answers

    def send(message: dict[str, Any]) -> None:
        answers.write(json.dumps(message) + "\n")
        answers.flush()

    import vllm  # pyright: ignore[reportMissingImports]

    llm: Any = vllm.LLM(sys.argv[1], **json.loads(sys.argv[2]))
    send({"version": vllm.__version__})
    for line in sys.stdin:
        asked = json.loads(line)
        prompts = [
            one if isinstance(one, str) else {"prompt_token_ids": one} for one in asked["prompts"]
        ]
        sampling = [vllm.SamplingParams(**fields) for fields in asked["sampling"]]
        start = time.perf_counter()
        outputs = llm.generate(prompts, sampling, use_tqdm=False)
        seconds = time.perf_counter() - start
        counts = [(len(one.prompt_token_ids), len(one.outputs[0].token_ids)) for one in outputs]
        send({"seconds": seconds, "counts": counts})


if __name__ == "__main__":
    main()
