"""Another engine's ``generate`` in a child process: ``python -c TEXT ENGINE MODEL ARGUMENTS``.

ENGINE is ``vllm`` or ``sglang``, ARGUMENTS a JSON object of its ``LLM`` or ``Engine``. The child
writes a JSON object a line: its version once it is ready, then for each ``{"prompts", "sampling"}``
that it reads (token ids or texts, and fields of vLLM's ``SamplingParams`` for each) the ``seconds``
of one call and the ``counts`` of prompt and output tokens. It runs in the engine's interpreter:
nothing else is imported, and Python 3.10 is enough.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable
from typing import Any

Answers = Callable[[], list[tuple[int, int]]]  # the call; counts of prompt and output tokens
Prepare = Callable[[list[Any], list[dict[str, Any]]], Answers]  # what is not timed


def of_vllm(model: str, arguments: dict[str, Any]) -> tuple[str, Prepare]:
    """The version of vLLM, and its calls."""
    import vllm  # pyright: ignore[reportMissingImports]

    llm: Any = vllm.LLM(model, **arguments)

    def prepare(prompts: list[Any], sampling: list[dict[str, Any]]) -> Answers:
        inputs = [one if isinstance(one, str) else {"prompt_token_ids": one} for one in prompts]
        params = [vllm.SamplingParams(**fields) for fields in sampling]

        def call() -> list[tuple[int, int]]:
            outputs = llm.generate(inputs, params, use_tqdm=False)
            return [(len(one.prompt_token_ids), len(one.outputs[0].token_ids)) for one in outputs]

        return call

    return vllm.__version__, prepare


def of_sglang(model: str, arguments: dict[str, Any]) -> tuple[str, Prepare]:
    """The version of SGLang, and its calls."""
    import sglang  # pyright: ignore[reportMissingImports]

    engine: Any = sglang.Engine(model_path=model, **arguments)

    def prepare(prompts: list[Any], sampling: list[dict[str, Any]]) -> Answers:
        params = [dict(one) for one in sampling]
        for one in params:
            one["max_new_tokens"] = one.pop("max_tokens")
        name = "prompt" if isinstance(prompts[0], str) else "input_ids"

        def call() -> list[tuple[int, int]]:
            outputs = engine.generate(**{name: prompts}, sampling_params=params)
            counts = [one["meta_info"] for one in outputs]
            return [(one["prompt_tokens"], one["completion_tokens"]) for one in counts]

        return call

    return sglang.__version__, prepare


def main() -> None:
    """Load once, then answer until stdin ends."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # a library's output must not mix with the answers

    def send(message: dict[str, Any]) -> None:
        answers.write(json.dumps(message) + "\n")
        answers.flush()

    _, engine, model, arguments = sys.argv
    version, prepare = {"vllm": of_vllm, "sglang": of_sglang}[engine](model, json.loads(arguments))
    send({"version": version})
    for line in sys.stdin:
        asked = json.loads(line)
        call = prepare(asked["prompts"], asked["sampling"])
        start = time.perf_counter()
        counts = call()
        send({"seconds": time.perf_counter() - start, "counts": counts})


if __name__ == "__main__":
    main()
