"""The child's side of the peer protocol: one JSON object per line, over stdin and stdout.

    at start   -> {"versions": {...}, "facts": {...}}, {"missing": reason} or {"error": reason}
    command    <- {"prompts": [[token id]], "max_tokens": int}
    answer     -> {"seconds": float, "token_ids": [[token id]]} or {"error": reason}

It runs in the peer's own interpreter: Python 3.10 and the standard library only.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable
from typing import Any

Generate = Callable[[list, int], list]  # (prompts, max_tokens) -> token ids of each answer


def serve(load: Callable[[], tuple[Generate, dict[str, Any]]]) -> None:
    """Load once, then answer commands until stdin ends; ``load`` also returns the start line."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # a library's output must not mix with the protocol

    def send(message: dict[str, Any]) -> None:
        answers.write(json.dumps(message) + "\n")
        answers.flush()

    try:
        generate, greeting = load()
    except ImportError as error:
        send({"missing": str(error)})
        return
    except Exception as error:
        send({"error": f"{type(error).__name__}: {error}"})
        return
    send(greeting)
    for line in sys.stdin:
        command = json.loads(line)
        try:
            started = time.perf_counter()
            token_ids = generate(command["prompts"], command["max_tokens"])
            seconds = time.perf_counter() - started
        except Exception as error:
            send({"error": f"{type(error).__name__}: {error}"})
        else:
            send({"seconds": seconds, "token_ids": token_ids})
